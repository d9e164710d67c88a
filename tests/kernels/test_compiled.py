"""Code is compiled once, files that are not whole are made anew, and wheels carry theirs."""

import logging
import os
import platform
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from outpace.kernels import build, compiled
from outpace.kernels.compiled import library

ROOT = Path(__file__).parents[2]
needs_code = pytest.mark.skipif(library() is None, reason="C cannot be compiled for this machine")


def test_code_is_there_where_it_can_be_compiled():
    """Else the tests that need it would all be left out, in silence."""
    if not compiled.may_compile() or not {"avx2", "fma", "f16c"} <= build.features():
        pytest.skip("other machines may have no code")
    try:
        build.compiler()
    except OSError:
        pytest.skip("there is no C compiler")
    assert library() is not None


NOT_FINITE = r"""
#include "products.h"

int main(void) {
    static char operands[1024] __attribute__((aligned(64)));
    const int kinds[] = {Q4_0, Q8_0};
    const float wrong[] = {NAN, INFINITY};
    for (int i = 0; i < 4; i++) {
        const Matrix m = {kinds[i / 2], GROUP, SPAN, NULL, NULL};
        float x[SPAN];
        for (int n = 0; n < SPAN; n++) x[n] = wrong[i % 2];
        product_prepare(&m, x, SPAN, 0, 1, 0, 1, operands);
        if (!isnan(meaning(kinds[i / 2], operands)->sum)) return 1;
    }
    return 0;
}
"""


@needs_code
def test_no_sum_overflows_where_numbers_are_not_finite(tmp_path):
    (tmp_path / "try.c").write_text(NOT_FINITE)
    traps = ("-fsanitize=signed-integer-overflow", "-fsanitize-undefined-trap-on-error")
    flags = ("-std=gnu11", "-O1", "-w", build.NATIVE, *traps, f"-I{build.FOLDER}")
    command = (build.compiler(), *flags, "-o", tmp_path / "try", tmp_path / "try.c", "-lm")
    subprocess.run(command, check=True, capture_output=True)
    subprocess.run([tmp_path / "try"], check=True)


@pytest.fixture
def calls(tmp_path, monkeypatch):
    """Commands of a compiler that writes nonsense; sources and the cache are in ``tmp_path``."""
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path))
    monkeypatch.setenv("OUTPACE_COMPILE", "1")
    monkeypatch.setattr(build, "FOLDER", tmp_path)
    monkeypatch.setattr(build, "SHIPPED", tmp_path / "shipped")
    calls = []

    def compiler(command, **options):
        calls.append(command)
        assert options["check"] and options["timeout"] > 0
        with open(command[command.index("-o") + 1], "wb") as file:
            file.write(b"\x7fELF and more")

    monkeypatch.setattr(subprocess, "run", compiler)
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    (tmp_path / "pass.c").write_text("int one;")
    return calls


def test_code_is_compiled_once(calls, tmp_path, monkeypatch):
    made = compiled._compiled()
    assert made == compiled._compiled() and len(calls) == 1
    assert list(made.parent.iterdir()) == [made], "nothing else is left"
    monkeypatch.setattr(compiled, "_processor", lambda: b"another")
    assert compiled._compiled() != made and len(calls) == 2
    for changed in ("pass.c", "some.h", "other.c"):
        (tmp_path / changed).write_text("int two;")
        before = len(calls)
        compiled._compiled()
        assert len(calls) == before + 1, "what it includes may have changed"


@pytest.mark.parametrize(
    "harmed",
    [
        lambda whole: b"",
        lambda whole: whole[:7],
        lambda whole: whole[:-1],
        lambda whole: whole[:-32],
        lambda whole: whole + b".",
        lambda whole: whole.replace(b"more", b"mose"),
    ],
)
def test_a_file_that_is_not_whole_is_made_anew(calls, harmed):
    made = compiled._compiled()
    whole = made.read_bytes()
    made.write_bytes(harmed(whole))
    assert compiled._compiled() == made and made.read_bytes() == whole and len(calls) == 2
    made.unlink()
    assert compiled._compiled() == made and len(calls) == 3


def test_what_a_killed_process_was_compiling_is_removed(calls, tmp_path):
    folder = tmp_path / "compiled"
    folder.mkdir()
    for name, age in (("killed", 300), ("runs", 100)):
        part = folder / f".pass-{name}.so.1-00.part"
        part.touch()
        os.utime(part, (time.time() - age,) * 2)
    made = compiled._compiled()
    assert {one.name for one in folder.iterdir()} == {made.name, ".pass-runs.so.1-00.part"}


