"""Damaged files, from a seed: every one is answered in time, in memory and in one line.

    python -m tests.mutations --files 2000 --seed 1       all kinds in turns; prints what failed
    python -m tests.mutations --files 200 --only gguf

A file that is still good may be used (exit 0). Any other ends with exit 2 and one short line.
"""

import argparse
import contextlib
import io
import json
import os
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from outpace.cli import train
from outpace.cli.main import main
from outpace.models.load import load_target
from outpace.models.tiny import tiny
from tests.methods.eagle3 import foreign
from tests.methods.eagle3.oracle import random_tensors, shape_for
from tests.models import making

SECONDS, BYTES, LETTERS = 2.0, 1 << 30, 2000
"""What answering one file may take, and the longest message."""
TOLD = ("outpace: taken from the model's generation config: ", "step ")
"""Beginnings of lines that are no error."""
_DEEP = 100_000
_NEST = "@nest@"
HOSTILE = (
    *(None, True, False, -1, 0, 1, 7, 2**31, 2**63, -(2**63), 10**9, 10**400, 1.5, -0.5, 1e308, 1e-320),
    *(float("nan"), float("inf"), "", "x", "x" * 100_000, "\ud800", "\x00", "../x", "a/b", "1", _NEST),
    *([], {}, [None], [5], [False], ["x"], [[]], [{}], [1, 2, 3], list(range(50_000)), {"x": 1}),
    *({"a": {"b": []}}, {"content": 5}),
)
"""Values that no file should hold where it holds another."""


@dataclass
class Kind:
    """One kind of file, and the command that reads it."""

    name: str
    file: Path
    command: list[str]
    store: Path | None = None
    """A folder that the command writes to as well; put back as it was after every file."""

    def words(self):
        """The command with the file's name in it."""
        return [w.format(file=self.file, folder=self.file.parent) for w in self.command]


def make(root):
    """Good files of every kind."""
    from outpace.methods.lookup.datastore import write_datastore

    target = tiny(0, dtype=torch.float32)
    model = root / "model"
    model.mkdir(parents=True)
    making.save_hf(model, "llama", vocab_size=300, num_hidden_layers=2, eos_token_id=0)
    making.save_tokenizer(model)
    write_gguf(root / "model.gguf", load_target(str(model), dtype="float32"))
    say = ["generate", "Hi", "--raw", "--max-new-tokens", "2", "--dtype", "float32"]
    plain, head = [*say, "--drafter", "none", "--model"], [*say, "--model", "tiny", "--drafter"]
    kinds = [Kind("gguf", root / "model.gguf", [*plain, "{file}"])]
    small = ("config", "tokenizer", "tokenizer_config", "generation_config")
    kinds += [Kind(f"{one}.json", model / f"{one}.json", [*plain, "{folder}"]) for one in small]
    kinds.append(Kind("safetensors", model / "model.safetensors", [*plain, "{folder}"]))
    for name, (objective, config, spec) in heads().items():
        folder = root / "drafters" / name
        write_head(target, folder, objective, config)
        for file in ("config.json", "model.safetensors"):
            kinds.append(Kind(f"{name} {file}", folder / file, [*head, spec]))
    for name, (config, file) in foreign_heads(target, root / "foreign").items():
        for each in (config, file):
            kinds.append(Kind(f"{name} {each.name}", each, [*head, "eagle3[model={folder}]"]))
    kinds += training_store(root / "work")
    store, words, table = root / "small.store", root / "words.txt", root / "small.bigram"
    write_datastore([[5, 6, 7, 8] * 20], target.tokenizer, store)
    words.write_text("one and two and three and one and two\n" * 20)
    code, said = answer(["build", "bigram", str(words), "--model", "tiny", "--out", str(table)])
    assert code == 0, said
    tree = root / "tree.json"
    tree.write_text(json.dumps({"parents": [-1, -1, 0, 0, 2]}))
    return [
        *kinds,
        Kind("datastore", store, [*head, "retrieval[store={file}]"]),
        Kind("bigram table", table, [*head, "max_gram[table={file}]"]),
        Kind("tree", tree, [*head, "draft_model[model=tiny layers=1 tree={file}]"]),
        Kind("profile", profile(target), [*head, "draft_model[model=tiny layers=1 policy=goodput]"]),
        Kind("passes", passes(target), [*head, "draft_model[model=tiny layers=1 policy=goodput]"]),
        Kind("learned", learned(target), [*head, "auto"]),
        Kind("skip set", skip_set(target), [*head, "layer_skip"]),
    ]


