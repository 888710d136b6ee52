"""Whether a call that needs gradients runs an operator's own backward: the records decide."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from tilewright.dispatch import evidence, selection
from tilewright.dispatch.functions.operator import backward_operator
from tilewright.dispatch.prepared import place_of, state
from tilewright.dispatch.seeding import seeded
from tilewright.errors import InvalidArgument, NoImplementation
from tilewright.fusion.frontend.families import outputs_of
from tilewright.fusion.frontend.reach import Reach, memories, reached
from tilewright.fusion.ir import Access, Graph
from tilewright.fusion.remembered import remembered
from tilewright.impls.fused import graph_of
from tilewright.op import OPS, Op, Workload, told_apart
from tilewright.tensor_spec import TensorSpec, name_of

_MAX_KEYS = 4096
"""Kinds of calls that are remembered; all are forgotten beyond, so that memory has a bound."""


@dataclass(frozen=True)
class Step:
    """A backward that was given the gradients of some outputs, as places in what it knows.

    Attributes:
        wanted: the arguments, by place, whose gradients are computed.
        asked: by which names; none where what is given is all that is wanted.
        order: what the backward's parameters are: places among the arguments, then the outputs that
            were kept, the gradients of outputs, and `constants`.
        constants: what follows from none of these.
        results: for each argument the place of its gradient, among those of outputs and then those
            that are computed; None where it has none.
    """

    wanted: tuple[int, ...]
    asked: tuple[str, ...] = ()
    order: tuple[int, ...] = ()
    constants: tuple[Any, ...] = ()
    results: tuple[int | None, ...] = ()

    def arguments(self, kept: Sequence[Any], gradients: Sequence[Tensor | None]) -> list[Any]:
        """What the backward is called with; `kept` are the arguments and the outputs."""
        known = (*kept, *gradients, *self.constants)
        return [known[i] for i in self.order]


@dataclass(frozen=True)
class Way:
    """How calls that are alike, of an operator of ours, are differentiated.

    Attributes:
        op: the operator.
        backward: by this operator, which raises where a fused function's gradients cannot be
            fused; None if by PyTorch's autograd of the function, which raises where a step has no
            derivative.
        draws: whether forward and backward need a seed that the call was not given.
        reach: what has gradients; None for all that is asked for.
        tensors: the arguments that are tensors, the seed included.
        reads: those whose values the gradients follow from.
        floats: the outputs that have gradients, by place.
        given: the parameters of the backward that are these gradients.
        same: {argument: what its gradient is too: that of another argument, or of an output}.
        numbers: `numbers_of` the call that it was found for.
    """

    op: Op
    backward: Op | None
    draws: bool
    reach: Reach | None
    tensors: tuple[str, ...]
    reads: frozenset[str]
    floats: tuple[int, ...] = ()
    given: tuple[str, ...] = ()
    same: Mapping[str, str] = field(default_factory=dict)
    numbers: tuple[float, ...] = ()

    def asked(self, wanted: Iterable[str]) -> tuple[str, ...]:
        """The gradients to compute where these arguments need theirs."""
        sources = dict.fromkeys(self.same.get(n, n) for n in wanted)
        return tuple(n for n in sources if n not in self.given)

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(self.op.parameters)

    @functools.cached_property
    def wide(self) -> tuple[str, ...]:
        """The statistics that the forward returns behind its outputs."""
        return self.backward.wide if self.backward is not None else ()

    @functools.cached_property
    def forward(self) -> str:
        """The name of the operator that runs forward."""
        return f"{self.op.name}_forward" if self.wide else self.op.name

    @functools.cached_property
    def tensor_places(self) -> tuple[int, ...]:
        return tuple(i for i, n in enumerate(self.names) if n in self.tensors)

    @functools.cached_property
    def kept(self) -> tuple[int, ...]:
        """The tensors to keep. Gradients of gradients follow from the arguments that statistics
        were computed from."""
        read = self.tensors if self.wide else self.reads
        return tuple(i for i in self.tensor_places if self.names[i] in read)

    @functools.cached_property
    def unread(self) -> tuple[int, ...]:
        return tuple(i for i in self.tensor_places if i not in self.kept)

    @functools.cached_property
    def kept_outputs(self) -> Mapping[str, int]:
        """What to keep of what the forward returns: {parameter of the backward: place}."""
        own, taken = self.op.parameters, self.backward.parameters if self.backward else {}
        returned = enumerate((*self.op.returns, *self.wide))
        return {n: i for i, n in returned if n in taken and n not in own}

    @remembered
    def step(self, needed: tuple[bool, ...], present: tuple[bool, ...]) -> Step:
        """The backward where these arguments need gradients and these outputs were given theirs."""
        flows = None if self.reach is None else self.reach.of([p or None for p in present])
        wanted = tuple(
            i for i, n in enumerate(self.names) if needed[i] and (flows is None or n in flows)
        )
        if not wanted:
            return Step(())
        assert self.backward is not None
        asked = self.asked(self.names[i] for i in wanted)
        known = [*self.names, *self.kept_outputs, *self.given]
        constants = {
            n: asked if n == "grads" else p.default
            for n, p in self.backward.parameters.items()
            if n not in known
        }
        places = {n: i for i, n in enumerate((*known, *constants))}
        results = {n: i for i, n in enumerate((*self.given, *asked))}
        return Step(
            wanted,
            asked,
            tuple(places[n] for n in self.backward.parameters),
            tuple(constants.values()),
            tuple(
                results[self.same.get(n, n)] if i in wanted else None
                for i, n in enumerate(self.names)
            ),
        )


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
        place = next((place_of(v.device) for v in bound.values() if isinstance(v, Tensor)), None)
        key = (op.name, state.generation, place, *bound, *described)
        found = _found.get(key)
    except RuntimeError:  # no strides, or a dtype that no kernel takes
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


def numbers_of(op: Op, bound: Mapping[str, Any]) -> tuple[float, ...]:
    """The numbers of a call that a way does not depend on."""
    return tuple(v for n, v in bound.items() if n in op.scalars and isinstance(v, float))


def _requiring(given: Mapping[str, Any]) -> tuple[str, ...]:
    """The arguments whose gradients are wanted."""
    return tuple(n for n, v in given.items() if isinstance(v, Tensor) and v.requires_grad)


def description(value: Any) -> Any:
    """All that a choice depends on: a tensor without its values, and all of anything else. Specs
    are for the choice itself: to make one takes longer than all of this.

    Raises:
        InvalidArgument: it is a tensor of a dtype that no kernel takes.
    """
    if isinstance(value, Tensor):
        return (
            name_of(value.dtype),
            value.shape,
            value.stride(),
            value.data_ptr() & 15,
            type(value),
            value.device,
            value.requires_grad,
        )
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
    generated = op.fused and not op.fallback and all(t.numel() for t in tensors)
    try:
        w = op.workload(**specs)
        given_seed = seeded(w, device)
        w = given_seed or w
        if op.fused and selection.choose(w, device).source == "default":
            return None  # else it says what is not taken
        floats = [(i, o) for i, o in enumerate(outputs_of(w)) if o.torch_dtype.is_floating_point]
        backward = backward_operator(op, len(floats)) if op.fused else OPS[f"{op.name}_backward"]
        reach = reached(w, wanted) if _has_a_reach(op) else None
    except (InvalidArgument, NoImplementation):
        if generated:
            raise
        return None  # fake tensors refuse some that are empty, too
    names = [n for n in backward.parameters if n.startswith("grad_output")]
    way = Way(
        op,
        backward,
        draws=given_seed is not None,
        reach=reach,
        tensors=tuple(w.tensors),
        reads=frozenset(w.tensors),
        floats=tuple(i for i, _ in floats),
        given=tuple(names[: len(floats)]),  # arguments that are named alike come behind
        same=backward.same_gradient,
        numbers=numbers_of(op, bound),
    )
    if reach is not None:
        if not reach.derived:
            return replace(way, backward=None)
        wanted = tuple(n for n in wanted if n in reach.arguments)
    if not wanted:
        return replace(way, reads=frozenset())
    try:
        return _of_kernels(way, w, [o for _, o in floats], wanted, device)
    except (InvalidArgument, NoImplementation):
        return way if generated else None  # the backward says what is not taken


def _of_kernels(
    way: Way, w: Workload, floats: Sequence[TensorSpec], wanted: Iterable[str], device: torch.device
) -> Way | None:
    """The way with what its backward reads and which gradients are one tensor; None where PyTorch's
    own backward is faster.

    Raises:
        NoImplementation, InvalidArgument: no kernel computes these gradients.
    """
    op, backward = way.op, way.backward
    assert backward is not None
    forward = OPS[way.forward].workload(**dict(w.args)) if way.wide else w
    saved = dict(zip((*op.returns, *way.wide), outputs_of(forward), strict=False))
    given = {**saved, **dict(w.args), "grads": way.asked(wanted)}
    given.update(zip(way.given, floats, strict=True))
    known = {n: v for n, v in given.items() if n in backward.parameters}
    differentiated = backward.workload(**known)
    way = replace(way, reads=backward.read(differentiated))
    if op.fused:
        outputs_of(differentiated)  # which raises where a step of it decides by values
        way = replace(way, same=_same_gradients(differentiated, way.given))
        if not (asked := way.asked(wanted)):
            return way
        differentiated = differentiated.with_args(grads=asked)
    choice = selection.choose(differentiated, device)
    return None if choice.implementation == "aten" and not op.fused else way


def _same_gradients(w: Workload, given: Sequence[str]) -> dict[str, str]:
    """Of a fused function's gradients, those that another tensor of the call is, as they are
    PyTorch's: a residual's is one that is given, and two tensors that are added have one. Others
    that are equal have memory of their own, which a hook may write to."""
    graph = graph_of(w)
    if not isinstance(graph, Graph) or graph.tensors:
        return {}
    pytorchs = memories(w)

    def memory(own: int, node: int, access: Access, spec: TensorSpec) -> tuple[Any, ...]:
        layout = access.strides, access.offset, spec.dtype, spec.shape, spec.real_strides
        return own, node, *layout

    loads = {n.attr: i for i, n in enumerate(graph.nodes) if n.op == "load"}
    found = {
        memory(pytorchs[place], loads[place], graph.inputs[place], spec): name
        for place, (name, spec) in enumerate(w.tensors.items())
        if name in given and place in loads
    }
    gradients: Any = w["grads"]
    own = pytorchs[len(w.tensors) :]
    computed = zip(gradients, own, graph.outputs, outputs_of(w), strict=True)
    return {name: found.setdefault(memory(m, *o, spec), name) for name, m, o, spec in computed}
