"""The check that lerp and its gradients share."""

from __future__ import annotations

from typing import Any

import torch

from tilewright.errors import InvalidArgument
from tilewright.ops._normalization import check_float
from tilewright.tensor_spec import TensorSpec


def check_lerp(name: str, args: dict[str, Any]) -> dict[str, Any]:
    """x, end and weight have one dtype and broadcast; a weight that is no tensor is a float."""
    tensors = {n: v for n, v in args.items() if isinstance(v, TensorSpec)}
    for argument, spec in tensors.items():
        check_float(name, argument, spec)
        if spec.dtype != args["x"].dtype:
            raise InvalidArgument(
                f"{name}: {argument} is {spec.dtype}, but x is {args['x'].dtype}; "
                "convert one of them"
            )
    if "weight" not in tensors:
        args["weight"] = float(args["weight"])
    try:
        torch.broadcast_shapes(*(spec.shape for spec in tensors.values()))
    except RuntimeError:
        shapes = ", ".join(f"{n} {list(spec.shape)}" for n, spec in tensors.items())
        raise InvalidArgument(
            f"{name}: {shapes} do not broadcast: aligned at the end, sizes must be equal or 1"
        ) from None
    return args
