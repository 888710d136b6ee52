"""Operators with an index on tensors of dtypes that no kernel here has.

Complex numbers are rows of two, which the operators move and add as any others. Booleans and
integers of one and two bytes are PyTorch's, whose sums of them have the same bits in any order; an
update on a GPU has the order of its positions kept as `scatter_positions` keeps it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Number
from typing import Any

import torch
from torch import Tensor

from tilewright.dispatch.plain_calls import refuse_on_meta
from tilewright.dispatch.ranges import look_after, look_first
from tilewright.errors import InvalidArgument
from tilewright.impls._in_place import refuse_shared
from tilewright.impls.indices._any_index import beyond, outside, reference, reported
from tilewright.op import Op
from tilewright.ops._indexing import check_dim, last_written, number
from tilewright.signature import of_python
from tilewright.tensor_spec import DTYPE_NAMES, TensorSpec

_SMALL = (torch.bool, torch.int8, torch.uint8, torch.int16)
_AS_LARGE = {1: torch.bool, 2: torch.float16}
"""Dtypes that specs know, by their bytes."""


def is_of_another_dtype(op: Op, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether x of a call is complex, or of small integers."""
    x = args[0] if args else kwargs.get("x", kwargs.get("input"))
    if "x" not in op.parameters or not isinstance(x, Tensor):
        return False
    if x.device.type not in ("cpu", "cuda"):
        return False
    return x.dtype.is_complex or x.dtype in _SMALL


def of_another_dtype(op: Op, operators: Any, bound: Mapping[str, Any]) -> Tensor:
    """What such a call gives; `operators` are the public functions by name.

    Raises:
        InvalidArgument: PyTorch would refuse the call.
    """
    defaults = {n: p.default for n, p in op.parameters.items() if p.default is not p.empty}
    kinds = {n: p.annotation for n, p in op.parameters.items()}
    given = {n: v if kinds[n] == "bool" else of_python(v) for n, v in {**defaults, **bound}.items()}
    refuse_on_meta(op.name, {n: given[n] for n in op.parameters})
    _check(op, given)
    _refuse_unordered(op, given)
    adds = given.get("reduce", "sum") in ("sum", "mean") and not op.name.startswith("index_reduce")
    if given["x"].dtype.is_complex and adds:
        return _as_pairs(op, operators, given)
    return _by_pytorch(op, given)


def _moved(given: Mapping[str, Any]) -> str | None:
    return next((n for n in ("src", "source") if n in given), None)


def _check(op: Op, given: dict[str, Any]) -> None:
    """As for an x of a dtype that operators have; whole numbers that 64 bits do not hold are floats
    from here on."""
    x, name = given["x"], _moved(given)
    moved = given.get(name or "")
    if isinstance(moved, Tensor) and moved.dtype != x.dtype:
        raise InvalidArgument(
            f"{op.name}: {name} is {moved.dtype}, but x is {x.dtype}; convert one of them"
        )
    specs: dict[str, Any] = {}
    for n, value in given.items():
        if isinstance(value, Tensor):
            dtype = "f32" if value.dtype == x.dtype else DTYPE_NAMES.get(value.dtype)
            if n == "index" and not value.numel():
                dtype = dtype or "f32"  # which one does not matter
            elif dtype is None or (n == "index" and value.dtype == x.dtype):
                raise InvalidArgument(
                    f"{op.name}: {n} is {value.dtype}, expected i64 or i32; convert it: {n}.long()"
                )
            value = TensorSpec(dtype, tuple(value.shape), tuple(value.stride()))
        elif isinstance(value, Number) and n in (name, "alpha"):
            if isinstance(value, int) and not -(2**63) <= value < 2**63:
                given[n] = number(op.name, n, value, TensorSpec("f32", ()))
            value = 1.0  # PyTorch says what x's dtype does not hold
        specs[n] = value
    op.workload(**specs)
    if op.form_of is not None and x.itemsize in _AS_LARGE:
        tensors = {n: v for n, v in given.items() if isinstance(v, Tensor) and n != "x"}
        known = {n: _known(t) for n, t in tensors.items()}
        refuse_shared(op.form_of, "x", _known(x), **known)


def _refuse_unordered(op: Op, given: Mapping[str, Any]) -> None:
    """What PyTorch's kernels find out that they do not have once they have written to x."""
    x, reduce = given["x"], given.get("reduce")
    if x.dtype.is_complex and reduce in ("amax", "amin"):
        raise InvalidArgument(
            f"{op.name}: reduce={reduce} of {x.dtype}, which has no order; reduce x.abs() or a part"
        )
    if x.dtype == torch.bool and reduce == "mean":
        raise InvalidArgument(
            f"{op.name}: a mean of torch.bool is none; convert x and src: x.float()"
        )


def _known(t: Tensor) -> Tensor:
    return t if t.dtype in DTYPE_NAMES else t.view(_AS_LARGE[t.itemsize])


def _as_pairs(op: Op, operators: Any, given: dict[str, Any]) -> Tensor:
    """Of complex numbers: real and imaginary parts are moved or added alike."""
    x, index, name = given["x"], given["index"], _moved(given)
    if not x.dim():
        flat = {n: v.reshape(-1) if isinstance(v, Tensor) else v for n, v in given.items()}
        out = _as_pairs(op, operators, flat)
        if op.form_of is not None:
            return x
        return out.view(index.shape if name is None else ())
    if op.form_of is not None and x.is_conj():
        return x.copy_(_as_pairs(op, operators, {**given, "x": x.resolve_conj()}))
    given["dim"] = check_dim(op.name, given["dim"], x.dim())
    if x.dim() == 1 and not x.numel():
        look_after(op, given)  # as PyTorch does, which looks at no index of rows without elements
    if name is not None:
        moved = given[name]
        if not isinstance(moved, Tensor):
            moved = x.new_full((), moved).expand(index.shape)
        alpha = given.get("alpha", 1)
        if isinstance(alpha, complex):
            moved, given["alpha"] = moved * alpha, 1.0
        given[name] = torch.view_as_real(moved.resolve_conj())
    if not op.name.startswith("index"):
        given["index"] = index.unsqueeze(-1).expand(*index.shape, 2)
    given["x"] = torch.view_as_real(x.resolve_conj())
    out = operators[op.name](**given)
    if op.form_of is not None:
        return x
    return torch.view_as_complex(out if out.stride(-1) == 1 else out.contiguous())


def _by_pytorch(op: Op, given: dict[str, Any]) -> Tensor:
    x, index = given["x"], given["index"]
    if op.indexed is not None and op.indexed.last_wins and x.is_cuda and index.numel():
        places = x.shape[given["dim"]] if x.dim() else 1
        skipped = reported(outside(index, places))
        given["dim"] = check_dim(op.name, given["dim"], x.dim())
        out = last_written(**{**given, "index": beyond(index, skipped, 0)}, skipped=skipped)
        return x.copy_(out) if op.form_of is not None else out
    if op.outlives_indices(x.device.type):
        result = reference(op, given)
        assert isinstance(result, Tensor)
        return result
    look_first(op, given)
    try:
        found: Tensor = op.reference(**given)
        return found
    except (RuntimeError, IndexError):
        look_after(op, given)
        raise
