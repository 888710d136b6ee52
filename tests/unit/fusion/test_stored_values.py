"""Values that are stored: slices of them would be computed anew in too many steps."""

import functools
import re
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from torch.nn import functional as F

import tilewright as tw
from emulated import emulated
from random_graphs import (
    MANY_MOVES,
    MANY_VIEWS,
    RARE_STEPS,
    gradient_workload,
    gradients_of,
    is_misfit,
    programs,
    run_examples,
    workload,
)
from stencil_functions import blurred, blurred_thrice, sobel, with_transposes
from tilewright.compile import cache, cxx, nvrtc
from tilewright.compile.cache import cached, compiled
from tilewright.compile.pool import CompilePool
from tilewright.device import DEVICES, spec_of
from tilewright.dispatch.dumps import dump
from tilewright.dispatch.functions.fuse import fuse
from tilewright.fusion.frontend import lower
from tilewright.fusion.ir import Graph
from tilewright.fusion.staged import Staged, graphs_of
from tilewright.impl import IMPLS
from tilewright.impls.fused import graph_of
from tilewright.measure.candidate import Candidate
from tilewright.measure.verify import Verifier
from tilewright.op import Workload
from tilewright.tune.ahead import code_of, needed
from tilewright.tune.trial import Trial

pytestmark = pytest.mark.usefixtures("forgets_functions")
needs_compiler = pytest.mark.skipif(cxx.missing() is not None, reason=str(cxx.missing()))
FUSED, CPU = IMPLS["fused"], torch.device("cpu")
HOST, H200 = spec_of(None), DEVICES["h200"]
DEVICES_HERE = [
    pytest.param(spec, marks=pytest.mark.skipif(missing is not None, reason=str(missing)))
    for spec, missing in ((HOST, cxx.missing()), (H200, nvrtc.missing()))
]


def weighed(x, weight):
    return functools.reduce(lambda a, _: (a + weight * a.t()).tanh(), range(6), x * weight)


def sliced_softmax(x):
    """Rows of what was reduced, in slices that are sliced again."""
    y = x.softmax(-1)
    for _ in range(7):
        y = F.pad(y[..., 1:] - y[..., :-1] + y[..., :-1].exp(), (0, 1))
    return y


def edges_of_edges(x):
    """Of booleans, that is."""
    found = sobel(x) > 1
    for _ in range(3):
        p = F.pad(found.float(), (1, 1, 1, 1))
        found = p[..., 2:, 1:-1] + p[..., :-2, 1:-1] + p[..., 1:-1, 2:] + p[..., 1:-1, :-2] > 1
    return found.float() * x


CASES = [
    (sobel, "x=f32[2,7,9]"),
    (sobel, "x=f16[5,12]"),
    (sobel, "x=bf16[2,6,8]@strides(100,1,7)"),
    (blurred_thrice, "x=f32[6,11]"),
    (with_transposes, "x=f32[9,9]"),
    (with_transposes, "x=f64[6,6]@strides(1,7)"),
    (sliced_softmax, "x=f32[3,21]"),
    (edges_of_edges, "x=f32[7,9]"),
]


def assert_right(w):
    verifier = Verifier(w, CPU)
    assert verifier.check(FUSED.build(FUSED.heuristic(w, HOST), w, HOST)).message == ""
    assert verifier.check(emulated(w, H200)).message == ""


@needs_compiler
@pytest.mark.parametrize(("function", "tensors"), CASES)
def test_slices_of_what_is_stored_are_right(function, tensors):
    fuse(function)
    w = Workload.parse(f"{function.__name__}({tensors})")
    assert isinstance(graph_of(w), Staged) == (function is not sobel)
    assert_right(w)


@needs_compiler
@pytest.mark.parametrize(("function", "tensors"), CASES)
def test_gradients_through_what_is_stored_are_right(function, tensors):
    fuse(function)
    w = gradients_of(Workload.parse(f"{function.__name__}({tensors})"))
    assert isinstance(graph_of(w), Staged)
    assert_right(w)


