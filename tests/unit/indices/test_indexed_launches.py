"""What kernels for indices are launched with, seen by a recorder."""

from types import SimpleNamespace

import pytest
import torch

from tilewright.device import DEVICES
from tilewright.errors import InvalidArgument
from tilewright.impl import IMPLS
from tilewright.impls.indices import _indexed
from tilewright.op import Workload

H200 = DEVICES["h200"]
STREAM, COUNTER, FAULT = 7, 999, 555
SCATTER = "scatter(x=f32[50], dim=0, index=i64[50], src=f32[50])"
MEETING = "scatter(x=f32[1000000], dim=0, index=i64[1000000], src=f32[1000000])"
SEVERAL = "index_add(x=f32[5000,8], dim=0, index=i64[9000], source=f32[9000,8])"


class Recorder:
    """Stands for a CudaKernel; every launch must fit the kernel's signature."""

    launches: list[SimpleNamespace] = []

    def __init__(self, built, entry, signature):
        self.entry, self.signature = entry, signature

    def launcher(self, device_index, *shape, **options):
        def launch(stream, args):
            assert len(args) == len(self.signature), (self.entry, self.signature, args)
            assert stream == STREAM
            found = {"entry": self.entry, "shape": shape[:-1], "args": args, **options}
            self.launches.append(SimpleNamespace(**found))

        return launch


@pytest.fixture(autouse=True)
def _recorded(monkeypatch):
    monkeypatch.setattr(_indexed, "CudaKernel", Recorder)
    monkeypatch.setattr(_indexed, "overlaps", lambda index: True)
    monkeypatch.setattr(_indexed, "fault_address", lambda: FAULT)
    monkeypatch.setattr(_indexed.counters, "address", lambda index, stream, count: COUNTER)
    get_stream = "_cuda_getCurrentRawStream"
    monkeypatch.setattr(torch._C, get_stream, lambda index: STREAM, raising=False)
    monkeypatch.setattr(Recorder, "launches", [])


def built(monkeypatch, text, name):
    w, impl = Workload.parse(text), IMPLS[name]
    module = __import__(impl.build.__module__, fromlist=["compiled"])
    monkeypatch.setattr(module, "compiled", lambda task: SimpleNamespace(resources=None))
    executable = impl.build(impl.heuristic(w, H200), w, H200)
    return executable, w.operator.examples(w, "random", 0, "cpu")


def test_a_kernel_gets_the_tensors_the_result_and_the_flag(monkeypatch):
    run, tensors = built(monkeypatch, SCATTER, "scatter_tiled")
    pointers = [t.data_ptr() for t in tensors]
    for told in ({}, {"pointers": pointers}):
        out = run(*tensors, **told)
        (launch,) = Recorder.launches
        assert launch.args == (*pointers, out.data_ptr(), 0.0, FAULT)
        assert launch.shape == ((1, 1, 1), (run.block_threads, 1, 1), run.shared_bytes, 1)
        assert (launch.cooperative, launch.overlapping) == (False, False)
        Recorder.launches.clear()


def test_what_is_written_in_place_is_the_result_and_may_not_be_read_elsewhere(monkeypatch):
    run, (x, index, src) = built(monkeypatch, f"{SCATTER}!donate=x", "scatter_tiled")
    assert run(x, index, src) is x
    (launch,) = Recorder.launches
    assert launch.args[3] == x.data_ptr()
    for told in ({}, {"pointers": [x.data_ptr(), index.data_ptr(), x.data_ptr()]}):
        with pytest.raises(InvalidArgument, match="x is written in place and shares memory"):
            run(x, index, x, **told)


def test_blocks_that_meet_start_together_and_get_a_counter(monkeypatch):
    run, tensors = built(monkeypatch, MEETING, "scatter_exchange")
    run(*tensors)
    (launch,) = Recorder.launches
    assert launch.cooperative
    assert COUNTER in launch.args


def test_kernels_that_follow_one_another_overlap_and_share_a_workspace(monkeypatch):
    run, tensors = built(monkeypatch, SEVERAL, "rows_sorted")
    run(*tensors)
    first, *others = Recorder.launches
    assert [n.entry for n in Recorder.launches] == [n.entry for n in run.launches]
    assert not first.overlapping
    assert all(n.overlapping for n in others)
    written = {a for n in Recorder.launches for a in n.args}
    assert {t.data_ptr() for t in tensors[1:]} <= written


@pytest.mark.parametrize(
    "text",
    [
        "gather(x=f32[9000,64], dim=0, index=i64[{n},64]@strides(1,0))",
        "gather(x=f16[{n},128,40], dim=1, index=i32[{n},50,40])",
        "gather(x=f32[50000], dim=0, index=i64[{n}])",
    ],
)
def test_gathers_that_differ_in_the_outermost_size_alone_share_a_binary(text):
    impl = IMPLS["gather_cuda"]
    config = impl.Config(1, 2, 256, 0)
    one, other = (impl.task(config, Workload.parse(text.format(n=n)), H200) for n in (20000, 30001))
    assert one == other
