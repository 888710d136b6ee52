"""What of a tensor a workload tells: dtype, shape, strides, alignment."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tilewright.errors import InvalidArgument, known_names

DTYPES: dict[str, torch.dtype] = {
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f32": torch.float32,
    "f64": torch.float64,
    "i32": torch.int32,
    "i64": torch.int64,
    "bool": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
HALVES = ("f16", "bf16")
WHOLE = ("i32", "i64")
DEFAULT_ALIGN = 16
"""Base addresses at least this aligned, in bytes, are not told apart: no access is wider."""

ADDRESSABLE_BYTES = 2**57
"""No machine addresses more; PyTorch's int64 sizes hold what references make of so much, too."""

MAX_RANK = 64
"""More dims PyTorch's kernels do not take."""


@dataclass(frozen=True)
class TensorSpec:
    """Shape, dtype, strides (in elements) and base alignment (in bytes, at most 16) of a tensor.

    `strides` is None for a contiguous tensor, so that equal layouts compare equal.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None = None
    align: int = DEFAULT_ALIGN

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise InvalidArgument(
                f"unknown dtype {self.dtype!r}; {known_names(self.dtype, DTYPES)}"
            )
        if any(n < 0 for n in self.shape):
            raise InvalidArgument(f"negative size in shape {list(self.shape)}")
        if self.strides is not None:
            if len(self.strides) != len(self.shape):
                raise InvalidArgument(
                    f"{len(self.strides)} strides {list(self.strides)} for a tensor of rank "
                    f"{len(self.shape)}: give one stride per dim"
                )
            if any(s < 0 for s in self.strides):
                raise InvalidArgument(f"negative stride in {list(self.strides)}")
            if same_layout(self.shape, self.strides, contiguous_strides(self.shape)):
                object.__setattr__(self, "strides", None)

    @classmethod
    def written(
        cls,
        dtype: str,
        shape: tuple[int, ...],
        strides: tuple[int, ...] | None = None,
        align: int = DEFAULT_ALIGN,
    ) -> TensorSpec:
        """What somebody wrote down, which unlike a tensor may be larger than any memory.

        Raises InvalidArgument for that, too.
        """
        if len(shape) > MAX_RANK:
            raise InvalidArgument(
                f"{dtype} of {len(shape)} dims: PyTorch's kernels take {MAX_RANK} at most"
            )
        spec = cls(dtype, shape, strides, align)
        sizes = [max(n, 1) for n in shape]
        reach = sum(n * s for n, s in zip(sizes, spec.real_strides, strict=True))
        elements = max(math.prod(sizes), reach)
        if elements * spec.itemsize > ADDRESSABLE_BYTES:
            raise InvalidArgument(
                f"{spec} spans {elements} elements, more than {ADDRESSABLE_BYTES} bytes hold; "
                "give smaller sizes or strides"
            )
        return spec

    @classmethod
    def of(cls, t: torch.Tensor) -> TensorSpec:
        dtype = name_of(t.dtype)
        align = math.gcd(t.data_ptr(), DEFAULT_ALIGN) if t.numel() else DEFAULT_ALIGN
        return cls(dtype, tuple(t.shape), tuple(t.stride()), align)

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def itemsize(self) -> int:
        return self.torch_dtype.itemsize

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def real_strides(self) -> tuple[int, ...]:
        return contiguous_strides(self.shape) if self.strides is None else self.strides

    @property
    def distinct_bytes(self) -> int:
        """Bytes of memory behind the tensor: an expanded dim (stride 0) counts once."""
        sizes = [n for n, s in zip(self.shape, self.real_strides, strict=True) if s or n == 0]
        return math.prod(sizes) * self.itemsize

    @property
    def storage_elements(self) -> int:
        """Elements from the first to the last one addressed, gaps included."""
        if self.numel == 0:
            return 0
        strides = self.real_strides
        return 1 + sum((n - 1) * s for n, s in zip(self.shape, strides, strict=True))

    def empty(self, device: torch.device | str, fill: float | None = None) -> torch.Tensor:
        """A tensor of exactly this layout and base alignment."""
        elements = self.storage_elements + DEFAULT_ALIGN // self.itemsize
        flat = torch.empty(elements, dtype=self.torch_dtype, device=device)
        if fill is not None:
            flat.fill_(fill)
        offset = (self.align % DEFAULT_ALIGN) // self.itemsize
        return flat.as_strided(self.shape, self.real_strides, offset)

    def __str__(self) -> str:
        text = f"{self.dtype}[{','.join(map(str, self.shape))}]"
        if self.strides is not None:
            if self.rank == 4 and self.strides == channels_last_strides(self.shape):
                text += "@channels_last"
            else:
                text += f"@strides({','.join(map(str, self.strides))})"
        if self.align != DEFAULT_ALIGN:
            text += f"@align{self.align}"
        return text


def name_of(dtype: torch.dtype) -> str:
    """Raises InvalidArgument for one that no tensor spec has."""
    if dtype not in DTYPE_NAMES:
        raise InvalidArgument(f"dtype {dtype} is not supported; use one of {list(DTYPES)}")
    return DTYPE_NAMES[dtype]


def other_layout(t: torch.Tensor) -> str | None:
    """What a tensor is that is not elements at strides: sparse, nested or opaque; else None."""
    return "nested" if t.is_nested else None if t.layout is torch.strided else str(t.layout)


def share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two strided tensors lie in one storage."""
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))


def channels_last_strides(shape: Sequence[int]) -> tuple[int, ...]:
    _, c, h, w = shape
    return (h * w * c, 1, w * c, c)


def same_layout(shape: Sequence[int], a: Sequence[int], b: Sequence[int]) -> bool:
    """Whether two stride tuples address the same elements; strides of size-1 dims are free."""
    if math.prod(shape) == 0:
        return True
    return all(n == 1 or s == t for n, s, t in zip(shape, a, b, strict=True))
