"""Whether a call that needs gradients runs an operator's own backward: the records decide."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from tilewright.dispatch import evidence, selection
from tilewright.dispatch.functions.operator import backward_operator
from tilewright.dispatch.prepared import state
from tilewright.dispatch.seeding import seeded
from tilewright.errors import InvalidArgument, NoImplementation
from tilewright.fusion.frontend.families import outputs_of
from tilewright.fusion.frontend.reach import Reach, reached
from tilewright.fusion.ir import Access
from tilewright.impls.fused import graph_of
from tilewright.op import OPS, Op, Workload, told_apart
from tilewright.tensor_spec import TensorSpec

_MAX_KEYS = 4096
"""Kinds of calls that are remembered; all are forgotten beyond, so that memory has a bound."""


@dataclass(frozen=True)
class Way:
    """How a call that runs an operator of ours is differentiated.

    Attributes:
        backward: by this operator; None if by PyTorch's autograd of the function, which raises
            where a step has no derivative.
        draws: whether forward and backward need a seed that the call was not given.
        reach: what has gradients; None for all that is asked for.
        reads: the arguments whose values the gradients follow from.
        given: the parameters of the backward that are gradients of outputs.
        same: {argument: what its gradient is too: that of another argument, or of an output}.
    """

    backward: Op | None
    draws: bool
    reach: Reach | None
    reads: frozenset[str]
    given: tuple[str, ...] = ()
    same: Mapping[str, str] = field(default_factory=dict)

    def asked(self, wanted: Iterable[str]) -> tuple[str, ...]:
        """The gradients to compute where these arguments need theirs."""
        sources = dict.fromkeys(self.same.get(n, n) for n in wanted)
        return tuple(n for n in sources if n not in self.given)


_PYTORCH = "PyTorch's"
_found: dict[tuple, Way | str] = {}
"""By operator and description of a call."""


def generated_backward(op: Op, bound: Mapping[str, Any]) -> Way | None:
    """How an operator of ours differentiates a call with these arguments, where one runs faster
    than PyTorch's; else None.

    A record must speak for an implementation of it other than aten; for a function that tw.fuse
    was asked to fuse, none is needed.
    """
    name = f"{op.name}_backward"
    if not op.fused:
        if name not in OPS:
            return None
        tensors = [v for v in bound.values() if isinstance(v, Tensor)]
        if not evidence.records_of(tensors[0].device, name).winners:
            return None
    try:
        described = [  # whole numbers of `scalars` are compiled in
            float if n in op.scalars and isinstance(v, float) else description(v)
            for n, v in bound.items()
        ]
        key = (op.name, state.generation, *bound, *described)
        found = _found.get(key)
    except RuntimeError:  # no strides
        return None
    except TypeError:  # no hash: PyTorch will say what is wrong, where no kernel is promised
        if op.fused and not op.fallback:
            op.workload_of(**bound)
        return None
    if found is not None:
        return found if isinstance(found, Way) else None
    with state.building.holding(key):
        found = _found.get(key) or _choose(op, bound) or _PYTORCH  # maybe by whom we waited for
        if len(_found) >= _MAX_KEYS:
            _found.clear()
        _found[key] = found
    return found if isinstance(found, Way) else None


def _has_a_reach(op: Op) -> bool:
    """Whether autograd may see less of it than that each result follows from each argument."""
    return op.fused or len(op.returns) > 1


def known_reach(w: Workload, given: Mapping[str, Any]) -> Reach | None:
    """What has gradients of a call that an implementation was named for, whatever can be fused;
    None for all that is asked for."""
    if not _has_a_reach(w.operator):
        return None
    try:
        return reached(w, _requiring(given))
    except (InvalidArgument, NoImplementation):  # only a run with values tells
        return None


def _requiring(given: Mapping[str, Any]) -> tuple[str, ...]:
    """The arguments whose gradients are wanted."""
    return tuple(n for n, v in given.items() if isinstance(v, Tensor) and v.requires_grad)


def description(value: Any) -> Any:
    """All that a choice depends on: a tensor without its values, and all of anything else."""
    if isinstance(value, Tensor):
        return TensorSpec.of(value), type(value), value.device, value.requires_grad
    return told_apart(value)


def _choose(op: Op, bound: Mapping[str, Any]) -> Way | None:
    device = next(v.device for v in bound.values() if isinstance(v, Tensor))
    if device.type not in ("cpu", "cuda") or any(
        type(v) not in (Tensor, torch.nn.Parameter) for v in bound.values() if isinstance(v, Tensor)
    ):
        return None
    wanted = _requiring(bound)
    tensors = [v for v in bound.values() if isinstance(v, Tensor)]
    specs: dict[str, Any] = {
        n: TensorSpec.of(v) if isinstance(v, Tensor) else v for n, v in bound.items()
    }
    try:
        w = op.workload(**specs)
        given_seed = seeded(w, device)
        w = given_seed or w
        if op.fused and selection.choose(w, device).source == "default":
            return None  # else it says what is not taken
        floats = [o for o in outputs_of(w) if o.torch_dtype.is_floating_point]
        backward = backward_operator(op, len(floats)) if op.fused else OPS[f"{op.name}_backward"]
        reach = reached(w, wanted) if _has_a_reach(op) else None
        if reach is not None:
            wanted = tuple(n for n in wanted if n in reach.arguments)
        if reach is not None and not reach.derived:
            return Way(None, given_seed is not None, reach, frozenset(w.tensors))
        if not wanted:
            return Way(backward, given_seed is not None, reach, frozenset())
        forward = OPS[f"{op.name}_forward"].workload(**dict(w.args)) if backward.wide else w
        saved = dict(zip((*op.returns, *backward.wide), outputs_of(forward), strict=False))
        names = [n for n in backward.parameters if n.startswith("grad_output")]
        gradients = tuple(names[: len(floats)])  # arguments that are named alike come behind
        same = backward.same_gradient
        way = Way(backward, given_seed is not None, reach, frozenset(), gradients, same)
        given = {**saved, **dict(w.args), "grads": way.asked(wanted)}
        given.update(zip(gradients, floats, strict=True))
        known = {n: v for n, v in given.items() if n in backward.parameters}
        differentiated = backward.workload(**known)
        way = replace(way, reads=backward.read(differentiated))
        if op.fused:
            way = replace(way, same=_same_gradients(differentiated, gradients))
            if not (asked := way.asked(wanted)):
                return way
            differentiated = differentiated.with_args(grads=asked)
        choice = selection.choose(differentiated, device)
    except (InvalidArgument, NoImplementation):
        if op.fused and not op.fallback and all(t.numel() for t in tensors):
            raise
        return None  # fake tensors refuse some that are empty, too
    return None if choice.implementation == "aten" and not op.fused else way


def _same_gradients(w: Workload, given: Sequence[str]) -> dict[str, str]:
    """Of a fused function's gradients, those that another tensor of the call is: a residual's is
    one that is given, and two tensors that are added have one."""
    graph = graph_of(w)
    if isinstance(graph, str) or graph.tensors:
        return {}

    def memory(node: int, access: Access, spec: TensorSpec) -> tuple[Any, ...]:
        return node, access.strides, access.offset, spec.dtype, spec.shape, spec.real_strides

    loads = {n.attr: i for i, n in enumerate(graph.nodes) if n.op == "load"}
    found = {
        memory(loads[place], graph.inputs[place], spec): name
        for place, (name, spec) in enumerate(w.tensors.items())
        if name in given and place in loads
    }
    gradients: Any = w["grads"]
    computed = zip(gradients, graph.outputs, outputs_of(w), strict=True)
    return {name: found.setdefault(memory(*o, spec), name) for name, o, spec in computed}
