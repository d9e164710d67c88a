"""What the rules of a request spell out by themselves: tokens that are certain, and usual spellings."""

from __future__ import annotations

from collections.abc import Sequence

from outpace.sampling import Warp


def spell(
    warp: Warp, path: Sequence[int], most: int, usual: float, least: float = 0.0
) -> tuple[list[int], list[float]]:
    """Tokens that must come after a path, one after the other.

    Where one token alone is allowed, it is certain: p = 1, whatever the model says. Where the text is fixed
    and its spelling is not, the usual spelling is a guess, and no more. Another one may be likelier further
    on. So nothing here is committed without being judged.

    Args:
        path: guesses after the committed text.
        most: tokens.
        usual: chance of a usual spelling.
        least: chance of all of them together below which they end.

    Returns:
        The tokens, and the chance of each after those before it.
    """
    tokens: list[int] = []
    own: list[float] = []
    guesses: list[int] = []
    whole = 1.0
    while len(tokens) < most:
        here = (*path, *tokens)
        token, chance = warp.certain(here), 1.0
        if token is None:
            guesses = guesses or list(warp.expects(here))
            if not guesses or whole * usual < least or not warp.allows(here, guesses[0]):
                break
            token, chance = guesses[0], usual
        guesses = guesses[1:] if guesses[:1] == [token] else []
        tokens.append(token)
        own.append(chance)
        whole *= chance
    return tokens, own
