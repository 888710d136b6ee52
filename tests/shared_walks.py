"""Functions of columns whose blocks share walks and meet: emulated, and on a GPU."""

import torch
from torch.nn import functional as F

from tilewright.dispatch.functions.fuse import fuse
from tilewright.dispatch.functions.operator import backward_operator
from tilewright.fusion.cuda.tiles.schedule import TileSchedule
from tilewright.op import OPS
from tilewright.tensor_spec import TensorSpec


def normed_columns(x):
    x = x if x.dtype == torch.float64 else x.float()
    return (x - x.mean(0)) / (x.std(0) + 1e-6)


def column_softmax(x):
    return x.softmax(0)


def spread_of_columns(x):
    """Results of a step each, and of all of them."""
    greatest, least = x.amax(0, keepdim=True), x.amin(0, keepdim=True)
    return (x - least) / (greatest - least + 1), greatest.squeeze(0), least.squeeze(0)


def weighed_columns(x, weight):
    """Sums of what does not vary along columns beside some of what does. weight [rows, 1]."""
    share = weight / weight.abs().sum(0, keepdim=True)
    return x * share - (x * share).sum(0, keepdim=True)


def channel_softmax(x):
    return x.softmax(1)


def normed_images(x, weight, bias):
    return F.relu(F.batch_norm(x, None, None, weight, bias, training=True))


FUNCTIONS = (normed_columns, column_softmax, spread_of_columns)
MEETING = TileSchedule(1, 4, 16, unroll=1, splits=4, storage="registers", combine="grid")


def workload(function, *specs):
    name = f"{function.__name__}_of_shared_walks"
    if name not in OPS:
        fuse(function, name=name)
    op = OPS[name]
    return op.workload(**dict(zip(op.parameters, specs, strict=False)))


def images(count, channels, size, dtype="f16"):
    """Of batch norm, channels last: its workload and that of its gradients."""
    strides = size * size * channels, 1, size * channels, channels
    x = TensorSpec(dtype, (count, channels, size, size), strides)
    number = TensorSpec("f64" if dtype == "f64" else "f32", (channels,))
    forward = workload(normed_images, x, number, number)
    op = backward_operator(forward.operator)
    names = [n for n in op.parameters if n not in ("seed", "grads")]
    specs = zip(names, [x, x, number, number], strict=True)
    return forward, op.workload(**dict(specs))