@pytest.mark.slow
@needs_code
def test_a_truncated_file_runs_again(tmp_path):
    """In processes of their own: a file that is loaded stays loaded."""
    told = []
    for _ in range(2):
        command = [sys.executable, "-m", "outpace", "version"]
        ran = subprocess.run(
            command,
            env={"OUTPACE_CACHE": str(tmp_path), "PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        )
        told.append(ran.stdout)
        if "from the wheel" in ran.stdout:
            pytest.skip("nothing is compiled here")
        (file,) = (tmp_path / "compiled").glob("*.so")
        size = file.stat().st_size
        with file.open("rb+") as out:
            out.truncate(size // 2)
    assert told[0] == told[1] and f"compiled here for this processor ({file})" in told[0]


def test_what_cannot_be_compiled_is_left_to_torch(calls, monkeypatch, caplog):
    caplog.set_level(logging.WARNING, "outpace.compiled")
    fresh = compiled.library.__wrapped__
    assert fresh() is None, "what was written is no library"
    assert "pass.c is not compiled (" in caplog.text

    def refuses(command, **options):
        raise subprocess.CalledProcessError(1, command, stderr="error: no\nvectors")

    monkeypatch.setattr(subprocess, "run", refuses)
    monkeypatch.setattr(compiled, "_processor", lambda: b"a third")
    assert fresh() is None and "(error: no vectors)" in caplog.text
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert fresh() is None and "there is no C compiler" in caplog.text
    caplog.clear()
    monkeypatch.setenv("OUTPACE_COMPILE", "0")
    assert fresh() is None and not caplog.text
    monkeypatch.setattr(compiled, "library", lambda: None)
    assert compiled.described() == "torch (compiling is off)"


def test_the_fastest_file_that_the_processor_runs_is_chosen(calls, tmp_path, monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    assert build.chosen() is None
    made = build.ship(build.SHIPPED)
    assert [path.name.rpartition("-")[0] for path in made] == list(build.VARIANTS) and len(calls) == 5
    avx2 = {"avx2", "fma", "f16c", "bmi1", "bmi2", "sse2"}
    avx512 = avx2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
    for known, want in [
        ({"sse2"}, None),
        (avx2, "avx2"),
        (avx512 - {"avx512vl"}, "avx2"),
        (avx512, "avx512"),
        (avx512 | {"avx512_vnni"}, "avx512-vnni"),
        (avx512 | {"avx512_bf16"}, "avx512"),
        (avx512 | {"avx512_vnni", "avx512_bf16"}, "avx512-bf16"),
        (avx512 | {"avx512_vnni", "avx512_bf16", "amx_tile"}, "avx512-bf16"),
        (avx512 | {"avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16"}, "amx"),
    ]:
        monkeypatch.setattr(build, "features", lambda known=known: frozenset(known))
        one = build.chosen()
        assert (one and one.name.rpartition("-")[0]) == want
    assert build.chosen() in made
    (tmp_path / "pass.c").write_text("int changed;")
    assert build.chosen() is None, "made from other sources"
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert build.ship(build.SHIPPED) == []


@pytest.mark.slow
@needs_code
@pytest.mark.skipif(platform.machine() != "x86_64", reason="other machines compile at first use")
def test_every_variant_compiles(tmp_path):
    made = build.ship(tmp_path)
    assert [path.name.rpartition("-")[0] for path in made] == list(build.VARIANTS)


@pytest.mark.slow
@needs_code
@pytest.mark.skipif(shutil.which("gcc") is None, reason="a parameter of GCC")
def test_rows_do_not_feel_how_a_compiler_is_tuned(tmp_path):
    """GCC avoids chains of fused sums for some processors: for one row of a tile and not for the next."""
    tuned = tmp_path / "cc"
    tuned.write_text('#!/bin/sh\ntouch "$0.called"\nexec gcc "$@" --param=avoid-fma-max-bits=512\n')
    tuned.chmod(0o755)
    command = [sys.executable, "-m", "pytest", "-q", "tests/models/test_products.py", "-k", "feel_each_other"]
    env = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    ran = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout
    assert tuned.with_name("cc.called").exists()


@pytest.mark.slow
def test_a_wheel_carries_compiled_code_if_there_is_a_compiler(tmp_path):
    pytest.importorskip("setuptools", minversion="77")
    copy = tmp_path / "copy"
    shutil.copytree(
        ROOT / "outpace", copy / "outpace", ignore=shutil.ignore_patterns("weights", "__pycache__")
    )
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for compilers, count in ((build.COMPILERS, 5), (("no-such-compiler",), 0)):
        file = copy / "outpace/kernels/build.py"
        text = (ROOT / "outpace/kernels/build.py").read_text()
        file.write_text(text.replace(repr(build.COMPILERS).replace("'", '"'), repr(compilers)))
        shutil.rmtree(copy / "build", ignore_errors=True)
        out = tmp_path / f"wheels{count}"
        code = f"import setuptools.build_meta as b; print(b.build_wheel({str(out)!r}))"
        out.mkdir()
        subprocess.run([sys.executable, "-c", code], cwd=copy, check=True, capture_output=True)
        (wheel,) = out.glob("*.whl")
        files = [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]
        assert len(files) == count
        assert ("py3-none-manylinux_2_17_x86_64" in wheel.name) == (count > 0)
