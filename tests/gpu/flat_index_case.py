"""What tests/gpu/sanitize.py runs of the kernel that makes one index of several tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from own_memory import laid_out
from tilewright.build import CompileTask
from tilewright.device import DeviceSpec
from tilewright.dispatch.indices.flat_index import by_operators
from tilewright.impls.indices._flat_index import FlatIndex
from tilewright.tensor_spec import TensorSpec
from tilewright.text import parse_call


@dataclass(frozen=True, eq=False)
class FlatIndexCase:
    """The kernel that makes one index of several, which is no operator's.

    Attributes:
        indices: tensors, as workloads have them.
        sizes: of the dims that they point into.
        out_of_range: some of the indices are, of which the kernel makes -1.
    """

    indices: tuple[str, ...]
    sizes: tuple[int, ...]
    out_of_range: bool = False
    implementation = "flat_index"

    def __str__(self) -> str:
        given = ", ".join(f"{i} of {n}" for i, n in zip(self.indices, self.sizes, strict=True))
        beyond = ", some indices out of range" if self.out_of_range else ""
        return f"{self.implementation} {given}{beyond}"

    @property
    def specs(self) -> list[TensorSpec]:
        return [parse_call(f"f(x={text})", TensorSpec)[1]["x"] for text in self.indices]

    def refusal(self, device: DeviceSpec) -> str | None:
        return None if device.kind == "cuda" else "it runs on a GPU"

    def task(self, device: DeviceSpec) -> CompileTask:
        return FlatIndex(self.specs, self.sizes, device).task

    def run(self, device: DeviceSpec) -> None:
        """
        Raises:
            AssertionError: it is wrong.
        """
        given = self.tensors()
        shape = torch.broadcast_shapes(*(t.shape for t in given))
        there = [laid_out(t, "cuda") for t in given]
        found = FlatIndex(self.specs, self.sizes, device)(there)
        expected = by_operators(given, self.sizes).expand(shape).reshape(-1)
        assert torch.equal(found.cpu(), expected), "the flat index is wrong"

    def tensors(self) -> list[torch.Tensor]:
        """On the CPU."""
        generator, found = torch.Generator().manual_seed(0), []
        for spec, size in zip(self.specs, self.sizes, strict=True):
            t = spec.empty("cpu")
            t.copy_(torch.randint(-size, size, spec.shape, generator=generator))
            if self.out_of_range:
                far = torch.iinfo(t.dtype).min if len(found) % 2 else size
                t.masked_fill_(torch.arange(t.numel()).view(t.shape) % 17 == 0, far)
            found.append(t)
        return found