def write_gguf(path, target):
    """A model as a GGUF file, with a tokenizer that fits."""
    config, rows = target.config, len(making.GGUF_TOKENS)
    tensors = {
        making.gguf_name(name, "llama"): target.checkpoint.tensor(name, torch.float32).numpy()
        for name in config.tensor_shapes()
    }
    for name in ("token_embd.weight", "output.weight"):
        tensors[name] = tensors[name][:rows]
    metadata = making.gguf_metadata(config, "llama") | {
        "llama.rope.scaling.type": "linear",
        "llama.rope.scaling.factor": 2.0,
        "general.sampling.temp": 0.5,
        "tokenizer.chat_template": making.CHAT_TEMPLATE,
    }
    making.write_gguf(path, tensors, metadata, arch="llama")


def heads():
    """Method -> objective, configuration, and the spec that reads its folder."""
    from outpace.methods.dflash.objective import DflashObjective, DflashTraining
    from outpace.methods.draft_model.acceptance_objective import Acceptance, AcceptanceTraining
    from outpace.methods.eagle3.objective import Eagle3, Eagle3Config
    from outpace.methods.early_exit.kangaroo_objective import KangarooObjective, KangarooTraining
    from outpace.methods.early_exit.objective import EarlyExitObjective, EarlyExitTraining
    from outpace.methods.falcon.objective import Falcon, FalconTraining
    from outpace.methods.fspad.objective import Fspad, FspadTraining
    from outpace.methods.medusa.hydra_objective import Hydra, HydraTraining
    from outpace.methods.medusa.objective import Medusa, MedusaTraining
    from outpace.methods.mtp.objective import Mtp, MtpTraining
    from outpace.methods.ppd.objective import Ppd, PpdTraining
    from outpace.methods.recurrent.objective import (
        CellTraining,
        Lstm,
        MlpSpeculator,
        MlpTraining,
        ReDrafter,
        ReDrafterTraining,
    )

    judged = "draft_model[model=tiny layers=1 acceptance={folder} policy=specdecpp]"
    return {
        "eagle3": (Eagle3, Eagle3Config(), "{folder}"),
        "kangaroo": (KangarooObjective, KangarooTraining(), "{folder}"),
        "early_exit": (EarlyExitObjective, EarlyExitTraining(), "{folder}"),
        "medusa": (Medusa, MedusaTraining(), "{folder}"),
        "hydra": (Hydra, HydraTraining(prefix=True), "{folder}"),
        "redrafter": (ReDrafter, ReDrafterTraining(), "{folder}"),
        "lstm": (Lstm, CellTraining(), "{folder}"),
        "mlp_speculator": (MlpSpeculator, MlpTraining(), "{folder}"),
        "mtp": (Mtp, MtpTraining(modules=2), "{folder}"),
        "falcon": (Falcon, FalconTraining(), "{folder}"),
        "fspad": (Fspad, FspadTraining(), "{folder}"),
        "dflash": (DflashObjective, DflashTraining(), "{folder}"),
        "ppd": (Ppd, PpdTraining(), "{folder}"),
        "acceptance": (Acceptance, AcceptanceTraining(draft="tiny", draft_layers=1), judged),
    }


def foreign_heads(target, root):
    """Format of another program -> files of an EAGLE head in it."""
    few = len(foreign.ids(target))
    fused = random_tensors(shape_for(target, draft_vocab=few)) | foreign.offsets(target)
    first = random_tensors(shape_for(target, fused=False, fc_bias=True, taps=("hidden.-1",)))
    # Each in the names of its own program.
    theirs = {name.replace("layers.0.", "midlayer."): one for name, one in fused.items()}
    reads = {"eagle_aux_hidden_state_layer_ids": [1, 0, 0]}
    layer = foreign.LAYER | {"vocab_size": target.vocab_size}
    out = {}
    for name, config, tensors in (
        ("speculators", foreign.speculators(target), fused),
        ("eagle3 authors", foreign.plain(target, eagle_config=reads), theirs),
        ("eagle authors", layer, first),
    ):
        folder = foreign.write(root / name.replace(" ", "_"), config, tensors, pickled=tensors is first)
        file = folder / ("pytorch_model.bin" if tensors is first else "model.safetensors")
        out[name] = (folder / "config.json", file)
    return out


