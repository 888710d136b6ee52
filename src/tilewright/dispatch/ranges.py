"""Indices looked at before PyTorch's kernels run: on a CPU those find out on the way, on a GPU they
end the process's use of it. Where nothing is written meanwhile, after they have found out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from numbers import Integral
from typing import Any

from torch import Tensor

from tilewright.impls.indices._any_index import POSITIONS
from tilewright.op import Op, Workload
from tilewright.ops._indexing import places_of_x, refuse_out_of_range
from tilewright.settings import settings


def in_range_first(w: Workload, run: Callable[..., Any]) -> Callable[..., Any]:
    """`run` of a scatter or the like, which raises IndexOutOfRange before it writes anything; on a
    GPU it waits to know, so not while its stream is captured."""
    look = _look(w)

    def call(*tensors: Tensor) -> Any:
        look(*tensors)
        return run(*tensors)

    return call


def in_range_after(w: Workload, run: Callable[..., Any]) -> Callable[..., Any]:
    """`run` of the same out of place on a CPU: where PyTorch raises because of an index,
    IndexOutOfRange is raised, and a good call costs no look."""
    look = _look(w)

    def call(*tensors: Tensor) -> Any:
        try:
            return run(*tensors)
        except (RuntimeError, IndexError):
            look(*tensors)
            raise

    return call


def _look(w: Workload) -> Callable[..., None]:
    at = [*w.tensors].index("index")
    size = places_of_x(w) if "x" in w.tensors else w["num_weights"]
    return lambda *tensors: refuse_out_of_range(w.op, tensors[at], size)


def look_first(op: Op, bound: Mapping[str, Any]) -> None:
    """The same for a call that PyTorch answers on a CPU, where its kernel would write before it
    raises, or not raise; and on a GPU if indices are to be checked.

    Raises:
        IndexOutOfRange: nothing was written.
    """
    index, x = bound.get("index"), bound.get("x")
    if not isinstance(index, Tensor) or (index.is_cuda and not settings().check_indices):
        return
    written = op.form_of is not None and not (isinstance(x, Tensor) and not x.numel())
    if written or index.is_cuda or x is None:
        _look_at(op, bound)


def look_after(op: Op, bound: Mapping[str, Any]) -> None:
    """The same once PyTorch has raised; on a GPU its error need not be this call's.

    Raises:
        IndexOutOfRange: that was why.
    """
    index = bound.get("index")
    if op.indexed is not None and isinstance(index, Tensor) and index.device.type == "cpu":
        _look_at(op, bound)


def _look_at(op: Op, bound: Mapping[str, Any]) -> None:
    index, x, dim = (bound.get(name) for name in ("index", "x", "dim"))
    if not isinstance(index, Tensor) or index.dtype not in POSITIONS:
        return  # what is wrong, PyTorch will say
    if isinstance(x, Tensor) and isinstance(dim, Integral):
        if not x.dim() or -x.dim() <= int(dim) < x.dim():
            refuse_out_of_range(op.name, index, x.shape[int(dim)] if x.dim() else 1)
    elif isinstance(rows := bound.get("num_weights"), Integral) and 0 <= int(rows) < 2**63:
        refuse_out_of_range(op.name, index, int(rows))
