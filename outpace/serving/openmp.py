"""The worker threads of the CPU, which belong to the thread that computes.

An OpenMP library keeps a team of workers for every thread that has ever computed something. If all
teams together have more threads than the machine has cores, idle workers go to sleep. Waking them for
each of a pass's hundreds of small pieces costs more than they save. A pass over 16 rows of a small model
took 40 ms on a second thread, and 24 ms on the first. So a thread that loads a model and leaves computing
to another one lets its own team go.
"""

from __future__ import annotations

import ctypes
import os
import sys

_SOFT = 1  # omp_pause_soft
_LIBRARIES = ("libgomp.so.1", "libiomp5.so", "libomp.so.5", "libomp.so")


def let_go() -> bool:
    """End the workers of the calling thread; they come back when it computes again.

    Returns:
        Whether a library said that it did so. False on systems where this is not known to work.
    """
    if not sys.platform.startswith("linux"):
        return False
    done = False
    for name in _LIBRARIES:
        try:
            library = ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
            done = library.omp_pause_resource_all(_SOFT) == 0 or done
        except (OSError, AttributeError):  # not in use here, or too old to know how
            continue
    return done
