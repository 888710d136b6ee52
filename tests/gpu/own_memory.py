"""Tensors whose memory ends where they do, as tools tell accesses beyond it."""

import torch

from tilewright.tensor_spec import TensorSpec


def laid_out(t: torch.Tensor, device: str) -> torch.Tensor:
    """The same there, in memory that ends where the tensor does, copied without a kernel."""
    end = (t.storage_offset() + TensorSpec.of(t).storage_elements) * t.element_size()
    raw = torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage(), 0, (end,))
    memory = raw.clone() if device == "cpu" else raw.to(device)
    moved = torch.empty(0, dtype=t.dtype, device=device)
    return moved.set_(memory.untyped_storage(), t.storage_offset(), t.shape, t.stride())
