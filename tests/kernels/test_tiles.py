"""Products by matrix units do not depend on the rows beside a row; units that err are not used.

The operations of the units are done in C here (tiles_in_c.h), so that any processor with instructions for
bfloat16 runs the test.
"""

import ctypes
import random
import shutil
from pathlib import Path

import pytest
import torch

from outpace.kernels import build, compiled
from outpace.models import fused, products
from outpace.models.products import Product, store_numbers
from tests.models import test_fused
from tests.models.test_products import rows

ENOUGH = {"avx512_vnni", "avx512_bf16", "avx512bw"} <= build.features() and compiled.library() is not None
pytestmark = pytest.mark.skipif(not ENOUGH, reason="needs bfloat16 and a compiler")
IN_C = Path(__file__).parent / "tiles_in_c.h"
KNOWN = 8
"""Operations of the known product."""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiles") / "right.so"
    build.compile_to(path, [*build.VARIANTS["avx512-bf16"], "-O2", "-include", str(IN_C)])
    return path


@pytest.fixture(scope="module", params=["right", "wrong"])
def units(request, file):
    """Code that multiplies by such units, and whether these are right."""
    right = request.param == "right"
    code = compiled.load(file if right else shutil.copy(file, file.with_name("wrong.so")))
    ctypes.c_int.in_dll(code, "outpace_wrong").value = int(not right)
    return code, right


def halves(outputs, inputs):
    weights = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(3)).bfloat16()
    bias = torch.linspace(-1, 1, outputs)
    return Product([store_numbers(weights)], bias), weights.double(), bias.double()


def test_many_rows_have_the_same_bits_as_few(units, set_threads, monkeypatch):
    """Where there are many, each of two threads has rows of its own."""
    set_threads(2)
    code, _ = units
    product, *_ = halves(72, 288)
    x = rows(231, 288)
    monkeypatch.setattr(products, "library", lambda: code)
    few = torch.cat([product(some) for some in x.split(40)])
    for count in (191, 192, 200, 231):
        assert torch.equal(product(x[:count]), few[:count]), count


@pytest.mark.parametrize("outputs", [72, 32, 16])
def test_rows_have_the_same_bits_beside_any_others(outputs, units, monkeypatch):
    code, right = units
    product, weights, bias = halves(outputs, 576)
    x = rows(70, 576).bfloat16().float()
    x[3] *= 2**13
    x[5, 40] = float("nan")
    plain = product(x)
    monkeypatch.setattr(products, "library", lambda: code)
    before = code.outpace_tile_adds()
    alone = torch.cat([product(x[row : row + 1]) for row in range(70)])
    for count in (1, 2, 8, 15, 16, 17, 31, 32, 33, 50, 70):
        got, finite = product(x[:count]), torch.arange(count) != 5
        assert torch.equal(got[finite], alone[:count][finite]), count
        assert not got[~finite].isfinite().any()
    finite = torch.arange(70) != 5
    want = x[finite].double() @ weights.T + bias
    assert (alone[finite].double() - want).norm() < 1e-6 * want.norm()
    assert (code.outpace_tile_adds() > before + KNOWN) == right
    if right and build.needed("amx") <= build.features():
        assert torch.equal(alone[finite], plain[finite]), "the processor adds in the same order"


def test_rows_attend_with_the_same_bits_beside_any_others(units, monkeypatch):
    """As with vectors; and the processor's own units give what those in C give."""
    code, right = units
    shape = test_fused.heads(*test_fused.GROUPED)
    spans, given = test_fused.batch(random.Random(4), 4), []
    before = code.outpace_tile_adds()
    for one in (compiled.library(), code):
        monkeypatch.setattr(fused, "library", lambda one=one: one)
        cache = test_fused.cache_of(shape, 4, kept=torch.bfloat16, tiled=True)
        attend = fused.FusedAttention(cache, spans, 200, shape, frozenset({50}), torch.float32)
        test_fused.fill(attend)
        given.append(attend(1, 50))
    assert (code.outpace_tile_adds() > before + KNOWN) == right
    torch.testing.assert_close(*given, atol=2e-2, rtol=0)
    own = build.needed("amx") <= build.features()
    assert torch.equal(*given) == (own == right)
    test_fused.test_a_row_gets_the_same_bits_whatever_is_beside_it(torch.bfloat16)


def test_inputs_that_fill_no_tile_are_multiplied_without(units, monkeypatch):
    code, _ = units
    product, *_ = halves(40, 72)
    x = rows(9, 72)
    want, before = product(x), code.outpace_tile_adds()
    monkeypatch.setattr(products, "library", lambda: code)
    assert torch.equal(product(x), want) and code.outpace_tile_adds() <= before + KNOWN


def test_a_variant_with_units_is_for_processors_that_have_them():
    assert {"amx_tile", "amx_bf16", "avx512_bf16"} <= build.needed(next(iter(build.VARIANTS)))
