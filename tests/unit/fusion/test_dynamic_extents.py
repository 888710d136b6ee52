"""One kernel serves the sizes of all dims of rows; see fusion/extents.py."""

import mmap
import tempfile

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

import tilewright as tw
from emulated import Emulated
from on_targets import H200, LENGTHS, TARGETS, emitted, executable, made, right, written
from over_rows import mean_loss, mean_square, standardised
from tilewright.compile.cache import compiled
from tilewright.fusion.cuda import target as cuda_target
from tilewright.fusion.cuda.tiles.schedule import TileSchedule
from tilewright.fusion.extents import divisor, reciprocal
from tilewright.impls.fused import graph_of
from tilewright.op import OPS, Workload


def shifted_rows(x, b):
    return x + b


def masked_norm(x, m, w, b):
    return F.layer_norm(x * m, x.shape[-1:], w, b)


def scaled_softmax(x, b):
    return torch.softmax(x * b, -1)


def softmax_over_rows(x):
    return torch.softmax(x, 1)


def sum_over_rows(x):
    return x.sum(1)


def blend(x, end, w):
    return torch.lerp(x, end, w)


def normed_groups(x, w, b):
    return F.group_norm(x, 4, w, b)


def gated_by_heads(x, b):
    return x * torch.sigmoid(b.transpose(1, 2))


def beside_transposed(x, b):
    return x + b.t()


def softmax_beside_transposed(x, b):
    return torch.softmax(x + b.t(), -1)


OPERATORS = (
    mean_square,
    mean_loss,
    standardised,
    shifted_rows,
    masked_norm,
    scaled_softmax,
    softmax_over_rows,
    sum_over_rows,
    blend,
    normed_groups,
    gated_by_heads,
    beside_transposed,
    softmax_beside_transposed,
)


@pytest.fixture(scope="module", autouse=True)
def _fused():
    before = set(OPS)
    for function in OPERATORS:
        tw.fuse(function)
    yield
    for name in set(OPS) - before:
        OPS.remove(name)


def broadcast3(s):
    return written("shifted_rows", x=(8, s, 64), b=(8, 1, 64))


def broadcast4(s):
    return written("shifted_rows", x=(4, 8, s, 64), b=(4, 1, s, 1))


def score_mask(s):
    return written("shifted_rows", x=(4, 8, s, s), b=(4, 1, s, s))


def normed(s, mask=(8, 1, 768)):
    return written("masked_norm", x=(8, s, 768), m=mask, w=(768,), b=(768,))


def normed_by_length(s):
    return normed(s, (1, s, 1))


def softmaxed(s):
    return written("scaled_softmax", x=(4, 8, s, 128), b=(4, 1, s, 1))


def over_rows(s):
    return written("softmax_over_rows", x=(8, s, 768))


def middle_softmax(s):
    return written("softmax_over_rows", x=(8, s, 64))


def batches_of_softmax(s):
    return written("softmax_over_rows", x=(s, 100, 64))


def middle_sum(s):
    return written("sum_over_rows", x=(64, s, 768))


def batches_of_sums(s):
    return written("sum_over_rows", x=(s, 512, 768))


def columns_of_sums(s):
    return written("sum_over_rows", x=(64, 100, 8 * s))


def blend_gradients(x, w):
    return written("blend_backward", grad_output=x, x=x, end=x, w=w)


def middle_broadcast(s):
    return blend_gradients((16, 3, s, 64), (16, 1, s, 64))


def batches_of_broadcast(s):
    return blend_gradients((s, 3, 64, 64), (s, 1, 64, 64))


def batches_of_channels(s):
    return blend_gradients((s, 3, 32, 64), (1, 3, 1, 1))


def masked_gradients(s):
    x, m, w = (8, s, 768), (1, s, 1), (768,)
    return written("masked_norm_backward", grad_output=x, x=x, m=m, w=w, b=w)


def images_of_groups(s):
    return written("normed_groups", x=(s, 64, 28, 28), w=(64,), b=(64,))


def gradients_of_groups(s):
    x = (s, 64, 28, 28)
    return written("normed_groups_backward", grad_output=x, x=x, w=(64,), b=(64,))


def gated(s):
    return written("gated_by_heads", x=(4, 8, s, 64), b=(4, s, 8, 64))


def gated_gradients(s):
    shapes = {"grad_output": (4, 8, s, 64), "x": (4, 8, s, 64), "b": (4, s, 8, 64)}
    return written("gated_by_heads_backward", **shapes)


def transposed(s):
    return written("beside_transposed", x=(s, 128), b=(128, s))


def mean_squares(s):
    return written("mean_square", x=(8, s, 512))


def mean_losses(s):
    return written("mean_loss", x=(8, s, 512))


def gradients_of_mean_losses(s):
    return written("mean_loss_backward", grad_output=(), x=(8, s, 512))


def standardised_columns(s):
    return written("standardised", x=(s, 512))


def gradients_of_standardised_columns(s):
    return written("standardised_backward", grad_output=(s, 512), x=(s, 512))


