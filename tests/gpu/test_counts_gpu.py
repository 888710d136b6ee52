"""Losses, sums and moments over rows, whose number kernels are given, on a GPU."""

import pytest
import torch
from torch.nn import functional as F

import tilewright as tw
from over_rows import mean_loss, mean_square, standardised
from tilewright.device import spec_of
from tilewright.dispatch.functions.operator import backward_operator
from tilewright.impl import IMPLS
from tilewright.measure.verify import Verifier
from tilewright.op import OPS

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("forgets_functions")]
FUSED = IMPLS["fused"]
ROWS = (5, 331, 333, 4096, 8191)


def normed_sum(x):
    return F.layer_norm(x, x.shape[-1:]).sum(0)


@pytest.mark.parametrize("function", [mean_square, mean_loss, standardised, normed_sum])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_any_number_of_rows_is_verified_and_two_share_a_kernel(function, dtype, device):
    tw.fuse(function)
    op, spec, sources = OPS[function.__name__], spec_of(device.index), {}
    backward = backward_operator(op, 1)
    for n in ROWS:
        x = torch.empty(n, 520, dtype=dtype)
        w, _ = op.workload_of(x)
        out = torch.empty(w.outputs[0].shape, dtype=w.outputs[0].torch_dtype)
        for each in (w, backward.workload_of(out, x)[0]):
            config = FUSED.heuristic(each, spec)
            sources.setdefault(each.op, []).append(FUSED.task(config, each, spec).source)
            found = Verifier(each, device).check(FUSED.build(config, each, spec))
            assert found.ok, found.message
    assert all(of[1] == of[2] for of in sources.values())
