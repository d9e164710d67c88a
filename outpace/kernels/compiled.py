"""C code of the package as this machine runs it.

A wheel may carry it compiled (`outpace.kernels.build`). Elsewhere it is compiled when first needed, in
some seconds. The cache folder keeps a file per sources, compiler and processor. Otherwise torch
computes, more slowly: without a C compiler or fused multiply-add, outside of Linux, or where no OpenMP
of torch lends its threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import torch

from outpace.config import cache_folder, may_compile
from outpace.files import replaced
from outpace.kernels import build

LOG = logging.getLogger("outpace.compiled")
LANES = 16
"""Numbers of the widest vector; of code that works on whole vectors, widths are multiples of it."""
DTYPES = (torch.float32, torch.bfloat16)
"""Of numbers that the code reads and writes."""
_ARGUMENTS = {
    "outpace_host": "a",
    "outpace_threads": "",
    "outpace_run": "a",
    "outpace_levels": "a",
    "outpace_trees": "a",
    "outpace_see": "aaiaiii",
    "outpace_move": "a",
    "outpace_attend": "aiaaiii",
    "outpace_norm": "aafafaiiiiii",
    "outpace_gate": "aaiiiii",
    "outpace_product": "aiaiiiaiiai",
    "outpace_room": "aii",
    "outpace_store": "iaiaiiai",
    "outpace_group_bytes": "ii",
    "outpace_dense": "aai",
    "outpace_tile": "",
    "outpace_softmax": "aida",
    "outpace_choose": "aid",
    "outpace_place": "aii",
    "outpace_strike": "aiaia",
    "outpace_excess": "aidaaiaa",
    "outpace_race": "aaiiia",
    "outpace_rank": "aaiiiaa",
    "outpace_truncate": "aididdaa",
}
"""Of every function: addresses, whole numbers of 64 bits, floats, doubles."""
_DIGEST = hashlib.sha256().digest_size
_TYPES = {"a": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float, "d": ctypes.c_double}


@functools.cache
def library() -> ctypes.CDLL | None:
    """Load the code; compiled first, if it never was.

    Returns:
        None where that is not possible; the log says why.
    """
    if not may_compile() or not sys.platform.startswith("linux"):
        return None
    try:
        threads = _threads()
        code = load(build.chosen() or _compiled())
    except (OSError, AttributeError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        said = " ".join(said.split())[:200]
        LOG.warning("%s is not compiled (%s); torch computes instead, more slowly", build.MAIN, said)
        return None
    code.outpace_host(threads)
    return code


def load(path: Path) -> ctypes.CDLL:
    """Load a file of the code, with the types of its functions.

    Raises:
        AttributeError: a function is missing.
        OSError: it cannot be loaded.
    """
    code = ctypes.CDLL(str(path))
    for function, letters in _ARGUMENTS.items():
        getattr(code, function).argtypes = [_TYPES[letter] for letter in letters]
        getattr(code, function).restype = ctypes.c_int64
    return code


def described() -> str:
    """Say in a few words which code runs on this machine's processor."""
    code = library()
    if code is None:
        why = "compiling is off" if not may_compile() else "no compiled code could be had"
        return f"torch ({why})"
    file = Path(code._name)
    if file.parent == build.SHIPPED:
        return f"compiled for {file.name.rpartition('-')[0]}, from the wheel"
    return f"compiled here for this processor ({file})"


def _threads() -> ctypes.c_void_p:
    """The function of torch's OpenMP that runs another one on several threads.

    It is found through torch's own library, for wheels give their OpenMP names such as
    ``libgomp-98df74fd.so.1.0.0``.

    Raises:
        OSError: torch has none.
    """
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        loaded = ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        return ctypes.cast(loaded.GOMP_parallel, ctypes.c_void_p)
    except (OSError, AttributeError):
        raise OSError("torch has no OpenMP whose threads can be borrowed") from None


def _compiled() -> Path:
    """The file of the sources, made now if it is not there or no longer what was made.

    Raises:
        OSError: no compiler, or nowhere to write.
        SubprocessError: it cannot be compiled here.
    """
    known = [build.sources(), build.compiler().encode(), " ".join(build.FLAGS).encode(), _processor()]
    folder = cache_folder() / "compiled"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    whole = folder / f"pass-{build.digest(*known)}.so"
    if not _is_whole(whole):
        _remove_parts(folder)
        with replaced(whole) as fresh:
            build.compile_to(fresh, [build.NATIVE])
            content = fresh.read_bytes()
            fresh.write_bytes(content + hashlib.sha256(content).digest())
    return whole


def _is_whole(file: Path) -> bool:
    """Whether a file ends with the digest of all before; whoever loads it reads no further than its code."""
    try:
        content = file.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-_DIGEST]).digest() == content[-_DIGEST:]


def _remove_parts(folder: Path) -> None:
    """Remove what was being compiled when its process was killed; no compiler takes as long as its age."""
    for part in folder.glob(".*.part"):
        with contextlib.suppress(OSError):  # another process was faster
            if time.time() - part.stat().st_mtime > 2 * build.SECONDS:
                part.unlink()


def _processor() -> bytes:
    """What its instructions depend on: a home may be shared by several machines."""
    return " ".join([platform.machine(), *sorted(build.features())]).encode()
