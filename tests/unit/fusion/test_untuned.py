"""What runs untuned where a compiler makes the heuristic's kernel spill registers."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from emulated import Emulated
from random_graphs import gradients_of
from tilewright.build import CompileTask
from tilewright.compile import cxx
from tilewright.compile.cache import compiled
from tilewright.compile.resources import call_resources
from tilewright.device import DEVICES, current_device
from tilewright.dispatch import selection
from tilewright.dispatch.functions.fuse import fuse
from tilewright.errors import CompileError
from tilewright.fusion.cuda import programs, target
from tilewright.fusion.cuda.rows.footprint import Footprint, estimated_registers, register_cap
from tilewright.impl import IMPLS
from tilewright.impls import fused as implementation
from tilewright.impls.fused import graph_of
from tilewright.measure.verify import Verifier
from tilewright.op import Workload
from tilewright.profiling.explain import explain, show

H200, FUSED = DEVICES["h200"], IMPLS["fused"]

pytestmark = pytest.mark.usefixtures("forgets_functions")
needs_compiler = pytest.mark.skipif(cxx.missing() is not None, reason=str(cxx.missing()))


def jensen_shannon(p, q):
    p, q = p.log_softmax(-1), q.log_softmax(-1)
    between = torch.logaddexp(p, q) - math.log(2)
    return 0.5 * ((p.exp() * (p - between)).sum(-1) + (q.exp() * (q - between)).sum(-1))


def kl_divergence(p, q):
    p, q = p.log_softmax(-1), q.log_softmax(-1)
    return F.kl_div(p, q, reduction="none", log_target=True).sum(-1)


def standardized(x):
    return (x - x.mean(0)) / x.std(0)


def squares_and_gates(x, w):
    return (x * torch.sigmoid(x) + w).tanh().square()


SPILLING = [
    (kl_divergence, "p=bf16[16384,1024], q=bf16[16384,1024]", 0),
    (jensen_shannon, "p=bf16[512,32000], q=bf16[512,32000]", 0),
    (kl_divergence, "p=bf16[8192,8192], q=bf16[8192,8192]", 0),
]


def gradients(function, tensors):
    fuse(function)
    return gradients_of(Workload.parse(f"{function.__name__}({tensors})"))


def spill_bytes(w, config, device=H200):
    return compiled(FUSED.task(config, w, device)).resources.spill_bytes


@pytest.mark.parametrize(("function", "tensors", "left"), SPILLING)
def test_a_schedule_with_more_room_runs_in_place_of_one_that_spills(function, tensors, left):
    w = gradients(function, tensors)
    first, found = FUSED.heuristic(w, H200), FUSED.untuned(w, H200)
    assert spill_bytes(w, first) > left
    assert spill_bytes(w, found) == left
    assert found in FUSED.space(w, H200)


def test_few_spilled_bytes_are_cheaper_than_half_the_threads():
    """Its own take 442 us on an H100, and 730 and 509 what spills none (61c63d2, no file kept)."""
    w = gradients(kl_divergence, "p=bf16[4096,32000], q=bf16[4096,32000]")
    first = FUSED.heuristic(w, H200)
    others = [c for c in target.roomier(graph_of(w), first, H200) if c in FUSED.space(w, H200)]
    assert spill_bytes(w, first) > 0
    assert [spill_bytes(w, c) for c in others] == [0] * len(others) != []
    assert FUSED.untuned(w, H200) == first


def test_rows_that_are_kept_are_not_read_again_and_few_bytes_have_no_larger_clusters():
    wide = gradients(jensen_shannon, "p=bf16[512,32000], q=bf16[512,32000]")
    narrow = gradients(kl_divergence, "p=bf16[8192,1152], q=bf16[8192,1152]")
    for w in (wide, narrow):
        first = FUSED.heuristic(w, H200)
        others = [*target.roomier(graph_of(w), first, H200)]
        assert others
        assert {c.storage for c in others} <= {"registers", "shared"}
        assert all(c.cluster == 1 for c in others if w is narrow)
    first = FUSED.heuristic(wide, H200)
    assert max(c.cluster for c in target.roomier(graph_of(wide), first, H200)) > 1


def test_what_spills_as_much_gives_way_to_nothing(monkeypatch):
    """Another kernel of the program does, of which the schedule is not: whatever a model expects of
    more threads."""
    w = gradients(kl_divergence, "p=bf16[8196,8192], q=bf16[8196,8192]")
    expected = iter((1.0, 0.5, 0.4, 0.3))
    monkeypatch.setattr(implementation.spills, "lost", lambda *_: next(expected))
    tried = spilling(monkeypatch, (96, 96, 96, 96))
    assert FUSED.untuned(w, H200) == FUSED.heuristic(w, H200)
    assert len(tried) == 4


def switchable(x, w, b, rho):
    of_image = (x - x.mean((2, 3), keepdim=True)) / (x.var((2, 3), keepdim=True) + 1e-5).sqrt()
    of_all = (x - x.mean((1, 2, 3), keepdim=True)) / (x.var((1, 2, 3), keepdim=True) + 1e-5).sqrt()
    share = rho.sigmoid()[:, None, None]
    return (share * of_image + (1 - share) * of_all) * w[:, None, None] + b[:, None, None]


def test_what_kernels_of_a_program_spill_is_told_for_each_by_its_own_threads():
    """The first has 512 threads, the one that spills 320, of which 512 would not fit on an SM."""
    parameters = "w=bf16[128], b=bf16[128], rho=bf16[128]"
    w = gradients(switchable, f"x=bf16[8,128,96,96], {parameters}")
    first = FUSED.heuristic(w, H200)
    assert spill_bytes(w, first) > 0
    assert spill_bytes(w, FUSED.untuned(w, H200)) <= spill_bytes(w, first)


def filtered(x, w):
    return sum(F.pad(x, (0, 0, 3 - k, 0))[:, : x.shape[1]] * w[k] for k in range(4))


def test_tiles_have_more_registers_by_each_roomier_schedule_than_by_the_one_before():
    """Other tiles of the program are narrower, and ask for more blocks."""
    columns = gradients(standardized, "x=bf16[32768,1024]")
    several = gradients(filtered, "x=bf16[8,4096,1024], w=bf16[4,1024]")
    for w in (columns, several):
        first = FUSED.heuristic(w, H200)
        caps = [c.max_registers for c in target.roomier(graph_of(w), first, H200)]
        assert caps == sorted(set(caps))
        assert min(caps, default=128) > 64
        assert caps or w is several


@pytest.mark.parametrize("device", ["a100", "h200", "b200"])
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_what_keeps_nothing_has_no_steps_of_a_whole_walk_on_their_way(dtype, device):
    """The second walk of a program whose first keeps its steps: with the loads of all of them it
    spilled 1824 bytes for sm_90."""
    w, spec = gradients(standardized, f"x={dtype}[32768,1024]"), DEVICES[device]
    first, graph = FUSED.heuristic(w, spec), graph_of(w)
    assert first.storage == "registers"
    program = programs.program_of(graph, first, spec)
    second = programs.tiles_of(program, 2, first)
    assert (second.kept_steps, second.s.storage) == (0, "reread")
    assert second.s.unroll == first.unroll
    assert spill_bytes(w, first, spec) == 0


def test_what_spills_nothing_stays_and_is_all_that_is_compiled(monkeypatch):
    asked, compile_now = [], implementation.compiled
    monkeypatch.setattr(
        implementation, "compiled", lambda task: asked.append(task) or compile_now(task)
    )
    w = Workload.parse("softmax(x=f16[512,1023])")
    assert FUSED.untuned(w, H200) == FUSED.heuristic(w, H200)
    assert asked == [FUSED.task(FUSED.heuristic(w, H200), w, H200)]
    assert FUSED.untuned(w, H200) == FUSED.heuristic(w, H200)
    assert len(asked) == 1


def spilling(monkeypatch, told):
    """The implementation as if kernels spilled so many bytes, in the order in which they are
    compiled; returns the configs that were."""
    configs = []

    def task(op, w, k, config, device):
        if config not in configs:
            configs.append(config)
        return CompileTask("nvrtc", str(config), (), "fused")

    def resources(task):
        spilled = told[[*map(str, configs)].index(task.source)]
        if spilled is None:
            raise CompileError("refused")
        log = (
            "Compiling entry function 'fused' for 'sm_90a'\n"
            f"{spilled} bytes stack frame, {spilled} bytes spill stores, 0 bytes spill loads\n"
            "Used 128 registers"
        )
        return replace(found, resources=call_resources(log, "fused"), log=log)

    w = Workload.parse("softmax(x=f16[512,1023])")
    found = compiled(FUSED.task(FUSED.heuristic(w, H200), w, H200))
    monkeypatch.setattr(implementation, "_task", task)
    monkeypatch.setattr(implementation, "compiled", resources)
    return configs


def test_where_all_spill_the_one_that_costs_least_runs(monkeypatch):
    w = gradients(kl_divergence, "p=bf16[8193,8192], q=bf16[8193,8192]")
    monkeypatch.setattr(implementation, "MOST_ROOMIER", 2)
    tried = spilling(monkeypatch, (96, 104, 40, 0))
    found = FUSED.untuned(w, H200)
    assert tried[0] == FUSED.heuristic(w, H200)
    assert found == tried[2]
    assert len(tried) == 3


def test_tiles_that_spill_are_given_more_registers(monkeypatch):
    w = Workload.parse("softmax(x=bf16[64,96,3136], dim=1)")
    first = FUSED.heuristic(w, H200)
    roomier = [*target.roomier(graph_of(w), first, H200)]
    assert [replace(c, max_registers=0) for c in roomier] == [first] * len(roomier) != []
    tried = spilling(monkeypatch, (96, 0))
    assert FUSED.untuned(w, H200) == tried[1] == roomier[0]
    assert first.max_registers == 0 < tried[1].max_registers


def test_a_roomier_schedule_that_no_compiler_takes_is_passed_by(monkeypatch):
    w = gradients(kl_divergence, "p=bf16[8194,8192], q=bf16[8194,8192]")
    tried = spilling(monkeypatch, (96, None, 0))
    assert FUSED.untuned(w, H200) == tried[2]


def test_what_no_compiler_takes_at_first_is_an_error(monkeypatch):
    w = gradients(kl_divergence, "p=bf16[8195,8192], q=bf16[8195,8192]")
    spilling(monkeypatch, (None,))
    with pytest.raises(CompileError, match="refused"):
        FUSED.untuned(w, H200)


def test_each_of_the_roomier_schedules_of_rows_has_more_registers_to_spare():
    w = gradients(kl_divergence, "p=bf16[8192,4096], q=bf16[8192,4096]")
    graph, first = graph_of(w), FUSED.heuristic(w, H200)
    footprint = Footprint(graph)
    every = [first, *target.roomier(graph, first, H200)]
    spare = [register_cap(c, H200) - estimated_registers(c, footprint) for c in every]
    assert len(spare) > 3
    assert all(a < b for a, b in itertools.pairwise(spare))


def test_steps_alone_have_roomier_schedules_of_fewer_elements_a_thread():
    fuse(squares_and_gates)
    w = Workload.parse("squares_and_gates(x=bf16[8192,4096], w=bf16[4096])")
    graph, first = graph_of(w), FUSED.heuristic(w, H200)
    kept = [c.vector * c.vectors_per_thread for c in target.roomier(graph, first, H200)]
    assert kept == [8, 4, 2, 1]
    assert all(c in FUSED.space(w, H200) for c in target.roomier(graph, first, H200))


@needs_compiler
@pytest.mark.parametrize(
    ("function", "tensors"),
    [
        (jensen_shannon, "p=f32[40,4096], q=f32[40,4096]"),
        (kl_divergence, "p=bf16[40,4096], q=bf16[40,4096]"),
    ],
)
def test_roomier_schedules_give_right_results(function, tensors):
    w = gradients(function, tensors)
    graph, verifier = graph_of(w), Verifier(w, torch.device("cpu"), seed=1)
    first = FUSED.heuristic(w, H200)
    found = [c for c in target.roomier(graph, first, H200) if c in FUSED.space(w, H200)]
    assert found
    for c in found[: implementation.MOST_ROOMIER]:
        assert verifier.check(Emulated(graph, c, H200, w)).message == "", c


def test_explain_shows_what_runs_and_says_why():
    w = gradients(kl_divergence, "p=bf16[8192,8192], q=bf16[8192,8192]")
    found = explain(w, device_spec="h200")
    (facts,) = [c for c in found.candidates if c.implementation == "fused"]
    assert facts.resources.spill_bytes == 0
    assert found.reason.endswith("; the heuristic's first schedule spills registers")
    told = show(w, "schedule", device_spec="h200")
    assert f"row_threads = {FUSED.untuned(w, H200).row_threads}\n" in told
    named = show(w, "resources", device_spec="h200", implementation="fused", config={"vector": 8})
    spilled = spill_bytes(w, replace(FUSED.heuristic(w, H200), vector=8))
    assert spilled > 0
    assert f"\nspill_bytes = {spilled}\n" in named


@needs_compiler
def test_a_call_builds_what_runs_untuned(monkeypatch):
    fused = fuse(kl_divergence)
    p, q = torch.randn(5, 33), torch.randn(5, 33)
    w = Workload.parse("kl_divergence(p=f32[5,33], q=f32[5,33])")
    spec = current_device("cpu")[1]
    other = replace(FUSED.heuristic(w, spec), rows=2)
    assert other != FUSED.heuristic(w, spec)
    built, build = [], type(FUSED).build
    monkeypatch.setattr(type(FUSED), "untuned", lambda self, w, device: other)
    monkeypatch.setattr(
        type(FUSED), "build", lambda self, c, w, d: built.append(c) or build(self, c, w, d)
    )
    torch.testing.assert_close(fused(p, q), kl_divergence(p, q))
    assert built == [other]
    with selection.use("fused", {"rows": 1}, op="kl_divergence"):
        fused(p, q)
    assert built[1].rows == 1


def norm_of_wide_numbers(x, weight, bias):
    return F.layer_norm(x.double(), x.shape[-1:], weight.double(), bias.double()).float()


@pytest.mark.parametrize(
    ("device", "rows", "width"), [("a100", 512, 2048), ("a100", 16, 12288), ("b200", 512, 2048)]
)
def test_fp32_that_is_widened_leaves_the_registers_that_it_takes(device, rows, width):
    fuse(norm_of_wide_numbers)
    tensors = f"x=f32[{rows},{width}], weight=f32[{width}], bias=f32[{width}]"
    w = Workload.parse(f"norm_of_wide_numbers({tensors})")
    assert spill_bytes(w, FUSED.heuristic(w, DEVICES[device]), DEVICES[device]) == 0
