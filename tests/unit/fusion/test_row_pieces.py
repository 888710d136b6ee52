"""Rows that are also used in pieces: one kernel that walks them once."""

import pytest
import torch
from torch.nn import functional as F

from emulated import Emulated
from random_graphs import gradients_of
from tilewright.compile import cxx
from tilewright.compile.cache import compiled
from tilewright.device import DEVICES, spec_of
from tilewright.dispatch.functions.fuse import fuse
from tilewright.fusion.cuda import programs, target
from tilewright.fusion.frontend.lower import lower
from tilewright.fusion.passes import optimise
from tilewright.fusion.row_pieces import in_pieces
from tilewright.impl import IMPLS
from tilewright.impls.fused import graph_of
from tilewright.measure.verify import Verifier
from tilewright.op import Workload

H200, CPU = DEVICES["h200"], torch.device("cpu")
FUSED = IMPLS["fused"]

pytestmark = pytest.mark.usefixtures("forgets_functions")
needs_compiler = pytest.mark.skipif(cxx.missing() is not None, reason=str(cxx.missing()))


def rotated_norm(x, weight, cos, sin):
    y = F.rms_norm(x, x.shape[-1:], weight)
    a, b = y.chunk(2, -1)
    return y * cos + torch.cat([-b, a], -1) * sin


def rotated_deviations(x):
    a, b = F.layer_norm(x, x.shape[-1:]).chunk(2, -1)
    return torch.cat([-b, a], -1)


def rotated_in_turn(x, cos, sin):
    y = F.rms_norm(x, x.shape[-1:])
    a, b = y[..., 0::2], y[..., 1::2]
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)


def half_of_softmax(x):
    return x.softmax(-1)[..., : x.shape[-1] // 2]


def middle_third(x):
    n = x.shape[-1] // 3
    return (x / x.abs().amax(-1, keepdim=True))[..., n : 2 * n]


def whole_and_gated(x):
    y = F.rms_norm(x, x.shape[-1:])
    a, b = y.chunk(2, -1)
    return y, F.silu(a) * b


def partly_rotated(x, cos, sin):
    n = x.shape[-1] // 4
    a, b, rest = x.split((n, n, x.shape[-1] - 2 * n), -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos, rest], -1)


def partly_rotated_norm(x, cos, sin):
    return partly_rotated(F.rms_norm(x, x.shape[-1:]), cos, sin)


QUARTERS = "cos=bf16[5,1,32], sin=bf16[5,1,32]"
ANGLES = "cos=bf16[5,1,128], sin=bf16[5,1,128]"
CUT = [
    (rotated_norm, f"x=bf16[2,5,3,128], weight=bf16[128], {ANGLES}", 64),
    (rotated_deviations, "x=f16[40,130]", 65),
    (rotated_in_turn, "x=f16[40,256], cos=f16[40,128], sin=f16[40,128]", 128),
    (half_of_softmax, "x=f32[30,1026]", 513),
    (half_of_softmax, "x=f32[30,1026]@strides(2000,1)", 513),
    (half_of_softmax, "x=f64[3,128]@strides(1,3)", 64),
    (middle_third, "x=bf16[30,99]", 33),
    (whole_and_gated, "x=f32[37,260]", 130),
    (partly_rotated_norm, f"x=bf16[2,5,3,128], {QUARTERS}", 32),
]


def assert_right(w):
    graph, spec = graph_of(w), spec_of(None)
    verifier = Verifier(w, CPU)
    for executable in (
        FUSED.build(FUSED.heuristic(w, spec), w, spec),
        Emulated(graph, target.heuristic(graph, H200), H200, w),
    ):
        assert verifier.check(executable).message == ""


@needs_compiler
@pytest.mark.parametrize(("function", "tensors", "width"), CUT)
def test_a_row_that_is_used_in_pieces_is_walked_once(function, tensors, width):
    fuse(function)
    w = Workload.parse(f"{function.__name__}({tensors})")
    graph = graph_of(w)
    assert width in graph.space
    assert len(graph.reduced) == 1
    assert len(target.describe(graph, target.heuristic(graph, H200), H200)) == 1
    assert_right(w)


@needs_compiler
@pytest.mark.parametrize(("function", "tensors"), [(f, t) for f, t, _ in CUT])
def test_gradients_through_pieces_of_a_row_are_right(function, tensors):
    fuse(function)
    w = gradients_of(Workload.parse(f"{function.__name__}({tensors})"))
    assert_right(w)


HEADS = "x=bf16[4,512,32,128], weight=bf16[128], cos=bf16[512,1,{n}], sin=bf16[512,1,{n}]"


def weighed_in_turn(x, weight, cos, sin):
    y = F.rms_norm(x, x.shape[-1:], weight)
    a, b = y[..., 0::2], y[..., 1::2]
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)


