"""Steps that a trace must refuse: PyTorch's kernels refuse them and its fake tensors do not, or one
trace for all calls would get them wrong."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._prims_common import canonicalize_dim
from torch.utils._python_dispatch import TorchDispatchMode

from tilewright.tensor_spec import share_memory

_NOT_OF_BOOLEANS = {
    *("floor", "ceil", "round", "trunc", "abs", "relu", "var", "std", "var_mean", "std_mean"),
    *("_softmax", "_log_softmax", "_safe_softmax", "gelu", "silu", "mish", "glu", "elu", "celu"),
    *("softplus", "threshold", "hardswish", "hardsigmoid", "_prelu_kernel", "dot", "vdot"),
}
_MAKES_NO_BOOLEANS = {
    *("clamp", "lerp", "hypot", "fmod", "remainder", "div", "addcmul", "addcdiv"),
}
"""Of booleans, that is: beside numbers PyTorch takes these."""
_OF_FLOATS = {
    *("gelu", "silu", "mish", "glu", "elu", "celu", "softplus", "log_sigmoid_forward", "hardswish"),
    *("hardsigmoid", "hardshrink", "lerp", "huber_loss", "logaddexp", "logaddexp2"),
    *("soft_margin_loss", "binary_cross_entropy", "_prelu_kernel", "native_batch_norm"),
    "round.decimals",
}
"""Fake tensors take these of whole numbers alone, too."""
_OF_WHOLE = {"bitwise_and", "bitwise_or", "bitwise_xor"}
"""And these of floats."""
_NORMS = ("native_layer_norm", "native_group_norm", "native_batch_norm")
"""The parameters of halves may all be fp32."""
_OF_ONE_DTYPE = {
    **dict.fromkeys(("huber_loss", "soft_margin_loss"), 1),
    **dict.fromkeys(("binary_cross_entropy", "heaviside"), 2),
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), 3),
    **dict.fromkeys(_NORMS, 5),
}
"""How many arguments PyTorch's kernels want of one floating dtype, which is the result's whatever
the others are. Fake tensors promote them."""
_SOFTMAXES = {"_softmax", "_log_softmax"}
"""Of a dim out of range fake tensors take them."""
_DIFFERENCES = {"sub", "rsub"}
# Each look-up of one of these makes another object, which is equal.
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_ASKED_OF_AUTOGRAD = {
    name: getattr(Tensor, name).__get__ for name in ("requires_grad", "grad_fn", "is_leaf")
}


class Refusing(TorchDispatchMode):
    """Inside, such a step raises, in words that tell the remedy; one of no elements whose
    decomposition divides by how many there are has its result."""

    def __torch_dispatch__(
        self,
        function: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if isinstance(function, OpOverload) and function.namespace == "aten":
            name = function._schema.name.removeprefix("aten::")
            _check_arithmetic(name, args, kwargs or {})
            tensors = [a for a in args if isinstance(a, Tensor)]
            step = name.removesuffix("_")
            of_floats = _OF_FLOATS & {step, f"{step}.{function._overloadname}"}
            if of_floats and all(map(_is_whole, tensors)):
                raise RuntimeError(
                    f"PyTorch has no {of_floats.pop()} of {args[0].dtype}; cast it first: .float()"
                )
            if step in _OF_ONE_DTYPE:
                _check_one_dtype(step, args)
            if name in _SOFTMAXES:
                canonicalize_dim(args[0].dim(), args[1])
            if name == "logsumexp":
                _check_logsumexp(*args)
            if name == "mse_loss_backward" and not args[1].numel():
                return torch.zeros_like(args[1])
            if name == "nansum":
                _check_nansum(*args)
            if function._schema.is_mutable:
                _check_memory(function, args)
            out = function(*args, **(kwargs or {}))
            if _is_boolean(out) and _makes_no_boolean(step, args):
                raise _none_of_pytorchs(name)
            if step in _OF_WHOLE and not _is_whole(out):
                raise NotImplementedError(
                    f"PyTorch has no {step} of {out.dtype}; compare first, or cast: .bool()"
                )
            return out
        return function(*args, **(kwargs or {}))


def _makes_no_boolean(step: str, args: Sequence[Any]) -> bool:
    """A clamp with a tensor as its one bound does: it is the greater or smaller of two."""
    given = [isinstance(a, Tensor) for a in args if a is not None]
    return step in _MAKES_NO_BOOLEANS and not (step == "clamp" and given == [True, True])


def _none_of_pytorchs(name: str) -> Exception:
    return NotImplementedError(
        f"{name.strip('_')} of booleans is none of PyTorch's; cast them first: .float()"
    )


def _check_arithmetic(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    given, step = [*map(_is_boolean, args)], name.removesuffix("_")
    if step in _NOT_OF_BOOLEANS and given[0]:
        raise _none_of_pytorchs(step)
    if step in _DIFFERENCES and any(given[:2]):
        raise RuntimeError(
            "PyTorch subtracts no booleans; invert a mask by ~, compare two by ^, or cast: .float()"
        )
    if step == "addcdiv" and given[1:] == [True, True]:
        raise RuntimeError("PyTorch divides no booleans in addcdiv; cast them first: .float()")
    if (
        step in {"add", *_DIFFERENCES}
        and isinstance(kwargs.get("alpha"), float)
        and all(_is_whole(a) if isinstance(a, Tensor) else isinstance(a, int) for a in args)
    ):
        raise RuntimeError(
            "PyTorch adds no whole numbers or booleans times a float; cast them first: .float()"
        )
    if name == "mul_" and given == [True, False]:
        raise RuntimeError("a product with numbers is none of booleans; multiply out of place")


def _check_one_dtype(step: str, args: Sequence[Any]) -> None:
    first, *others = [a for a in args if isinstance(a, Tensor)]
    parameters = {t.dtype for t in others if t.is_floating_point()}
    if step in _NORMS and first.dtype.itemsize == 2 and parameters == {torch.float32}:
        return
    for i, t in enumerate(args):
        if not isinstance(t, Tensor) or not t.is_floating_point():
            continue
        one = t.dtype if i < _OF_ONE_DTYPE[step] else torch.result_type(first, t)
        if one != first.dtype:
            raise RuntimeError(f"{step} is of one dtype: cast {t.dtype} by .to({first.dtype})")


def _check_logsumexp(x: Tensor, dims: Sequence[int], keepdim: bool = False) -> None:
    if x.dim() and x.numel() and not (dims or keepdim):
        raise RuntimeError(
            "logsumexp over no dims, dim=(), is one over all, of which PyTorch cannot drop the "
            f"dims; give dim={(*range(x.dim()),)}, or keepdim=True"
        )


def _check_nansum(x: Tensor, dims: Sequence[int] | None = None, keepdim: bool = False) -> None:
    if dims is not None and not dims:
        raise RuntimeError(
            "nansum and nanmean over no dims, dim=(), are those over all, of which PyTorch's own "
            "meta kernel drops none; leave dim out"
        )


def _is_whole(t: Tensor) -> bool:
    return not (t.is_floating_point() or t.is_complex())


def _is_boolean(value: Any) -> bool:
    return value.dtype is torch.bool if isinstance(value, Tensor) else isinstance(value, bool)


def _check_memory(function: OpOverload, args: Sequence[Any]) -> None:
    written: list[Tensor] = []
    read: list[Tensor] = []
    for value, argument in zip(args, function._schema.arguments, strict=False):
        if isinstance(value, Tensor):
            writes = argument.alias_info is not None and argument.alias_info.is_write
            (written if writes else read).append(value)
    for one, other in itertools.product(written, read):
        if overlap_in_part(one, other):
            raise RuntimeError(
                f"{function._schema.name.removeprefix('aten::')} writes to memory that it "
                "reads at other elements, of which PyTorch promises no result; "
                "clone() what is read"
            )


def overlap_in_part(a: Tensor, b: Tensor) -> bool:
    """Whether an element of one is another element of the other."""
    if not share_memory(a, b) or not a.numel() or not b.numel():
        return False
    apart = int(b.storage_offset() - a.storage_offset())
    same = (apart, a.shape, _strides(a)) == (0, b.shape, _strides(b))
    return not same and _meet(apart, _spans(a, b))


def _strides(t: Tensor) -> list[int]:
    """Of the dims along which there is a second element."""
    return [stride for size, stride in zip(t.shape, t.stride(), strict=True) if size > 1]


def _spans(a: Tensor, b: Tensor) -> list[tuple[int, int, int]]:
    """(stride, least, greatest) of index differences between elements of the two, widest first."""
    found: dict[int, list[int]] = {}
    for t, end in ((a, 1), (b, 0)):
        for size, stride in zip(t.shape, t.stride(), strict=True):
            found.setdefault(stride, [0, 0])[end] += size - 1
    return sorted(((s, -low, high) for s, (low, high) in found.items() if s), reverse=True)


def _meet(apart: int, spans: Sequence[tuple[int, int, int]]) -> bool:
    """Whether a sum of strides, each so many times as its span allows, is `apart`."""
    if not spans:
        return apart == 0
    (stride, low, high), *rest = spans
    least, most = sum(s * k for s, k, _ in rest), sum(s * k for s, _, k in rest)
    first = max(low, -((most - apart) // stride))
    last = min(high, (apart - least) // stride)
    return any(_meet(apart - k * stride, rest) for k in range(first, last + 1))


def untraceable(function: Any, asker: FrameType | None) -> str | None:
    """Why one trace for all calls would get a step wrong that code at `asker` takes, or None."""
    if function == _SET_DATA:
        return "a write to .data of a tensor is not traced"
    for name, get in _ASKED_OF_AUTOGRAD.items():
        if function == get and not _is_of_pytorch(asker):
            return (
                f".{name} of a tensor differs between calls that share a trace; "
                "give the function a bool instead"
            )
    if torch.is_autocast_enabled("cuda"):
        return (
            "autocast of a GPU inside a function is not traced; cast there by .to(dtype), or call "
            "the function under autocast"
        )
    return None


def _is_of_pytorch(frame: FrameType | None) -> bool:
    """Whether the code behind modes of ours is PyTorch's own."""
    while frame is not None and _package(frame) == "tilewright":
        frame = frame.f_back
    return frame is not None and _package(frame) == "torch"


def _package(frame: FrameType) -> str:
    return frame.f_globals.get("__name__", "").partition(".")[0]
