"""Whether a call that needs gradients runs an operator's own backward: the records decide."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tilewright.dispatch import evidence, selection
from tilewright.dispatch.functions.operator import backward_operator
from tilewright.dispatch.functions.seeding import seeded
from tilewright.dispatch.prepared import state
from tilewright.errors import InvalidArgument, NoImplementation
from tilewright.fusion.frontend.trace import Reach, reached
from tilewright.op import OPS, Op, Workload
from tilewright.tensor_spec import TensorSpec

_MAX_KEYS = 4096
"""Kinds of calls that are remembered; all are forgotten beyond, so that memory has a bound."""
Way = tuple[Op | None, bool, Reach | None]
_PYTORCH = None, False, None
_found: dict[tuple, Way] = {}
"""By operator and description of a call: the backward that runs it, or None for PyTorch's; whether
the call draws and was given no seed; what has gradients, or None for all that is asked for."""


def generated_backward(op: Op, bound: Mapping[str, Any]) -> Way:
    """The gradient operator for a call with these arguments, where one runs faster than PyTorch's;
    whether forward and backward need a seed; and what of a person's function has gradients.

    A record must speak for an implementation of it other than aten; for a function that tw.fuse
    was asked to fuse, none is needed.
    """
    name = f"{op.name}_backward"
    if not op.fused:
        if name not in OPS:
            return _PYTORCH
        tensors = [v for v in bound.values() if isinstance(v, Tensor)]
        if not evidence.records_of(tensors[0].device, name).winners:
            return _PYTORCH
    try:
        described = [float if n in op.scalars else description(v) for n, v in bound.items()]
        key = (op.name, state.generation, *bound, *described)
        found = _found.get(key)
    except (RuntimeError, TypeError):  # no strides, or no hash: PyTorch will say what is wrong
        return _PYTORCH
    if found is not None:
        return found
    with state.building.holding(key):
        found = _found.get(key) or _choose(op, bound)  # maybe by whom we waited for
        if len(_found) >= _MAX_KEYS:
            _found.clear()
        _found[key] = found
    return found


def known_reach(w: Workload, given: Mapping[str, Any]) -> Reach | None:
    """What has gradients of a call that an implementation was named for, whatever can be fused;
    None for all that is asked for."""
    if not w.operator.fused:
        return None
    try:
        return reached(w, _requiring(given))
    except (InvalidArgument, NoImplementation):  # only a run with values tells
        return None


def _requiring(given: Mapping[str, Any]) -> tuple[str, ...]:
    """The arguments whose gradients are wanted."""
    return tuple(n for n, v in given.items() if isinstance(v, Tensor) and v.requires_grad)


def description(value: Any) -> Any:
    """All that a choice depends on: a tensor without its values, and anything else as it is."""
    if isinstance(value, Tensor):
        return TensorSpec.of(value), type(value), value.device, value.requires_grad
    return value


def _choose(op: Op, bound: Mapping[str, Any]) -> Way:
    device = next(v.device for v in bound.values() if isinstance(v, Tensor))
    if device.type not in ("cpu", "cuda") or any(
        type(v) not in (Tensor, torch.nn.Parameter) for v in bound.values() if isinstance(v, Tensor)
    ):
        return _PYTORCH
    wanted = _requiring(bound)
    specs: dict[str, Any] = {
        n: TensorSpec.of(v) if isinstance(v, Tensor) else v for n, v in bound.items()
    }
    reach = None
    try:
        w = op.workload(**specs)
        given_seed = seeded(w, device)
        w = given_seed or w
        if op.fused:
            if selection.choose(w, device).source == "default":  # or it says what is not taken
                return _PYTORCH
            floats = [o for o in w.outputs if o.torch_dtype.is_floating_point]
            backward = backward_operator(op, len(floats))
            reach = reached(w, wanted)
            wanted = tuple(n for n in wanted if n in reach.arguments)
            if not wanted:
                return backward, given_seed is not None, reach
        else:
            backward = OPS[f"{op.name}_backward"]
        forward = OPS[f"{op.name}_forward"].workload(**dict(w.args)) if backward.wide else w
        saved = dict(zip((*op.returns, *backward.wide), forward.outputs, strict=False))
        given = {**saved, **dict(w.args), "grads": backward.gradients_for(wanted)}
        gradients = [n for n in backward.parameters if n.startswith("grad_output")]
        floats = [o for o in w.outputs if o.torch_dtype.is_floating_point]
        given.update(zip(gradients, floats, strict=True))
        known = {n: v for n, v in given.items() if n in backward.parameters}
        choice = selection.choose(backward.workload(**known), device)
    except (InvalidArgument, NoImplementation):
        if op.fused and not op.fallback:
            raise
        return _PYTORCH
    if choice.implementation == "aten" and not op.fused:
        return _PYTORCH
    return backward, given_seed is not None, reach
