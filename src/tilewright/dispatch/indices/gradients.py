"""Gradients of the operators with an index: operators with an index, of the gradient.

What was copied or added to places is gathered from them, and what was gathered is added to them.
Those are calls of the public functions, so that backward too runs the implementation that the
records speak for, and is differentiable itself. The formulas are PyTorch's (derivatives.yaml), also
where an index of `scatter` repeats: each position gets the gradient of its place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tilewright.dispatch import evidence, selection
from tilewright.dispatch.gradients import description
from tilewright.dispatch.prepared import state
from tilewright.errors import InvalidArgument, NoImplementation
from tilewright.impl import IMPLS
from tilewright.op import OPS, Op, Workload
from tilewright.settings import nondeterministic, trusts_indices
from tilewright.tensor_spec import DTYPE_NAMES, TensorSpec

_MAX_KEYS = 4096
"""Kinds of calls that are remembered; all are forgotten beyond, so that memory has a bound."""
_PLAIN = (Tensor, torch.nn.Parameter)
_HALVES = (torch.float16, torch.bfloat16)
_found: dict[tuple, bool] = {}

Run = Callable[..., Tensor]
Gradients = Mapping[str, Callable[[], Tensor]]
"""By the name of an argument."""


class Moved(torch.autograd.Function):
    """Forward and backward by public functions; of the tensors, only the index is kept."""

    @staticmethod
    def forward(ctx: Any, op: Op, operators: Any, *args: Any) -> Tensor:
        """`args` are the reference's, in its order; `operators` the public functions by name."""
        given = dict(zip(op.parameters, args, strict=True))
        ctx.op, ctx.operators, ctx.asked = op, operators, selection.any_forced()
        ctx.given = {n: v.shape if isinstance(v, Tensor) else v for n, v in given.items()}
        ctx.save_for_backward(given["index"])
        if op.form_of is not None:
            ctx.mark_dirty(given["x"])
        return operators[op.name](*args)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (index,) = grads, ctx.saved_tensors

        run = functools.partial(selection.as_before(ctx.asked, run_beside), ctx.operators)
        gradients = _FORMULAS[ctx.op.form_of or ctx.op.name](run, grad, index, ctx.given)
        wanted = zip(ctx.op.parameters, ctx.needs_input_grad[2:], strict=True)
        return (None, None, *(gradients[n]() if needed else None for n, needed in wanted))


def run_beside(operators: Any, name: str, *args: Any) -> Tensor:
    """A public function that another call needs: by what was asked for where that serves it, too,
    else by aten."""
    forced = selection.forced_for(name.removesuffix("_"))
    if forced is None or IMPLS[forced.implementation].serves(name.removesuffix("_")):
        result: Tensor = operators[name](*args)
        return result
    with selection.use("aten"):
        return run_beside(operators, name, *args)


# --- formulas ------------------------------------------------------------------------------------


def _of_gather(run: Run, grad: Tensor, index: Tensor, given: Mapping[str, Any]) -> Gradients:
    def of_x() -> Tensor:
        return run("scatter_add_", grad.new_zeros(given["x"]), given["dim"], index, grad)

    return {"x": of_x}


def _of_scatter(run: Run, grad: Tensor, index: Tensor, given: Mapping[str, Any]) -> Gradients:
    return {
        "x": lambda: run("scatter", grad, given["dim"], index, 0.0),
        "src": lambda: run("gather", grad, given["dim"], index),
    }


def _of_scatter_add(run: Run, grad: Tensor, index: Tensor, given: Mapping[str, Any]) -> Gradients:
    return {"x": lambda: grad, "src": lambda: run("gather", grad, given["dim"], index)}


def _of_scatter_reduce(
    run: Run, grad: Tensor, index: Tensor, given: Mapping[str, Any]
) -> Gradients:
    dim, included = given["dim"], given["include_self"]
    if given["reduce"] == "mean":
        half = grad.dtype in _HALVES
        terms = torch.full_like(grad, included, dtype=torch.float32 if half else grad.dtype)
        ones = terms.new_ones(()).expand(index.shape)
        grad = (grad / run("scatter_add_", terms, dim, index, ones).clamp_min(1)).to(grad.dtype)
    kept = {} if included else _of_scatter(run, grad, index, given)
    return {**_of_scatter_add(run, grad, index, given), **{n: kept[n] for n in kept if n == "x"}}


def _of_index_add(run: Run, grad: Tensor, index: Tensor, given: Mapping[str, Any]) -> Gradients:
    def of_source() -> Tensor:
        line = [1] * grad.dim()
        line[given["dim"]] = -1
        rows = index.reshape(line).expand(given["source"])
        taken = run("gather", grad, given["dim"], rows)
        return taken if given["alpha"] == 1 else taken * given["alpha"]

    return {"x": lambda: grad, "source": of_source}


_FORMULAS: Mapping[str, Callable[..., Gradients]] = {
    "gather": _of_gather,
    "scatter": _of_scatter,
    "scatter_add": _of_scatter_add,
    "scatter_reduce": _of_scatter_reduce,
    "index_add": _of_index_add,
}


# --- when ----------------------------------------------------------------------------------------


