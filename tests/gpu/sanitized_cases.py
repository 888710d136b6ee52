"""What runs under compute-sanitizer: every way to split a weight gradient, and a config of each
other kind of kernel and of schedule."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.nn import functional as F

import tilewright as tw
from flat_index_case import FlatIndexCase
from own_memory import laid_out
from tilewright.build import CompileTask
from tilewright.device import DeviceSpec
from tilewright.dispatch.functions.fuse import fuse
from tilewright.errors import IndexOutOfRange
from tilewright.impl import IMPLS, Implementation
from tilewright.op import OPS, Workload
from tilewright.ops._indexing import places_of_x, told_once


def sanitized_dropout(x, weight, bias):
    return F.layer_norm(F.dropout(x, 0.25), x.shape[-1:], weight, bias)


def sanitized_pieces(x, y):
    return torch.cat([x[:, 3:].softmax(-1), y.tanh()], -1)


def sanitized_turns(x):
    y = x * x.square().mean(-1, keepdim=True).rsqrt()
    even, odd = y[..., 0::2], y[..., 1::2]
    return even - odd, even.sum(0), odd.sum(0)


def sanitized_heads(x):
    y = x * x.square().mean(-1, keepdim=True).rsqrt()
    first, second = y.chunk(2, -1)
    return first - second, first.sum(0), second.sum(0)


def sanitized_rolls(x):
    y = F.rms_norm(x, x.shape[-1:])
    return y.roll(1, -1), y.norm()


def sanitized_totals(x, mask):
    return x.softmax(-1), (x * mask).sum(), x.amax()


def sanitized_columns(x):
    return (x - x.mean(0)) / (x.std(0) + 1e-6)


def sanitized_samples(x):
    y = x - x.mean(-1, keepdim=True)
    return y, y.sum(1)


def sanitized_sets(x):
    y = x - x.mean((2, 3), keepdim=True)
    peak = y.amax(-1, keepdim=True)
    return y / peak, peak.sum(2)


def sanitized_channels(x):
    y = x.softmax(1)
    return y, y.square().sum((0, 2)), y.amax(2)


def sanitized_labels(x, labels):
    later = torch.ones_like(x, dtype=torch.bool).triu(1)
    return F.cross_entropy(x, labels), (x * labels[:, None]).masked_fill(later, 0.0).softmax(-1)


def sanitized_far(x, far, weight):
    """Some rows are corrected: their mean is a million deviations from zero."""
    return F.layer_norm(x + 1e6 * far.relu(), x.shape[-1:], weight)


def sanitized_shift(x, mix):
    return x + (F.pad(x, (0, 0, 1, -1)) - x) * mix


def sanitized_norms(x, y, w, v):
    return F.rms_norm(x, x.shape[-1:], w), F.rms_norm(y, y.shape[-1:], v)


def sanitized_stencils(x):
    for _ in range(3):
        padded, (n, m) = F.pad(x, (1, 1, 1, 1)), x.shape[-2:]
        x = sum(padded[..., i : i + n, j : j + m] for i in range(3) for j in range(3)) / 9
    return x, x.amax(-1)


FUNCTIONS = {
    f.__name__: f
    for f in (
        sanitized_dropout,
        sanitized_pieces,
        sanitized_turns,
        sanitized_heads,
        sanitized_rolls,
        sanitized_totals,
        sanitized_columns,
        sanitized_samples,
        sanitized_sets,
        sanitized_channels,
        sanitized_labels,
        sanitized_far,
        sanitized_shift,
        sanitized_norms,
        sanitized_stencils,
    )
}
"""Operators that exist once a case asks for them."""


@dataclass(frozen=True, eq=False)
class Case:
    """
    Attributes:
        knobs: of the config, others at their defaults; none for the heuristic's. `blocks` counts in
            as many as the device has SMs.
        out_of_range: some of the indices are, which the kernel must tell and leave out.
        sms: of a device that deals its rows out evenly; None: of any.
    """

    implementation: str
    workload: str
    knobs: dict[str, Any] = field(default_factory=dict)
    out_of_range: bool = False
    sms: int | None = None

    def __str__(self) -> str:
        knobs = " ".join(f"{name}={value}" for name, value in self.knobs.items())
        beyond = ", some indices out of range" if self.out_of_range else ""
        return f"{self.implementation} {self.workload} {knobs or 'untuned'}{beyond}"

    @property
    def impl(self) -> Implementation:
        return IMPLS[self.implementation]

    @property
    def w(self) -> Workload:
        name = self.workload.partition("(")[0].removesuffix("_backward")
        if name in FUNCTIONS and name not in OPS:
            fuse(FUNCTIONS[name])
        return Workload.parse(self.workload)

    def refusal(self, device: DeviceSpec) -> str | None:
        if self.sms not in (None, device.sms):
            return f"its rows are for {self.sms} SMs, of which {device.name} has {device.sms}"
        why = self.impl.unsupported(self.w, device)
        if why is None and self.knobs and self.implementation == "fused":
            return self.impl.space(self.w, device).why_not(self.config(device))
        return why

    def config(self, device: DeviceSpec) -> Any:
        heuristic = self.impl.heuristic(self.w, device)
        if not self.knobs:
            return heuristic
        more = {"blocks": self.knobs["blocks"] * device.sms} if "blocks" in self.knobs else {}
        return type(heuristic)(**{**self.knobs, **more})

    def task(self, device: DeviceSpec) -> CompileTask | None:
        return self.impl.task(self.config(device), self.w, device)

    def run(self, device: DeviceSpec) -> None:
        """Twice: counters are as the first call has left them.

        Raises:
            AssertionError: an index out of range was not told, or one was told where there is none.
        """
        executable = self.impl.build(self.config(device), self.w, device)
        for _ in range(2):
            executable(*(laid_out(t, "cuda") for t in self.tensors()))
            told = False
            try:
                tw.check()  # which waits, and takes back what it tells
            except IndexOutOfRange:
                told = True
            assert told == self.out_of_range, f"tw.check() told of an index out of range: {told}"

    def tensors(self) -> list[torch.Tensor]:
        """On the CPU."""
        w = self.w
        given = w.operator.examples(w, "random", 0, "cpu")
        if self.out_of_range:
            index = told_once(w.call(given)["index"])
            places = places_of_x(w) if "x" in w.tensors else w["num_weights"]
            ends = torch.iinfo(index.dtype)
            wrong = torch.tensor([-1, places, ends.min, ends.max], dtype=index.dtype)
            where = torch.arange(0, index.numel(), 17)
            index.put_(where, wrong[torch.arange(len(where)) % len(wrong)])
        return given


def layer(n, c, k, size, kernel, groups=1, more="", name="weight", layout="@channels_last"):
    """A weight gradient of images that keep their size."""
    return (
        f"conv2d_{name}_grad(x=f16[{n},{c},{size},{size}]{layout}, "
        f"grad_output=f16[{n},{k},{size},{size}]{layout}, kernel_size={kernel}, "
        f"padding={kernel // 2}, groups={groups}{more})"
    )


def with_bias_and_into(text):
    """The bias's gradient too, both added to others in fp32."""
    w = Workload.parse(text)
    shape = ",".join(map(str, w.outputs[0].shape))
    features = w.outputs[0].shape[0]
    both = f", into=f32[{shape}], into_bias=f32[{features}])"
    return text.replace("weight_grad", "weight_bias_grad")[:-1] + both


