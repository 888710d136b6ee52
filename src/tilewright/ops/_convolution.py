"""What the gradients of convolutions share: geometry, checks, work and traffic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active
from torch.compiler import is_dynamo_compiling

from tilewright.errors import InvalidArgument
from tilewright.op import Workload
from tilewright.ops._normalization import check_float
from tilewright.tensor_spec import DTYPE_NAMES, HALVES

GEOMETRY = ("kernel_size", "stride", "padding", "dilation")
_LEAST = {"kernel_size": 1, "stride": 1, "padding": 0, "dilation": 1}


def pair(value: int | Sequence[int]) -> tuple[int, int]:
    """(height, width) from either, one number for both, or a list of one."""
    sizes = (value,) if isinstance(value, int) else tuple(value)
    height, width = sizes * 2 if len(sizes) == 1 else sizes
    return height, width


def check_geometry(name: str, args: dict[str, Any]) -> None:
    """Make pairs of `kernel_size`, `stride`, `padding` and `dilation`; hold each to its range."""
    for argument, least in _LEAST.items():
        given = args[argument]
        sizes = (given,) if isinstance(given, int) else tuple(given)
        if len(sizes) not in (1, 2) or min(sizes) < least:
            raise InvalidArgument(
                f"{name}: {argument}={given} should be one or two whole numbers of at least {least}"
            )
        if max(sizes) >= 2**63:
            raise InvalidArgument(f"{name}: {argument}={given} should be below 2^63")
        args[argument] = pair(sizes)
    if args["groups"] < 1:
        raise InvalidArgument(f"{name}: groups={args['groups']} should be at least 1")


def output_size(
    size: Sequence[int],
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> tuple[int, int]:
    """Height and width of a convolution's output; below 1 where the filter does not fit."""
    height, width = (
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, k, s, p, d in zip(size, kernel_size, stride, padding, dilation, strict=True)
    )
    return height, width