@pytest.mark.parametrize("device", ["a100", "h200", "b200"])
@pytest.mark.parametrize(("function", "angles"), [(rotated_norm, 128), (weighed_in_turn, 64)])
def test_heads_and_their_weights_gradients_are_one_pass(function, angles, device):
    """Several rows by each warp, which add up the columns of all on the way."""
    fuse(function)
    heads = HEADS.format(n=angles)
    given = f"grad_output=bf16[4,512,32,128], {heads}, grads=[x,weight]"
    graph = graph_of(Workload.parse(f"{function.__name__}_backward({given})"))
    spec = DEVICES[device]
    config = target.heuristic(graph, spec)
    rows, joined = target.describe(graph, config, spec)
    assert rows.startswith("kernel 0: space [4, 512, 32, 64], reduces axes [3], [0, 1, 2]")
    assert joined.startswith("kernel 1: joins what blocks summed over rows")
    assert config.row_threads < 32
    assert compiled(target.task(graph, config, spec)).resources.spill_bytes == 0


def test_every_nth_elements_are_accessed_by_narrow_vectors():
    fuse(weighed_in_turn), fuse(rotated_in_turn)
    fuse(lambda x: x[..., 0::2] * x[..., 1::2], name="products_in_turn")
    rows = graph_of(Workload.parse(f"weighed_in_turn({HEADS.format(n=64)})"))
    assert target.heuristic(rows, H200).vector == 1
    steps = graph_of(Workload.parse("products_in_turn(x=bf16[8192,4096])"))
    assert target.heuristic(steps, H200).vector == 2
    halves = graph_of(Workload.parse("products_in_turn(x=bf16[8192,4096]@strides(1,8192))"))
    assert target.heuristic(halves, H200).vector > 2  # along the rows, side by side


def test_pieces_are_read_as_later_steps_read_them():
    for function, tensors in ((rotated_norm, CUT[0][1]), (rotated_in_turn, CUT[2][1])):
        fuse(function)
        graph = graph_of(Workload.parse(f"{function.__name__}({tensors})"))
        read = [n.attr for n in graph.nodes if n.op == "load"]
        tensors_read = {(graph.inputs[i].strides, graph.inputs[i].offset) for i in read}
        assert len(read) == len(set(read))
        of_x = [a for a in tensors_read if a[0][0] == max(s[0] for s, _ in tensors_read)]
        assert len(of_x) == 2  # either half once


@needs_compiler
def test_a_rest_that_is_no_row_is_walked_in_pieces_of_the_others():
    fuse(partly_rotated)
    w = Workload.parse(f"partly_rotated(x=bf16[2,5,3,128], {QUARTERS})")
    for each in (w, gradients_of(w)):
        graph = graph_of(each)
        assert graph.space == (2, 5, 3, 32)
        assert len(target.describe(graph, target.heuristic(graph, H200), H200)) == 1
        assert_right(each)


# ---- a piece and a few elements ------------------------------------------------------------------


def mixed_tokens(x, key, value):
    before = F.pad(x, (0, 0, 1, -1))
    return x * key + before * (1 - key), x * value + before * (1 - value)


def mixed_norm(x, weight, share):
    x = F.rms_norm(x, x.shape[-1:], weight)
    return x * share + F.pad(x, (0, 0, 1, -1)) * (1 - share)


def causal_convolution(x, weight):
    taps = (F.pad(x, (0, 0, 3 - k, k - 3)) * weight[k] for k in range(4))
    return F.silu(sum(taps)) + x


def steps_and_moments(x):
    """Differences of neighbours beside what is reduced over all: in one, over other dims, too."""
    steps = x[:, 1:] - x[:, :-1]
    return steps.square().sum(1), x.mean(1), x.amax((0, 1)), x.var((0, 1)), steps


def steps_along_rows(x):
    steps = x[..., 2:] - x[..., :-2]
    return steps * x.softmax(-1)[..., 1:-1], F.layer_norm(x, x.shape[-1:])


def rolled(x):
    return F.rms_norm(x, x.shape[-1:]).roll(1, -1)


def products_of_neighbours(x):
    return (x[:, 1:] * x[:, :-1]).sum(0), x.prod(1), x.sum((0, 1, 2))


SHIFTED = [
    (mixed_tokens, "x={d}[2,9,8], key={d}[8], value={d}[8]"),
    (mixed_norm, "x={d}[3,33,7], weight={d}[7], share={d}[7]"),
    (causal_convolution, "x={d}[2,11,16], weight={d}[4,16]"),
    (steps_and_moments, "x={d}[3,17,33]"),
    (steps_along_rows, "x={d}[6,66]"),
    (rolled, "x={d}[30,100]"),
    (products_of_neighbours, "x={d}[2,9,8]"),
]


