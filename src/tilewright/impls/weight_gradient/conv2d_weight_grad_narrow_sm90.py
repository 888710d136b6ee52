"""The weight gradient of a convolution of few channels on Hopper: wgmma beside unfolding."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch

from tilewright.build import CompileTask
from tilewright.compile import tensor_map
from tilewright.compile.cache import Compiled
from tilewright.device import DeviceSpec
from tilewright.impls.weight_gradient import _rows as rows
from tilewright.impls.weight_gradient._narrow import (
    copy_bytes,
    narrow_refusal,
    octets_of,
    raw_bytes,
    unfolded_bytes,
)
from tilewright.impls.weight_gradient._rows import (
    Layout,
    RowsKernel,
    WeightGradByRows,
    chunk_of,
    prime,
    rows_task,
)
from tilewright.op import Workload
from tilewright.space import ConfigSpace, param
from tilewright.tensor_spec import TensorSpec

FEATURES = 64
"""Of a block: a swizzled row of 128 bytes."""


@dataclass(frozen=True)
class Config(rows.Config):
    """
    Attributes:
        shares: of a line's pixels; warps share its taps instead.
        producers: threads that copy and unfold.
        groups: of those, which take steps in turn; each has `stages` of its steps under way.
        lead: steps that may be unfolded before they are read.
        pending: lines whose products are under way while the next one's taps are read.
    """

    stages: int = param(3, 2, 4, 1)
    shares: int = param(1)
    waves: float = param(1.0, 0.5)
    producers: int = param(256, 128)
    groups: int = param(1, 2, 4)
    lead: int = param(2, 3)
    pending: int = param(0, 1)


class Conv2dWeightGradNarrowSm90(WeightGradByRows):
    """As `conv2d_weight_grad_narrow`, with taps as rows of the product: warpgroups multiply them,
    from registers, with one tile of grad_output that all of them read."""

    name = "conv2d_weight_grad_narrow_sm90"

    def unsupported(self, w: Workload, device: DeviceSpec) -> str | None:
        if device.arch != "sm_90a":
            return f"wgmma is an instruction of sm_90a, and {device.name} is {device.arch}"
        return (
            narrow_refusal(w, device)
            or rows.room_refusal(w, self.space(w, device))
            or rows.sums_refusal(self, w, device)
        )

    def space(self, w: Workload, device: DeviceSpec) -> ConfigSpace[Config]:
        def refusal(c: Config) -> str | None:
            if c.groups == 1 and c.stages == 1:
                return "one step under way is waited for at once"
            return rows.shape_refusal(_layout(w, c), c, device)

        return ConfigSpace(Config, None, refusal)

    def heuristic(self, w: Workload, device: DeviceSpec) -> Config:
        """Few lines leave more sums than work. Of ResNet's first layer two groups of unfolders were
        best at batch 8 and 32, seven and 27 lines an SM, and four, which leave shared memory for no
        more than a step of each, at 256 (docs/weight_gradient_kernels.md).
        """
        n, _, height, _ = w["grad_output"].shape
        lines = n * height / device.sms
        # 64 lies between the 27 and 217 lines that were timed.
        groups, lead, stages, pending = (4, 3, 1, 0) if lines >= 64 else (2, 2, 3, 1)
        waves = 1.0 if lines >= 4 else 0.5  # a guess: fewer than were timed
        like = {"groups": groups, "waves": waves, "lead": lead, "pending": pending}
        fits = list(self.space(w, device))
        return min(
            fits,
            key=lambda c: (*(getattr(c, k) != v for k, v in like.items()), abs(c.stages - stages)),
        )

    def layout(self, w: Workload, config: Config) -> Layout:
        return _layout(w, config)

    def compile_key(self, config: Config, w: Workload) -> str:
        """Sizes of images are arguments; the filter and the chunk of a row are baked in."""
        layout = _layout(w, config)
        dtypes = (w["x"].dtype, *(o.dtype for o in w.outputs))
        baked = (dtypes, w["kernel_size"], w["stride"], w["x"].shape[1])
        knobs = f"{config.stages} {config.groups} {config.lead} {config.pending}"
        return f"{knobs} {layout} {baked} {copy_bytes(w)}"

    def task(self, config: Config, w: Workload, device: DeviceSpec) -> CompileTask:
        more = {
            "C": w["x"].shape[1], "COPY_BYTES": copy_bytes(w), "GROUPS": config.groups,
            "LEAD": config.lead, "PENDING": config.pending,
        }  # fmt: skip
        files, text = ("unfold", "narrow_sm90"), wgmma(w["x"].dtype)
        return rows_task(files, w, device, _layout(w, config), config, more, text)

    def kernel(
        self, built: Compiled, w: Workload, device: DeviceSpec, layout: Layout, config: Any
    ) -> RowsKernel:
        return NarrowKernel(built, w, device, layout, config)


class NarrowKernel(RowsKernel):
    """Tensor maps hold addresses: one is made once for each grad_output that comes."""

    signature = "TPP"

    def __init__(
        self, built: Compiled, w: Workload, device: DeviceSpec, layout: Layout, config: Config
    ):
        super().__init__(built, w, device, layout, config)
        self.map = functools.lru_cache(maxsize=256)(
            functools.partial(_lines, w["grad_output"], layout.chunk)
        )

    def operands(self, x: torch.Tensor, grad_output: torch.Tensor) -> tuple[Any, ...]:
        address = grad_output.data_ptr()
        return self.map(address), x.data_ptr(), address


def _lines(spec: TensorSpec, chunk: int, address: int) -> bytes:
    """grad_output as [line][pixel][feature]."""
    n, features, height, width = spec.shape
    strides = features * spec.itemsize, width * features * spec.itemsize
    return tensor_map.tiled(
        spec.dtype, address, (features, width, n * height), strides, (FEATURES, chunk, 1)
    )


def wgmma(dtype: str) -> str:
    """`multiply(sums, a, b)`: 64 x FEATURES x 16, a in registers, b transposed in shared memory."""
    count = FEATURES // 2
    registers = ", ".join(f"%{i}" for i in range(count))
    operand = ", ".join(f"%{count + i}" for i in range(4))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    return (
        f"TW_DEVICE void multiply(float (&d)[{count}], const u32 (&a)[4], u64 b) {{\n"
        '  asm volatile("{\\n.reg .pred p;\\nsetp.ne.b32 p, 1, 0;\\n"\n'
        f'    "wgmma.mma_async.sync.aligned.m64n{FEATURES}k16.f32.{dtype}.{dtype} '
        f'{{{registers}}}, {{{operand}}}, %{count + 4}, p, 1, 1, 1;\\n}}"\n'
        f'    : {outputs} : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b) : "memory");\n}}\n'
    )


def _layout(w: Workload, config: Config) -> Layout:
    """As kernels/weight_gradient/narrow_sm90.cuh computes it."""
    filter_height, chunk = w["kernel_size"][0], chunk_of(w["grad_output"].shape[3])
    warps = math.ceil(filter_height * octets_of(w) / 8) * 4
    ring = max(prime(filter_height, w["stride"][0]) + 1, config.groups) + config.lead
    grads = config.stages * config.groups + 2 + config.lead
    loop_bytes = grads * (chunk * FEATURES * 2 + 8) + ring * (unfolded_bytes(w, chunk) + 16)
    loop_bytes += (config.stages + 1) * config.groups * raw_bytes(w, chunk)
    return Layout(FEATURES, chunk, warps, FEATURES // 8, loop_bytes, config.producers)