def moves(op: Op, bound: Mapping[str, Any]) -> bool:
    """Whether a call that needs gradients goes by `Moved`, not by PyTorch's function.

    It does where forward or backward then runs something other than aten: an implementation that
    was asked for or that records speak for, one that keeps a promise that aten does not, or one
    for PyTorch's deterministic mode.
    """
    known_gradient = bound.get("reduce", "sum") in ("sum", "mean")
    if (op.form_of or op.name) not in _FORMULAS or not known_gradient:
        return False
    if op.form_of == "scatter" or (op.form_of and not _may_be_written(bound.get("x"))):
        return False  # an update is copied instead; of what may not be, PyTorch says why
    forced = selection.any_forced() or {}
    asked = any(f.implementation != "aten" for f in forced.values())
    if forced and not asked:
        return False
    deterministic = torch.are_deterministic_algorithms_enabled()
    waived = nondeterministic(), trusts_indices()
    if not (asked or deterministic or _may_pay(op, bound.get("x"), all(waived))):
        return False
    modes = asked, deterministic, waived, state.generation
    try:
        key = (op.name, *modes, *bound, *map(description, bound.values()))
        known = key in _found
    except (RuntimeError, TypeError):  # no strides, or no hash: PyTorch will say what is wrong
        return False
    if not known:
        if len(_found) >= _MAX_KEYS:
            _found.clear()
        _found[key] = _serves(op, bound) and (asked or _pays(op, bound))
    return _found[key]


def keeps_bits(op: Op, bound: Mapping[str, Any]) -> bool:
    """Whether a forward whose gradient has no formula here keeps what a sum promises only by an
    implementation of ours: means and products of floats on a GPU, of halves on a CPU. Backward is
    PyTorch's, computed anew."""
    x = bound.get("x")
    if (op.form_of or op.name) not in ("index_reduce", "scatter_reduce"):
        return False
    if bound.get("reduce") not in ("mean", "prod") or not isinstance(x, Tensor):
        return False
    assert op.indexed is not None
    promised = op.indexed.promises_values(DTYPE_NAMES.get(x.dtype, "i"), x.device.type)
    return promised and _serves(op, bound)


def keeps_order(op: Op, x: Any) -> bool:
    """Whether the operator promises an order of writes that PyTorch's kernel does not keep."""
    last_wins = op.indexed is not None and op.indexed.last_wins
    return last_wins and isinstance(x, Tensor) and x.is_cuda


def _may_be_written(x: Any) -> bool:
    """Whether autograd lets x be written to: no leaf whose gradient is wanted, a view of other
    memory or not, no view of one, nor a view that was made without gradients or beside others."""
    if not isinstance(x, Tensor):
        return True
    if x.is_leaf and x.requires_grad:
        return False
    if not x._is_view():
        return True
    made = torch._C._autograd._get_creation_meta(x)
    base = x._base
    plain = made == torch._C._autograd.CreationMeta.DEFAULT
    return plain and not (base is not None and base.is_leaf and base.requires_grad)


def _may_pay(op: Op, x: Any, waived: bool) -> bool:
    """Without a look at the call: whether there are records, or a promise to keep."""
    if not isinstance(x, Tensor):
        return False
    sums_promise = not waived if x.is_cuda else x.dtype in _HALVES
    if keeps_order(op, x) or sums_promise:  # each sums, forward or backward
        return True
    backward = "scatter_add" if op.name == "gather" else "gather"
    names = op.form_of or op.name, backward
    return any(evidence.records_of(x.device, name).winners for name in names)


def _serves(op: Op, bound: Mapping[str, Any]) -> bool:
    tensors = [v for v in bound.values() if isinstance(v, Tensor)]
    x, index, source = (bound.get(n) for n in ("x", "index", "src"))
    if (
        not (isinstance(x, Tensor) and isinstance(index, Tensor) and x.dim())
        or x.device.type not in ("cpu", "cuda")
        or any(t.device != x.device or type(t) not in _PLAIN for t in tensors)
    ):
        return False
    if not isinstance(source, Tensor) or not source.requires_grad:
        return True
    return source.shape == index.shape  # else PyTorch has no gradient


def _pays(op: Op, bound: Mapping[str, Any]) -> bool:
    device = bound["x"].device
    if device.type == "cuda" and torch.are_deterministic_algorithms_enabled():
        return True
    specs: dict[str, Any] = {
        n: TensorSpec.of(v) if isinstance(v, Tensor) else v for n, v in bound.items()
    }
    wanted = [n for n, v in bound.items() if isinstance(v, Tensor) and v.requires_grad]
    try:
        w = op.workload(**specs)
        calls = [w, *_backward(w, wanted)]
        return any(selection.choose(c, device).implementation != "aten" for c in calls)
    except (InvalidArgument, NoImplementation):
        return False


def _backward(w: Workload, wanted: list[str]) -> list[Workload]:
    """The gather or the sum that the gradients take most of their time for."""
    (out,), index = w.outputs, w["index"]
    if w.op == "gather":
        into = TensorSpec(out.dtype, w["x"].shape)
        sums = OPS["scatter_add"].workload
        return [sums(x=into, dim=w["dim"], index=index, src=out, flags=["donate=x"])]
    if wanted == ["x"]:
        return []
    if w.op == "index_add":
        along = sum(index.real_strides)  # an index of no dims is one of one position
        strides = [along if d == w["dim"] else 0 for d in range(out.rank)]
        index = TensorSpec(index.dtype, w["source"].shape, tuple(strides))
    return [OPS["gather"].workload(x=out, dim=w["dim"], index=index)]
