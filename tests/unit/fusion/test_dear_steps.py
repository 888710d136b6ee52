"""Untuned CUDA schedules of functions whose steps take more time than their memory leaves."""

import pytest
import torch

import tilewright as tw
from emulated import Emulated
from tilewright.compile import cxx
from tilewright.compile.cache import compiled
from tilewright.device import DEVICES
from tilewright.fusion import instructions
from tilewright.fusion.cuda import target
from tilewright.fusion.cuda.rows.footprint import Footprint
from tilewright.fusion.ir import Node
from tilewright.impls.fused import graph_of
from tilewright.measure.verify import Verifier
from tilewright.op import Workload

H200 = DEVICES["h200"]


def dear_softmax(x):
    return (torch.tanh(x / 30.0) * 30.0).softmax(-1)


def dear_quotients(x, y):
    return x / x.norm(dim=-1, keepdim=True) + y / y.norm(dim=-1, keepdim=True)


def dear_means(x, w):
    return w * x / (x.abs().mean(-1, keepdim=True) + 1e-5)


def dear_powers(x):
    return (x.abs() ** 1.3).softmax(-1)


def dear_gelu(x, bias):
    return torch.nn.functional.gelu(x + bias)


def dear_errors(x, w):
    return w * torch.erf(x) * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5)


def dear_gates(x, y):
    return torch.nn.functional.layer_norm(x, x.shape[-1:]) * torch.sigmoid(y.softmax(-1))


def dear_waves(x):
    return (x.abs() ** 1.3 + torch.sin(x) * torch.cos(x)).softmax(-1)


def dear_swish(x):
    gate, up = x.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def dear_average(a, b, c, d):
    return (a + b + c + d) * 0.25


@pytest.fixture(autouse=True)
def functions(forgets_functions):
    for name, function in [*globals().items()]:
        if name.startswith("dear_"):
            tw.fuse(function)


def untuned(text, device=H200):
    return target.heuristic(graph_of(Workload.parse(text)), device)


def steps_of(op, dtype="f32"):
    return instructions.of(Node(op, (), dtype, ()))


def test_steps_that_take_many_instructions_are_known_to():
    few, more, most = (steps_of(op) for op in ("add", "quick_exp", "div"))
    assert few == 1 < more < most
    assert steps_of("div", "f64") == 2 * most
    graph = graph_of(Workload.parse("dear_softmax(x=bf16[32768,2048])"))
    rows = Footprint(graph)
    tanh = steps_of("tanh")
    again = rows.instructions("two_pass") - rows.instructions("two_pass", recompute=False)
    assert 2 * tanh < again < 4 * tanh  # each of three sweeps, and a division beside
    assert rows.instructions("two_pass", recompute=False) < 2 * tanh


def dear_way_between(p, q):
    p, q = p.log_softmax(-1), q.log_softmax(-1)
    between = torch.logaddexp(p, q)
    return (p.exp() * (p - between)).sum(-1) + (q.exp() * (q - between)).sum(-1)


@pytest.mark.parametrize("device", ["a100", "h200", "b200"])
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_a_sweep_that_computes_much_keeps_what_the_next_one_needs_of_it(dtype, device):
    """Two values more, in place of some 120 instructions."""
    two = f"p={dtype}[8192,4096], q={dtype}[8192,4096]"
    text = f"dear_way_between_backward(grad_output={dtype}[8192], {two})"
    rows = Footprint(graph_of(Workload.parse(text)))
    again = rows.instructions("two_pass") - rows.instructions("two_pass", recompute=False)
    assert again > 100
    kept = [rows.kept_at_once("two_pass", recompute) for recompute in (True, False)]
    assert kept == [4 if dtype == "bf16" else 8, 16]
    config = untuned(text, DEVICES[device])
    assert (config.recompute, config.row_threads) == (False, 256)
    assert spilled(text, device) == 0


@pytest.mark.skipif(cxx.missing() is not None, reason=str(cxx.missing()))
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize(("width", "threads"), [(1024, 128), (4096, 256)])
def test_rows_that_keep_much_are_right(dtype, width, threads):
    def text(rows):
        two = f"p={dtype}[{rows},{width}], q={dtype}[{rows},{width}]"
        return f"dear_way_between_backward(grad_output={dtype}[{rows}], {two})"

    config, w = untuned(text(16384)), Workload.parse(text(13))
    assert (config.recompute, config.row_threads) == (False, threads)
    found = Verifier(w, torch.device("cpu")).check(Emulated(graph_of(w), config, H200, w))
    assert found.message == ""


@pytest.mark.parametrize("device", ["a100", "h200", "b200"])
def test_wide_rows_of_which_no_cluster_keeps_what_is_dear_are_read_again(device):
    two = "p={d}[4096,32000], q={d}[4096,32000]"
    text = f"dear_way_between_backward(grad_output={{d}}[4096], {two})"
    config = untuned(text.format(d="bf16"), DEVICES[device])
    assert (config.storage, config.cluster, config.block_threads) == ("reread", 1, 512)
    assert spilled(text.format(d="bf16"), device) < 16
    if DEVICES[device].max_cluster > 1:
        whole = untuned(text.format(d="f32"), DEVICES[device])
        assert (whole.storage, whole.recompute) == ("registers", False)


