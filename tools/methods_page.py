"""Writes docs/methods.md from the registry and the classes of the methods.

python tools/methods_page.py           write the page
python tools/methods_page.py --check   exit with 1 if the page is out of date
"""

import sys
from pathlib import Path

from sentences import wrapped

from outpace import registry
from outpace.cli.settings import Setting, lacks, natural_shape, settings_of

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "methods.md"

HEAD = """\
<!-- Written by `make docs` from the registry and the docstrings. Do not edit. -->

# Methods

## Map of the field

Generalized speculative decoding: anything may draft, and the target verifies. Every family has a row.

%(map)s

*Missing* means that it belongs here and is not there yet. Each method follows its paper, which its entry below names.

## Method specs

A *method spec* names a drafter and its settings, on the command line and in Python:

```text
prompt_lookup
prompt_lookup[max_ngram=5 tree_size=16]
draft_model[model=smollm2-135m layers=12 tree=4x2x1 policy=confidence]
./my-head[tree=chain]
```

The last one is a folder that `outpace train` wrote. It stands for `METHOD[model=./my-head tree=chain]`. A path has
a slash in it, or begins with a dot or `~`.

Every drafter takes these settings besides its own. `auto` takes `policy` alone; its members take the others:

| key | meaning |
|---|---|
| `tree` | shape of its drafts: `chain`, `dynamic` (grown where it pays; `dynamic:W` expands at most W nodes per level, `dynamic:W:L` takes guesses that are at least L / `tree_size` likely), `cape` (a chain of 4 with siblings where the drafter is unsure; `cape:D` of D), children per level such as `4x2x1`, a table of parents such as `[-1,-1,0]`, or a `FILE.json` of `outpace analyze shape`; default: `chain`, unless the drafter below says otherwise |
| `tree_size` | most drafted tokens per pass; for a chain, its length |
| `verifier` | who decides what is kept, from the list below, with settings: `tree[replacement=true]`; default `tree` |
| `policy` | who sets the budget of every step, from the list below, with settings: `confidence[threshold=0.6]`; default `fixed`, of `auto` the policy `auto` |

A setting that does not exist is an error. `outpace methods` prints this list for the methods that
are installed, plug-ins included, and `outpace methods NAME` the settings of one.

A method that *needs weights of its own* needs a trained folder for your model. For SmolLM2-135M the package has those of
`eagle3`, which `auto` uses, and `max_gram`; the repository has six more ([weights](../outpace/weights/README.md)). `outpace methods --model M` says what is there for a model.
"""  # noqa: E501

MAP: tuple[tuple[str, str, tuple[str, ...], str, str], ...] = (
    (
        "guesses from text",
        "copy what followed the same words, or what a grammar forces",
        (
            *("prompt_lookup", "max_gram", "suffix", "adaptive_ngram", "reference", "retrieval", "recycling"),
            *("lookahead", "grammar"),
        ),
        "",
        "",
    ),
    (
        "draft models",
        "a smaller model guesses; it may be distilled, on policy and online",
        ("draft_model", "cross_vocabulary"),
        "",
        "",
    ),
    (
        "recurrent drafters",
        "a small network without attention",
        ("redrafter", "lstm", "mlp_speculator"),
        "",
        "",
    ),
    (
        "the target's own layers",
        "early exits with learned thresholds, skipped layers, sorted exits, masks, rounded weights",
        ("early_exit", "kangaroo", "layer_skip", "clasp", "s2d", "sec", "s3d", "quantized_self"),
        "",
        "federated early exit for speech: it shares training among devices, and nothing is verified",
    ),
    (
        "views of the KV cache",
        "the target over a part of its context",
        ("window_self", "token_select", "triforce"),
        "",
        "",
    ),
    (
        "heads on the target's features",
        "trained layers or heads guess",
        ("eagle3", "fspad", "glide", "falcon", "mtp", "medusa", "hydra"),
        "",
        "",
    ),
    (
        "riders in the target's pass",
        "trained vectors or weights guess while the target verifies",
        ("ppd", "streaming", "coral"),
        "",
        "",
    ),
    (
        "block drafters",
        "many positions in one drafter pass",
        ("dflash", "dspark", "jetspec"),
        "the path selector of DFlash2, the recurrent head of Domino, P-EAGLE",
        "",
    ),
    (
        "drafters of drafters",
        "combine guesses",
        ("cascade", "hybrid", "select", "ouroboros", "graph", "auto"),
        "",
        "",
    ),
    (
        "trees",
        "which guesses share a pass: chains, templates, Sequoia's shapes, dynamic trees, `cape`",
        (),
        "",
        "",
    ),
    (
        "encoder-decoder targets",
        "T5 and BART kinds; the source text is a draft. All drafters that need no features work",
        ("reference",),
        "a drafter of masked blocks for them (GAD)",
        "",
    ),
    ("no drafter", "plain decoding, the baseline", ("none",), "", ""),
    (
        "verification",
        "what is kept, losslessly",
        (
            *("match", "chain", "tree", "block", "k_seq", "greedy_plus_one", "spechub", "traversal"),
            *("coupled", "typical"),
        ),
        "",
        "rules that change the distribution by default: `typical` needs `allow_lossy`",
    ),
    (
        "length of drafts",
        "how much to draft, and when",
        ("fixed", "confidence", "specdecpp", "schedule", "bandit", "goodput", "two_lines", "auto"),
        "",
        "",
    ),
    (
        "other models than autoregressive text",
        "the same words for another task",
        (),
        "",
        "pruning of diffusion models: it changes the model, and there is no token distribution to verify",
    ),
)
"""Family, idea, methods, what is missing, what is out of scope and why."""

