"""Workloads of the operators for indices, for hypothesis to choose from."""

import math

from hypothesis import strategies as st

from tilewright.impl import IMPLS
from tilewright.indexed import DISTRIBUTIONS
from tilewright.op import Workload

DTYPES = ("f16", "bf16", "f32", "f64", "i32", "i64")
ROWS = (
    "index_add",
    "index_reduce",
    "embedding_backward",
    "scatter_add",
    "scatter_reduce",
    "scatter",
)


def cuda_kernels(w, device):
    """Implementations in CUDA that serve a workload on a device."""
    cuda = [impl for impl in IMPLS.values() if impl.backend == "cuda" and impl.serves(w.op)]
    return [impl for impl in cuda if impl.unsupported(w, device) is None]


@st.composite
def shapes(draw, most):
    """Of every rank from 1 to 6 as often, and at most so many elements."""
    rank = draw(st.integers(1, 6))
    side = min(int(most ** (1 / rank)), 12)
    return draw(st.lists(st.integers(1, side), min_size=rank, max_size=rank))


@st.composite
def moves(draw, dtypes=DTYPES):
    """What brings values to places: any operator, reduction, rank from 1 to 6, dim, dtype, kind and
    distribution of indices, up to 200 or thousands, in place or not; a scatter's index may be
    expanded over its rows, all of them or those of a batch, or smaller than x and src, or both."""
    op = draw(st.sampled_from(ROWS))
    t, kind = draw(st.sampled_from(dtypes)), draw(st.sampled_from(["i32", "i64"]))
    flags = "!donate=x" if draw(st.booleans()) else ""
    flags += f"!indices={draw(st.sampled_from(DISTRIBUTIONS))}"
    length = draw(st.one_of(st.integers(1, 200), st.integers(1, 200), st.integers(1025, 5000)))
    if op == "embedding_backward":
        t, width = t.replace("i", "f"), draw(st.integers(1, 40))
        more = f"padding_idx={draw(st.sampled_from([-1, 2]))}, "
        more += f"scale_grad_by_freq={draw(st.booleans())}"
        return Workload.parse(
            f"{op}(grad={t}[{length},{width}], index={kind}[{length}], "
            f"num_weights={draw(st.integers(3, 90))}, {more}){flags.replace('!donate=x', '')}"
        )
    shape = draw(shapes(200))
    dim = draw(st.integers(-len(shape), len(shape) - 1))
    moved = [length if d == dim % len(shape) else n for d, n in enumerate(shape)]
    index = f"[{length}]"
    if op.startswith("scatter"):
        expanded = ",".join("1" if d == dim % len(shape) else "0" for d in range(len(shape)))
        along = dim % len(shape)
        of_batches = [math.prod(moved[d + 1 : along + 1]) for d in range(along)]
        batched = ",".join(map(str, [*of_batches, 1] + [0] * (len(shape) - along - 1)))
        kinds = [f"{moved}@strides({s})" for s in (expanded, batched)] + [f"{moved}", "smaller"]
        if (index := draw(st.sampled_from(kinds))) == "smaller":
            index = f"{[draw(st.integers(max(1, n - 1), n)) for n in moved]}"
            index += f"@strides({expanded})" if draw(st.booleans()) else ""
            moved = [n + draw(st.integers(0, 1)) for n in moved]
    source = f"{'src' if op.startswith('scatter') else 'source'}={t}{moved}"
    if op.endswith("reduce"):
        ways = ["prod", "mean", "amax", "amin"] + ["sum"] * (op == "scatter_reduce")
        source += f", reduce={draw(st.sampled_from(ways))}, include_self={draw(st.booleans())}"
    if op == "index_add":
        source += f", alpha={draw(st.sampled_from([1.0, -2.0]))}"
    return Workload.parse(f"{op}(x={t}{shape}, dim={dim}, index={kind}{index}, {source}){flags}")


@st.composite
def gathers(draw):
    """Of ranks 1 to 6, any dtype: x contiguous or with its dims the other way around, an index that
    is smaller than x, or longer along dim, and expanded over some dims."""
    shape = draw(shapes(3000))
    dim = draw(st.integers(-len(shape), len(shape) - 1))
    length = draw(st.integers(1, 40))
    along = dim % len(shape)
    index = [
        length if d == along else draw(st.integers(max(1, n - 1), n)) for d, n in enumerate(shape)
    ]
    expanded = [draw(st.booleans()) and d != along for d in range(len(shape))]
    strides, step = [0] * len(shape), 1
    for d in reversed(range(len(shape))):
        if not expanded[d]:
            strides[d], step = step, step * index[d]
    of_x = [1]
    for n in shape[:-1]:
        of_x.append(of_x[-1] * n)
    dtype = draw(st.sampled_from(DTYPES))
    turned = f"@strides({','.join(map(str, of_x))})" if draw(st.booleans()) else ""
    kind, spread = draw(st.sampled_from(["i32", "i64"])), draw(st.sampled_from(DISTRIBUTIONS))
    return Workload.parse(
        f"gather(x={dtype}{shape}{turned}, dim={dim}, "
        f"index={kind}{index}@strides({','.join(map(str, strides))}))!indices={spread}"
    )