def dear_distance(x, y):
    x = x.log_softmax(-1)
    return -(0.9 * (x * y).sum(-1) + 0.1 * x.mean(-1))


@pytest.mark.parametrize("device", ["a100", "h200", "b200"])
def test_rows_of_two_tensors_that_are_kept_have_a_block_each(device):
    two = "x=f32[8192,4096], y=f32[8192,4096]"
    config = untuned(f"dear_distance_backward(grad_output=f32[8192], {two})", DEVICES[device])
    assert (config.row_threads, config.rows_per_block, config.stages) == (256, 1, 0)
    assert config.min_blocks * config.block_threads >= 768


@pytest.mark.parametrize(
    ("text", "keeps"),
    [
        ("dear_softmax(x=bf16[32768,2048])", True),
        ("dear_softmax(x=bf16[32768,8192])", True),
        ("softmax(x=bf16[32768,2048])", False),
        ("softmax(x=f32[32768,2048])", False),
    ],
)
def test_what_many_rows_would_compute_three_times_they_keep(text, keeps):
    config = untuned(text, DEVICES["h100"])
    assert config.recompute != keeps
    assert config.storage == ("registers" if keeps else "shared")


@pytest.mark.parametrize(
    ("width", "threads", "rows"), [(512, 32, 4), (1024, 32, 4), (4096, 256, 1)]
)
def test_many_rows_that_are_divided_are_read_by_narrow_accesses(width, threads, rows):
    config = untuned(f"dear_quotients(x=f16[8192,{width}], y=f16[8192,{width}])")
    assert (config.vector, config.row_threads, config.rows_per_block) == (4, threads, rows)
    few = untuned(f"dear_quotients(x=f16[64,{width}], y=f16[64,{width}])")
    assert few.vector == 8


@pytest.mark.parametrize(
    "text",
    [
        "dear_softmax(x=f32[8192,8192])",
        "dear_softmax_backward(grad_output=f32[8192,8192], x=f32[8192,8192])",
        "dear_means_backward(grad_output=bf16[8192,8192], x=bf16[8192,8192], w=bf16[8192], grads=[x])",  # noqa: E501
        "dear_quotients_backward(grad_output=bf16[8192,8192], x=bf16[8192,8192], y=bf16[8192,8192])",  # noqa: E501
        "dear_powers(x=f16[8192,1024])",
    ],
)
@pytest.mark.parametrize("device", ["a100", "h200", "b200"])
def test_untuned_kernels_of_many_steps_spill_nothing(text, device):
    assert spilled(text, device) == 0


def spilled(text, device):
    graph, spec = graph_of(Workload.parse(text)), DEVICES[device]
    task = target.task(graph, target.heuristic(graph, spec), spec)
    return compiled(task).resources.spill_bytes


@pytest.mark.parametrize(
    ("text", "device"),
    [
        ("dear_errors(x=f16[64,65536], w=f16[65536])", "h200"),  # beside parameters at hand
        ("dear_gates_backward(grad_output=f64[2048,1000], x=f64[2048,1000], y=f64[2048,1000])", "a100"),  # noqa: E501
        ("dear_waves(x=bf16[64,25088])", "a100"),  # wide rows, few of them
    ],
)  # fmt: skip
def test_nor_do_those_whose_steps_hold_more_than_others(text, device):
    assert spilled(text, device) == 0


def test_a_thread_has_two_vectors_where_it_computes_long_and_one_where_it_loads_much():
    gelu = untuned("dear_gelu(x=f16[8192,4096], bias=f16[4096])")
    assert (gelu.vectors_per_thread, gelu.block_threads, gelu.stream_loads) == (2, 128, True)
    two = "dear_swish_backward(grad_output=f16[8192,4096], x=f16[8192,8192])"
    assert (untuned(two).vectors_per_thread, untuned(two).block_threads) == (1, 256)
    lerp = untuned("lerp(x=f32[8192,4096], end=f32[4096], weight=0.3)")
    assert (lerp.vectors_per_thread, lerp.block_threads, lerp.stream_loads) == (1, 256, False)
    tensors = ", ".join(f"{name}=f32[8192,4096]" for name in "abcd")
    assert untuned(f"dear_average({tensors})").vectors_per_thread == 1
    assert untuned(f"dear_average({tensors.replace('f32', 'f16')})").vectors_per_thread == 1
    three = "lerp(x=f32[8192,4096], end=f32[8192,4096], weight=f32[8192,4096])"
    assert untuned(three).vectors_per_thread == 2