def training_store(work):
    """Answers and features that a training reads, and the training."""
    prompts = work.parent / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"tell {i}"}) + "\n" for i in range(60)))
    common = ["train", "medusa", "--model", "tiny", "--dtype", "float32", "--work", str(work)]
    common += [w for pair in ("pipeline.vocab=64", "pipeline.tokens_per_batch=64") for w in ("--set", pair)]
    small = ["--set", "data.batch=8", "--set", "data.max_new_tokens=16", "--tokens", "300", "--only-data"]
    code, said = answer([*common, *small, "--prompts", str(prompts)])
    assert code == 0, said
    train.MEASURED_PROMPTS, train.MEASURED_TOKENS = 1, 4
    command = [*common, "--set", "loop.steps=1", "--out", str(work / "out")]
    code, said = answer(command)  # keeps the features that it computed
    assert code == 0, said
    shutil.rmtree(work / "out")
    files = sorted(file for file in work.rglob("*") if file.is_file() and file.stat().st_size)
    return [Kind(f"store {file.relative_to(work)}", file, command, work) for file in files]


def write_head(target, folder, objective, config):
    """A drafter as it is before training, over most of the target's tokens."""
    from outpace.law import VocabMap

    known = torch.tensor([i for i in range(target.vocab_size) if i % 5])
    feed_V = torch.full((target.vocab_size,), -1)
    feed_V[known] = torch.arange(len(known))
    measured = {"measured": {"mean_emitted": 2.5, "accepted_by_depth": [0.6, 0.3], "prompts": 8}}
    objective.build(config, target, VocabMap(known, feed_V)).save(folder, measured)


def profile(target):
    """A profile of `tiny`, where commands look for it."""
    from outpace.analysis.profile import Learned, Profile, save
    from outpace.curve import KnownDrafter

    known = KnownDrafter(call=0.001, level=0.001, kept_D=(6.0, 3.0), tried_D=(10.0, 6.0))
    learned = Learned(
        spec="draft_model",
        speedup=1.5,
        mean_emitted=1.9,
        drafted=40,
        accepted=20,
        previewed=False,
        known=known,
        expected_D=(1.2, 1.5),
    )
    about = {"model": "tiny", "digest": target.digest, "dtype": "float32", "threads": 1, "device": "cpu"}
    numbers = {"prompts": 8, "max_new_tokens": 64, "plain_tokens_per_second": 90.0, "pass_factor": 1.1}
    return save(target, Profile(**about, **numbers, workload="chat", drafters=(learned,)))


def passes(target):
    """Measured passes of `tiny`, where commands look for them."""
    from outpace.curve import CostCurve
    from outpace.models.measured import store

    curve = CostCurve(
        model="tiny",
        dtype="float32",
        threads=1,
        device="cpu",
        rows_R=(1, 4),
        context_C=(64, 256),
        seconds_CR=((0.01, 0.02), (0.02, 0.03)),
        batch_B=(1, 2),
        seconds_CB=((0.01, 0.015), (0.02, 0.025)),
    )
    return store("passes", target, "", curve)


def learned(target):
    """What `auto` learned of lookups for `tiny`, where commands look for it."""
    from outpace.models.measured import store
    from outpace.policies.acceptance import Pool

    pool = Pool(kept_D=(6.0, 3.0), tried_D=(10.0, 6.0)).to_json()
    kinds = {"greedy": {"suffix": pool}, "drawn": {"prompt_lookup": pool}}
    return store("learned", target, "", {"auto": kinds})


def skip_set(target):
    """A set of left-out layers of `tiny`, where commands look for it."""
    from outpace.files import write_whole
    from outpace.methods.layer_skip.drafter import LayerSkip, LayerSkipConfig

    file = LayerSkip.file(LayerSkipConfig(), target)
    said = {"target": "tiny", "skip": "1", "agreement": 0.5, "cost": 0.5, "tried": 3}
    write_whole(file, json.dumps(said))
    return file


