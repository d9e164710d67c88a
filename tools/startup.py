"""Time from exec of ``outpace generate`` to its first token: a cold process, weights in the cache
of the operating system.

    python tools/startup.py [--runs 5] [-- more options of outpace generate]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

PROMPT = "Name three rivers."


def first_token(extra: list[str]) -> tuple[float, float]:
    """Seconds from exec to the first byte of text, and to the end."""
    command = [
        sys.executable,
        "-m",
        "outpace.cli.main",
        "generate",
        PROMPT,
        "--max-new-tokens",
        "8",
        "--temperature",
        "0",
        *extra,
    ]
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        first = process.stdout.read(1)
        to_first = time.perf_counter() - began
        process.stdout.read()
        code = process.wait()
    if code or not first:
        raise SystemExit(f"{' '.join(command)} ended with {code}")
    return to_first, time.perf_counter() - began


def main() -> None:
    """Warm the cache once, then measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("extra", nargs="*")
    args = parser.parse_args()
    first_token(args.extra)
    runs = [first_token(args.extra) for _ in range(args.runs)]
    print("to the first token:", " ".join(f"{first:.2f}" for first, _ in runs), "s")
    print(
        f"median {statistics.median(first for first, _ in runs):.2f} s, "
        f"to the end {statistics.median(end for _, end in runs):.2f} s"
    )


if __name__ == "__main__":
    main()