def narrow_gradients(rows, width, dtype="bf16", name="rms_norm"):
    row, moments = f"{dtype}[{rows},{width}]", f"f32[{rows},1]"
    means = f", mean={moments}" if name == "layer_norm" else ""
    return (
        f"{name}_backward(grad_output={row}, x={row}{means}, rstd={moments}, "
        f"weight={dtype}[{width}])"
    )


@pytest.mark.parametrize(
    ("rows", "width", "dtype", "at_once", "threads"),
    [
        (262144, 128, "bf16", 4, 512),
        (262144, 128, "f32", 2, 512),
        (262144, 256, "bf16", 2, 512),
        (20000, 128, "bf16", 2, 512),  # that each warp walks some rounds
        (8192, 128, "bf16", 1, 256),
        (262144, 512, "bf16", 1, 256),  # wide enough for loads of one
    ],
)
def test_a_warp_takes_several_of_many_narrow_rows(rows, width, dtype, at_once, threads):
    config = untuned(narrow_gradients(rows, width, dtype))
    assert (config.row_threads, config.rows_per_thread) == (32, at_once)
    assert config.block_threads * config.min_blocks == threads


def test_one_of_which_it_computes_much():
    w = "dear_errors_backward(grad_output=bf16[262144,128], x=bf16[262144,128], w=bf16[128])"
    config = untuned(w)
    assert (config.row_threads, config.rows_per_thread, config.stages) == (32, 1, 3)
    assert config.block_threads * config.min_blocks == 512


def dear_gate_before_a_norm(x, g, w):
    return torch.nn.functional.rms_norm(x * torch.nn.functional.silu(g), x.shape[-1:], w)


def gate_gradients(width, dtype="bf16"):
    row = f"{dtype}[8192,{width}]"
    return (
        f"dear_gate_before_a_norm_backward(grad_output={row}, x={row}, g={row}, w={dtype}[{width}])"
    )


@pytest.mark.parametrize(
    ("width", "threads", "blocks", "cluster"),
    [(512, 32, 3, 1), (1024, 64, 2, 1), (4096, 256, 2, 1), (5120, 320, 1, 1), (16384, 512, 1, 2)],
)
def test_gradients_of_many_steps_have_little_of_a_row_for_each_thread(
    width, threads, blocks, cluster
):
    config = untuned(gate_gradients(width))
    found = config.row_threads, config.min_blocks, config.cluster
    assert found == (threads, blocks, cluster)
    assert config.parameters == "shared"
    few = untuned(narrow_gradients(8192, width))
    assert few.block_threads * few.min_blocks == 256  # each with more of a row


def dear_divergence(x, y):
    share, other = x.softmax(-1), torch.log_softmax(y, -1)
    return (share * (share.log() - other)).sum(-1)


@pytest.mark.parametrize(
    ("text", "cluster"),
    [
        ("dear_divergence(x=bf16[2048,16384], y=bf16[2048,16384])", 4),
        ("dear_divergence(x=bf16[2048,32000], y=bf16[2048,32000])", 8),
    ],
)
def test_wide_rows_of_which_much_is_computed_leave_an_sm_threads_enough(text, cluster):
    config = untuned(text)
    assert config.cluster == cluster
    assert config.block_threads * config.min_blocks == 512
    assert not config.recompute


def dear_sums(x, y):
    scaled = x * y[:, None]
    return scaled, scaled.mean(-1)


def test_a_narrow_row_that_is_read_once_is_a_warps():
    once = untuned("dear_sums(x=f16[16384,784], y=f16[16384])")
    assert (once.row_threads, once.rows_per_block, once.stages) == (32, 4, 0)
    again = untuned("softmax(x=f16[16384,784])")
    assert (again.row_threads, again.stages) == (32, 2)
    assert untuned("dear_sums(x=f16[64,784], y=f16[64])").row_threads > 32  # few rows


def dear_scale(x, y, g):
    return x + g[:, None, None] * y


SCALE = "f16[32,384,28,28]"
SCALE = f"dear_scale_backward(grad_output={SCALE}, x={SCALE}, y={SCALE}, g=f16[384], grads=[y,g])"


def test_a_row_that_is_read_once_is_loaded_a_few_turns_at_a_time():
    long, short = untuned(SCALE), untuned(SCALE.replace("28,28", "8,8"))
    assert (long.storage, short.storage) == ("reread", "registers")


@pytest.mark.parametrize("device", ["a100", "h200", "b200"])
@pytest.mark.parametrize(
    "text",
    [
        SCALE,
        *map(gate_gradients, (512, 1024, 5120)),
        narrow_gradients(262144, 128),
        narrow_gradients(262144, 256, "f16", "layer_norm"),
        "dear_errors_backward(grad_output=f16[262144,128], x=f16[262144,128], w=f16[128])",
        "dear_divergence(x=bf16[2048,32000], y=bf16[2048,32000])",
    ],
)
def test_neither_do_these_spill(text, device):
    assert spilled(text, device) == 0
