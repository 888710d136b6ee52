"""Counted positions, and losses by labels, on a GPU."""

import pytest
import torch

from counted import BY_LABELS, WITH_POSITIONS
from tilewright.device import spec_of
from tilewright.dispatch.functions.fuse import fuse
from tilewright.impl import IMPLS
from tilewright.measure.verify import Verifier
from tilewright.op import OPS

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("forgets_functions")]

FUSED = IMPLS["fused"]
EVERY = {**WITH_POSITIONS, **BY_LABELS}
SHAPES = [
    (torch.float32, 4000, 1003),
    (torch.bfloat16, 3000, 4096),
    (torch.float16, 500, 32000),
    (torch.float32, 16, 128256),
]


@pytest.mark.parametrize(("dtype", "rows", "columns"), SHAPES)
@pytest.mark.parametrize("name", EVERY)
def test_they_pass_verification(dtype, rows, columns, name, device):
    x = torch.zeros(rows, columns, dtype=dtype, device=device)
    fuse(EVERY[name], name="counted")
    w, _ = OPS["counted"].workload_of(x, torch.zeros(rows, dtype=torch.int64, device=device))
    spec = spec_of(device.index)
    executable = FUSED.build(FUSED.untuned(w, spec), w, spec)
    verdict = Verifier(w, device).check(executable)
    assert verdict.ok, verdict.message


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", BY_LABELS)
def test_gradients_are_pytorchs(dtype, name, device):
    torch.manual_seed(0)
    x = torch.randn(700, 5003, device=device).to(dtype).requires_grad_()
    labels = torch.randint(0, 5003, (700,), device=device)
    fused = fuse(BY_LABELS[name], name="counted")
    (found,) = torch.autograd.grad(fused(x, labels).float().square().sum(), x)
    wide = x.detach().double().requires_grad_()
    (right,) = torch.autograd.grad(BY_LABELS[name](wide, labels).square().sum(), wide)
    scale = right.abs().max().item()
    tolerance = 1e-5 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(found.double(), right, rtol=tolerance, atol=tolerance * scale)
