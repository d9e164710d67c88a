"""Products by matrix units have the bits of those without; units that err are not used.

The operations of the units are done in C here (tiles_in_c.h), so that any processor with VNNI runs the test.
"""

import ctypes
import shutil
from pathlib import Path

import pytest
import torch

from outpace.kernels import build, compiled
from outpace.models import products
from outpace.models.products import CODED
from tests.models.test_products import made, rows

ENOUGH = {"avx512_vnni", "avx512bw"} <= build.features() and compiled.library() is not None
pytestmark = pytest.mark.skipif(not ENOUGH, reason="needs VNNI and a compiler")
IN_C = Path(__file__).parent / "tiles_in_c.h"


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiles") / "right.so"
    build.compile_to(path, [*build.VARIANTS["avx512-vnni"], "-O2", "-include", str(IN_C)])
    return path


@pytest.fixture(scope="module", params=["right", "wrong"])
def units(request, file):
    """Code that multiplies by such units, and whether these are right."""
    right = request.param == "right"
    code = compiled.load(file if right else shutil.copy(file, file.with_name("wrong.so")))
    ctypes.c_int.in_dll(code, "outpace_wrong").value = int(not right)
    return code, right


@pytest.mark.parametrize("kind", sorted(CODED))
def test_products_by_units_have_the_same_bits(kind, units, monkeypatch):
    code, right = units
    product, _ = made(kind, 72, 512, torch.randn(72))
    x = rows(70, 512)
    x[3] *= 1e4
    x[5, 40] = float("nan")
    counts = (7, 8, 9, 15, 16, 17, 24, 33, 70)
    want = [product(x[:count]) for count in counts]
    monkeypatch.setattr(products, "library", lambda: code)
    before = code.outpace_tile_adds()
    for count, plain in zip(counts, want, strict=True):
        got, finite = product(x[:count]), torch.arange(count) != 5
        assert torch.equal(got[finite], plain[finite]), count
        assert not got[~finite].isfinite().any()
    assert (code.outpace_tile_adds() > before + 2) == right
    assert products.tile_rows() == (16 if right else 8)


def test_a_variant_with_units_is_for_processors_that_have_them():
    assert {"amx_tile", "amx_int8", "avx512_vnni"} <= build.needed(next(iter(build.VARIANTS)))
