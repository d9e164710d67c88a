"""Other programs as contenders: the same model, the same prompts, in turns with ours.

| peer | what it is | where it runs |
|---|---|---|
| `hf` | `generate` of transformers | in this process, on the same weights |
| `hf-prompt-lookup` | the same with `prompt_lookup_num_tokens` | |
| `hf-assisted` | the same with an assistant model | |
| `openvino` | OpenVINO GenAI | in a child process of another environment |
| `openvino-prompt-lookup` | the same with `prompt_lookup` | |
| `llamacpp` | llama.cpp, by llama-cpp-python | |

A peer gets token ids, so tokenizers do not matter, and neutral sampling settings but for the
temperature.
"""

from __future__ import annotations

import importlib.metadata
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from outpace.bench.peers import hf as hf_peer
from outpace.bench.peers import hf_generate
from outpace.bench.peers.files import peer_model
from outpace.bench.peers.process import ChildPeer, refuse
from outpace.bench.records import Case, Contender, Kind, Run, Settings
from outpace.engine.results import Counters
from outpace.errors import ModelError, OutpaceError, UnknownNameError
from outpace.files import expanded
from outpace.models.base import Target

PEERS = ("hf", "hf-prompt-lookup", "hf-assisted", "openvino", "openvino-prompt-lookup", "llamacpp")

_LONGEST = 8192  # tokens of context that a child reserves memory for
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def make_peer(
    name: str,
    target: Target,
    *,
    dtype: str | torch.dtype | None = None,
    threads: int | None = None,
    peer_python: str | Path | None = None,
    assistant: str | Path | None = None,
    note: Callable[[str], object] | None = None,
    beside: Sequence[Contender] = (),
) -> Contender | None:
    """Make a peer of a target.

    Args:
        dtype: what the peer computes in; None is what the target computes in.
        threads: of a child process; None is what this process uses. Peers in this process
            share its threads.
        peer_python: the Python of the environment that holds OpenVINO GenAI or
            llama-cpp-python; may be the folder of the environment.
        assistant: model that drafts for ``hf-assisted``: a short name, folder or hub id.
        note: told in one line why a peer is left out; None writes to standard error.
        beside: peers that were made before; transformers' model is shared with them, or it
            would be in memory once for each.

    Returns:
        The peer, loaded; close it. None if it cannot take part here.

    Raises:
        UnknownNameError: there is no such peer.
    """
    if name not in PEERS:
        raise UnknownNameError("peer", name, PEERS)
    wanted = target.dtype if dtype is None else _DTYPES.get(str(dtype).removeprefix("torch."))
    count = torch.get_num_threads() if threads is None else threads
    try:
        if wanted is None:
            raise ModelError(f"dtype {dtype!r} is not one of {', '.join(_DTYPES)}")
        if name.startswith("hf"):
            return _inside(name, target, wanted, assistant, beside)
        return _outside(name, target, wanted, count, peer_python)
    except OutpaceError as error:
        line = f"{name} is left out: {error}"
        print(line, file=sys.stderr) if note is None else note(line)
        return None


def end_ids(target: Target) -> frozenset[int]:
    """Tokens that end an answer of the target."""
    ids = frozenset(target.defaults.eos_ids if target.defaults else ())
    return ids | target.tokenizer.eos_ids if target.tokenizer else ids


