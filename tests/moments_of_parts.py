"""Functions of moments of columns, which blocks find of parts: emulated, and on a GPU."""

import torch
from torch.nn import functional as F

from row_schedules import FAR
from tilewright.dispatch.functions.fuse import fuse
from tilewright.op import OPS
from tilewright.tensor_spec import TensorSpec

ROUNDINGS = 5
"""Of fp32, relative: sums over parts are short."""
ROWS = 9 * 1024
FAR_COLUMNS = [*FAR, ("f32", 1e5, 1.0)]
EQUAL_VALUES = [0.0, 0.1, -7.3, 1e6, 3e38, float("inf"), float("nan")]


def wide(x):
    return x if x.dtype == torch.float64 else x.float()


def moments(x):
    return torch.var_mean(wide(x), 0)


def deviations(x):
    return x.std(0)


def standardized(x):
    return (x - x.mean(0)) / (x.std(0) + 1e-6)


def normed_images(x, weight, bias):
    return F.relu(F.batch_norm(x, None, None, weight, bias, training=True))


def workload(function, *specs):
    fuse(function, name=f"{function.__name__}_in_parts")
    op = OPS[f"{function.__name__}_in_parts"]
    return op.workload(**dict(zip(op.parameters, specs, strict=False)))


def following_workloads(dtype):
    """Of what follows from moments: images whose channels are last, and columns."""
    number = TensorSpec(dtype if dtype == "f64" else "f32", (24,))
    images = TensorSpec(dtype, (16, 24, 32, 18), (32 * 18 * 24, 1, 18 * 24, 24))
    yield workload(normed_images, images, number, number)
    yield workload(standardized, TensorSpec(dtype, (ROWS, 40)))


def assert_far_columns_right(executable, w, centre, spread, device):
    (x,) = w.operator.examples(w, "random", 0, device)
    x = (x.float() * spread + centre).to(x.dtype)
    eps = torch.finfo(torch.float32).eps
    for own, true, scale in zip(executable(x), moments(x.double()), (None, centre), strict=True):
        assert ((own - true).abs() <= ROUNDINGS * eps * (true if scale is None else scale)).all()


def assert_equal_values_right(executable, value, device):
    """Deviations of columns of one value: never the root of less than nothing."""
    found = executable(torch.full((ROWS, 8), value, device=device))
    if abs(value) <= 1e6:
        assert (found >= 0).all()
        assert (found <= 1e-6 * abs(value)).all()
    else:
        assert not (found < torch.inf).any()


def extreme_columns():
    """Columns with infinities, NaN, and squares that overflow."""
    x = torch.randn(ROWS, 8)
    x[5, 0], x[5000, 1], x[7, 2] = torch.inf, -torch.inf, torch.nan
    x[8, 3], x[9, 3] = torch.inf, -torch.inf
    x[:, 4] *= 1e30
    return x


def assert_found_as_by_pytorch(executable, x, device):
    found = tuple(t.cpu() for t in executable(x.to(device)))
    torch.testing.assert_close(found, (x.var(0), x.mean(0)), equal_nan=True)
