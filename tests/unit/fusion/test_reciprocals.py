"""A CUDA kernel's reciprocals of a vector at once are those of IEEE 754, whatever its elements."""

import pytest
import torch

from emulated import Emulated
from tilewright.compile import cxx
from tilewright.device import DEVICES
from tilewright.dispatch.functions.fuse import fuse
from tilewright.fusion.cuda import target
from tilewright.fusion.cuda.rows.schedule import RowSchedule
from tilewright.impls.fused import graph_of
from tilewright.op import Workload

H200 = DEVICES["h200"]
VECTORS = (1, 2, 4)

pytestmark = [
    pytest.mark.skipif(cxx.missing() is not None, reason=str(cxx.missing())),
    pytest.mark.usefixtures("forgets_functions"),
]


def reciprocals(x):
    """In a row kernel: others take them one by one."""
    return x.reciprocal(), x.amax(-1)


def of_all_exponents(count: int) -> torch.Tensor:
    """So many numbers of each, of either sign: infinities, NaN, zeros and subnormals among them."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(0, 1 << 23, (256, count), generator=generator)
    bits[:, 0], bits[:, 1] = 0, (1 << 23) - 1
    bits += torch.arange(256)[:, None] << 23
    signs = torch.randint(0, 2, bits.shape, generator=generator)
    return torch.where(signs.bool(), bits - (1 << 31), bits).to(torch.int32).view(torch.float32)


@pytest.mark.parametrize("vector", VECTORS)
@pytest.mark.parametrize("mixed", [False, True])
def test_reciprocals_are_exact_of_every_exponent(mixed, vector):
    fuse(reciprocals)
    x = of_all_exponents(64)
    if mixed:  # ordinary numbers beside others in one vector
        x = x.T.contiguous()
    w = Workload.parse(f"reciprocals(x=f32[{x.shape[0]},{x.shape[1]}])")
    graph = graph_of(w)
    config = RowSchedule(vector, 16, 8, 1, "registers", "two_pass", 1, 1)
    assert config in target.space(graph, H200)
    found, _ = Emulated(graph, config, H200, w)(x)
    torch.testing.assert_close(found, 1 / x, rtol=0, atol=0, equal_nan=True)