PLAIN, MATRIX = layer(4, 64, 136, 13, 3), layer(4, 128, 128, 13, 1)
MANY_TILES = layer(4, 384, 640, 7, 3)
BOTH = {
    dtype: layer(
        4, 64, 136, 13, 3, name="weight_bias",
        more=f", into={dtype}[136,64,3,3]@channels_last, into_bias={dtype}[136]",
    )
    for dtype in ("f16", "f32")
}  # fmt: skip
WIDE = [PLAIN.replace("f16", dtype) for dtype in ("f32", "f64")]
TF32 = WIDE[0][:-1] + ", allow_tf32=True)"
CONTIGUOUS = layer(4, 64, 136, 13, 3, layout="")
STEM, GROUPS = layer(2, 3, 64, 20, 7), layer(2, 64, 64, 14, 3, 16)
DEPTHWISE = layer(9, 64, 64, 14, 5, 64)
SPLITS = [
    {"split_k": 1},
    {"split_k": 2, "combine": "last"},
    {"split_k": 3, "combine": "grid"},
    {"split_k": 5, "combine": "kernel"},
    {"split_k": 4, "combine": "serial"},
]
HOPPER_SPLITS = [
    {"split_k": 5, "combine": "marked"},
    {"split_k": 3, "cluster": 3},
    {"split_k": 4, "cluster": 2, "combine": "last"},
    {"split_k": 6, "cluster": 2, "combine": "grid"},
    {"split_k": 8, "cluster": 4, "combine": "kernel"},
    {"split_k": 2, "cluster": 2, "exchange": "sent"},
    {"blocks": 1},
]
SM80, SM90 = "conv2d_weight_grad_sm80", "conv2d_weight_grad_sm90"
SMALL = {"tile_m": 64, "tile_n": 64, "stages": 3}
INDEXED = {
    "bucket_extremes": "scatter_reduce(x=f64[90000], dim=0, index=i64[100000], src=f64[100000], "
    "reduce=amax)!indices=zipf",
    "bucket_integers": "scatter_add(x=i64[90000], dim=0, index=i64[100000], src=i64[100000])"
    "!indices=zipf",
    "bucket_products": "scatter_reduce(x=f32[90000], dim=0, index=i64[100000], src=f32[100000], "
    "reduce=prod)!indices=zipf",
    "bucket_sums": "scatter_add(x=f32[90000], dim=0, index=i64[100000], src=f32[100000])"
    "!indices=zipf",
    "gather_cuda": "gather(x=f16[900,48], dim=0, index=i64[3000,48]@strides(1,0))",
    "gather_tiled": "gather(x=f64[3,900,5], dim=1, index=i32[3,2000,5])",
    "integer_sums": "index_add(x=f32[900,64], dim=0, index=i64[3000], source=f32[3000,64])"
    "!indices=zipf",
    "rows_atomic": "index_add(x=f32[900,64], dim=0, index=i64[3000], source=f32[3000,64])"
    "!nondeterministic",
    "rows_balanced": "index_add(x=f32[900,64], dim=0, index=i64[3000], source=f32[3000,64])"
    "!indices=zipf",
    "rows_bins": "index_add(x=f32[70,20], dim=0, index=i64[5000], source=f32[5000,20])",
    "rows_dealt": "index_add(x=f32[900,64], dim=0, index=i64[3000], source=f32[3000,64])"
    "!indices=zipf",
    "rows_serial": "index_add(x=f32[90,64], dim=0, index=i64[900], source=f32[900,64])"
    "!indices=zipf",
    "rows_sorted": "index_add(x=f32[900,64], dim=0, index=i64[3000], source=f32[3000,64])"
    "!indices=zipf",
    "rows_sorted_torch": "index_add(x=f32[900,64], dim=0, index=i64[3000], source=f32[3000,64])"
    "!indices=zipf",
    "rows_unique": "index_add(x=f32[900,64], dim=0, index=i64[300], source=f32[300,64])"
    "!donate=x!indices=unique",
    "rows_winner": "scatter(x=f32[900,64], dim=0, index=i64[3000,64]@strides(1,0), "
    "src=f32[3000,64])",
    "scatter_buckets": "scatter(x=f32[70000], dim=0, index=i64[100000], src=f32[100000])",
    "scatter_exchange": "scatter(x=f32[70000], dim=0, index=i64[100000], src=f32[100000])",
    "scatter_serial": "scatter_add(x=f32[9000,17], dim=0, index=i64[30,16], src=f32[31,17])",
    "scatter_sorted": "scatter_add(x=f32[9000,17], dim=0, index=i64[3000,16], src=f32[3001,17])",
    "scatter_strided": "scatter(x=f32[9000,17], dim=0, index=i64[3000,16], src=f32[3001,17])",
    "scatter_tiled": "scatter(x=f32[100,16,7,7], dim=0, index=i64[130,16,7,7], "
    "src=f32[130,16,7,7])",
    "scatter_winner": "scatter(x=f32[70000], dim=0, index=i64[100000], src=f32[100000])",
}
COLUMNS = "sanitized_columns(x=f32[9216,40])"
"""Walks that blocks share; with splits= moments of parts of them."""
FUSED = [
    "lerp(x=f32[300,400], end=f32[300,400]@strides(1,300), weight=0.2)",
    "softmax(x=f16[64,256])",
    "softmax(x=f16[1201,768])",  # two rows a block, copied to shared memory
    "rms_norm(x=f16[1201,1280], weight=f16[1280])",  # two at a time
    "softmax(x=f16[64,5140])",
    "softmax(x=f32[400,96], dim=0)",
    "softmax(x=f32[3,400000])",  # rows that blocks share
    "sanitized_pieces(x=f16[37,515], y=f16[37,130])",
    "sanitized_turns(x=bf16[3001,128])",  # several rows by each warp
    *(
        f"sanitized_labels(x=f16[301,{n}], labels={d}[301])"
        for n, d in ((1024, "i64"), (333, "i32"))
    ),
    "sanitized_heads(x=bf16[3001,128])",
    "sanitized_rolls(x=f32[37,513])",
    "sanitized_totals(x=f32[1301,520], mask=f32[1301,520])",
    COLUMNS,
    "sanitized_samples(x=f16[3,301,1032])",
    "sanitized_samples(x=bf16[3,17,16384])",
    "sanitized_sets(x=f16[3,2,12,8200])",  # in clusters
    "sanitized_sets(x=f32[200,2,6,72])",
    "layer_norm(x=f64[301,1032], weight=f64[1032], bias=f64[1032])",
    "sanitized_shift(x=f16[4,37,264], mix=f16[264])",  # kernels side by side
    "sanitized_shift_backward(grad_output=f16[4,37,264], x=f16[4,37,264], mix=f16[264])",
    "sanitized_norms(x=bf16[301,4,128], y=bf16[301,1,128], w=bf16[128], v=bf16[128])",
    "sanitized_stencils(x=f32[3,41,40])",  # of values that are stored
    "rms_norm_backward(grad_output=bf16[40001,128], x=bf16[40001,128], rstd=f32[40001,1], "
    "weight=bf16[128])",  # four rows at once
    "rms_norm_backward(grad_output=bf16[301,1032], x=bf16[301,1032], rstd=f32[301,1], "
    "weight=bf16[1032], grads=[x,weight])",
    "rms_norm_backward(grad_output=bf16[301,12289], x=bf16[301,12289], rstd=f32[301,1], "
    "weight=bf16[12289])",  # odd rows, in clusters
    "layer_norm_backward(grad_output=f16[37,1024], x=f16[37,1024], mean=f32[37,1], "
    "rstd=f32[37,1], weight=f16[1024], grads=[x,weight,bias])",
]
"""By element, by row, by row and cluster, by tiles of columns, and sums over rows beside rows; of
pieces of tensors, to one number beside rows, and in other dtypes."""


