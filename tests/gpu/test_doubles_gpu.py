"""Steps in fp64 among fp32 and halves, on a GPU."""

import pytest
import torch
from torch.nn import functional as F

from tilewright.device import spec_of
from tilewright.dispatch.functions.fuse import fuse
from tilewright.dispatch.functions.operator import backward_operator
from tilewright.impl import IMPLS
from tilewright.measure.verify import Verifier
from tilewright.op import OPS
from tilewright.tensor_spec import TensorSpec

pytestmark = pytest.mark.gpu
FUNCTIONS = {
    "a mean": lambda x: x.double().mean(-1),
    "elements": lambda x: (x.double() * 2.7).sin().to(x.dtype),
    "sums of both over columns": lambda x: (x.double() * 2).sum(0) * (x.float() * 3).sum(0),
    "a norm": lambda x: F.layer_norm(x.double(), x.shape[-1:]).to(x.dtype),
    "softmax's dtype": lambda x: F.softmax(x, -1, dtype=torch.float64),
    "to a half": lambda x: (x.double() / 3).half() * x,
}


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32"])
@pytest.mark.parametrize("case", FUNCTIONS)
def test_values_and_gradients_are_verified(case, dtype):
    fuse(FUNCTIONS[case], name="doubles_on_gpu")
    try:
        op, x = OPS["doubles_on_gpu"], TensorSpec(dtype, (513, 1030))
        w = op.workload(x=x)
        backward = backward_operator(op, 1).workload(grad_output=w.outputs[0], x=x, grads=None)
        for each in (w, backward):
            fused, spec = IMPLS["fused"], spec_of(0)
            built = fused.build(fused.heuristic(each, spec), each, spec)
            assert Verifier(each, torch.device("cuda")).check(built).message == ""
    finally:
        for name in ("doubles_on_gpu", "doubles_on_gpu_backward"):
            OPS.remove(name)
