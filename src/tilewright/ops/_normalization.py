"""Checks that the normalisation operators share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tilewright.errors import InvalidArgument
from tilewright.op import DTYPES, HALVES, TensorSpec

FLOATS = ("f16", "bf16", "f32", "f64")


def check_normalization(name: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """A check for operators that normalise trailing dims.

    Fills in `normalized_shape` (the last dim) and `eps` (None: the machine epsilon of the
    arithmetic, fp32 for halves, as torch.nn.functional.rms_norm has it), and holds every
    parameter's shape and dtype against x.
    """

    def check(args: dict[str, Any]) -> dict[str, Any]:
        x = args["x"]
        check_float(name, "x", x)
        if x.rank == 0:
            raise InvalidArgument(f"{name}: x is a scalar; it needs at least one dim to normalise")
        shape = args.get("normalized_shape")
        if shape is None:
            shape = x.shape[-1:]
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        if not shape or x.shape[-len(shape) :] != shape:
            raise InvalidArgument(
                f"{name}: normalized_shape={list(shape)} does not end x's shape {list(x.shape)}"
            )
        if "normalized_shape" in args:
            args["normalized_shape"] = shape
        for parameter, value in args.items():
            if isinstance(value, TensorSpec) and parameter != "x":
                check_parameter(name, parameter, value, x, shape)
        if args["eps"] is None:
            args["eps"] = torch.finfo(DTYPES["f32" if x.dtype in HALVES else x.dtype]).eps
        args["eps"] = float(args["eps"])
        return args

    return check


def check_float(name: str, argument: str, spec: TensorSpec) -> None:
    if spec.dtype not in FLOATS:
        raise InvalidArgument(
            f"{name}: {argument} is {spec.dtype}, expected one of {', '.join(FLOATS)}"
        )


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
