"""GliDe: a small layer that guesses, with a glimpse at the target's own keys and values."""