@needs_compiler
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f64"])
@pytest.mark.parametrize(("function", "tensors"), SHIFTED)
def test_a_row_beside_itself_shifted_is_a_piece_and_single_elements(function, tensors, dtype):
    fuse(function)
    w = Workload.parse(f"{function.__name__}({tensors.format(d=dtype)})")
    for each in (w, gradients_of(w)):
        graph, spec, verifier = graph_of(each), spec_of(None), Verifier(each, CPU)
        for run in (
            FUSED.build(FUSED.heuristic(each, spec), each, spec),
            Emulated(graph, target.heuristic(graph, H200), H200, each),
        ):
            found = verifier.check(run)
            # On few elements how well PyTorch's own rounding turns out is luck.
            assert found.ok or "PyTorch's largest error" in found.message, (each, found.message)


@pytest.mark.parametrize(
    ("function", "tensors"),
    [
        (mixed_tokens, "x=bf16[4,2048,4096], key=bf16[4096], value=bf16[4096]"),
        (mixed_norm, "x=bf16[4,2048,4096], weight=bf16[4096], share=bf16[4096]"),
        (causal_convolution, "x=bf16[4,2048,4096], weight=bf16[4,4096]"),
    ],
)
@pytest.mark.parametrize("device", ["a100", "h200", "b200"])
def test_gradients_of_a_shift_walk_large_tensors_once(function, tensors, device):
    fuse(function)
    w = gradients_of(Workload.parse(f"{function.__name__}({tensors})"))
    graph, spec = graph_of(w), DEVICES[device]
    assert programs.program_of(graph, target.heuristic(graph, spec), spec).large() == 1


def test_a_row_shares_most_of_what_pieces_read():
    """Behind the shift for gradients, of which a token's go to the one before."""
    fuse(mixed_tokens)
    w = gradients_of(Workload.parse(f"mixed_tokens({SHIFTED[0][1].format(d='f32')})"))
    graph = graph_of(w)
    pieces = [a.offset for a in graph.memory if all(a.strides)]
    assert sorted(pieces) == [0, 0, 0, 8, 8]  # x, and gradients here and behind


def graph_and_pieces(function, tensors):
    fuse(function)
    graph = optimise(lower(Workload.parse(f"{function.__name__}({tensors})")))
    return graph, in_pieces(graph)


def test_shifted_rows_are_on_the_axis_of_the_piece():
    for function, tensors, space in [
        (steps_and_moments, "x=f32[3,17,33]", (3, 16, 33)),
        (steps_along_rows, "x=f32[6,66]", (6, 64)),
        (rolled, "x=f32[30,100]", (30, 99)),
        (products_of_neighbours, "x=f32[2,9,8]", (2, 8, 8)),
    ]:
        graph, cut = graph_and_pieces(function, tensors)
        assert len(graph.space) > len(cut.space)
        assert cut.space == space, function


