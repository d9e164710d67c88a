"""How the C code is compiled; by the user's machine, or before for a wheel. Standard library only.

A wheel carries one file for each of ``VARIANTS``, and whoever loads one takes the first whose
instructions the processor has. ``setup.py`` runs this file before torch or the package is there.
"""

from __future__ import annotations

import hashlib
import platform
import shutil
import subprocess
from collections.abc import Collection, Mapping
from pathlib import Path

FOLDER = Path(__file__).parent
SHIPPED = FOLDER / "shipped"
"""Where a wheel has its files."""
MAIN = "pass.c"
"""What is compiled; it includes all others."""
FLAGS = ("-std=gnu11", "-O3", "-ffp-contract=off", "-pthread", "-shared", "-fPIC")
NATIVE = "-march=native"
COMPILERS = ("cc", "gcc", "clang")
_AVX2 = ("-mavx2", "-mfma", "-mf16c", "-mbmi", "-mbmi2")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")
VARIANTS: Mapping[str, tuple[str, ...]] = {
    "amx": (*_AVX512, "-mavx512vnni", "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
    "avx512-bf16": (*_AVX512, "-mavx512vnni", "-mavx512bf16"),
    "avx512-vnni": (*_AVX512, "-mavx512vnni"),
    "avx512": _AVX512,
    "avx2": _AVX2,
}
"""Flags of each, the fastest first."""
_CALLED = {
    "bmi": "bmi1",
    "avx512vnni": "avx512_vnni",
    "avx512bf16": "avx512_bf16",
    "amx-tile": "amx_tile",
    "amx-bf16": "amx_bf16",
}
"""What Linux calls an instruction set, where compilers call it otherwise."""
SECONDS = 120.0
"""What a compiler is given."""


def sources() -> bytes:
    """All that is compiled, to tell one state of it from another."""
    files = sorted([*FOLDER.glob("*.c"), *FOLDER.glob("*.h")])
    return b"\0".join(part for file in files for part in (file.name.encode(), file.read_bytes()))


def digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def compiler() -> str:
    """Path of a C compiler.

    Raises:
        OSError: there is none.
    """
    for name in COMPILERS:
        if (path := shutil.which(name)) is not None:
            return path
    raise OSError("there is no C compiler")


def compile_to(path: Path, flags: Collection[str], source: Path = FOLDER / MAIN) -> None:
    """Compile into a file.

    Raises:
        OSError: no compiler, or nowhere to write.
        SubprocessError: the compiler refuses.
    """
    command = [compiler(), *FLAGS, *flags, "-o", str(path), str(source), "-lm"]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=SECONDS)


def shipped(variant: str) -> Path:
    """The file of a variant; of another state of the sources it has another name."""
    return SHIPPED / f"{variant}-{digest(sources())}.so"


def features() -> frozenset[str]:
    """Instruction sets of this processor, as Linux calls them."""
    told = Path("/proc/cpuinfo")
    lines = told.read_text(errors="replace").splitlines() if told.exists() else []
    for line in lines:
        name, _, words = line.partition(":")
        if name.strip().lower() in ("flags", "features"):
            return frozenset(words.split())
    return frozenset()


def needed(variant: str) -> frozenset[str]:
    """Instruction sets of a variant, as Linux calls them."""
    names = (flag.removeprefix("-m") for flag in VARIANTS[variant])
    return frozenset(_CALLED.get(name, name) for name in names)


def chosen() -> Path | None:
    """The fastest file of the wheel that this processor runs, if there is one."""
    known = features()
    for variant in VARIANTS if platform.machine() == "x86_64" else ():
        if needed(variant) <= known and shipped(variant).exists():
            return shipped(variant)
    return None


def ship(folder: Path) -> list[Path]:
    """Compile all variants for a wheel.

    Returns:
        What was made; nothing on another system than Linux on x86-64 or without a compiler.
    """
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return []
    made: list[Path] = []
    for variant, flags in VARIANTS.items():
        path = folder / shipped(variant).name
        folder.mkdir(parents=True, exist_ok=True)
        try:
            compile_to(path, flags)
        except (OSError, subprocess.SubprocessError) as error:
            said = getattr(error, "stderr", None) or str(error)
            print(f"outpace: no compiled code for {variant} ({said.strip()[:200]})")
            continue
        made.append(path)
    return made
