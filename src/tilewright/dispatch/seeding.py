"""Seeds for functions that draw: where a call's masks come from."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active, _len_torch_dispatch_stack
from torch.compiler import is_dynamo_compiling

from tilewright.dispatch import selection
from tilewright.dispatch.prepared import MAX_KEYS, state
from tilewright.impl import IMPLS
from tilewright.op import Op, TensorSpec, Workload
from tilewright.philox import Seeded

SEED = "seed"
SPEC = TensorSpec("i64", ())
_LEAST, _END = -(2**63), 2**63 - 1


def with_seed(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with one more parameter, which decides what it draws; None leaves it to
    PyTorch. One that has a parameter of that name stays as it is."""
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())
    if SEED in signature.parameters:
        return function
    place = sum(p.kind <= p.POSITIONAL_OR_KEYWORD for p in parameters)
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    added = inspect.Parameter(SEED, kind, default=None, annotation=Tensor | None)

    @functools.wraps(function)
    def reference(*args: Any, **kwargs: Any) -> Any:
        seed = args[place] if len(args) > place else kwargs.pop(SEED, None)
        if seed is None:
            return function(*args[:place], **kwargs)
        with Seeded(seed):
            return function(*args[:place], **kwargs)

    listed = [*parameters[:place], added, *parameters[place:]]
    reference.__signature__ = signature.replace(parameters=listed)  # type: ignore[attr-defined]
    reference.__annotations__ = {**function.__annotations__, SEED: Tensor | None}
    return reference


@functools.lru_cache(maxsize=MAX_KEYS)
def draws(w: Workload) -> bool:
    """Whether the reference draws masks for these shapes that a seed could decide."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fakes = [
            torch.empty_strided(s.shape, s.real_strides, dtype=s.torch_dtype)
            for s in w.tensors.values()
        ]
        with Seeded(SPEC.empty("cpu")) as seeded:
            w.operator.reference(**w.call(fakes))
    return seeded.calls > 0


def seeding(op: Op, call: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, which gets a fresh seed where the function draws.

    The seed is drawn by PyTorch's default generator of the tensors' device: torch.manual_seed
    repeats it, and a captured CUDA graph draws another with each replay.
    """
    known: dict[tuple, bool] = {}
    place = list(op.parameters).index(SEED)

    @functools.wraps(call)
    def public(*args: Any, **kwargs: Any) -> Any:
        if (
            SEED in kwargs
            or len(args) > place
            or is_dynamo_compiling()
            or not state.enabled
            or _len_torch_dispatch_stack()
            or _are_functorch_transforms_active()
        ):
            return call(*args, **kwargs)
        try:
            key = tuple([_described(a) for a in (*args, *kwargs.items())])
            needed = known.get(key)
        except (RuntimeError, TypeError):  # sparse tensors and what cannot be hashed
            return call(*args, **kwargs)
        if needed is None:
            if len(known) >= MAX_KEYS:
                known.clear()
            needed = known[key] = _needs_seed(op, args, kwargs)
        if not needed:
            return call(*args, **kwargs)
        device = next(a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)).device
        seed = torch.randint(_LEAST, _END, (), dtype=torch.int64, device=device)
        if len(args) == place:
            return call(*args, seed, **kwargs)
        return call(*args, **kwargs, seed=seed)

    return public


def _described(a: Any) -> Any:
    if isinstance(a, tuple) and len(a) == 2 and isinstance(a[1], Tensor):  # by keyword
        return a[0], _described(a[1])
    return (a.shape, a.stride(), a.dtype, a.device, type(a)) if isinstance(a, Tensor) else a


def _needs_seed(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
    if any(type(t) not in (Tensor, torch.nn.Parameter) for t in tensors):
        return False
    w, _ = op.workload_of(*args, **kwargs)
    if not draws(w):
        return False
    spec = selection.device_spec_of(tensors[0].device)
    return not op.fallback or IMPLS["fused"].unsupported(w.with_args(seed=SPEC), spec) is None
