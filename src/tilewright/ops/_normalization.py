"""Checks that the normalisation operators share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tilewright.errors import InvalidArgument, InvalidDim
from tilewright.examples import random_tensors
from tilewright.op import Workload
from tilewright.tensor_spec import DTYPES, HALVES, TensorSpec

FLOATS = ("f16", "bf16", "f32", "f64")


def check_normalization(
    name: str, like_x: Sequence[str] = (), statistics: Sequence[str] = (), of: str = "x"
) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """A check for operators that normalise trailing dims, and for their gradients.

    Fills in `normalized_shape` (the last dim) and `eps` (None: the machine epsilon of the
    arithmetic, fp32 for halves, as torch.nn.functional.rms_norm has it), and holds every
    parameter's shape and dtype against x.

    Args:
        like_x: tensors of the shape and dtype of x.
        statistics: tensors of one element for each row, in the arithmetic type.
        of: the tensor whose rows are normalised.
    """

    def check(args: dict[str, Any]) -> dict[str, Any]:
        x = args[of]
        check_float(name, of, x)
        if x.rank == 0:
            raise InvalidArgument(
                f"{name}: {of} is a scalar; it needs at least one dim to normalise"
            )
        shape = args.get("normalized_shape")
        if shape is None:
            shape = x.shape[-1:]
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        if not shape or x.shape[-len(shape) :] != shape:
            raise InvalidArgument(
                f"{name}: normalized_shape={list(shape)} does not end {of}'s shape {list(x.shape)}"
            )
        if "normalized_shape" in args:
            args["normalized_shape"] = shape
        for parameter, value in args.items():
            if not isinstance(value, TensorSpec) or parameter == of:
                continue
            if parameter in like_x:
                check_like(name, parameter, value, of, x)
            elif parameter in statistics:
                rows = x.shape[: -len(shape)] + (1,) * len(shape)
                wide = "f32" if x.dtype in HALVES else x.dtype
                check_like(name, parameter, value, f"{of}'s statistic", TensorSpec(wide, rows))
            else:
                check_parameter(name, parameter, value, x, shape)
        if "eps" in args:
            if args["eps"] is None:
                args["eps"] = torch.finfo(DTYPES["f32" if x.dtype in HALVES else x.dtype]).eps
            args["eps"] = float(args["eps"])
        return args

    return check


def check_like(name: str, argument: str, spec: TensorSpec, other: str, like: TensorSpec) -> None:
    """Hold a tensor against the shape and dtype that it must have."""
    if spec.shape != like.shape or spec.dtype != like.dtype:
        raise InvalidArgument(
            f"{name}: {argument} is {spec.dtype}{list(spec.shape)}, but {other} is "
            f"{like.dtype}{list(like.shape)}: shape and dtype must agree"
        )


def check_float(name: str, argument: str, spec: TensorSpec) -> None:
    if spec.dtype not in FLOATS:
        raise InvalidArgument(
            f"{name}: {argument} is {spec.dtype}, expected one of {', '.join(FLOATS)}"
        )


def normalized_dims(x: torch.Tensor, normalized_shape: Sequence[int] | None) -> list[int]:
    """The sizes of the dims to normalise: None is the last one; none at all are refused later."""
    return list(x.shape[-1:] if normalized_shape is None else normalized_shape)


def check_parameter(
    name: str, argument: str, spec: TensorSpec, x: TensorSpec, shape: tuple[int, ...]
) -> None:
    if spec.shape != shape:
        raise InvalidArgument(
            f"{name}: {argument} has shape {list(spec.shape)}, but a row of x is {list(shape)}"
        )
    if spec.dtype != x.dtype and not (x.dtype in HALVES and spec.dtype == "f32"):
        raise InvalidArgument(
            f"{name}: {argument} is {spec.dtype} beside x of {x.dtype}; "
            f"convert it to {x.dtype}" + (" or f32" if x.dtype in HALVES else "")
        )


def check_dim(name: str, argument: str, spec: TensorSpec, dim: int) -> int:
    """The dim counted from the end."""
    rank = max(spec.rank, 1)
    if not -rank <= dim < rank:
        raise InvalidDim(
            f"{name}: dim={dim} is out of range for {argument} of rank {spec.rank}: "
            f"use {-rank} to {rank - 1}"
        )
    return dim - rank if dim >= 0 else dim


def row_statistics(
    x: torch.Tensor, shape: Sequence[int], centred: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """(mean, 1 / sqrt(mean square of deviations + 1e-5)) of each row, in fp64; the mean is 0 if
    not `centred`."""
    dims = list(range(-len(shape), 0))
    wide = x.double()
    mean = wide.mean(dims, keepdim=True) * centred
    return mean, (wide - mean).square().mean(dims, keepdim=True).add(1e-5).rsqrt()


def with_statistics(of: str) -> Callable[..., list[torch.Tensor]]:
    """The `examples` of gradients that read each row's rstd, and mean if there is one, of `of`."""

    def examples(w: Workload, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
        tensors = random_tensors(w.tensors, *args, **kwargs)
        shape = dict(w.args).get("normalized_shape") or tensors[of].shape[-1:]
        mean, rstd = row_statistics(tensors[of], shape, centred="mean" in tensors)
        if "mean" in tensors:
            tensors["mean"].copy_(mean)
        tensors["rstd"].copy_(rstd)
        return list(tensors.values())

    return examples


def beside_statistics(
    weight: torch.Tensor | None, x: torch.Tensor, mean: torch.Tensor, shape: Sequence[int]
) -> torch.Tensor | None:
    """The weight as PyTorch's kernel wants it: for halves on a CPU it must be there, in fp32."""
    if x.device.type != "cpu" or x.dtype == mean.dtype:
        return weight
    return mean.new_ones(shape) if weight is None else weight.to(mean.dtype)


def rms_norm_with_statistic(
    x: torch.Tensor, shape: list[int], weight: torch.Tensor | None, eps: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """What PyTorch's autograd runs for RMS norm: the rows, and 1 / sqrt(mean square + eps)."""
    out, rstd = torch.ops.aten._fused_rms_norm(x, shape, weight, eps)
    for layout, rank in ((torch.channels_last, 4), (torch.channels_last_3d, 5)):
        if x.dim() == rank and not x.is_contiguous() and x.is_contiguous(memory_format=layout):
            out = out.contiguous(memory_format=layout)  # F.rms_norm keeps it, this kernel does not
    return out, rstd


def rms_norm_gradients(
    grad_output: torch.Tensor,
    x: torch.Tensor,
    shape: list[int],
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    mask: list[bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """What PyTorch's autograd runs for (dx, dweight): its kernel, or on a CPU, where there is none,
    that kernel's decomposition."""
    run = backward = torch.ops.aten._fused_rms_norm_backward.default
    if x.device.type == "cpu":
        run = torch._decomp.get_decompositions([backward])[backward]  # type: ignore[assignment]
    return run(grad_output, x, shape, rstd, weight, mask)  # type: ignore[no-any-return]
