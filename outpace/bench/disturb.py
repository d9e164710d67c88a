"""A process that takes a core while others are measured."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

_SPIN = """
import os, sys, time
parent, end = int(sys.argv[1]), time.monotonic() + float(sys.argv[2])
print(flush=True)
while os.getppid() == parent and time.monotonic() < end:
    for _ in range(100000):
        pass
"""
_LONGEST = 3600.0
"""Seconds after which it ends whatever happens."""


@contextlib.contextmanager
def spinning() -> Iterator[int]:
    """Let another process spin on one core; gives its id.

    It ends with the block, also where Ctrl-C or an error ends that, and with this process.
    """
    command = [sys.executable, "-c", _SPIN, str(os.getpid()), str(_LONGEST)]
    # A session of its own: Ctrl-C is for us, and we end it.
    process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert process.stdout is not None
        process.stdout.readline()  # it spins
        yield process.pid
    finally:
        process.kill()
        process.communicate()
