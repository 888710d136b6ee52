"""Calls that PyTorch answers: through the operator's reference, differentiable and traceable."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral
from operator import eq, is_
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from tilewright.dispatch.ranges import look_after
from tilewright.impls._vendor import call_reference
from tilewright.impls.indices import _any_index
from tilewright.op import Op


def as_pytorch(op: Op, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What PyTorch gives for a call of the public function, without validation of ours."""
    of_ours = "value" in kwargs and "value" in op.aliases  # a number in a tensor, as scatter has it
    read = with_numbers_read(op, args, kwargs) if of_ours else None
    bound = read or bind(op, args, kwargs)
    return with_own_memory(op, bound.values(), call_reference(op, bound))


def as_written(op: Op, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The same in the dtypes that PyTorch makes of these, as autocast does."""
    bound = bind(op, args, kwargs)
    return with_own_memory(op, bound.values(), op.reference(**bound))


def with_own_memory(op: Op, given: Iterable[Any], found: Any) -> Any:
    """What PyTorch returned of a person's function, with memory of its own for each result, as
    kernels give it: one that shares an argument's or another's is copied."""
    if not op.fused or op.gradient_of is not None:
        return found
    outs = found if isinstance(found, tuple) else (found,)
    tensors = [v for v in given if isinstance(v, Tensor)]
    results = [out for out in outs if isinstance(out, Tensor)]
    own = iter(_apart(tensors, results))
    outs = tuple([next(own) if isinstance(out, Tensor) else out for out in outs])
    return outs if isinstance(found, tuple) else outs[0]


def _apart(known: Iterable[Tensor], results: Iterable[Tensor]) -> list[Tensor]:
    """The results, those copied that share memory with a known tensor or with one before."""
    memory, same = (_root, is_) if is_dynamo_compiling() else (_memory, eq)
    taken = [memory(t) for t in known]
    own: list[Tensor] = []
    for out in results:
        found = memory(out)
        shared = found is not None and any(same(found, t) for t in taken)
        own.append(out.clone() if shared else out)
        taken.append(memory(own[-1]))
    return own


def _root(tensor: Tensor) -> Tensor:
    """What a tensor is a view of, or itself: Dynamo, which traces this, knows of no memory."""
    return tensor if tensor._base is None else tensor._base


def _memory(tensor: Tensor) -> int | None:
    """What its values lie in, also below function transforms and without values; None where it has
    no such memory."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # sparse ones
        return None


def outliving_indices(op: Op, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The same on plain tensors outside transforms, where an index out of range leaves the process
    the use of a GPU."""
    if op.indexed is None:
        return as_pytorch(op, args, kwargs)
    bound = bind(op, args, kwargs)
    index = bound.get("index")
    if isinstance(index, Tensor) and op.outlives_indices(index.device.type):
        return _any_index.reference(op, bound)
    return op.reference(**bound)


def or_why(op: Op, args: Sequence[Any], kwargs: dict[str, Any], run: Callable[[], Any]) -> Any:
    """`run()`, which is PyTorch's; what it refuses is refused in our words where those have any.

    Raises:
        InvalidArgument: PyTorch raised, and the call is at fault; IndexOutOfRange among these.
    """
    try:
        return run()
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):
        op.workload_of(*args, **kwargs)
        look_after(op, bind(op, args, kwargs))
        raise


def bind(op: Op, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments by the reference's names; one number for several sizes becomes a tuple.

    Raises:
        InvalidType: too many arguments, an unknown name, or one given twice.
    """
    bound = op.signature.bind(args, kwargs)
    for name, value in bound.items():
        if not op.fused and "tuple" in op.parameters[name].annotation and _is_whole(value):
            bound[name] = (value if type(value) is int else int(value),)
    return bound


def by_place(op: Op, bound: Mapping[str, Any]) -> list[Any]:
    """The arguments that `bind` gave, and the defaults of others, in the reference's order."""
    return [bound.get(n, p.default) for n, p in op.parameters.items()]


def with_numbers_read(
    op: Op, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any] | None:
    """The arguments of a call that has tensors in place of numbers, with these read; else None."""
    names = in_place_of_numbers(op, args, kwargs)
    if not names:
        return None
    bound = bind(op, args, kwargs)
    return {**bound, **{n: bound[n].item() for n in names}}


def in_place_of_numbers(op: Op, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
    """Parameters whose number is in a tensor of no dims, as PyTorch takes it. Not of one on a GPU:
    to read it would wait."""
    if not any(_is_readable(v) for v in (*args, *kwargs.values())):
        return []
    by_alias = {op.aliases[n] for n in kwargs if n == "value" and n in op.aliases}
    return [
        n
        for n, v in bind(op, args, kwargs).items()
        if _is_readable(v) and (n in by_alias or "Tensor" not in op.parameters[n].annotation)
    ]


def with_scalars_alike(
    op: Op, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any] | None:
    """The arguments of a call in which a tensor of no dims that stands for a number (`op.scalars`)
    has another dtype or device than the first tensor, in those as PyTorch has it; else None. A
    person's own function has it in the dtype that it came in."""
    if not op.scalars or not any(
        isinstance(v, Tensor) and not v.dim() for v in (*args, *kwargs.values())
    ):
        return None
    bound = bind(op, args, kwargs)
    first = next(iter(bound.values()), None)
    if not isinstance(first, Tensor) or not (op.fused or first.is_floating_point()):
        return None
    given = {n: bound[n] for n in op.scalars if _is_number(bound.get(n))}
    alike = {
        n: _alike(v, first.device, v.dtype if op.fused else first.dtype) for n, v in given.items()
    }
    unlike = {n: v for n, v in alike.items() if v is not given[n]}
    return {**bound, **unlike} if unlike else None


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.dim() and not value.is_complex()


def _alike(value: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor | float:
    """What lies on the CPU is read, so that captures have no copy of it, but where a gradient or a
    trace needs the tensor."""
    cast = value.to(dtype)
    if device == value.device or not value.is_cpu:
        return cast
    kept = value.requires_grad or is_dynamo_compiling()
    return cast.to(device) if kept else cast.item()


def _is_readable(value: Any) -> bool:
    return (
        type(value) is Tensor
        and not value.dim()
        and value.device.type == "cpu"
        and not value.requires_grad
    )


def _is_whole(value: Any) -> bool:
    """Python's (also one that a trace has no value of) and numpy's; True is no number."""
    return type(value) is int or (isinstance(value, Integral) and type(value) is not bool)
