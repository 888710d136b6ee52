"""Rows that hold NaN or infinity, or do not vary, and more than 2^31 elements, on a GPU."""

import pytest
import torch

import tilewright as tw
from extreme_rows import (
    NORMS,
    ON_ROWS,
    assert_constant_rows_right,
    assert_least_probabilities_right,
    assert_rows_stay_by_themselves,
    workload,
)
from far_rows import (
    FUNCTIONS,
    SCHEDULES,
    SHIFTED,
    assert_equal_values_have_no_deviations,
    assert_nearly_equal_values_right,
    assert_norms_right,
)
from far_rows import norm as far_norm
from far_rows import workload as far_workload
from tilewright.compile.cache import compiled
from tilewright.device import spec_of
from tilewright.fusion.cuda import target
from tilewright.impl import IMPLS
from tilewright.impls.fused import graph_of

pytestmark = pytest.mark.gpu
FUSED = IMPLS["fused"]
WIDTHS = {520: 40, 5140: 300, 16384: 33}
"""Rows by their width: none that is a multiple of anything."""


def executable(w, device):
    spec = spec_of(device.index)
    return FUSED.build(FUSED.heuristic(w, spec), w, spec)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ON_ROWS)
def test_rows_of_nan_and_infinity_stay_by_themselves(name, width, dtype, device):
    w = workload(name, dtype, WIDTHS[width], width)
    assert_rows_stay_by_themselves(w, executable(w, device), device)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "f64"])
@pytest.mark.parametrize("name", NORMS)
def test_rows_that_do_not_vary_are_right(name, dtype, device):
    w = workload(name, dtype)
    assert_constant_rows_right(w, executable(w, device), device)


@pytest.mark.parametrize("width", [520, 768, 999, 5140, 16384, 65536])
@pytest.mark.parametrize("rows", [1, 33, 4000])
def test_rows_of_equal_numbers_leave_nothing_and_nearly_equal_ones_what_they_should(
    rows, width, device
):
    assert_norms_right(executable(far_norm(rows, width), device), rows, width, device)


@pytest.mark.parametrize("config", [*SCHEDULES, *SHIFTED], ids=str)
def test_so_they_do_under_every_kind_of_schedule(config, device):
    rows, width, spec = 3001, 999 if config.shifted else 520, spec_of(device.index)
    w = far_norm(rows, width)
    graph = graph_of(w)
    if why := target.space(graph, spec).why_not(config):
        pytest.skip(why)
    built = compiled(target.task(graph, config, spec))
    run = target.executable(graph, config, w, built, spec)
    assert_norms_right(run, rows, width, device)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_so_does_whatever_takes_deviations(name, device, forgets_functions):
    function, shape = FUNCTIONS[name]
    run = executable(far_workload(function, shape), device)
    assert_equal_values_have_no_deviations(run, shape, device)
    assert_nearly_equal_values_right(run, function, shape, device)


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize("width", WIDTHS)
def test_probabilities_that_are_no_normal_numbers_are_right(dtype, width, device):
    w = workload("softmax", dtype, WIDTHS[width], width)
    assert_least_probabilities_right(w, executable(w, device), device)


HUGE = (524300, 4100)
"""Rows and width of more than 2^31 elements; of halves 4.3 GB."""


def sample(device):
    """The first and last rows, those around the 2^31st element, and some others."""
    rows, middle = HUGE[0], 2**31 // HUGE[1]
    ends = torch.tensor([0, 1, middle - 1, middle, middle + 1, rows - 2, rows - 1])
    return torch.cat([ends, torch.randperm(rows)[:500]]).unique().to(device)


def scaled_sum(x, y):
    return (x * y).sum(-1), x + y


