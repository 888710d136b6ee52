"""tw.fuse: a person's own function of tensors as one operator."""

from __future__ import annotations

import functools
import inspect
import re
import types
from collections.abc import Callable, Sequence
from typing import Any

from tilewright.dispatch.call import operators
from tilewright.dispatch.functions.operator import FusedFunction, check, register, steps
from tilewright.dispatch.functions.outside import with_outside
from tilewright.dispatch.seeding import SEED, with_seed
from tilewright.errors import InvalidArgument, known_names

_OWN_NAMES = re.compile(rf"{SEED}|flags|grads|grad_output\d*")


def fuse(
    function: Callable[..., Any] | None = None,
    *,
    name: str | None = None,
    scalars: Sequence[str] = (),
    fallback: bool = False,
) -> Callable[..., Any]:
    """Make one operator of a function of tensors: generated kernels run it, differentiably.

    The function is traced for the shapes it is called with, more than once and not at later calls,
    and with symbols for sizes: further ones are not traced where it asks nothing about them. So it
    must not decide by values of tensors, and what else it does (print) is done then. Numbers
    that its own code reads from globals and closures are read at each call; what it takes from
    outside otherwise (as a method, or behind a decorator) is read when it is traced, and tensors
    are refused.
    Its steps may be arithmetic, comparisons, `where`, casts, elementary functions, sums and other
    reductions over any dims, and views (docs/fusion.md lists them). It is computed in
    fp32 where tensors are halves, and rounded where it casts and at its end. What it drops out
    follows from a seed (docs/fusion.md), drawn anew for each call or given as `seed=`, an int64
    scalar on the tensors' device. Its gradients are
    those of PyTorch's autograd, as kernels too. Like every operator it can be tuned, verified and
    recorded, under its name.

    Args:
        function: tensors and other values in, a tensor or a tuple of them out; a list and a named
            tuple become a tuple, and what holds one tensor becomes that. An argument that is
            returned as it came is copied.
        name: of the operator; by default the function's.
        scalars: parameters whose number may change from call to call without another kernel.
        fallback: let PyTorch run what cannot be fused, compiled or launched, instead of raising.

    Raises:
        InvalidArgument: it is no Python function (a module, a partial), or takes any number of
            arguments, or some by place alone, or one named flags, or a number named seed, grads or
            flags from outside; the name is taken by another operator, or is none; `scalars` names
            no parameter. At a call: another function was fused under its name since.
            Gradients are asked for, and a parameter is named as one of theirs (grads, grad_output).
            The function raises, called with tensors of these shapes; the message names the line.
        NoImplementation: at the call, naming the step that cannot be fused and its line.
        CompileError, CompilerMissing: at the call, if a kernel cannot be compiled.
    """
    if function is None:
        return functools.partial(fuse, name=name, scalars=scalars, fallback=fallback)
    if not callable(function):
        raise InvalidArgument(
            f"fuse: {function!r} is no function: put @tw.fuse above a def, or call "
            "tw.fuse(function, name=...)"
        )
    if not isinstance(inspect.unwrap(function), (types.FunctionType, types.MethodType)):
        raise InvalidArgument(
            f"fuse: {function!r} is no function of Python's own; fuse one that calls it"
        )
    place = name or function.__qualname__
    name = name or function.__name__
    if not name.isidentifier():
        raise InvalidArgument(f"fuse: {name!r} cannot name an operator; give name=")
    parameters = inspect.signature(function).parameters
    if "flags" in parameters:
        raise InvalidArgument(
            f"fuse: {name} takes 'flags', which names those of its workloads; give it another name"
        )
    for parameter in parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise InvalidArgument(f"fuse: {name} takes {parameter}; give each argument a name")
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise InvalidArgument(
                f"fuse: {name} takes {parameter.name!r} by place alone; leave out the '/' behind it"
            )
    if isinstance(scalars, str):
        raise InvalidArgument(
            f"fuse: scalars={scalars!r} is a string; give a list of names: scalars=[{scalars!r}]"
        )
    if unknown := [n for n in scalars if n not in parameters]:
        raise InvalidArgument(
            f"fuse: scalars={scalars!r}: {name} has no parameter {unknown[0]!r}; "
            f"{known_names(unknown[0], parameters)}"
        )
    outside_too, outside = with_outside(function)
    if outside is not None and (clash := [n for n in outside() if _OWN_NAMES.fullmatch(n)]):
        raise InvalidArgument(
            f"fuse: {name} takes {clash[0]!r} from outside, which names a parameter of its "
            "operator, of the gradients' or of workloads; give it another name"
        )
    reference = with_seed(outside_too)
    seed = None if reference is outside_too else SEED
    reference = _returning_tuples(reference)
    op = FusedFunction(
        name,
        reference,
        flops=steps,
        check=functools.partial(check, name, seed),
        scalars=tuple(scalars),
        fused=True,
        fallback=fallback,
        seed=seed,
        outside=outside,
    )
    register(op)
    fused = operators[name]
    # Where other processes, that pickle sends it to, import it from.
    fused.__module__, fused.__qualname__ = function.__module__, place
    return fused


def _returning_tuples(function: Callable[..., Any]) -> Callable[..., Any]:
    """Where PyTorch runs the function, too, it returns what kernels do."""

    @functools.wraps(function)
    def reference(*args: Any, **kwargs: Any) -> Any:
        out = function(*args, **kwargs)
        if not isinstance(out, (tuple, list)):
            return out
        return out[0] if len(out) == 1 else tuple(out)

    return reference