def pyramid(x):
    n = x.shape[-1]
    return x * 2, x[:, : n // 8].exp(), x[:, : n // 64].sin(), x[:, : n // 512].cos()


def pyramid_of_shares(x):
    x, n = x.softmax(-1), x.shape[-1]
    return x, x[:, : n // 8].exp(), x[:, : n // 64].sin(), x[:, : n // 512].cos()


def narrow_slice(x):
    return x * 2, x[:, :2].exp()


def neighbours_along_memory(x):
    return x.diff(dim=-1), x.exp()


def neighbours_in_both_dims(x):
    y = x / (x.norm(dim=(-1, -2), keepdim=True) + 1e-6)
    return y[..., 1:, 1:] - y[..., :-1, :-1]


@pytest.mark.parametrize(
    ("function", "tensors"),
    [
        (pyramid, "x=bf16[1024,4096]"),
        (narrow_slice, "x=f32[131072,16]"),
        (neighbours_along_memory, "x=bf16[4096,4096]"),
        (neighbours_in_both_dims, "x=bf16[32,16,128,128]"),
    ],
)
def test_what_pieces_would_make_slower_stays_as_it_is(function, tensors):
    """More steps than kernels hold, a whole row by vectors of a narrow slice, or single elements
    that spare no walk."""
    graph, cut = graph_and_pieces(function, tensors)
    assert cut is graph


def test_pieces_of_pieces_end_before_they_are_too_many():
    graph, cut = graph_and_pieces(pyramid_of_shares, "x=f32[64,4096]")
    assert graph.space == (64, 4096, 512, 64, 8)
    assert cut.space == (64, 512, 64, 8)
    assert len(cut.nodes) < 12 * len(graph.nodes)


def test_variances_of_rows_that_are_cut_are_as_exact_as_others():
    """Less what was rounded of their means, which are far from zero here."""
    fuse(lambda x: (x[:, :2048] * x[:, 2048:], x.var(-1)), name="halves_and_variance")
    w = Workload.parse("halves_and_variance(x=f32[8,4096])")
    assert graph_of(w).space == (8, 2048)
    x = torch.randn(8, 4096) + 1e5
    spec = spec_of(None)
    _, found = FUSED.build(FUSED.heuristic(w, spec), w, spec)(x)
    torch.testing.assert_close(found.double(), x.double().var(-1), rtol=1e-6, atol=0)


def first_of_many(x):
    return F.rms_norm(x, x.shape[-1:])[..., :10]


def also_totalled(x):
    return F.rms_norm(x, x.shape[-1:])[..., :50] * x.square().sum()


@pytest.mark.parametrize(
    ("function", "tensors"),
    [
        (first_of_many, "x=f32[30,100]"),
        (also_totalled, "x=f32[30,100]"),
    ],
)
def test_what_is_no_few_equal_pieces_of_a_row_stays_as_it_is(function, tensors):
    fuse(function)
    w = Workload.parse(f"{function.__name__}({tensors})")
    graph = optimise(lower(w))
    assert len(graph.space) == 3
    assert in_pieces(graph) is graph
    assert_right(w)


def test_a_graph_of_which_a_step_has_all_axes_stays_as_it_is():
    fuse(lambda x: x.softmax(-1) + x[:, :1], name="beside_its_first")
    graph = optimise(lower(Workload.parse("beside_its_first(x=f32[30,100])")))
    assert in_pieces(graph) is graph


@pytest.mark.parametrize("tensors", ["x=f32[]", "x=f16[1]", "x=f64[1,1]"])
def test_a_single_number_has_schedules(tensors):
    fuse(lambda x: x.abs() + 1, name="a_number")
    w = Workload.parse(f"a_number({tensors})")
    assert_right(w)


def two_norms(x, y, w, v):
    return F.rms_norm(x, x.shape[-1:], w), F.layer_norm(y, y.shape[-1:], v)


NORMS = [
    ("x=bf16[4,512,32,128], y=bf16[4,512,8,128], w=bf16[128], v=bf16[128]", 65536, 16384),
    ("x=f32[8192,4096], y=f32[2048,4096], w=f32[4096], v=f32[4096]", 8192, 2048),
    ("x=f16[8192,1024], y=f16[6144,1024], w=f16[1024], v=f16[1024]", 8192, 6144),
]


@pytest.mark.parametrize("device", ["a100", "h200", "b200"])
@pytest.mark.parametrize(("tensors", "many", "few"), NORMS)
def test_norms_of_two_tensors_and_their_gradients_walk_each_once(tensors, many, few, device):
    """Whether or not one has so many times as many rows as the other, of which its own are no
    pieces; and the weights' gradients are added up on the way."""
    fuse(two_norms)
    w, spec = Workload.parse(f"two_norms({tensors})"), DEVICES[device]
    for each, summed in ((w, ""), (gradients_of(w), ", [0]")):
        graph = graph_of(each)
        lines = target.describe(graph, target.heuristic(graph, spec), spec)
        width = tensors.partition("]")[0].rpartition(",")[2]
        told = [line.partition(" (")[0].partition(";")[0] for line in lines]
        assert told == [
            f"kernel {k}: space [{rows}, {width}], reduces axes [1]{summed}"
            for k, rows in enumerate((few, many))
        ]


@needs_compiler
@pytest.mark.parametrize(
    "tensors",
    [
        "x=bf16[2,6,8,64], y=bf16[2,6,2,64], w=bf16[64], v=bf16[64]",
        "x=f32[96,130], y=f32[24,130], w=f32[130], v=f32[130]",
        "x=f16[37,255], y=f16[11,255], w=f16[255], v=f16[255]",
    ],
)
def test_gradients_of_norms_of_two_tensors_are_right(tensors):
    fuse(two_norms)
    w = gradients_of(Workload.parse(f"two_norms({tensors})"))
    assert_right(w)


def test_pieces_that_have_a_tensor_in_common_with_the_row_are_walked_with_it():
    """Though nothing that follows from the one is used with the other."""
    fuse(lambda x: (x.square().sum(-1), x[..., : x.shape[-1] // 2] * 2), name="sum_and_half")
    graph = graph_of(Workload.parse("sum_and_half(x=f32[30,1026])"))
    assert graph.space == (30, 513)
    fuse(lambda x, y: (x.square().sum(-1), y * 2), name="sum_and_other")
    graph = graph_of(Workload.parse("sum_and_other(x=f32[30,1026], y=f32[30,513])"))
    assert graph.space == (30, 1026, 513)