def answer(words):
    """Run a command line here: exit code, and what it wrote on standard error."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words)
    return code, err.getvalue()


def mutated(kind, good, rng):
    """A damaged copy of a file's content, and in a few words what was done to it."""
    if rng.random() < 0.7:
        if kind.file.suffix == ".json":
            return mutated_json(good, rng)
        if kind.file.suffix == ".safetensors":
            return mutated_header(good, rng)
        if kind.file.suffix == ".gguf":
            return mutated_gguf(good, rng)
    return mutated_bytes(good, rng)


def mutated_bytes(good, rng):
    """Bits turned, numbers exchanged, ends cut, stretches blanked or doubled; mostly near the start."""
    data = bytearray(good)
    at = min(len(data) - 1, int(rng.random() ** 3 * len(data)))
    how = rng.choice(("bit", "number", "cut", "blank", "double", "noise"))
    if how == "bit":
        data[at] ^= 1 << rng.randrange(8)
    elif how == "number":
        data[at : at + 8] = struct.pack("<Q", rng.choice((0, 1, 2**31, 2**40, 2**63, 2**64 - 1)))
    elif how == "cut":
        del data[at:]
    elif how == "blank":
        data[at : at + 16] = bytes(len(data[at : at + 16]))
    elif how == "double":
        data[at:at] = data[at : at + 64]
    else:
        data[at : at + 8] = rng.randbytes(8)
    return bytes(data), f"{how} at {at}"


def places(value, path=()):
    """Every place of a JSON value, its root left out; long lists by their first entries."""
    inner = list(value.items()) if isinstance(value, dict) else []
    if isinstance(value, list):
        inner = list(enumerate(value[:3]))
    for key, below in inner:
        yield (*path, key)
        yield from places(below, (*path, key))


def mutated_value(root, rng):
    """Exchange, drop or add one value of a JSON tree, in place."""
    top = [(key,) for key in root]
    path = rng.choice(top if rng.random() < 0.5 else list(places(root)) or [()])
    inner = root
    for key in path[:-1]:
        inner = inner[key]
    if rng.random() < 0.1:
        del inner[path[-1]]
        return f"{path} dropped"
    new = inner[path[-1]] = rng.choice(HOSTILE)
    return f"{path} = {str(new)[:40]!r}"


def dumped(root):
    """JSON text, deep nests written out."""
    text = json.dumps(root)
    deep = ("[" * _DEEP + "]" * _DEEP, '{"a":' * _DEEP + "1" + "}" * _DEEP)[len(text) % 2]
    return text.replace(json.dumps(_NEST), deep).encode()


def mutated_json(good, rng):
    """A JSON file with one value exchanged, or another root."""
    if rng.random() < 0.05:
        new = rng.choice(HOSTILE)
        return dumped(new), f"root = {str(new)[:40]!r}"
    root = json.loads(good)
    if not isinstance(root, dict) or not root:
        return mutated_bytes(good, rng)
    done = mutated_value(root, rng)
    return dumped(root), done


def mutated_header(good, rng):
    """A safetensors file with one value of its header exchanged."""
    (length,) = struct.unpack_from("<Q", good)
    root = json.loads(good[8 : 8 + length])
    done = mutated_value(root, rng)
    header = dumped(root)
    return struct.pack("<Q", len(header)) + header + good[8 + length :], done


_U32, _STRING, _ARRAY = 4, 8, 9