@pytest.mark.alone
@pytest.mark.parametrize("name", ["softmax", "layer_norm", "rms_norm", "add_rms_norm", "lerp"])
def test_results_of_more_than_two_to_the_31_elements(name, device, needs_memory):
    needs_memory(20e9)
    w, rows = workload(name, "f16", *HUGE), sample(device)
    assert w.main.numel > 2**31
    generator = torch.Generator(device).manual_seed(0)
    tensors = [
        torch.randn(t.shape, generator=generator, dtype=t.torch_dtype, device=device)
        for t in w.tensors.values()
    ]
    found = executable(w, device)(*tensors)
    few = workload(name, "f16", len(rows), HUGE[1])
    given = [t[rows] if t.shape[0] == HUGE[0] else t for t in tensors]
    found = found if isinstance(found, tuple) else (found,)
    for mine, right in zip(found, few.operator.truth(few, given), strict=True):
        torch.testing.assert_close(mine[rows].double(), right, rtol=2e-3, atol=2e-3)


@pytest.mark.alone
def test_a_fused_function_of_more_than_two_to_the_31_elements(device, needs_memory):
    needs_memory(20e9)
    generator, rows = torch.Generator(device).manual_seed(0), sample(device)
    x, y = (
        torch.randn(*HUGE, generator=generator, dtype=torch.half, device=device) for _ in range(2)
    )
    try:
        dots, sums = tw.fuse(scaled_sum, name="huge_scaled_sum")(x, y)
        a, b = x[rows].double(), y[rows].double()
        torch.testing.assert_close(sums[rows].double(), a + b, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(dots[rows].double(), (a * b).sum(-1), rtol=2e-3, atol=0.1)
    finally:
        tw.op.OPS.remove("huge_scaled_sum")


@pytest.mark.alone
def test_lerps_gradients_of_more_than_two_to_the_31_elements_are_summed(device, needs_memory):
    needs_memory(20e9)
    rows, width = HUGE
    w = tw.Workload.parse(
        f"lerp_backward(grad_output=f16[{rows},{width}], x=f16[{rows},{width}], end=f16[{width}], "
        "weight=0.3)"
    )
    grad, x, end = (
        torch.randn(t.shape, dtype=torch.half, device=device) for t in w.tensors.values()
    )
    dx, dend = executable(w, device)(grad, x, end)
    some = sample(device)
    torch.testing.assert_close(dx[some].double(), 0.7 * grad[some].double(), rtol=1e-3, atol=1e-3)
    right = sum(part.double().sum(0) for part in grad.split(8192)) * 0.3
    torch.testing.assert_close(dend.double(), right, rtol=1e-3, atol=0.02)


def peaks_and_deviations(x):
    return x.amax(0), x - x.mean(0, keepdim=True)


@pytest.mark.alone
def test_columns_of_more_than_two_to_the_31_elements(device, needs_memory, forgets_functions):
    needs_memory(20e9)
    x = torch.randn(HUGE, dtype=torch.half, device=device)
    peaks, apart = tw.fuse(peaks_and_deviations)(x)
    some = sample(device)
    mean = sum(part.double().sum(0) for part in x.split(8192)) / HUGE[0]
    assert torch.equal(peaks, torch.stack([part.amax(0) for part in x.split(8192)]).amax(0))
    torch.testing.assert_close(apart[some].double(), x[some].double() - mean, rtol=1e-3, atol=1e-3)


def distances(x, y):
    return (x[:, :, None] - y[:, None, :]).abs().sum((1, 2))


def test_rows_of_more_columns_than_an_int_numbers(device, forgets_functions):
    x, y = torch.rand(2, 16, 50000, device=device)
    found = tw.fuse(distances)(x, y)
    parts = y.double().split(200, dim=1)
    right = sum(distances(x.double(), part) for part in parts)
    torch.testing.assert_close(found.double(), right, rtol=1e-5, atol=0)


def sums_of_samples(x):
    y = x - x.mean(-1, keepdim=True)
    return y, y.sum(1)


@pytest.mark.parametrize("samples", [65535, 65536])
def test_as_many_samples_as_a_grid_has_rows_and_one_more(samples, device, forgets_functions):
    x = torch.randn(samples, 16, 128, dtype=torch.half, device=device)
    y, sums = tw.fuse(sums_of_samples)(x)
    some = torch.cat([torch.tensor([0, samples - 1]), torch.randperm(samples)[:500]]).to(device)
    right = x[some].double() - x[some].double().mean(-1, keepdim=True)
    torch.testing.assert_close(y[some].double(), right, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(sums[some].double(), right.sum(1), rtol=1e-3, atol=1e-3)
