"""What a reference returns: its tensors, and the dtype and layout of each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from tilewright.errors import NoImplementation
from tilewright.tensor_spec import DTYPE_NAMES, DTYPES, TensorSpec


def tensors_of(name: str, out: Any) -> tuple[torch.Tensor, ...]:
    """The tensors that the reference of operator `name` returned.

    Raises:
        NoImplementation: these are no tensors.
    """
    outs = tuple(out) if isinstance(out, (tuple, list)) else (out,)
    if not outs:
        raise NoImplementation(f"{name} returns no tensors; it should return at least one")
    for k, o in enumerate(outs):
        if not isinstance(o, torch.Tensor):
            which = "" if o is out else f" as element {k}"
            raise NoImplementation(
                f"{name} returns {type(o).__name__}{which}; it should return a tensor, or a tuple "
                "of them"
            )
    return outs


def specs_of(
    name: str, outs: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]
) -> tuple[TensorSpec, ...]:
    """Shape and layout of what operator `name` returned, in these dtypes.

    Raises:
        NoImplementation: kernels have no such dtype.
    """
    for dtype in dtypes:
        if dtype not in DTYPE_NAMES:
            known = ", ".join(DTYPE_NAMES.values())
            raise NoImplementation(f"{name} returns {dtype}; results may be {known}")
    return tuple(
        TensorSpec(DTYPE_NAMES[dtype], tuple(o.shape), tuple(o.stride()))
        for o, dtype in zip(outs, dtypes, strict=True)
    )


def dtypes_like(names: Iterable[str | None], args: Mapping[str, Any]) -> list[torch.dtype]:
    """Of each output that of the argument it is named like, or for None the arithmetic type;
    `args` holds tensors or their specs."""
    main = next(v for v in args.values() if hasattr(v, "dtype"))
    main_dtype = DTYPES.get(main.dtype, main.dtype)
    half = main_dtype in (torch.float16, torch.bfloat16)
    found = []
    for name in names:
        dtype: Any = args[name].dtype if name else torch.float32 if half else main_dtype
        found.append(DTYPES[dtype] if isinstance(dtype, str) else dtype)
    return found
