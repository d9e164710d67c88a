"""Drawing what ``outpace.analysis.picture`` saw: as lines of text and as SVG.

The tree grows to the right. Its accepted path comes first, so that it runs straight along the
top. The top row thus reads as the text that a pass emits. What hangs below was guessed in vain.

Nothing is fetched: styles stand in the document, and fonts are the reader's own.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

from outpace.analysis.picture import Fate, Picture, Trace
from outpace.types import ROOT

Role = Literal["pending", "accepted", "added", "refused", "unreached"]
_ROLE: dict[Fate, Role] = {Fate.ACCEPTED: "accepted", Fate.REFUSED: "refused", Fate.NOT_REACHED: "unreached"}
WORDS: dict[Role, str] = {
    "pending": "pending",
    "accepted": "accepted",
    "added": "the target's own",
    "refused": "refused",
    "unreached": "not reached",
}
_SIGNS = {" ": "\u00b7", "\n": "\u21b5", "\t": "\u21e5", "\r": "\u240d"}
_PLAIN = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}
_WIDEST = 18  # columns of a token; longer ones are cut
_TAIL = 56  # characters of the text before a pass

_WIDE, _HIGH, _ROW = 104, 46, 58  # of a box, least; from row to row
_LETTER, _GAP, _LEFT, _HEAD = 7.9, 40, 24, 74
_LINES = {True: ("|- ", "`- ", "|  ", "   "), False: ("\u251c\u2500 ", "\u2514\u2500 ", "\u2502  ", "   ")}


@dataclass(frozen=True, slots=True)
class Spot:
    text: str
    role: Role
    q: float | None
    p: float | None
    level: int
    """0 for the pending token."""
    row: int
    parent: int | None
    """Place in the list of its parent; None for the pending token."""
    last: bool
    """Whether no sibling follows."""


def layout(picture: Picture) -> list[Spot]:
    """Every box of a picture, parents first and row by row; the accepted path is row 0."""
    kids: dict[int, list[int]] = {}
    for node, guess in enumerate(picture.guesses):
        kids.setdefault(guess.parent, []).append(node)
    end = picture.kept[-1] if picture.kept else ROOT
    kept = set(picture.kept)
    spots = [Spot(picture.pending, "pending", None, None, 0, 0, None, True)]
    rows = 0

    def hang(node: int, at: int) -> None:
        nonlocal rows
        below: list[int | None] = [child for child in kids.get(node, ()) if child in kept]
        if node == end and picture.added is not None:
            below.append(None)
        below += [child for child in kids.get(node, ()) if child not in kept]
        for turn, child in enumerate(below):
            rows += turn > 0
            level, last = spots[at].level + 1, turn == len(below) - 1
            if child is None:
                assert picture.added is not None
                own = picture.added
                spots.append(Spot(own.text, "added", None, own.p, level, rows, at, last))
            else:
                guess = picture.guesses[child]
                spots.append(Spot(guess.text, _ROLE[guess.fate], guess.q, guess.p, level, rows, at, last))
                hang(child, len(spots) - 1)

    hang(ROOT, 0)
    return spots


def visible(text: str, plain: bool = False) -> str:
    """A token's text with its blanks to be seen, and cut if it is long.

    Args:
        plain: in quotes and ASCII, for terminals that know no other characters.
    """
    signs = _PLAIN if plain else _SIGNS
    out = "".join(
        signs.get(char)
        or (
            char
            if char.isprintable() and (char.isascii() or not plain)
            else char.encode("unicode_escape").decode("ascii")
        )
        for char in text
    )
    if len(out) > _WIDEST:
        out = out[: _WIDEST - 2] + (".." if plain else "\u2026")
    return f"'{out}'" if plain else out


def percent(value: float | None) -> str:
    """A probability in four characters or fewer; empty for None."""
    if value is None:
        return ""
    return "<1%" if 0 < value < 0.005 else f"{100 * value:.0f}%"


def caption(picture: Picture) -> str:
    drafted, kept, emitted = len(picture.guesses), len(picture.kept), len(picture.emitted)
    tokens = "1 token" if emitted == 1 else f"{emitted} tokens"
    if not drafted:
        return f"nothing was guessed, {tokens} emitted"
    return f"{kept} of {drafted} guesses accepted, {tokens} emitted"


def lines(picture: Picture, *, plain: bool = False) -> Iterator[list[tuple[str, Role | None]]]:
    """A tree for a terminal: per line, pieces of text and the role that colours them."""
    spots = layout(picture)
    tee, elbow, bar, blank = _LINES[plain]
    labels: list[tuple[str, str]] = []
    trunk: list[str] = []
    for spot in spots:
        stem = "" if spot.parent is None else trunk[spot.parent]
        trunk.append("" if spot.parent is None else stem + (blank if spot.last else bar))
        branch = "" if spot.parent is None else stem + (elbow if spot.last else tee)
        labels.append((branch, visible(spot.text, plain)))
    width = max(len(branch) + columns(text) for branch, text in labels) + 2
    yield [(" " * width + "   q     p", None)]
    for spot, (branch, text) in zip(spots, labels, strict=True):
        space = " " * (width - len(branch) - columns(text))
        numbers = f"{percent(spot.q):>4}  {percent(spot.p):>4}  "
        yield [(branch, None), (text, spot.role), (space, None), (numbers + WORDS[spot.role], spot.role)]


def columns(text: str) -> int:
    """Columns of a terminal, or of a font whose letters are equally wide."""
    return sum(
        0 if unicodedata.combining(char) else 1 + (unicodedata.east_asian_width(char) in "WF")
        for char in text
    )


def svg(trace: Trace) -> str:
    """One document with the trees of all passes below each other."""
    top, parts = 156.0, []
    signs, long = legend()
    widest = max(long, _LETTER * columns(trace.drafter)) + 2 * _LEFT
    for number, picture in enumerate(trace.passes, start=1):
        body, width, height = tree(picture, number)
        parts.append(f'<g transform="translate(0 {top:g})">{body}</g>')
        top, widest = top + height + 26, max(widest, width)
    head = (
        f'<text class="title" x="{_LEFT}" y="40">{escape(trace.model)}</text>'
        f'<text class="line" x="{_LEFT}" y="63">{escape(trace.drafter)}</text>'
        f'<text class="words" x="{_LEFT}" y="86">{escape(subtitle(trace))}</text>'
        f'<g transform="translate({_LEFT} 104)">{signs}</g>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{widest:g}" height="{top:g}" '
        f'viewBox="0 0 {widest:g} {top:g}" role="img">'
        f"<title>{escape(trace.model)}, {escape(trace.drafter)}</title><style>{STYLE}</style>"
        f'<rect class="ground" width="100%" height="100%"/>{head}{"".join(parts)}</svg>\n'
    )


def tree(picture: Picture, number: int) -> tuple[str, float, float]:
    """The elements of one pass, their width and height in pixels."""
    spots = layout(picture)
    labels = [visible(spot.text) for spot in spots]
    widths = [max(_WIDE, 22 + _LETTER * columns(label)) for label in labels]
    left = [float(_LEFT)]
    for level in range(max(spot.level for spot in spots)):
        widest = max(w for w, spot in zip(widths, spots, strict=True) if spot.level == level)
        left.append(left[-1] + widest + _GAP)
    edges, boxes = [], []
    for spot, label, width in zip(spots, labels, widths, strict=True):
        x, y = left[spot.level], _HEAD + spot.row * _ROW
        boxes.append(_box(spot, label, x, y, width))
        if spot.parent is not None:
            above = spots[spot.parent]
            edges.append(
                (
                    spot.role,
                    _edge(
                        left[above.level] + widths[spot.parent],
                        _HEAD + above.row * _ROW + _HIGH / 2,
                        x,
                        y + _HIGH / 2,
                    ),
                )
            )
    # The way that was taken is drawn over the others.
    edges.sort(key=lambda edge: edge[0] in ("accepted", "added"))
    drawn = "".join(f'<path class="edge {role}" d="{path}"/>' for role, path in edges)
    before = picture.before + picture.pending
    before = flat(before if len(before) <= _TAIL else "\u2026" + before[-_TAIL:])
    roles = ["accepted"] * len(picture.kept) + ["added"]
    pieces = [flat(piece) for piece in picture.emitted]
    spans = [f'<tspan class="soft">{escape(before)}</tspan>']
    spans += [
        f'<tspan class="{role}">{escape(piece)}</tspan>' for piece, role in zip(pieces, roles, strict=False)
    ]
    head = (
        f'<text class="title" x="{_LEFT}" y="24">Pass {number}'
        f'<tspan class="words" dx="12">{escape(caption(picture))}</tspan></text>'
        f'<text class="line" x="{_LEFT}" y="50" xml:space="preserve">{"".join(spans)}</text>'
    )
    right = max(left[spot.level] + width for spot, width in zip(spots, widths, strict=True))
    return (
        head + drawn + "".join(boxes),
        max(right, _LEFT + _LETTER * columns(before + "".join(pieces))) + _LEFT,
        _HEAD + (1 + max(spot.row for spot in spots)) * _ROW,
    )


def flat(text: str) -> str:
    """Text in one line: blanks as they are, line breaks and the like as signs."""
    return "".join(char if char == " " else visible(char) for char in text)


def _box(spot: Spot, label: str, x: float, y: float, width: float) -> str:
    """A token with its two probabilities, as numbers and as bars."""
    told = [f"{name} {value:.4f}" for name, value in (("q", spot.q), ("p", spot.p)) if value is not None]
    hint = ", ".join([repr(spot.text), *told, WORDS[spot.role]])
    out = [
        f'<g class="node {spot.role}"><title>{escape(hint)}</title>'
        f'<rect class="box" x="{x:g}" y="{y:g}" width="{width:g}" height="{_HIGH}" rx="8"/>'
        f'<text class="token" x="{x + 11:g}" y="{y + 19:g}" xml:space="preserve">'
        f"{escape(label)}</text>"
    ]
    if spot.p is None:
        out.append(f'<text class="small" x="{x + 11:g}" y="{y + 33:g}">pending</text>')
    else:
        half, at = (width - 28) / 2, x + 11
        for name, value in (("q", spot.q), ("p", spot.p)):
            if value is None:
                continue
            out.append(
                f'<text class="small" x="{at:g}" y="{y + 33:g}">{name} {escape(percent(value))}'
                f'</text><rect class="rail" x="{at:g}" y="{y + 37:g}" width="{half:g}" '
                f'height="4" rx="2"/><rect class="{name}" x="{at:g}" y="{y + 37:g}" '
                f'width="{half * value:.1f}" height="4" rx="2"/>'
            )
            at += half + 6
    return "".join(out) + "</g>"


def _edge(x: float, y: float, to_x: float, to_y: float) -> str:
    """From a box to one on its right, level or below, with round corners."""
    if to_y == y:
        return f"M{x:g} {y:g}H{to_x:g}"
    turn = to_x - _GAP / 2
    return (
        f"M{x:g} {y:g}H{turn - 9:g}Q{turn:g} {y:g} {turn:g} {y + 9:g}"
        f"V{to_y - 9:g}Q{turn:g} {to_y:g} {turn + 9:g} {to_y:g}H{to_x:g}"
    )


def legend() -> tuple[str, float]:
    """What the boxes and bars mean, in one line, and its width in pixels."""
    out, x = [], 0.0
    for role, words in WORDS.items():
        out.append(
            f'<g class="node {role}"><rect class="box" x="{x:g}" y="5" width="20" height="14" '
            'rx="4"/></g>'
            f'<text class="words" x="{x + 27:g}" y="17">{words}</text>'
        )
        x += 45 + 6.5 * len(words)
    for name, words in (("q", "the drafter's"), ("p", "the target's")):
        out.append(
            f'<g class="node"><rect class="{name}" x="{x:g}" y="10" width="20" height="4" '
            f'rx="2"/></g><text class="words" x="{x + 27:g}" y="17">{name}, {words}</text>'
        )
        x += 45 + 6.5 * (len(words) + 3)
    return "".join(out), x


def subtitle(trace: Trace) -> str:
    count = len(trace.passes)
    shown = "" if trace.temperature else " (probabilities as at temperature 1)"
    return (
        f"{count} pass{'' if count == 1 else 'es'}, mean emitted {trace.mean_emitted:.2f}, "
        f"temperature {trace.temperature:g}{shown}"
    )


_LIGHT: Sequence[tuple[str, str]] = (
    (".ground", "fill:#fff"),
    (".title,.line", "fill:#1f2328"),
    (".words", "fill:#57606a"),
    (".soft", "fill:#6e7781"),
    (".line .accepted", "fill:#116329"),
    (".line .added", "fill:#8a5300"),
    (".edge", "stroke:#c4cbd3"),
    (".edge.accepted", "stroke:#2da44e"),
    (".edge.added", "stroke:#d4920b"),
    (".node .box", "fill:#f6f8fa;stroke:#c4cbd3"),
    (".node text", "fill:#656d76"),
    (".pending .box", "fill:#24292f;stroke:#24292f"),
    (".pending text", "fill:#fff"),
    (".accepted .box", "fill:#e6f7ea;stroke:#2da44e"),
    (".accepted text", "fill:#0f5323"),
    (".added .box", "fill:#fff5da;stroke:#d4920b"),
    (".added text", "fill:#6f4400"),
    (".unreached .box", "fill:#fff;stroke:#d0d7de"),
    (".node .rail", "fill:#e1e5ea"),
    (".node .q", "fill:#8250df"),
    (".node .p", "fill:#0969da"),
)
_DARK: Sequence[tuple[str, str]] = (
    (".ground", "fill:#0d1117"),
    (".title,.line", "fill:#e6edf3"),
    (".words", "fill:#9ea7b3"),
    (".soft", "fill:#8b949e"),
    (".line .accepted", "fill:#7ee2a0"),
    (".line .added", "fill:#f0c674"),
    (".edge", "stroke:#3d444d"),
    (".edge.accepted", "stroke:#3fb950"),
    (".edge.added", "stroke:#d29922"),
    (".node .box", "fill:#161b22;stroke:#3d444d"),
    (".node text", "fill:#9198a1"),
    (".pending .box", "fill:#e6edf3;stroke:#e6edf3"),
    (".pending text", "fill:#0d1117"),
    (".accepted .box", "fill:#12281b;stroke:#3fb950"),
    (".accepted text", "fill:#9be9b4"),
    (".added .box", "fill:#2d2210;stroke:#d29922"),
    (".added text", "fill:#f2cc80"),
    (".unreached .box", "fill:#0d1117;stroke:#30363d"),
    (".node .rail", "fill:#2b323b"),
    (".node .q", "fill:#a371f7"),
    (".node .p", "fill:#58a6ff"),
)
_SHAPES = (
    'svg text{font-family:system-ui,"Segoe UI",Roboto,Helvetica,Arial,"DejaVu Sans",sans-serif}'
    ".title{font-size:17px;font-weight:600}.words{font-size:13px;font-weight:400}"
    "svg .line,svg .token,svg .small{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"
    '"DejaVu Sans Mono",monospace}'
    ".line{font-size:13px;white-space:pre}.line .accepted,.line .added{font-weight:700}"
    ".token{font-size:13px;font-weight:600;white-space:pre}.small{font-size:10px}"
    ".refused .token,.unreached .token{font-weight:400}"
    ".edge{fill:none;stroke-width:1.5}.edge.accepted,.edge.added{stroke-width:3}"
    ".node .box{stroke-width:1.2}"
    ".accepted .box,.added .box{stroke-width:2.2}"
    ".unreached .box{stroke-dasharray:4 3}.edge.unreached{stroke-dasharray:4 3}"
    ".refused .q,.refused .p,.unreached .q,.unreached .p{opacity:.45}"
)


def _rules(pairs: Sequence[tuple[str, str]]) -> str:
    return "".join(f"{names}{{{rule}}}" for names, rule in pairs)


STYLE = _SHAPES + _rules(_LIGHT) + "@media (prefers-color-scheme:dark){" + _rules(_DARK) + "}"