SECTIONS = (
    ("drafter", "Drafters", "A drafter proposes tokens and never decides."),
    ("verifier", "Verifiers", "A verifier decides which guesses are kept, and adds one token of the target."),
    ("policy", "Policies", "A policy sees numbers only, and says how much to draft."),
)


def render() -> str:
    """The page. Plug-ins are left out: the page describes this package."""
    own = [row for row in registry.entries() if row.path.startswith("outpace.")]
    if lost := {row.name for row in own} ^ {name for row in MAP for name in row[2]}:
        raise SystemExit(f"error: the map of {Path(__file__).name} and the registry differ by {sorted(lost)}")
    parts = [HEAD % {"map": _map()}]
    for kind, title, intro in SECTIONS:
        parts.append(f"## {title}\n\n{intro}\n")
        parts += [_method(row) for row in own if row.kind == kind]
    return wrapped("\n".join(parts))


def _map() -> str:
    """Every method in a row of its family, with a link to its entry."""
    rows = ["family", "the idea", "here", "missing", "out of scope, and why"], ["---"] * 5
    cells = [(one, idea, ", ".join(map(_link, names)), *rest) for one, idea, names, *rest in MAP]
    return "\n".join(f"| {' | '.join(row)} |" for row in (*rows, *cells))


def _link(name: str) -> str:
    return f"[`{name}`](#{name})"


def _method(row: registry.MethodEntry) -> str:
    cls = registry.load(row.kind, row.name)
    file = ROOT / (row.path.partition(":")[0].replace(".", "/") + ".py")
    facts = []
    if row.kind == "drafter":
        facts.append(f"Family `{row.family}`.")
        facts += [shape] if (shape := natural_shape(cls)) else []
    facts.append("Lossless." if row.lossless else "**Lossy**: needs `allow_lossy`.")
    if row.trained:
        facts.append(f"Needs {lacks(row)}.")
    out = [f"### `{row.name}`\n", f"{row.summary}.\n"]
    if row.paper:
        facts.append(f"After {row.paper.rstrip('.')}.")
    facts.append(f"Code: [{file.name}](../{file.relative_to(ROOT).as_posix()}).")
    out.append(" ".join(facts) + "\n")
    settings = settings_of(cls.Config)
    if settings:
        out += ["| setting | type | default | meaning |", "|---|---|---|---|"]
        out += [_line(cls.Config, one) for one in settings]
        out.append("")
    return "\n".join(out)


def _line(config: type, one: Setting) -> str:
    """A row of the table; a bar in a cell would end it."""
    if not one.meaning:
        raise SystemExit(f"error: {config.__name__}.{one.name} has no docstring below it")
    default = "required" if one.default is None else f"`{one.default}`"
    cells = (f"`{one.name}`", f"`{one.kind}`", default, one.meaning)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def main(arguments: list[str]) -> int:
    """Write the page, or check it."""
    if arguments not in ([], ["--check"]):
        print("usage: python tools/methods_page.py [--check]", file=sys.stderr)
        return 2
    page, name = render(), PAGE.relative_to(ROOT)
    if arguments:
        if PAGE.exists() and PAGE.read_text(encoding="utf-8") == page:
            return 0
        print(f"error: {name} is out of date; run: make docs", file=sys.stderr)
        return 1
    PAGE.write_text(page, encoding="utf-8")
    print(f"wrote {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
