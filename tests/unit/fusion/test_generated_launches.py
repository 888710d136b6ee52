"""What generated kernels are launched with: addresses, counts and workspace, seen by a recorder."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tilewright.device import DEVICES
from tilewright.fusion.cuda import target
from tilewright.impls.fused import graph_of
from tilewright.op import Workload
from tilewright.suite import SUITES

H200 = DEVICES["h200"]
NORM = "layer_norm(x=f16[600,1024], weight=f16[1024], bias=f16[1024])"
BACKWARD = (
    "layer_norm_backward(grad_output=f16[600,1024], x=f16[600,1024], mean=f32[600,1],"
    " rstd=f32[600,1], weight=f16[1024])"
)
PROGRAM = (
    "lerp_backward(grad_output=f32[4,3,44,44], x=f32[4,1,1,1], end=f32[4,3,44,44],"
    " weight=f32[3,1,44])"
)
SHARED = "lerp_backward(grad_output=f32[16,90000], x=f32[16,1], end=f32[16,90000], weight=0.5)"
STREAM, COUNTER = 7, 999


class Recorder:
    """Stands for a CudaKernel; every launch must fit the kernel's signature."""

    launches: list[SimpleNamespace] = []

    def __init__(self, built, entry, signature):
        self.entry, self.signature = entry, signature

    def resident_blocks(self, *args):
        return 64

    def launch(self, grid, block, shared_bytes, stream, device_index, *args, **options):
        assert len(args) == len(self.signature), (self.entry, self.signature, args)
        assert stream == STREAM
        found = {"entry": self.entry, "grid": grid, "args": args, **options}
        self.launches.append(SimpleNamespace(**found))

    def launcher(self, device_index, grid, block, shared_bytes, cluster, stream, **options):
        shape = {"cluster": cluster, **options}

        def launch(stream, args):
            self.launch(grid, block, shared_bytes, stream, device_index, *args, **shape)

        return launch


@pytest.fixture(autouse=True)
def _recorded(monkeypatch):
    monkeypatch.setattr(target, "CudaKernel", Recorder)
    monkeypatch.setattr(target, "overlaps", lambda index: True)
    monkeypatch.setattr(target.counters, "address", lambda index, stream, count: COUNTER)
    get_stream = "_cuda_getCurrentRawStream"
    monkeypatch.setattr(torch._C, get_stream, lambda index: STREAM, raising=False)
    monkeypatch.setattr(Recorder, "launches", [])


def called(text, **changed):
    """A call's tensors, its results, and the launches that it made."""
    w = Workload.parse(text)
    graph = graph_of(w)
    config = replace(target.heuristic(graph, H200), **changed)
    executable = target.executable(graph, config, w, SimpleNamespace(resources=None), H200)
    tensors = w.operator.examples(w, "random", 0, "cpu")
    outs = executable(*tensors)
    pointers = [t.data_ptr() for t in tensors]
    again = executable(*tensors, pointers=pointers)
    outs, again = (o if isinstance(o, tuple) else (o,) for o in (outs, again))
    half = len(Recorder.launches) // 2
    first, second = Recorder.launches[:half], Recorder.launches[half:]
    for one, other in zip(first, second, strict=True):
        assert (one.entry, one.grid) == (other.entry, other.grid)
        own = {o.data_ptr(): a.data_ptr() for o, a in zip(outs, again, strict=True)}
        told = {*pointers, *own}
        assert [own.get(a, a) for a in one.args if a in told] == [
            b for b in other.args if b in {*pointers, *own.values()}
        ]
    return pointers, [o.data_ptr() for o in outs], first, executable


def test_one_kernel_gets_inputs_results_and_the_number_of_rows():
    inputs, outs, (launch,), executable = called(NORM, in_turn=False)
    assert launch.args[: len(inputs) + len(outs) + 1] == (*inputs, *outs, 600)
    assert executable.workspace_bytes == 0


