"""C code of the package, compiled for this machine when it is first needed.

A file is kept per source, compiler and processor in the cache folder, so that this takes half a
second once. Where it cannot be done there is a slower way: no C compiler, no processor with fused
multiply-add, a system other than Linux, or a torch without an OpenMP whose threads can be borrowed.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from outpace.config import cache_folder, may_compile

LOG = logging.getLogger("outpace.compiled")
_COMPILERS = ("cc", "gcc", "clang")
_FLAGS = ("-std=gnu11", "-O3", "-march=native", "-ffp-contract=fast", "-pthread", "-shared", "-fPIC")
OPENMP = ("libgomp.so.1", "libiomp5.so", "libomp.so.5", "libomp.so")
"""Libraries that torch may have its threads from, the usual one first."""
LANES = 16
"""Numbers of the widest vector; of code that works on whole vectors, widths are multiples of it."""
DTYPES = (torch.float32, torch.bfloat16)
"""Of numbers that the code reads and writes."""
_SECONDS = 60.0
_ARGUMENTS = {
    "outpace_host": "a",
    "outpace_threads": "",
    "outpace_run": "a",
    "outpace_attend": "aaai",
    "outpace_norm": "aaafaiiiiii",
    "outpace_gate": "aaiiiii",
    "outpace_product": "aiaiiiaiiai",
    "outpace_room": "aii",
    "outpace_store": "iaiaiiai",
    "outpace_group_bytes": "ii",
    "outpace_dense": "aai",
}
"""Of every function: addresses, whole numbers of 64 bits, floats."""
_TYPES = {"a": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float}


@functools.cache
def library(name: str = "pass") -> ctypes.CDLL | None:
    """Load the code of ``name.c`` beside this file; compiled first, if it never was.

    Returns:
        None where that is not possible; the log says why.
    """
    if not may_compile() or not sys.platform.startswith("linux"):
        return None
    source = Path(__file__).with_name(f"{name}.c")
    try:
        threads = _threads()
        code = ctypes.CDLL(str(_compiled(source)))
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        LOG.info("%s is not compiled (%s); torch computes instead", source.name, " ".join(said.split())[:200])
        return None
    for function, letters in _ARGUMENTS.items():
        getattr(code, function).argtypes = [_TYPES[letter] for letter in letters]
        getattr(code, function).restype = ctypes.c_int64
    code.outpace_host(threads)
    return code


def _threads() -> ctypes.c_void_p:
    """The function of torch's OpenMP that runs another one on several threads.

    Raises:
        OSError: torch has none.
    """
    for name in OPENMP:
        try:
            loaded = ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
            return ctypes.cast(loaded.GOMP_parallel, ctypes.c_void_p)
        except (OSError, AttributeError):
            continue
    raise OSError("torch has no OpenMP whose threads can be borrowed")


def _compiled(source: Path) -> Path:
    """The file of a source, made now if it is not there.

    Raises:
        OSError: no compiler, or nowhere to write.
        SubprocessError: it cannot be compiled here.
    """
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise OSError("there is no C compiler")
    headers = [file.read_bytes() for file in sorted(source.parent.glob("*.h"))]
    known = (source.read_bytes(), *headers, compiler.encode(), " ".join(_FLAGS).encode(), _processor())
    digest = hashlib.sha256(b"\0".join(known)).hexdigest()[:16]
    folder = cache_folder() / "compiled"
    whole = folder / f"{source.stem}-{digest}.so"
    if whole.exists():
        return whole
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=folder) as work:
        part = Path(work) / whole.name
        subprocess.run(
            [compiler, *_FLAGS, "-o", str(part), str(source), "-lm"],
            check=True,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
        )
        part.replace(whole)
    return whole


def _processor() -> bytes:
    """What its instructions depend on: a home may be shared by several machines."""
    told = Path("/proc/cpuinfo")
    lines = told.read_text(errors="replace").splitlines() if told.exists() else []
    flags = [line for line in lines if line.lower().startswith(("flags", "features"))]
    return "\n".join([platform.machine(), *flags[:1]]).encode()
