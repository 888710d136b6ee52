"""Tensors of whole numbers on a GPU: exact alone, and right beside floats."""

import pytest
import torch

from tilewright.device import spec_of
from tilewright.dispatch.functions.fuse import fuse
from tilewright.impl import IMPLS
from tilewright.measure.verify import Verifier
from tilewright.op import OPS
from whole_numbers import EXACT, MASKS, SMALL, assert_equal, edges

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("forgets_functions")]

FUSED = IMPLS["fused"]
KINDS = {"i": torch.int32, "l": torch.int64}


def built(function, *tensors):
    fuse(function, name="of_integers")
    w, _ = OPS["of_integers"].workload_of(*tensors)
    spec = spec_of(tensors[0].device.index)
    return w, FUSED.build(FUSED.heuristic(w, spec), w, spec)


@pytest.mark.parametrize("dtypes", ["ii", "ll", "il"])
@pytest.mark.parametrize("name", EXACT)
def test_whole_numbers_of_any_size_are_exact(dtypes, name, device):
    a, b = (edges(KINDS[d], 50 * 371, i).view(50, 371) for i, d in enumerate(dtypes))
    x = torch.randn(50, 371, generator=torch.Generator().manual_seed(2))
    tensors = [t.to(device) for t in (a, b, x)]
    _, executable = built(EXACT[name], *tensors)
    assert_equal(executable(*tensors), EXACT[name](*tensors))


@pytest.mark.parametrize("dtypes", ["ii", "ll", "li"])
@pytest.mark.parametrize("name", SMALL)
def test_arithmetic_of_whole_numbers_is_pytorchs(dtypes, name, device):
    generator = torch.Generator().manual_seed(0)
    a, b = (
        torch.randint(-99, 99, (60, 400), generator=generator, dtype=KINDS[d]).to(device)
        for d in dtypes
    )
    _, executable = built(SMALL[name], a, b)
    assert_equal(executable(a, b), SMALL[name](a, b))


@pytest.mark.parametrize("dtype", ["i", "l"])
@pytest.mark.parametrize(("rows", "columns"), [(4000, 1003), (3000, 4096), (16, 65536)])
@pytest.mark.parametrize("name", MASKS)
def test_beside_reductions_they_pass_verification(dtype, rows, columns, name, device):
    m = torch.zeros(rows, columns, dtype=KINDS[dtype], device=device)
    w, executable = built(MASKS[name], m, torch.zeros(rows, columns, device=device))
    verdict = Verifier(w, device).check(executable)
    assert verdict.ok, verdict.message
