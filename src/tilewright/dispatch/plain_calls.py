"""What calls ask of their arguments before any is read; see `tw.embedding`, `tw.index_put`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch._C import (
    _are_functorch_transforms_active,
    _is_torch_function_mode_enabled,
    _len_torch_dispatch_stack,
)
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling
from torch.jit import is_tracing
from torch.nn import Parameter
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from tilewright.errors import InvalidArgument, InvalidType
from tilewright.tensor_spec import other_layout

_PLAIN = (Tensor, Parameter)


def is_traced(*tensors: Tensor) -> bool:
    """Whether the call is traced, by torch.compile or torch.jit, or `is_transformed`."""
    return is_dynamo_compiling() or is_tracing() or is_transformed(*tensors)


def is_transformed(*tensors: Tensor) -> bool:
    """Whether the call is under function transforms, forward-mode gradients or modes, or on tensors
    that are not plain."""
    if any(type(t) not in _PLAIN for t in tensors) or _are_functorch_transforms_active():
        return True
    if is_dynamo_compiling():  # whose trace is under modes of its own
        return False
    return bool(
        _len_torch_dispatch_stack()
        or _is_torch_function_mode_enabled()
        or forward_ad._current_level >= 0
    )


def any_without_memory(values: Iterable[Any]) -> bool:
    """Whether a tensor is among them that has no address or no strides: a sparse, opaque or nested
    one, or one on meta."""
    tensors = (v for v in values if isinstance(v, Tensor))
    return any(t.is_meta or other_layout(t) is not None for t in tensors)


def under_a_default_device() -> bool:
    """Whether torch.set_default_device, a function mode too, is the only one: no reason to leave a
    call to PyTorch."""
    if is_dynamo_compiling() or not _is_torch_function_mode_enabled():
        return False
    return all(isinstance(mode, DeviceContext) for mode in _get_current_function_mode_stack())


def refuse_others(op: str, wanted: str, kinds: type | tuple[type, ...], **given: Any) -> None:
    """Arguments of other types, in PyTorch's kind of error; True is no number.

    Raises:
        InvalidType: one is of none of `kinds`.
    """
    for name, value in given.items():
        if not isinstance(value, kinds) or (type(value) is bool and kinds is not bool):
            raise InvalidType(f"{op}: {name} is of type {type(value).__name__}, expected {wanted}")


def refuse_on_meta(name: str, given: Mapping[str, Any]) -> None:
    """Some of PyTorch's functions read a tensor on meta beside a first one that has memory as if it
    had some, too.

    Args:
        given: arguments by name, the first of them what a result is made of.

    Raises:
        InvalidArgument: one behind it is on meta, and it is not.
    """
    (main, x), *others = ((n, v) for n, v in given.items() if isinstance(v, Tensor))
    for argument, t in others:
        if t.is_meta and not x.is_meta:
            raise InvalidArgument(
                f"{name}: {argument} is on meta, but {main} is on {x.device}; make it there"
            )
