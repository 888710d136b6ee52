"""Seeds for functions that draw: where a call's masks come from."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tilewright.dispatch import selection
from tilewright.errors import InvalidArgument, InvalidType
from tilewright.fakes import fake_tensors, tracing_lock, without_hooks
from tilewright.fusion.frontend.families import AcrossSizes
from tilewright.fusion.frontend.trace import by_shapes
from tilewright.impl import IMPLS
from tilewright.op import Workload
from tilewright.philox import Seeded
from tilewright.tensor_spec import TensorSpec

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
        if not isinstance(seed, Tensor) or seed.dtype != torch.int64 or seed.dim():
            raise no_seed(function.__name__, list(signature.parameters))
        with Seeded(_as_it_is(seed)):
            return function(*args[:place], **kwargs)

    listed = [*parameters[:place], added, *parameters[place:]]
    reference.__signature__ = signature.replace(parameters=listed)  # type: ignore[attr-defined]
    reference.__annotations__ = {**function.__annotations__, SEED: Tensor | None}
    return reference


def no_seed(name: str, own: Sequence[str], given: Any = None) -> InvalidType:
    """What was given for one is most likely an argument too many."""
    told = SEED if given is None else f"{SEED}={given}"
    as_tensor = f": torch.tensor({given})" if type(given) is int else ""
    return InvalidType(
        f"{name}({', '.join(own)}): {told}, given beside its arguments, should be an int64 scalar "
        f"tensor, which decides what the function draws{as_tensor}"
    )


def _as_it_is(seed: Tensor) -> Tensor:
    """A seed that was made inside of torch.func.grad or jvp is wrapped there, for no gradient."""
    if torch.compiler.is_compiling():
        return seed
    functorch = torch._C._functorch
    while functorch.is_gradtrackingtensor(seed):
        seed = functorch.get_unwrapped(seed)
    if functorch.is_batchedtensor(seed):
        raise InvalidArgument(f"{SEED} is mapped over by vmap; give one for all, or call in a loop")
    return seed


@AcrossSizes
def draws(w: Workload) -> bool:
    """Whether the reference draws masks for these shapes that a seed could decide."""
    with tracing_lock(), without_hooks(), fake_tensors():
        fakes = [
            torch.empty_strided(s.shape, s.real_strides, dtype=s.torch_dtype, device="cpu")
            for s in w.tensors.values()
        ]
        with Seeded(SPEC.empty("cpu")) as counted, by_shapes(w.operator, w):
            w.operator.reference(**w.call(fakes))
    return counted.calls > 0


def seeded(w: Workload, device: torch.device) -> Workload | None:
    """The same with a seed, where the function draws and a kernel of ours may run it."""
    if not w.operator.draws(w):
        return None
    given = w.with_seed()
    if not w.operator.fallback:
        return given
    reason = IMPLS["fused"].unsupported(given, selection.device_spec_of(device))
    return given if reason is None else None


def fresh_seed(device: torch.device) -> Tensor:
    """From PyTorch's default generator of the device: torch.manual_seed repeats it, and a captured
    CUDA graph draws another with each replay."""
    return torch.randint(_LEAST, _END, (), dtype=torch.int64, device=device)


def drawing(run: Callable[..., Any], w: Workload, device: torch.device) -> Callable[..., Any]:
    """What runs the workload `w`, which has a seed, as a function of its other tensors."""
    place = w.seed
    assert place is not None

    def call(*tensors: Tensor, **scalars: Any) -> Any:
        return run(*tensors[:place], fresh_seed(device), *tensors[place:], **scalars)

    return call
