"""What is too large for kernels runs in slices, one after the other, with the same result."""

import pytest
import torch
from cuda_on_cpu import DEVICE, OnCpu

from tilewright.compile import cxx
from tilewright.device import DEVICES, spec_of
from tilewright.dispatch import evidence, selection
from tilewright.dispatch.evidence import OperatorRecords
from tilewright.dispatch.slices import of_slices, slices_of
from tilewright.errors import SharedMemory
from tilewright.impl import IMPLS, Executable
from tilewright.impls._vendor import vendor
from tilewright.measure.verify import Verifier
from tilewright.op import Workload

IN_SLICES = [
    "scatter_add(x=f32[50], dim=0, index=i64[300], src=f32[300])",
    "scatter_add(x=f64[50,3], dim=0, index=i64[100,3], src=f64[100,3])!donate=x",
    "scatter_add(x=f16[30,9], dim=1, index=i64[30,11], src=f16[30,11])",
    "scatter_reduce(x=f32[30,9], dim=1, index=i64[30,11], src=f32[30,11], reduce=mean, "
    "include_self=False)",
    "scatter_reduce(x=i64[9,30], dim=0, index=i64[11,30], src=i64[11,30], reduce=prod)",
    "scatter_reduce(x=bf16[9,30], dim=0, index=i64[11,30], src=bf16[11,30], reduce=amax)!donate=x",
    "index_add(x=f32[9,4], dim=0, index=i64[333], source=f32[333,4], alpha=2.0)",
    "index_add(x=f32[90,4,5], dim=1, index=i64[7], source=f32[90,7,5])!donate=x",
    "index_reduce(x=f32[90,4], dim=1, index=i64[7], source=f32[90,7], reduce=prod)",
    "index_add(x=f32[9,4]@strides(7,1), dim=0, index=i64[99]@strides(3), source=f32[99,4])",
]
UPDATES = [
    "scatter(x=f32[50], dim=0, index=i64[300], src=f32[300])",
    "scatter(x=f32[9,30]@strides(1,9), dim=0, index=i64[40,30], src=2.5)!donate=x",
    "scatter(x=i32[60,4], dim=1, index=i64[60,9], src=i32[60,9])",
]
WHOLE = [
    "scatter_add(x=f32[50], dim=0, index=i64[99], src=f32[99])",  # none is large
    "scatter_add(x=f16[50], dim=0, index=i64[300], src=f16[300])",  # rounded once
    "scatter_reduce(x=f32[5], dim=0, index=i64[300], src=f32[300], reduce=prod)",
    "scatter_reduce(x=f32[5], dim=0, index=i64[300], src=f32[300], reduce=mean)",
    "scatter_reduce(x=f32[5], dim=0, index=i64[300], src=f32[300], reduce=amax, "
    "include_self=False)",
    "scatter_add(x=f32[300], dim=0, index=i64[5], src=f32[5])",  # the places are many
    "scatter_add(x=f32[30,9], dim=1, index=i64[20,11], src=f32[20,11])",
    "gather(x=f32[30], dim=0, index=i64[300])",
    "embedding_backward(grad=f32[300,4], index=i64[300], num_weights=5)",
]


@pytest.mark.parametrize("text", [*IN_SLICES, *UPDATES])
def test_slices_one_after_the_other_give_the_whole(text):
    w = Workload.parse(text)
    expected = vendor(w)(*w.operator.examples(w, "integer", 0, "cpu")).clone()
    if text in UPDATES:  # of PyTorch's kernels on a CPU the last write wins, too
        assert w.operator.indexed.last_wins
    slices = slices_of(w, 100)
    assert len(slices) > 1
    for name in slices[0].tensors:
        assert sum(s.workload[name].shape[0] for s in slices) == w[name].shape[0]
        assert all(s.workload[name].numel < 100 for s in slices)
    tensors = w.operator.examples(w, "integer", 0, "cpu")
    before = tensors[0].clone()
    found = of_slices(w, slices, [vendor(s.workload) for s in slices])(*tensors)
    assert torch.equal(found, expected)
    assert found.stride() == w.outputs[0].real_strides
    if w.donated:
        assert found.data_ptr() == tensors[0].data_ptr()
    else:
        assert torch.equal(tensors[0], before)