def test_a_second_kernel_joins_the_workspace_that_the_first_one_filled():
    inputs, outs, (first, second), executable = called(BACKWARD, combine="kernel")
    partials = second.args[0]
    assert first.args[: len(inputs) + 3] == (*inputs, outs[0], partials, 600)
    assert set(outs[1:]) <= set(second.args)
    assert second.overlapping
    clusters = first.grid[0] // first.cluster
    assert clusters in second.args
    assert executable.workspace_bytes == clusters * 2 * 1024 * 4


def test_blocks_that_meet_get_a_counter_and_every_result_and_start_together():
    inputs, outs, (launch,), executable = called(BACKWARD, combine="grid")
    assert launch.cooperative
    assert launch.args[: len(inputs) + len(outs)] == (*inputs, *outs)
    assert launch.args[len(inputs) + len(outs) + 1 :][:2] == (600, COUNTER)
    assert executable.workspace_bytes == launch.grid[0] // launch.cluster * 2 * 1024 * 4


def test_blocks_that_share_walks_get_room_for_what_they_leave_and_start_together():
    text = "softmax(x=f32[600,40], dim=0)"
    inputs, outs, (launch,), executable = called(
        text, lanes=8, shares=8, splits=4, combine="grid", storage="registers", vector=1, unroll=1
    )
    assert launch.cooperative
    assert not launch.overlapping
    assert launch.args[:2] == (*inputs, *outs)
    assert launch.args[3] == COUNTER
    assert launch.grid == (4 * 5, 1, 1)
    assert executable.workspace_bytes >= 2 * 20 * 8 * 4


def test_a_program_s_kernels_write_every_result():
    inputs, outs, launches, _ = called(PROGRAM, combine="kernel")
    written = {a for launch in launches for a in launch.args}
    assert {*inputs, *outs} <= written
    assert len(launches) == 2


def test_a_kernel_whose_last_blocks_join_partials_gets_a_counter_and_no_workspace():
    inputs, outs, (launch,), executable = called(PROGRAM, combine="last")
    assert set(launch.args[: launch.args.index(COUNTER)]) == {*inputs, *outs}
    assert executable.workspace_bytes == 0


@pytest.mark.parametrize("text", SUITES["lerp_paddle"].texts)
def test_lerp_is_one_launch_and_its_gradients_two_where_partials_are_joined(text, monkeypatch):
    """As calls make them, of memory that is allocated for the results and partials alone."""
    monkeypatch.setattr(torch.Tensor, "copy_", None)
    monkeypatch.setattr(torch.Tensor, "zero_", None)
    monkeypatch.setattr(torch.Tensor, "fill_", None)
    w = Workload.parse(text)
    graph = graph_of(w)
    config = target.heuristic(graph, H200)
    executable = target.executable(graph, config, w, SimpleNamespace(resources=None), H200)
    executable(*(torch.empty_strided(t.shape, t.real_strides, dtype=t.torch_dtype)
                 for t in w.tensors.values()))  # fmt: skip
    launches = Recorder.launches
    joins = bool(executable.workspace_bytes)
    assert len(launches) == 1 + joins, [launch.entry for launch in launches]
    assert not (joins and w.op == "lerp")


def test_numbers_of_a_call_take_the_place_of_the_workload_s():
    *_, executable = called(SHARED)
    tensors = Workload.parse(SHARED).operator.examples(Workload.parse(SHARED), "random", 0, "cpu")
    for numbers, told in (((0.125,), (0.125, 0.875)), (None, (0.5, 0.5))):  # weight, 1 - weight
        executable(*tensors, scalars=numbers)
        assert Recorder.launches[-1].args[-2:] == told


def test_blocks_that_share_rows_get_a_counter_after_the_number_of_rows():
    inputs, outs, (launch,), _ = called(SHARED)
    assert launch.args[: len(inputs) + len(outs) + 2] == (*inputs, *outs, 16, COUNTER)
    assert launch.grid[0] % 16 == 0
    assert launch.grid[0] > 128