def mutated_gguf(good, rng):
    """A GGUF file with one metadata entry exchanged for another type or an absurd value."""
    at, (count,) = 24, struct.unpack_from("<Q", good, 16)
    entries = []
    for _ in range(count):
        start, (length,) = at, struct.unpack_from("<Q", good, at)
        key = good[at + 8 : at + 8 + length]
        at += 8 + length
        value = at
        at = skip(good, at + 4, struct.unpack_from("<I", good, at)[0])
        entries.append((start, value, at, key))
    start, value, end, key = rng.choice(entries)
    new = rng.choice(
        (
            struct.pack("<IQ", 10, rng.choice((0, 1, 3, 10**9, 2**31, 2**63, 2**64 - 1))),
            struct.pack("<Iq", 11, -1),
            struct.pack("<If", 6, rng.choice((0.0, -1.0, 1e38, float("nan"), float("inf")))),
            struct.pack("<I?", 7, True),
            struct.pack("<IQ", _STRING, 1) + b"x",
            struct.pack("<IQ", _STRING, 10**6) + b"x" * 10**6,
            struct.pack("<IQ", _STRING, 3) + b"\xed\xa0\x80",
            struct.pack("<IQ", _STRING, 2**40),
            struct.pack("<IIQ", _ARRAY, _U32, 2**40),
            struct.pack("<IIQ", _ARRAY, _U32, 0),
            struct.pack("<IIQ3I", _ARRAY, _U32, 3, 1, 2, 3),
            struct.pack("<IIQQ", _ARRAY, _STRING, 1, 1) + b"x",
            struct.pack("<I", _ARRAY) + struct.pack("<IQ", _ARRAY, 1) * 50_000,
            struct.pack("<IIQ", _ARRAY, _ARRAY, 10**5),
        )
    )
    return good[:value] + new + good[end:], f"{key.decode()} = {new[:24].hex()}"


def skip(data, at, kind):
    """Where a value of a kind ends."""
    if kind == _STRING:
        return at + 8 + struct.unpack_from("<Q", data, at)[0]
    if kind == _ARRAY:
        inner, count = struct.unpack_from("<IQ", data, at)
        at += 12
        for _ in range(count):
            at = skip(data, at, inner)
        return at
    return at + {0: 1, 1: 1, 2: 2, 3: 2, 7: 1, 10: 8, 11: 8, 12: 8}.get(kind, 4)


class TooLong(BaseException):
    """A file took longer than it may."""


def fault(words):
    """What is wrong with the answer to a command line; empty if nothing is."""

    def late(*_):
        raise TooLong

    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, 4 * SECONDS)  # the rest is for reading where it hangs
    began = time.process_time()
    try:
        code, said = answer(words)
    except BaseException as error:
        return "".join(traceback.format_exception(error, limit=-6))[-3000:]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    took = time.process_time() - began
    if took > SECONDS:
        return f"took {took:.1f} s"
    said = "".join(line for line in said.splitlines(keepends=True) if not line.startswith(TOLD))
    if code not in (0, 2) or "Traceback" in said:
        return f"exit {code}: {said[:500]}"
    if code == 2 and (said.count("\n") != 1 or len(said) > LETTERS):
        return f"{said.count(chr(10))} lines, {len(said)} letters: {said[:300]} ... {said[-300:]}"
    return ""


def put_back(kind, whole):
    """Undo what a command wrote beside the file."""
    if kind.store is not None:
        shutil.rmtree(kind.store)
        shutil.copytree(whole, kind.store)


def faults(files, seed, only=""):
    """Try damaged files of all kinds in turns; yield what is wrong with the answers."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="outpace-mutations-") as root:
        os.environ["OUTPACE_DATA"] = os.environ["OUTPACE_CACHE"] = str(Path(root) / "home")
        kinds = [kind for kind in make(Path(root)) if only in kind.name]
        whole = Path(root) / "whole"
        for store in {kind.store for kind in kinds if kind.store}:
            shutil.copytree(store, whole)
        for kind in kinds:
            code, said = answer(kind.words())
            assert code == 0, f"{kind.name}, not damaged: {said}"
            put_back(kind, whole)
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + BYTES, resource.RLIM_INFINITY))
        for number in range(files):
            kind, rng = kinds[number % len(kinds)], random.Random(f"{seed} {number}")
            good = kind.file.read_bytes()
            bad, done = mutated(kind, good, rng)
            kind.file.write_bytes(bad)
            wrong = fault(kind.words())
            put_back(kind, whole)
            kind.file.unlink()
            kind.file.write_bytes(good)
            if wrong:
                yield f"file {number} of seed {seed}: {kind.name}: {done}\n{wrong}"
    shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--files", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="kinds whose name holds this")
    given = parser.parse_args()
    found = 0
    for line in faults(given.files, given.seed, given.only):
        found += 1
        print(line, flush=True)
    print(f"{found} of {given.files} damaged files were answered wrongly")
    sys.exit(bool(found))