@needs_compiler
@pytest.mark.parametrize("function", [sobel, blurred_thrice, with_transposes])
def test_they_are_pytorchs_at_any_size_and_in_any_order(function):
    fused = tw.fuse(function)
    for size in (6, 13):
        x = torch.randn(size, 2 * size)[:, ::2].t().requires_grad_()
        out = fused(x)
        given = torch.randn_like(out)
        (found,) = torch.autograd.grad(out, x, given)
        wide = x.detach().double().requires_grad_()
        right = function(wide)
        (gradient,) = torch.autograd.grad(right, wide, given.double())
        torch.testing.assert_close(out, right.float())
        torch.testing.assert_close(found, gradient.float(), rtol=1e-4, atol=1e-5)


@needs_compiler
def test_numbers_of_a_call_reach_every_stage():
    fused = tw.fuse(weighed)
    x = torch.randn(9, 9, dtype=torch.float64)
    for weight in (0.25, 0.5, 0.75):
        torch.testing.assert_close(fused(x, weight), weighed(x, weight))


@needs_compiler
def test_other_schedules_are_right():
    fuse(sobel)
    w = gradients_of(Workload.parse("sobel(x=f32[64,70])"))
    verifier, space = Verifier(w, CPU), FUSED.space(w, HOST)
    assert FUSED.heuristic(w, HOST) in space
    for config in space.neighbours(FUSED.heuristic(w, HOST)):
        assert verifier.check(FUSED.build(config, w, HOST)).message == ""


@pytest.mark.parametrize("device", [HOST, H200], ids=lambda spec: spec.kind)
def test_it_is_told_why_a_value_is_stored(device):
    fuse(sobel)
    w = gradients_of(Workload.parse("sobel(x=f32[16,512,512])"))
    graph = graph_of(w)
    assert [len(g.stored) for g in graphs_of(graph)] == [2, 0]
    told = FUSED.describe(FUSED.heuristic(w, device), w, device)
    heads = [k for k, line in enumerate(told) if line.startswith("stage ")]
    assert [told[k].partition(":")[0] for k in heads] == ["stage 1 of 2", "stage 2 of 2"]
    lines = [line for line in told if not line.startswith("stage ")]
    assert told[heads[1] + 1] == lines[4]
    assert [line.partition(":")[0] for line in lines] == [f"kernel {k}" for k in range(8)]
    line = sobel.__code__.co_firstlineno
    (why,) = (s for s in lines if "a value is stored" in s)
    told = "a value is stored: slices of it would be computed anew in more than 2000 steps"
    assert f"; cut: {told} (" in why
    assert int(why.rpartition(":")[2].rstrip(")")) - line in range(9)


@pytest.mark.parametrize("device", DEVICES_HERE, ids=lambda spec: spec.kind)
def test_every_stage_is_shown(device):
    fuse(sobel)
    w = gradients_of(Workload.parse("sobel(x=f32[7,9])"))
    config = FUSED.heuristic(w, device)
    tasks = FUSED.tasks(config, w, device)
    assert tasks.index(FUSED.task(config, w, device)) == graph_of(w).main
    shown = {what: dump(what, FUSED, config, w, device) for what in ("source", "resources")}
    for text in shown.values():
        assert text.startswith("// stage 1 of 2\n")
        assert text.count("// stage 2 of 2\n") == 1
    first, second = shown["source"].removeprefix("// stage 1 of 2\n").split("\n// stage 2 of 2\n")
    assert (first, second) == tuple(task.source for task in tasks)
    if device.kind == "cuda":
        registers = [compiled(task).resources.registers for task in tasks]
        assert FUSED.build(config, w, device).resources.registers == max(registers)
        for stage, most in zip(shown["resources"].split("// stage 2"), registers, strict=True):
            assert most == max(map(int, re.findall(r"^registers = (\d+)", stage, re.M)))
        for text in (dump("ptx", FUSED, config, w, device, max_registers=m) for m in (None, 64)):
            assert text.count(".visible .entry fused(") == len(tasks)


