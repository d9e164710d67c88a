"""Why a drafter gains little: what is wrong with it, with the pair, or with the machine."""
