"""Keywords of PyTorch's functions that say what to do with an operator, not what it computes.

`out=` has its result copied, scatter's `reduce=` is another operator's name, and `sparse_grad=`
is about the gradient of gather. No workload has them, and a call without them does not come here.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Number
from typing import Any

import torch
from torch import Tensor
from torch.jit import is_tracing

from tilewright.dispatch.pytorch import bind, or_why, with_numbers_read
from tilewright.errors import InvalidArgument, InvalidType
from tilewright.impls.indices._any_index import gather
from tilewright.op import Op
from tilewright.ops._indexing import number, readable
from tilewright.signature import of_python
from tilewright.tensor_spec import DTYPE_NAMES, TensorSpec


def with_keywords(op: Op, operators: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A call with one of `op.keywords` or more; `operators` are the public functions by name.

    Raises:
        InvalidArgument: PyTorch would refuse the keyword's value.
    """
    name = next(k for k in op.keywords if k in kwargs)
    rest = {k: v for k, v in kwargs.items() if k != name}
    if kwargs[name] is None:
        return operators[op.name](*args, **rest)
    return _MEANINGS[name](op, operators, kwargs[name], args, rest)


def called_by(op: Op) -> Iterator[str]:
    """The public functions that its keywords call. They are made with its own: while one that
    torch.compile meets is traced, none can be."""
    form = "_" if op.form_of else ""
    if "out" in op.keywords and op.inplace is not None:
        yield f"{op.name}_"
    if "reduce" in op.keywords:
        yield from (f"scatter_add{form}", f"scatter_reduce{form}")


def _copied(op: Op, operators: Any, out: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Into `out`, which is left as it was where the call raises, and may overlap any argument."""
    if not isinstance(out, Tensor):
        raise InvalidType(f"{op.name}: out is of type {type(out).__name__}, expected a Tensor")
    tensors = [t for t in (out, *args, *kwargs.values()) if isinstance(t, Tensor)]
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        raise InvalidArgument(
            f"{op.name}: out= has no gradients, but a tensor of the call requires one; "
            "leave out= away, or call under torch.no_grad()"
        )
    if op.inplace is not None and args and out is args[0]:
        return operators[f"{op.name}_"](*args, **kwargs)
    result = operators[op.name](*args, **kwargs)
    if (out.dtype, out.device) != (result.dtype, result.device):
        raise InvalidArgument(
            f"{op.name}: out is {out.dtype} on {out.device}, but the result is {result.dtype} on "
            f"{result.device}; make out of that dtype there"
        )
    if out.shape != result.shape:
        if out.numel():
            warnings.warn(
                f"{op.name}: out of shape {list(out.shape)} is resized to {list(result.shape)}, "
                "which PyTorch deprecates: give that shape, or resize out to no elements first",
                UserWarning,
                stacklevel=4,
            )
        out.resize_(result.shape)
    return out.copy_(result)


def _reducing(
    op: Op, operators: Any, reduce: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """What torch.scatter calls by `reduce`; a number is added or multiplied once an index."""
    form = "_" if op.form_of else ""
    if reduce not in ("add", "multiply"):
        raise InvalidArgument(
            f"{op.name}: reduce={reduce} is not one of add, multiply; "
            f"scatter_reduce{form} knows others"
        )
    given = with_numbers_read(op, args, kwargs) or bind(op, args, kwargs)
    bound = {n: of_python(v) for n, v in given.items()}
    x, index, src = (bound.get(n) for n in ("x", "index", "src"))
    if isinstance(src, Number) and isinstance(x, Tensor) and isinstance(index, Tensor):
        bound["src"] = _scalar(op, src, x).expand(index.shape)
    if reduce == "add":
        return operators[f"scatter_add{form}"](**bound)
    return operators[f"scatter_reduce{form}"](**bound, reduce="prod")


def _scalar(op: Op, value: Any, x: Tensor) -> Tensor:
    """A number in x's dtype, which has to hold it: new_full makes infinite halves."""
    if isinstance(value, (int, float)) and x.dtype in DTYPE_NAMES:
        value = number(op.name, "src", value, TensorSpec(DTYPE_NAMES[x.dtype], ()))
    return x.new_full((), value)


def _sparse_gradient(
    op: Op, operators: Any, wanted: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """PyTorch's gather where x needs a gradient, which is then a sparse tensor."""
    if type(wanted) is not bool:
        raise InvalidType(f"{op.name}: sparse_grad={wanted} should be bool")
    bound = bind(op, args, kwargs)
    given: list[Any] = [bound.get(n) for n in op.parameters]
    x, dim, index = given
    needed = isinstance(x, Tensor) and torch.is_grad_enabled() and x.requires_grad
    if not (wanted and (needed or is_tracing())):
        return operators[op.name](*args, **kwargs)

    def run(x: Any, dim: Any, index: Any) -> Tensor:
        return torch.gather(x, dim, readable(index), sparse_grad=True)

    if isinstance(index, Tensor) and op.outlives_indices(index.device.type):
        return or_why(op, args, kwargs, lambda: gather(x, dim, index, run))
    return or_why(op, args, kwargs, lambda: run(x, dim, index))


_MEANINGS: Mapping[str, Callable[..., Any]] = {
    "out": _copied,
    "reduce": _reducing,
    "sparse_grad": _sparse_gradient,
}