@pytest.mark.parametrize("device", DEVICES_HERE, ids=lambda spec: spec.kind)
def test_every_stage_is_compiled_ahead(device, tmp_path, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path))
    fuse(sobel)
    w = gradients_of(Workload.parse("sobel(x=f32[6,10])"))
    config, runner = FUSED.heuristic(w, device), SimpleNamespace(compiles=True)
    with CompilePool(jobs=1) as pool:
        session = SimpleNamespace(spec=device, pool=pool, runner=runner, overlap=False)
        trial = SimpleNamespace(session=session, w=w)
        trial._tasks = partial(Trial._tasks, trial)
        candidate = Candidate.of("fused", config)
        ((found,),) = Trial._built(trial, [candidate])
    binaries = [*map(cached, needed(FUSED, config, w, device))]
    assert len(binaries) == 2
    assert binaries[0] == cached(FUSED.task(config, w, device))
    assert found == (candidate, replace(binaries[0], key=code_of(binaries)))
    monkeypatch.setattr(cache, "_COMPILERS", {
        name: replace(c, compile=None) for name, c in cache._COMPILERS.items()
    })  # fmt: skip
    assert len(FUSED.build(config, w, device).executables) == 2


@needs_compiler
def test_what_is_stored_is_workspace():
    fuse(sobel)
    w = gradients_of(Workload.parse("sobel(x=f32[16,40,50])"))
    assert FUSED.build(FUSED.heuristic(w, HOST), w, HOST).workspace_bytes >= 2 * 16 * 40 * 50 * 4


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.cat([x[..., 4:].exp(), x[..., :4].exp()], -1) * x,
        lambda x: (x.sigmoid()[..., 1:] - x.sigmoid()[..., :-1]).square(),
        lambda x: x.tanh() + x.tanh().t(),
        blurred,
    ],
)
def test_what_costs_little_to_compute_anew_is_not_stored(function):
    fuse(function, name="cheap")
    assert isinstance(graph_of(Workload.parse("cheap(x=f32[8,8])")), Graph)


def test_extremes_of_what_is_stored_meet_the_same_bits():
    """What a stage computes anew is compared with what another found the greatest of."""
    fuse(lambda x: with_transposes(x).amax(-1), name="greatest")
    w = gradients_of(Workload.parse("greatest(x=f32[9,9])"))
    assert all(graph.meets_extremes for graph in graphs_of(graph_of(w)))


def test_more_than_so_many_values_are_not_stored(monkeypatch):
    monkeypatch.setattr(lower, "MOST_KEPT", 1)

    def some(x):
        return with_transposes(x, 12)

    def more(x):
        return with_transposes(x, 13)

    for function in (some, more):
        fuse(function)
        graph = graph_of(Workload.parse(f"{function.__name__}(x=f32[9,9])"))
        assert isinstance(graph, Staged) == (function is some)
    line = more.__code__.co_firstlineno + 1
    assert "need more than 2000 steps: each computes anew what it is of; fuse what is" in graph
    assert f"test_stored_values.py:{line})" in graph


def anything(lowering, outputs):
    """Up to three results are stored, whatever they cost."""
    lowering.taken.update(range(len(lowering.steps)))
    able = [node for node, _ in lowering.taken_results()]
    if len(lowering.reasons) == 3 or not able:
        return None
    return able[(7 * len(lowering.reasons) + 3) % len(able)], "it is tried"


@needs_compiler
@pytest.mark.parametrize("kinds", [MANY_MOVES, MANY_VIEWS, RARE_STEPS])
@pytest.mark.parametrize("of", [workload, gradient_workload], ids=["forward", "gradients"])
def test_random_graphs_are_right_whatever_is_stored(kinds, of, monkeypatch):
    monkeypatch.setattr(lower._Lowering, "costlier_than_memory", anything)
    staged = 0

    @given(programs(kinds=kinds, most_steps=6))
    def check(program):
        nonlocal staged
        w = of(program)
        if not is_misfit(FUSED.unsupported(w, HOST)):
            staged += isinstance(graph_of(w), Staged)
            assert_right(w)

    run_examples(check, 8, shrink=False)
    assert staged > 4