def norm(rows, width, name="layer_norm", more=""):
    return f"{name}(x=f16[{rows},{width}], weight=f16[{width}], bias=f16[{width}]{more})"


NORM, MANY_ROWS = norm(37, 2056), norm(2501, 2056)
"""Rows with a tail; more of them than groups of threads run at once."""


def sums(rows, width):
    x, of_row = f"f16[{rows},{width}]", f"f32[{rows},1]"
    given = f"grad_output={x}, x={x}, mean={of_row}, rstd={of_row}, weight=f16[{width}]"
    return f"layer_norm_backward({given})"


SUMS, ODD_SUMS = sums(2501, 1032), sums(2501, 1031)
UNEVEN, ODD_UNEVEN = sums(2503, 1032), sums(2503, 1031)
"""Groups of several warps, of which some have more rows: racecheck misses the barriers behind those
that they pass more often (docs/measured_facts.md)."""
H200_SMS = 132
EVEN, ODD_EVEN = (sums(H200_SMS * 4 * 5, width) for width in (1032, 1031))
"""The same kernels, where all four groups of each SM's block have five rows, and both groups of a
cluster of two blocks have twenty."""
FAR, ODD_FAR, FEW_FAR = (
    f"sanitized_far(x=f32[{n},{width}], far=f32[{n},1], weight=f32[{width}])"
    for n, width in ((1501, 1032), (1501, 1031), (3, 400000))
)
ODD, SOFTMAX, FLAT = norm(37, 2051), "softmax(x=f16[37,2056])", "lerp(x=f16[1300,515], end=f16[515]"
BROADCAST = "lerp_backward(grad_output=f32[8,3,40,40], x=f32[8,1,1,1], end=f32[8,3,40,40], "
SHARED_ROWS = BROADCAST + "weight=f32[3,1,40], grads=[x,end])"
TILED, LINES = BROADCAST + "weight=f32[3,1,40])", BROADCAST + "weight=f32[3,1,1])"
ACROSS = "softmax(x=f16[6,100,48], dim=1)"
CHANNELS = "sanitized_channels(x=f16[3,100,331])"
"""Walks that are also added up across: by parts of warps, and by several."""
ROW = {"row_threads": 128, "rows_per_block": 2}
WALK = {**ROW, "stages": 2, "parameters": "shared"}
FAR_ROW, FAR_WALK = {**ROW, "vector": 4}, {**WALK, "vector": 4}
IN_CLUSTERS = {**WALK, "row_threads": 64, "rows_per_block": 4, "cluster": 2, "bulk": True}
COPIED = {"storage": "shared", "unroll": 3, "stream_loads": False}
WARPS = {"vector": 4, "row_threads": 32, "rows_per_block": 8, "stages": 2}
SEVERAL_WARPS = {**WARPS, "row_threads": 64, "rows_per_block": 4}
TWO_IN_CLUSTERS = {**WARPS, "row_threads": 128, "rows_per_block": 2, "cluster": 2}
SHIFTED = {"shifted": True, "parameters": "registers"}
WAYS = ("kernel", "last")
TILE = {"vector": 4, "lanes": 16, "shares": 8}
MEET = {"splits": 4, "combine": "grid"}
SCHEDULES = [
    *((NORM, {**ROW, "moments": how}) for how in ("two_pass", "merge", "lanes", "tensor_cores")),
    *((NORM, {**ROW, "storage": where}) for where in ("shared", "reread")),
    (NORM, {**ROW, "parameters": "ahead", "min_blocks": 2}),
    (NORM, {**ROW, "contiguous": True, "rows_per_thread": 2}),
    (NORM, {**ROW, "tail": "predicated", "rematerialize": True}),
    (NORM, {**ROW, "storage": "shared", "max_registers": 40, "stream_loads": False}),
    *(
        (ODD, {"row_threads": 256, "shifted": True, "storage": where})
        for where in ("registers", "shared", "reread")
    ),
    *((FAR, {**FAR_ROW, "moments": how}) for how in ("two_pass", "merge", "lanes")),
    *((FAR, {**FAR_ROW, "storage": where}) for where in ("shared", "reread")),
    *((FAR, {**FAR_WALK, "in_turn": turns, "rows_per_thread": 2}) for turns in (False, True)),
    *((FAR, {**FAR_WALK, "bulk": True, "moments": how}) for how in ("two_pass", "lanes")),
    *((FAR, {**IN_CLUSTERS, "vector": 4, "in_turn": turns}) for turns in (False, True)),
    (FAR, {"vector": 4, "row_threads": 32, "rows_per_block": 8, "stages": 2}),
    (ODD_FAR, {"vector": 4, "row_threads": 256, "shifted": True, "storage": "shared"}),
    (FEW_FAR, {}),  # rows that blocks share
    (SOFTMAX, {**ROW, "moments": "merge"}),
    (SOFTMAX, {**ROW, "recompute": False}),
    (SOFTMAX, {"vector": 4, "row_threads": 32, "rows_per_block": 2, **COPIED}),
    (SOFTMAX, {"vector": 4, "row_threads": 128, "rows_per_block": 1, **COPIED}),
    (MANY_ROWS, WALK),
    (MANY_ROWS, {**WALK, "parameters": "registers", "widened": True, "stages": 0}),
    (MANY_ROWS, {**WALK, "parameters": "registers", "stages": 1, "rows_per_thread": 2}),
    *((MANY_ROWS, {**WALK, "in_turn": True, "bulk": bulk}) for bulk in (False, True)),
    (MANY_ROWS, {**WALK, "bulk": True, "stages": 3}),
    *((norm(1501, 2056), {**IN_CLUSTERS, "in_turn": turns}) for turns in (False, True)),
    (norm(37, 2056, "sanitized_dropout", ", seed=i64[]"), ROW),
    (norm(2501, 2056, "sanitized_dropout", ", seed=i64[]"), {**WALK, "bulk": True}),
    *((SUMS, {**WARPS, "combine": how}) for how in ("kernel", "grid")),
    (SUMS, {**WARPS, "early": True, "bulk": True}),
    (SUMS, {**WARPS, "row_threads": 256, "rows_per_block": 1, "cluster": 2}),
    (UNEVEN, SEVERAL_WARPS),
    *((ODD_SUMS, {**WARPS, "shifted": True, "combine": how}) for how in ("kernel", "grid")),
    (ODD_UNEVEN, {**SEVERAL_WARPS, **SHIFTED}),
    *(
        (SHARED_ROWS, {"vector": 4, "row_threads": 64, "blocks_per_row": 4, "storage": where})
        for where in ("registers", "reread")
    ),
    *((TILED, {**TILE, "splits": n, "combine": how}) for n in (1, 4) for how in WAYS),
    (TILED, {**TILE, "storage": "registers", "combine": "last"}),
    (TILED, {**TILE, "shares": 4, "unroll": 2, "ahead": True, "stream_loads": False}),
    *((TILED, {**TILE, "sizes": "compiled", "combine": how}) for how in WAYS),
    *((LINES, {**TILE, "lanes": 32, "turns": 4, "unroll": 2, "combine": how}) for how in WAYS),
    *((ACROSS, {**TILE, "storage": where}) for where in ("reread", "registers")),
    (ACROSS, {**TILE, "storage": "registers", "max_registers": 40}),
    *((ACROSS, {**TILE, **MEET, "storage": where}) for where in ("reread", "registers")),
    *(
        (CHANNELS, {"vector": 1, "lanes": lanes, "shares": 8, "storage": where})
        for lanes in (8, 64)
        for where in ("reread", "registers")
    ),
    (COLUMNS, {"vector": 4, "lanes": 16, "shares": 16, "splits": 64, "storage": "registers"}),
    (FLAT + ", weight=0.3)", {"flat": True, "vectors_per_thread": 2}),
    (
        FLAT + ", weight=f16[1300,1])",
        {"flat": True, "broadcast_first": True, "stream_stores": True},
    ),
    (
        "lerp(x=f32[300,40], end=f32[40], weight=0.3)",
        {"vector": 2, "stream_loads": False, "block_threads": 128, "max_registers": 24},
    ),
    *(
        ("lerp(x=f32[31,10,40], end=f32[10,40], weight=0.3)", {"vector": 4, "sizes": sizes})
        for sizes in ("given", "compiled")
    ),
]
"""One of each kind that `fused` has: by row, persistent, over rows, by tiles, by element."""
EVENLY = [
    *((EVEN, {**SEVERAL_WARPS, "combine": how}) for how in ("kernel", "grid")),
    (EVEN, {**SEVERAL_WARPS, "early": True, "bulk": True}),
    *((ODD_EVEN, {**SEVERAL_WARPS, **SHIFTED, "combine": how}) for how in ("kernel", "grid")),
    *((EVEN, {**TWO_IN_CLUSTERS, "combine": how}) for how in ("kernel", "grid")),
    (EVEN, {**TWO_IN_CLUSTERS, "rows_per_thread": 2, "combine": "grid"}),
    (EVEN, {**TWO_IN_CLUSTERS, "early": True, "bulk": True}),
    (EVEN, {**TWO_IN_CLUSTERS, "bulk": True, "combine": "grid"}),
]
TABLES = "scatter_add(x=f32[4,300], dim=1, index=i64[4,9000], src=f32[4,9000])!indices=zipf"
BOX = "(x=f32[700,17], dim=0, index=i64[3000,16], src=f32[3001,17])"
UPDATES = "scatter_buckets", "scatter_exchange", "scatter_tiled", "scatter_winner"
INDEXED_CASES = [
    Case("integer_sums", TABLES, {"private": True}),
    *(Case("integer_sums", TABLES, {"private": own, "launches": 1}) for own in (False, True)),
    Case("integer_sums", INDEXED["integer_sums"] + "!donate=x", {"launches": 1}),
    Case("scatter_winner", INDEXED["scatter_winner"], {"sent": 1024, "launches": 3}),
    Case("scatter_strided", INDEXED["scatter_strided"], {"named": True, "hashed": True}),
    *(Case(name, f"scatter{BOX}") for name in UPDATES),
    *(Case(name, f"scatter_add{BOX}") for name in ("bucket_sums", "scatter_tiled")),
    Case("bucket_sums", INDEXED["bucket_sums"].replace("f32", "f64")),
    Case(
        "bucket_sums",
        "index_add(x=f32[90000], dim=0, index=i64[100001], source=f32[100001]@strides(0), "
        "alpha=-2.0)!donate=x",
    ),
    *(
        Case(name, "embedding_backward(grad=bf16[9000,96], index=i64[9000], num_weights=500)")
        for name in ("rows_balanced", "rows_dealt")
    ),
    Case("rows_balanced", INDEXED["rows_balanced"].replace("zipf", "constant") + "!donate=x"),
    *(Case(name, text) for name, text in INDEXED.items()),
]
CASES = [
    *(Case(SM80, PLAIN, {**SMALL, **split}) for split in SPLITS),
    *(Case(SM80, BOTH["f32"], {**SMALL, **split}) for split in SPLITS),
    *(Case(SM80, text) for text in (CONTIGUOUS, *WIDE, TF32)),
    *(Case(SM90, w, {**SMALL, **split}) for split in SPLITS for w in (PLAIN, *BOTH.values())),
    *(Case(SM90, PLAIN, {**SMALL, **split}) for split in HOPPER_SPLITS),
    Case(SM90, MANY_TILES, {**SMALL, "blocks": 1, "whole": True}),
    Case(SM90, PLAIN, {**SMALL, "tile_n": 192, "halo": 1, "split_k": 3, "combine": "grid"}),
    *(Case(SM90, MATRIX, {**SMALL, "tile_n": 128, "fetch": how}) for how in ("matrix", "shared")),
    *(
        Case(f"conv2d_weight_grad_{name}", text)
        for name, text in {
            "narrow": STEM,
            "narrow_sm90": STEM,
            "grouped": GROUPS,
            "depthwise": DEPTHWISE,
            "depthwise_mma": DEPTHWISE,
            "depthwise_sm90": DEPTHWISE,
            "depthwise_fma_sm90": layer(9, 64, 64, 14, 3, 64),
        }.items()
    ),
    Case("conv2d_weight_grad_narrow_sm90", STEM, {"stages": 1, "groups": 4, "pending": 1}),
    *(
        Case(f"conv2d_weight_grad_{name}", with_bias_and_into(text))
        for name, text in {
            "narrow": STEM,
            "grouped": GROUPS,
            "depthwise_mma": DEPTHWISE,
            "depthwise_fma_sm90": DEPTHWISE,
        }.items()
    ),
    *INDEXED_CASES,
    *(replace(case, out_of_range=True) for case in INDEXED_CASES),
    *(Case("fused", text) for text in FUSED),
    *(Case("fused", text, knobs) for text, knobs in SCHEDULES),
    *(Case("fused", text, knobs, sms=H200_SMS) for text, knobs in EVENLY),
    Case(
        "fused_training",
        "layer_norm_training(x=f16[64,1024], grad_output=f16[64,1024], weight=f16[1024], "
        "bias=f16[1024])",
    ),
]
FLAT_INDICES = [
    FlatIndexCase(("i64[26,212]",) * 4, (21, 3, 2600, 212)),
    FlatIndexCase(("i32[50,1]", "i64[9,1,50]@strides(7,0,450)"), (9, 300)),
]
ALL = [
    *CASES,
    *FLAT_INDICES,
    *(replace(case, out_of_range=True) for case in FLAT_INDICES),
]