class TransformersPeer:
    """``generate`` of transformers, in this process.

    Args:
        eos_ids: tokens that end an answer unless they are to be ignored.
        prompt_lookup: tokens that prompt lookup drafts; None drafts none.
        assistant: a model of transformers that drafts.
    """

    kind: Kind = "peer"

    def __init__(
        self,
        name: str,
        model: Any,
        *,
        eos_ids: frozenset[int],
        prompt_lookup: int | None = None,
        assistant: Any = None,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        self.name, self.model = name, model
        self._eos_ids, self._lookup, self._assistant = eos_ids, prompt_lookup, assistant
        self._drafts = prompt_lookup is not None or assistant is not None
        self.about: Mapping[str, Any] = {
            "dtype": str(model.dtype).removeprefix("torch."),
            "weights": "the same, expanded",
            "threads": torch.get_num_threads(),
            "versions": {p: importlib.metadata.version(p) for p in ("transformers", "torch")},
            "prefill ends": "at the first call of a logits processor",
            **(about or {}),
        }

    def run(self, unit: tuple[Case, ...], settings: Settings) -> Run:
        """Answer a unit, timed. Prompts of a batch are padded on the left.

        Counters of a peer that drafts: transformers drafts beside the prompt already, and then
        that pass is counted as one.

        Raises:
            RequestError: a batch for a peer that drafts, or reproducible sampling.
        """
        refuse(self.name, unit, settings, one_row=self._drafts)
        made = hf_generate.generate(
            self.model,
            [case.ids for case in unit],
            max_new_tokens=settings.max_new_tokens,
            eos_ids=frozenset() if settings.ignore_eos else self._eos_ids,
            temperature=settings.temperature,
            seed=unit[0].seed,
            prompt_lookup=self._lookup,
            assistant=self._assistant,
        )
        return Run(
            tokens=made.tokens,
            seconds=made.seconds,
            prefill_seconds=made.prefill_seconds,
            counters=tuple(
                count(len(tokens), made.emitted, made.drafted)
                if self._drafts
                else Counters(new_tokens=len(tokens), passes=len(tokens) - 1)
                for tokens in made.tokens
            ),
        )

    def close(self) -> None:
        """Let go of the models; whoever shares them still has them."""
        self.model = self._assistant = None


def count(new_tokens: int, emitted: Sequence[int], drafted: Sequence[int]) -> Counters:
    """Counters of a peer from what each forward emitted and checked, the prompt's first."""
    first = 0 if drafted and drafted[0] else 1
    passes = list(zip(emitted, drafted, strict=True))[first:]
    deepest = max((guesses for _, guesses in passes), default=0)
    longest = max((made - 1 for made, _ in passes), default=0)
    return Counters(
        new_tokens=new_tokens,
        passes=len(passes),
        drafted=sum(guesses for _, guesses in passes),
        accepted=sum(made - 1 for made, _ in passes),
        drafted_at=tuple(sum(n >= d for _, n in passes) for d in range(1, deepest + 1)),
        accepted_at=tuple(sum(n > d for n, _ in passes) for d in range(1, longest + 1)),
    )


def _inside(
    name: str, target: Target, dtype: torch.dtype, assistant: str | Path | None, beside: Sequence[Contender]
) -> Contender:
    if name == "hf-assisted" and assistant is None:
        raise ModelError("it needs an assistant model, and none was named")
    shared = next((peer.model for peer in beside if isinstance(peer, TransformersPeer)), None)
    model = hf_peer.transformers_twin(target, dtype) if shared is None else shared
    given: dict[str, Any] = {}
    about: dict[str, Any] = {}
    if target.quantize is not None:
        about["weights"] = f"not rounded to {target.quantize}, as ours are"
    if name == "hf-prompt-lookup":
        given["prompt_lookup"] = hf_generate.PROMPT_LOOKUP
        about["settings"] = {"prompt_lookup_num_tokens": hf_generate.PROMPT_LOOKUP}
    if name == "hf-assisted":
        given["assistant"] = hf_peer.load_assistant(str(assistant), target, dtype)
        about["assistant"] = str(assistant)
    return TransformersPeer(name, model, eos_ids=end_ids(target), about=about, **given)


def _outside(
    name: str, target: Target, dtype: torch.dtype, threads: int, python: str | Path | None
) -> Contender:
    if python is None:
        raise ModelError("it runs in an environment of its own; name its Python (--peer-python)")
    program = expanded(python)
    if program.is_dir():
        program = program / "bin" / "python"
    found = shutil.which(program)
    if found is None:
        raise ModelError(f"there is no Python at {program}")
    engine = name.partition("-")[0]
    model, about = peer_model(engine, target, dtype)
    given = {
        "engine": engine,
        "model": str(model),
        "dtype": str(dtype).removeprefix("torch."),
        "threads": threads,
        "context": min(target.max_positions, _LONGEST),
        "prompt_lookup": name.endswith("-prompt-lookup"),
    }
    return ChildPeer(
        name,
        Path(found),
        given,
        about=about | {"threads": threads},
        eos_ids=end_ids(target),
        one_row=engine == "llamacpp",
    )