def gradients_of_a_sum(s):
    """That of all results is one number."""
    x, of_rows = f"f16[{s},768]", f"f32[{s},1]"
    given = f"grad_output={x}@strides(0,0), x={x}, mean={of_rows}, rstd={of_rows}"
    return Workload.parse(f"layer_norm_backward({given}, weight=f16[768])")


MOST = {
    mean_squares: {"cuda": 11, "cpp": 2},
    mean_losses: {"cuda": 7, "cpp": 3},
    gradients_of_mean_losses: {"cuda": 3, "cpp": 2},
    standardised_columns: {"cuda": 10, "cpp": 3},
    gradients_of_standardised_columns: {"cuda": 10, "cpp": 3},
    gradients_of_a_sum: {"cuda": 2, "cpp": 3},
    broadcast3: {"cuda": 1, "cpp": 2},
    broadcast4: {"cuda": 1, "cpp": 2},
    score_mask: {"cuda": 4, "cpp": 3},
    normed: {"cuda": 5, "cpp": 2},
    normed_by_length: {"cuda": 5, "cpp": 2},
    softmaxed: {"cuda": 2, "cpp": 2},
    gated: {"cuda": 1, "cpp": 2},
    gated_gradients: {"cuda": 1, "cpp": 2},
    transposed: {"cuda": 1, "cpp": 2},
    over_rows: {"cpp": 3},
    middle_softmax: {"cuda": 11, "cpp": 2},
    batches_of_softmax: {"cuda": 4, "cpp": 3},
    middle_sum: {"cuda": 6, "cpp": 3},
    batches_of_sums: {"cuda": 4, "cpp": 2},
    columns_of_sums: {"cuda": 6, "cpp": 3},
    middle_broadcast: {"cuda": 2, "cpp": 2},
    batches_of_broadcast: {"cuda": 1, "cpp": 2},
    batches_of_channels: {"cuda": 13, "cpp": 3},
    masked_gradients: {"cpp": 5},
    images_of_groups: {"cuda": 4, "cpp": 2},
    gradients_of_groups: {"cuda": 4, "cpp": 3},
}


@pytest.mark.parametrize("workload", MOST)
def test_many_lengths_take_few_kernels(workload):
    lengths = LENGTHS if workload in (broadcast3, normed) else LENGTHS[::8]
    sources = {target: set() for target in MOST[workload]}
    for s in lengths:
        w = workload(s)
        for target, found in sources.items():
            found.add(emitted(target, w)[2].source)
    counts = {target: len(found) for target, found in sources.items()}
    assert all(counts[target] <= most for target, most in MOST[workload].items()), counts


