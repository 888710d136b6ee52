"""Other layouts than channels_last: converted for the weight-gradient kernels, and back.

PyTorch's default is contiguous (NCHW) memory; the kernels read and write NHWC. What is contiguous
is transposed by a kernel of ours (kernels/weight_gradient/layout.cuh), all tensors in one launch;
what is neither, such as an expanded grad_output, is copied by PyTorch. The gradient is brought to
the layout that PyTorch gives it. All of it is part of the executable, and so of its time.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tilewright.build import CompileTask
from tilewright.compile import nvrtc
from tilewright.compile.cache import compiled
from tilewright.compile.launch import CudaKernel
from tilewright.device import DeviceSpec
from tilewright.impl import Executable, allocate
from tilewright.impls.weight_gradient._problem import as_read, source
from tilewright.op import Workload
from tilewright.tensor_spec import TensorSpec

ENTRY, THREADS, TILE_BYTES, LINE_BYTES, TILE_COLUMNS = "transpose_all", 256, 8192, 128, 64
ITEMS = {2: "u16", 4: "u32", 8: "u64"}


def in_any_layout(kernel: Executable, w: Workload, device: DeviceSpec) -> Executable:
    """The kernel as it is, or with the conversions that the workload's layouts need."""
    given = (*w.tensors.values(), w.outputs[0])
    return kernel if all(as_read(s) == s for s in given) else Converted(kernel, w, device)


class Converted(Executable):
    """A kernel for channels_last tensors between conversions.

    What the gradient is added to (`into`) is converted like an operand; the kernel then adds to
    the converted tensor in place.
    """

    def __init__(self, kernel: Executable, w: Workload, device: DeviceSpec):
        self.kernel, self.resources = kernel, kernel.resources
        self.block_threads, self.shared_bytes = kernel.block_threads, kernel.shared_bytes
        given = tuple(w.tensors.values())
        self.read = tuple(None if as_read(s) == s else as_read(s) for s in given)
        self.before = Conversion(
            [(s, to) for s, to in zip(given, self.read, strict=True) if to is not None], device
        )
        self.in_place = bool(w.operator.destinations(w))
        self.output = w["into"] if self.in_place else w.outputs[0]
        written = as_read(self.output)
        self.converts_result = written != self.output
        self.after = Conversion([(written, self.output)] * self.converts_result, device)
        made = [*filter(None, self.read), *[written] * self.converts_result]
        self.workspace_bytes = kernel.workspace_bytes + sum(s.numel * s.itemsize for s in made)

    def __call__(self, *tensors: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        device = tensors[0].device
        read = [
            t if spec is None else allocate(spec, device)
            for t, spec in zip(tensors, self.read, strict=True)
        ]
        self.before([(t, r) for t, r in zip(tensors, read, strict=True) if r is not t])
        found = self.kernel(*read)
        if not self.converts_result:
            return found
        weight, *rest = found if isinstance(found, tuple) else (found,)
        out = tensors[2] if self.in_place else allocate(self.output, device)
        self.after([(weight, out)])
        return (out, *rest) if rest else out


class Conversion:
    """Copies of tensors in other layouts, (from, to) as specs; at most three of one dtype each.

    Those between contiguous and channels_last memory take one launch for each dtype.
    """

    def __init__(self, pairs: Sequence[tuple[TensorSpec, TensorSpec]], device: DeviceSpec):
        batches = {i: _transposition(*pair) for i, pair in enumerate(pairs)}
        self.copied = [i for i, batch in batches.items() if batch is None]
        self.launches = []
        for size in sorted({batch.itemsize for batch in batches.values() if batch}):
            alike = {i: b for i, b in batches.items() if b and b.itemsize == size}
            self.launches.append((list(alike), Transposition(list(alike.values()), device)))

    def __call__(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for i in self.copied:
            pairs[i][1].copy_(pairs[i][0])
        for chosen, kernel in self.launches:
            kernel([pairs[i] for i in chosen])


@dataclass(frozen=True)
class Batch:
    """Matrices to be transposed, dense one behind the other.

    Attributes:
        from_align, to_align: of the first one's address, in bytes.
    """

    matrices: int
    rows: int
    columns: int
    itemsize: int
    from_align: int
    to_align: int

    @property
    def whole(self) -> int:
        """Rows where a tile has them all, else 0."""
        return self.rows if self.rows * self.itemsize < LINE_BYTES else 0

    @property
    def tiles(self) -> tuple[int, int]:
        """Of one matrix, along rows and columns."""
        if not self.whole:
            rows = math.ceil(self.rows * self.itemsize / LINE_BYTES)
            return rows, math.ceil(self.columns / TILE_COLUMNS)
        columns = TILE_BYTES // self.itemsize // self.rows // 8 * 8
        return 1, math.ceil(self.columns / columns)

    @property
    def read_width(self) -> int:
        """Elements of a load."""
        return math.gcd(self.columns * self.itemsize, self.from_align, 16) // self.itemsize

    @property
    def write_width(self) -> int:
        """Elements of a store; whole rows are written across columns."""
        piece = self.rows * (self.columns if self.whole else 1) * self.itemsize
        return math.gcd(piece, self.to_align, 16) // self.itemsize


def _transposition(given: TensorSpec, wanted: TensorSpec) -> Batch | None:
    """From contiguous to channels_last memory or the other way; None for other layouts."""
    n, c, h, w = given.shape
    size, aligned = given.itemsize, (given.align, wanted.align)
    if given.strides is None and as_read(wanted) == wanted:
        return Batch(n, c, h * w, size, *aligned)
    if wanted.strides is None and as_read(given) == given:
        return Batch(n, h * w, c, size, *aligned)
    return None


class Transposition:
    """One launch that transposes up to three batches of matrices of one element size."""

    def __init__(self, batches: Sequence[Batch], device: DeviceSpec):
        self.task = _task(batches, device)
        self.kernel = CudaKernel(compiled(self.task), ENTRY, "PPPPPPT")
        fields, self.blocks = [], 0
        for batch in batches:
            along_rows, along_columns = batch.tiles
            self.blocks += batch.matrices * along_rows * along_columns
            fields += [batch.rows, batch.columns, along_rows, along_columns, self.blocks]
        self.problem = struct.pack(f"{len(fields)}i", *fields).ljust(128, b"\0")
        self.unused = (0,) * (6 - 2 * len(batches))

    def __call__(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        index = pairs[0][0].device.index
        stream = torch._C._cuda_getCurrentRawStream(index)
        addresses = [t.data_ptr() for pair in pairs for t in pair]
        self.kernel.launch(
            (self.blocks, 1, 1), (THREADS, 1, 1), TILE_BYTES, stream, index,
            *addresses, *self.unused, self.problem,
        )  # fmt: skip


def _task(batches: Sequence[Batch], device: DeviceSpec) -> CompileTask:
    """Widths are baked in; sizes are arguments, but for rows that are few."""

    def listed(values: Sequence[int]) -> str:
        return f"{{{', '.join(map(str, values))}}}"

    defined = {
        "ITEM": ITEMS[batches[0].itemsize],
        "READS": listed([b.read_width for b in batches]),
        "WRITES": listed([b.write_width for b in batches]),
        "WHOLE": listed([b.whole for b in batches]),
    }
    text = "".join(f"#define {key} {value}\n" for key, value in defined.items())
    flags = nvrtc.flags_for(device.arch)
    return CompileTask("nvrtc", text + source("layout.cuh"), flags, ENTRY)