@pytest.mark.parametrize("text", [*IN_SLICES, *UPDATES])
def test_slices_are_what_their_tensors_are(text):
    w = Workload.parse(text)
    seen = []

    def run_of(one):
        def run(*tensors):
            named = zip(one.workload.tensors.values(), tensors, strict=True)
            for spec, t in named:
                assert (spec.shape, spec.real_strides) == (tuple(t.shape), t.stride())
                assert t.data_ptr() % spec.align == 0
            seen.append(one)

        return run

    slices = slices_of(w, 100)
    of_slices(w, slices, [run_of(s) for s in slices])(*w.operator.examples(w, "random", 0, "cpu"))
    assert seen == slices


@pytest.mark.parametrize("text", WHOLE)
def test_what_slices_would_change_or_is_small_has_none(text):
    assert slices_of(Workload.parse(text), 100) == []


def test_what_shares_memory_is_refused_before_any_slice_is_written():
    w = Workload.parse("scatter_add(x=f32[200], dim=0, index=i64[200], src=f32[200])!donate=x")
    memory, index = torch.ones(300), torch.zeros(200, dtype=torch.int64)
    slices = slices_of(w, 100)
    run = of_slices(w, slices, [vendor(s.workload) for s in slices])
    with pytest.raises(SharedMemory):
        run(memory[:200], index, memory[100:])
    assert (memory == 1).all()


class InSlices(Executable):
    """Kernels of ours for each slice, on a CPU."""

    def __init__(self, w, slices):
        chosen = [selection._ordered(s.workload, torch.device("cuda"), DEVICE) for s in slices]
        runs = [
            OnCpu(IMPLS[choice.implementation], choice.config, s.workload)
            for s, choice in zip(slices, chosen, strict=True)
        ]
        self._run, self.in_place = of_slices(w, slices, runs), bool(w.donated)

    def __call__(self, *tensors):
        return self._run(*tensors)


@pytest.mark.skipif(cxx.missing() is not None, reason=str(cxx.missing()))
@pytest.mark.parametrize(
    "text",
    [
        "scatter(x=f32[50], dim=0, index=i64[300], src=f32[300])!donate=x!indices=zipf",
        "scatter_add(x=f32[50], dim=0, index=i64[300], src=f32[300])!indices=few_bins",
        "scatter_add(x=f16[30,9], dim=1, index=i64[30,11], src=f16[30,11])!indices=zipf",
        "index_add(x=f32[9,4], dim=0, index=i64[99], source=f32[99,4], alpha=2.0)!donate=x",
    ],
)
def test_kernels_are_right_in_slices_and_stay_in_their_memory(text):
    w = Workload.parse(text)
    slices = slices_of(w, 150)
    assert len(slices) > 1
    verdict = Verifier(w, torch.device("cpu")).check(InSlices(w, slices))
    assert verdict.ok, verdict.message
    assert verdict.deterministic


FAR = 2**31 + 2**20


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (f"scatter_add(x=f32[50], dim=0, index=i32[{FAR}], src=f32[{FAR}])", 2),
        (f"scatter_add(x=f16[4,{FAR // 2}], dim=1, index=i64[4,50], src=f16[4,50])", 4),
        (f"scatter(x=f32[50], dim=0, index=i64[{2 * FAR}], src=f32[{2 * FAR}])!donate=x", 3),
        (f"index_add(x=f32[50,2], dim=0, index=i64[{FAR}], source=f32[{FAR},2])", 3),
    ],
)
def test_beyond_what_kernels_number_they_run_in_slices(monkeypatch, text, count):
    device = torch.device("cuda:0")
    monkeypatch.setattr(
        selection,
        "device_spec_of",
        lambda d: DEVICES["h200"] if d.type == "cuda" else spec_of(None),
    )
    monkeypatch.setattr(evidence, "records_of", lambda device, op: OperatorRecords([]))
    choice = selection.choose(Workload.parse(text), device)
    assert len(choice.slices) == count
    assert f"in {count} slices" in choice.reason
    for s, of_slice in choice.slices:
        assert IMPLS[of_slice.implementation].keeps_promises
        assert of_slice.implementation != "scatter_positions"
        reason = IMPLS[of_slice.implementation].unsupported(s.workload, DEVICES["h200"])
        assert reason is None
