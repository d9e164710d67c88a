"""Peak memory from the start of loading to the end of 512 tokens, less what the imports hold.

    python tools/memory.py [--dtype bfloat16] [--threads 1] [--model smollm2-135m]

The ratio is over the weights in the chosen dtype and the cache, each printed.
"""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path


def peak() -> int:
    """Highest resident set since the mark, bytes (Linux)."""
    return next(
        int(line.split()[1]) * 1024
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmHWM")
    )


def memory(args) -> None:
    """Peak resident memory from loading to 512 tokens, less what the imports hold."""
    import torch

    from outpace import Engine, SamplingParams  # noqa: F401  (imports are what is subtracted)
    from outpace.models import decoder, load, zoo  # noqa: F401

    torch.set_num_threads(args.threads)
    torch.ones(64, 64) @ torch.ones(64, 64)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    before = peak()
    engine = Engine.load(args.model, drafter="none", dtype=args.dtype)
    loaded = peak()
    engine.generate(list(range(100, 110)), max_new_tokens=502, ignore_eos=True)
    after = peak()
    weights, cache = engine.target.weight_bytes, engine.cache.nbytes
    print(f"weights {weights / 1e6:.0f} MB in {args.dtype}, cache {cache / 1e6:.0f} MB")
    print(
        f"peak after loading {(loaded - before) / 1e6:.0f} MB, "
        f"after 512 tokens {(after - before) / 1e6:.0f} MB, imports {before / 1e6:.0f} MB"
    )
    print(f"ratio {(after - before) / (weights + cache):.2f}")


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    memory(parser.parse_args())


if __name__ == "__main__":
    main()