FUNCTIONS = {
    "shifted_rows": lambda b, h, s, d: {"x": (b, h, s, d), "b": (b, 1, s, 1)},
    "scaled_softmax": lambda b, h, s, d: {"x": (b, h, s, d), "b": (b, 1, s, 1)},
    "masked_norm": lambda b, h, s, d: {"x": (b, h, s, d), "m": (b, 1, s, d), "w": (d,), "b": (d,)},
    "gated_by_heads": lambda b, h, s, d: {"x": (b, h, s, d), "b": (b, s, h, d)},
    "softmax_over_rows": lambda b, h, s, d: {"x": (b, h * s, d)},
    "sum_over_rows": lambda b, h, s, d: {"x": (b, h * s, d + h)},
    "beside_transposed": lambda b, h, s, d: {"x": (b * h * s, d), "b": (d, b * h * s)},
    "mean_square": lambda b, h, s, d: {"x": (b * h, s, d)},
    "mean_loss": lambda b, h, s, d: {"x": (b * h, s, d)},
    "standardised": lambda b, h, s, d: {"x": (b * h * s, d)},
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", FUNCTIONS)
@settings(max_examples=20)
@given(sizes=st.tuples(*[st.integers(2, n) for n in (5, 7, 33)]), seed=st.integers(0, 99))
def test_a_kernel_of_other_sizes_is_right(name, target, sizes, seed):
    w = written(name, **FUNCTIONS[name](*sizes, 24))
    tensors = made(w, seed)
    torch.testing.assert_close(
        executable(target, w)(*tensors).double(), right(w, tensors), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("name", ["shifted_rows", "scaled_softmax", "gated_by_heads"])
@pytest.mark.parametrize("target", TARGETS)
def test_one_kernel_is_right_for_all_of_several_sizes(name, target):
    """Sizes of one schedule: then the source of the first serves the others."""
    sources = set()
    for sizes in ((2, 3, 5), (3, 2, 4), (4, 5, 2), (2, 2, 7)):
        w = written(name, **FUNCTIONS[name](*sizes, 24))
        sources.add(emitted(target, w)[2].source)
        tensors = made(w, sum(sizes))
        found = executable(target, w)(*tensors)
        torch.testing.assert_close(found.double(), right(w, tensors), rtol=1e-5, atol=1e-5)
    assert len(sources) == 1


def served_by_one(operator, shapes, schedules):
    """The kernels of these schedules for these shapes, which have to be one, are right."""
    sources = set()
    for shape, schedule in zip(shapes, schedules, strict=True):
        w = written(operator, x=shape)
        graph = graph_of(w)
        sources.add(cuda_target.task(graph, schedule, H200).source)
        tensors = made(w, sum(shape))
        found = Emulated(graph, schedule, H200, w)(*tensors)
        torch.testing.assert_close(found.double(), right(w, tensors), rtol=1e-4, atol=1e-4)
    return len(sources) == 1


def test_tiles_of_one_schedule_are_one_kernel_for_all_sizes():
    schedules = [TileSchedule(vector=4, lanes=8, shares=8, unroll=2)] * 4
    shapes = [(2, 260, 40), (3, 260, 40), (2, 270, 40), (2, 90, 72)]
    assert served_by_one("sum_over_rows", shapes, schedules)


def test_a_walk_in_splits_is_one_kernel_for_any_number_of_them():
    schedules = [TileSchedule(2, 16, 8, unroll=2, splits=n) for n in (2, 4, 8, 5)]
    shapes = [(3, 260, 40), (2, 250, 40), (3, 263, 72), (2, 301, 40)]
    assert served_by_one("sum_over_rows", shapes, schedules)


def test_steps_that_are_kept_are_one_kernel_for_several_numbers_of_them():
    schedules = [TileSchedule(4, 4, 8, storage="registers")] * 4
    shapes = [(2, 8 * n + k, 24) for n, k in ((16, 1), (17, 0), (18, 5), (20, 0))]
    assert served_by_one("softmax_over_rows", shapes, schedules)
    other = [(2, 8 * 16, 24), (2, 8 * 16 + 1, 24)]
    assert not served_by_one("softmax_over_rows", other, schedules[:2])


def test_three_rounds_of_a_walk_are_four():
    schedules = [TileSchedule(4, 4, 8, unroll=2)] * 3
    shapes = [(2, 33, 24), (2, 48, 24), (2, 64, 24)]
    assert served_by_one("sum_over_rows", shapes, schedules)


def test_strides_of_64_bits_are_those_of_another_kernel():
    def source(step):
        text = f"shifted_rows(x=f16[4,3,64]@strides({step},64,1), b=f16[4,1,64])"
        return emitted("cuda", Workload.parse(text))[2].source

    assert source(2**20) == source(2**22)
    assert "u32 in0_stride0" in source(2**20)
    assert "i64 in0_stride0" in source(2**33)


def test_elements_of_a_row_may_be_more_than_32_bits_apart():
    step, columns = 80_000_000, 64
    w = Workload.parse(
        f"softmax_beside_transposed(x=f32[2,{columns}], b=f32[{columns},2]@strides({step},1))"
    )
    with tempfile.TemporaryFile() as sparse:
        sparse.truncate(4 * columns * step)
        memory = mmap.mmap(sparse.fileno(), 0)
    b = torch.frombuffer(memory, dtype=torch.float32).as_strided((columns, 2), (step, 1))
    x, values = torch.randn(2, columns), torch.randn(columns, 2)
    b.copy_(values)
    found = executable("cuda", w)(x, b)
    torch.testing.assert_close(found.double(), right(w, [x, values]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bits", [32, 64])
@given(data=st.data())
def test_the_quotient_is_exact_by_any_divisor(bits, data):
    last = 2 ** (bits - 1) - 1
    size = data.draw(st.integers(1, 4096) | st.integers(1, last))
    n = data.draw(st.integers(0, last))
    factor, shift = reciprocal(size, bits)
    assert factor < 2**bits
    for each in {n, n // size * size, max(n // size * size - 1, 0), last}:
        assert each * factor >> shift == each // size
        if size > 1:
            assert (each * factor >> bits) >> divisor(size, bits)[1] == each // size


def test_indices_of_64_bits_are_divided_by_multiplying():
    step = 2**32
    w = Workload.parse(f"shifted_rows(x=f32[3,5,24]@strides({step},24,1), b=f32[3,1,24])")
    with tempfile.TemporaryFile() as sparse:
        sparse.truncate(4 * 3 * step)
        memory = mmap.mmap(sparse.fileno(), 0)
    x = torch.frombuffer(memory, dtype=torch.float32).as_strided((3, 5, 24), (step, 24, 1))
    x.copy_(torch.randn(3, 5, 24))
    b = torch.randn(3, 1, 24)
    task = emitted("cuda", w)[2]
    source = task.source[task.source.index('extern "C"') :]
    assert "u64 n2_factor" in source
    torch.testing.assert_close(executable("cuda", w)(x, b), x + b)
    assert compiled(task).resources.spill_bytes == 0


def test_rows_of_one_dim_are_not_divided():
    for text in (
        "shifted_rows(x=f16[8192,768], b=f16[768])",
        "masked_norm(x=f32[64,12,768], m=f32[64,12,1], w=f32[768], b=f32[768])",
    ):
        source = emitted("cuda", Workload.parse(text))[2].source
        kernel = source[source.index('extern "C"') :]
        assert "divide(" not in source[source.index("struct f16") :]
        assert "stride" not in kernel
