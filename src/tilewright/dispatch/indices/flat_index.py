"""One flat index of several index tensors: on a GPU by one launch of a kernel of ours."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from tilewright.dispatch.prepared import MAX_KEYS, state
from tilewright.dispatch.selection import device_spec_of
from tilewright.errors import TilewrightError
from tilewright.impls.indices._any_index import from_front, holding
from tilewright.impls.indices._flat_index import FlatIndex, serves
from tilewright.tensor_spec import TensorSpec

_built: dict[tuple, FlatIndex] = {}
_given_up: set[torch.device] = set()


def flat_index(indices: Sequence[Tensor], sizes: Sequence[int], shape: torch.Size) -> Tensor:
    """Positions in the flattened leading dims, one behind the other; one that is out of range in
    any dim is out of range.

    Args:
        indices: one for each of those dims, int32 or int64, on one device.
        sizes: of these dims.
        shape: that the indices broadcast to.
    """
    device = indices[0].device
    if device.type == "cuda" and state.enabled and serves(len(shape), len(indices)):
        try:
            if (run := _kernel(device, indices, sizes)) is not None:
                return run(indices)
        except (TilewrightError, OSError) as error:
            _give_up(device, error)
    return by_operators(indices, sizes).expand(shape).reshape(-1)


def _kernel(
    device: torch.device, indices: Sequence[Tensor], sizes: Sequence[int]
) -> FlatIndex | None:
    """None where there is none and none can be made now: PyTorch's operators are captured then."""
    key = (device, *sizes, *((i.dtype, i.shape, i.stride()) for i in indices))
    found = _built.get(key)
    if found is None and device not in _given_up:
        if torch.cuda.is_current_stream_capturing():
            return None
        specs = [TensorSpec.of(i) for i in indices]
        found = FlatIndex(specs, sizes, device_spec_of(device))
        found.load(device.index)
        if len(_built) >= MAX_KEYS:
            _built.clear()
        _built[key] = found
    return found


def _give_up(device: torch.device, error: Exception) -> None:
    """Remember that operators do it from now on, and say why."""
    _built.clear()
    if device not in _given_up:
        _given_up.add(device)
        warnings.warn(
            f"PyTorch's operators make one index of several on {device} from now on: "
            f"{type(error).__name__}: {error}",
            RuntimeWarning,
            stacklevel=2,
        )


def by_operators(indices: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """The same in the shape of the indices, or one that it can be expanded from."""
    if len(indices) == 1:
        return from_front(indices[0], sizes[0])
    flat: Tensor | None = None
    wrong: Tensor | None = None
    for index, size in zip(indices, sizes, strict=True):  # in few kernels: each is a launch
        index = holding(index, size)
        front = from_front(index, size)
        far = index.clamp(-size, size - 1) != index
        flat = front.long() if flat is None else torch.add(front, flat, alpha=size)
        wrong = far if wrong is None else wrong | far
    assert flat is not None
    assert wrong is not None
    return flat.masked_fill_(wrong, -1)