def touched_share(
    size: Sequence[int],
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> float:
    """The part of the input's pixels that some output depends on."""
    outputs = output_size(size, kernel_size, stride, padding, dilation)
    share = 1.0
    for n, out, k, s, p, d in zip(
        size, outputs, kernel_size, stride, padding, dilation, strict=True
    ):
        touched = {i * s - p + tap * d for i in range(out) for tap in range(k)}
        share *= len(touched & set(range(n))) / max(n, 1)
    return share


def meets_padding_alone(
    n: int, outputs: int, taps: int, stride: int, padding: int, dilation: int
) -> bool:
    """Whether some tap of a filter, along one dim of n pixels, meets none of them."""
    for tap in range(taps):
        offset = tap * dilation - padding
        first = max(-(offset // stride), 0)  # the first output whose pixel is not before x
        if first >= outputs or first * stride + offset >= n:
            return True
    return False


def check_weight_grad(name: str, args: dict[str, Any]) -> dict[str, Any]:
    """Hold x, grad_output and the geometry together; make pairs of the latter."""
    x, grad = args["x"], args["grad_output"]
    for argument, spec in (("x", x), ("grad_output", grad)):
        check_float(name, argument, spec)
        if spec.rank != 4:
            raise InvalidArgument(
                f"{name}: {argument} has rank {spec.rank}, expected 4: batch, channels, height, "
                "width"
            )
    check_dtypes(name, args)
    check_geometry(name, args)
    if args["allow_tf32"] is False:
        raise InvalidArgument(
            f"{name}: allow_tf32=False should be True or None; torch's flag "
            'torch.backends.cudnn.conv.fp32_precision = "ieee" forbids TF32'
        )
    args["allow_tf32"] = (args["allow_tf32"] and x.dtype == "f32") or None
    groups = args["groups"]
    for argument, spec in (("x", x), ("grad_output", grad)):
        if spec.shape[1] % groups:
            raise InvalidArgument(
                f"{name}: {argument} has {spec.shape[1]} channels, which groups={groups} do not "
                "divide"
            )
    if grad.shape[1] < groups:
        raise InvalidArgument(f"{name}: grad_output has no channels, expected {groups} or more")
    check_sizes(name, x, grad, *(args[n] for n in GEOMETRY))
    return args


def check_dtypes(name: str, args: Mapping[str, Any]) -> tuple[str, ...]:
    """Hold the dtypes of x and grad_output together, tensors or their specs; returns those that
    results may have."""
    x, grad = (_dtype_name(args[argument]) for argument in ("x", "grad_output"))
    if grad != x:
        raise InvalidArgument(f"{name}: grad_output is {grad}, but x is {x}; convert one of them")
    allowed, asked = (x, "f32") if x in HALVES else (x,), args.get("out_dtype")
    if asked is not None and asked not in allowed:
        raise InvalidArgument(
            f"{name}: out_dtype={asked} should be {' or '.join(allowed)} beside x of {x}"
        )
    return allowed


def _dtype_name(t: Any) -> str:
    return t.dtype if isinstance(t.dtype, str) else DTYPE_NAMES.get(t.dtype, str(t.dtype))


def check_sizes(
    name: str,
    x: Any,
    grad: Any,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> None:
    """Hold the shape of grad_output to that of x; both are tensors, or their specs."""
    sizes = output_size(x.shape[2:], kernel_size, stride, padding, dilation)
    expected = (x.shape[0], grad.shape[1], *sizes)
    if min(sizes) < 1:
        raise InvalidArgument(
            f"{name}: a filter of kernel_size={list(kernel_size)}, dilation={list(dilation)} is "
            f"larger than x {list(x.shape)} with padding={list(padding)}"
        )
    if tuple(grad.shape) != expected:
        raise InvalidArgument(
            f"{name}: grad_output has shape {list(grad.shape)}, but the convolution of "
            f"x {list(x.shape)} with kernel_size={list(kernel_size)}, stride={list(stride)}, "
            f"padding={list(padding)}, dilation={list(dilation)} gives {list(expected)}"
        )


def check_results(name: str, args: dict[str, Any], shapes: Mapping[str, Sequence[int]]) -> None:
    """Hold `out_dtype` and what gradients are added to together, and with x.

    Args:
        shapes: of each argument to which a gradient is added; all are given, or none.
    """
    x, asked = args["x"], args["out_dtype"]
    allowed = check_dtypes(name, args)
    into = {argument: args[argument] for argument in shapes if args[argument] is not None}
    args["out_dtype"] = None if asked == x.dtype or into else asked
    if not into:
        return
    first, *others = shapes
    for argument, shape in shapes.items():
        if argument not in into:
            raise InvalidArgument(
                f"{name}: {argument} is missing: both gradients are added to others, or none"
            )
        spec = into[argument]
        if spec.shape != tuple(shape) or spec.dtype not in allowed:
            raise InvalidArgument(
                f"{name}: {argument}={spec} should be {' or '.join(allowed)}{list(shape)}, "
                "as the gradient that is added to it"
            )
    if asked not in (None, into[first].dtype):
        raise InvalidArgument(
            f"{name}: out_dtype={asked}, but {first} is {into[first].dtype}; leave it out"
        )
    for argument in others:
        if into[argument].dtype != into[first].dtype:
            raise InvalidArgument(
                f"{name}: {argument} is {into[argument].dtype}, but {first} is "
                f"{into[first].dtype}; convert one of them"
            )


def results_like(name: str, args: Mapping[str, Any], names: Sequence[str]) -> list[str | None]:
    """For each gradient the argument whose dtype it has, of those that it may be added to; None for
    the arithmetic type. Under transforms and in traces nothing else has checked the dtypes."""
    allowed = check_dtypes(name, args)
    for argument in names:
        into = args.get(argument)
        if into is not None and _dtype_name(into) not in allowed:
            raise InvalidArgument(
                f"{name}: {argument} is {_dtype_name(into)}, expected {' or '.join(allowed)}"
            )
    if args.get(names[0]) is not None:
        return list(names)
    own = args.get("out_dtype") in (None, _dtype_name(args["x"]))
    return ["x" if own else None] * len(names)


def weight_shape(args: Any) -> tuple[int, ...]:
    """(K, C / groups, R, S), from checked arguments or a workload."""
    channels = args["x"].shape[1] // args["groups"]
    return (args["grad_output"].shape[1], channels, *args["kernel_size"])


def flops(w: Workload) -> int:
    """One multiply-add for each output pixel, channel pair of a group, and filter tap."""
    r, s = w["kernel_size"]
    return 2 * w["grad_output"].numel * (w["x"].shape[1] // w["groups"]) * r * s


def bytes_moved(w: Workload) -> tuple[int, int]:
    """A strided convolution with a small filter leaves rows and columns of x unread."""
    share = touched_share(w["x"].shape[2:], *(w[name] for name in GEOMETRY))
    others = (spec.distinct_bytes for name, spec in w.tensors.items() if name != "x")
    read = round(w["x"].distinct_bytes * share) + sum(others)
    return read, sum(o.numel * o.itemsize for o in w.outputs)


def is_matrix_product(w: Workload) -> bool:
    """Depthwise, each output is a product of two channels alone: nothing for tensor cores."""
    return w["x"].shape[1] > w["groups"]


def gradients(
    x: Tensor,
    grad_output: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    bias: bool,
) -> tuple[Tensor, Tensor]:
    """The weight's gradient and, if asked for, the bias's, as PyTorch's autograd computes them."""
    features = grad_output.shape[1]
    shape = (features, x.shape[1] // groups, *pair(kernel_size))
    weight = x.new_empty(1).expand(shape)  # only its shape is read
    sizes = pair(stride), pair(padding), pair(dilation)
    if is_dynamo_compiling() or _are_functorch_transforms_active():  # nothing has checked the call
        name = "conv2d_weight_bias_grad" if bias else "conv2d_weight_grad"
        check_sizes(name, x, grad_output, pair(kernel_size), *sizes)
    if _reads_unwritten(x, grad_output, shape[3], *(size[1] for size in sizes)):
        wide = x.float(), grad_output.float()
        dw, db = gradients(*wide, kernel_size, stride, padding, dilation, groups, bias)
        return dw.to(x.dtype), db.to(x.dtype) if bias else db
    _, dw, db = torch.ops.aten.convolution_backward(
        grad_output, x, weight, [features] if bias else None, *sizes, False, (0, 0), groups,
        (False, True, bias),
    )  # fmt: skip
    if bias and not x.numel():  # PyTorch's is zero: without x its convolution has no features
        db = grad_output.sum((0, 2, 3))
    if not _are_functorch_transforms_active():  # vmap cannot tell or give a memory format
        dw = dw.contiguous(memory_format=_weight_format(x, grad_output))
    return dw, db


def _reads_unwritten(
    x: Tensor, grad_output: Tensor, taps: int, stride: int, padding: int, dilation: int
) -> bool:
    """Whether PyTorch's gradient may be of memory that nothing has written: on a CPU with AMX,
    oneDNN's kernel for bf16 leaves out the columns of the filter that meet padding alone, where
    the gradient is zero (torch 2.13)."""
    if x.device.type != "cpu" or not x.dtype == grad_output.dtype == torch.bfloat16:
        return False
    columns, outputs = x.shape[3], grad_output.shape[3]
    return meets_padding_alone(columns, outputs, taps, stride, padding, dilation)


def added(into: Tensor, found: Tensor) -> Tensor:
    """Their sum; nothing is broadcast.

    Raises:
        InvalidArgument: their shapes differ.
    """
    if into.shape != found.shape:
        raise InvalidArgument(
            f"a gradient of shape {list(found.shape)} is to be added to one of "
            f"{list(into.shape)}; give one of its shape"
        )
    return into + found


def widened(given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments whose x and grad_output have the dtype of what the gradient is added to, if that is
    wider: their gradient is not rounded before."""
    dtype = given["into"].dtype
    return {**given, **{name: given[name].to(dtype) for name in ("x", "grad_output")}}


def _weight_format(x: Tensor, grad_output: Tensor) -> torch.memory_format:
    for t in (x, grad_output):
        if t.is_contiguous(memory_format=torch.channels_last) and not t.is_contiguous():
            return torch.channels_last
    return torch.contiguous_format
