"""What one call makes the device do."""

from types import SimpleNamespace

import torch

from tilewright.device import current_device
from tilewright.impl import IMPLS
from tilewright.measure.activity import MARK, Activity, activity_of, by_call, counted
from tilewright.op import Workload


def test_allocations_on_a_cpu_are_those_of_one_call():
    x = torch.randn(50, 100)
    assert activity_of(lambda t: t.softmax(1), [x]) == Activity(0, 0, 0, 1)
    assert activity_of(lambda t: t.view(-1), [x]).allocations == 0
    norm = activity_of(lambda t: torch.nn.functional.layer_norm(t, (100,)), [x])
    assert norm.allocations == 3  # the output, mean and rstd


def test_a_generated_kernel_allocates_its_output_alone():
    w = Workload.parse("rms_norm(x=f32[50,100], weight=f32[100])")
    _, spec = current_device("cpu")
    fused = IMPLS["fused"]
    executable = fused.build(fused.heuristic(w, spec), w, spec)
    tensors = w.operator.examples(w, "random", 0, torch.device("cpu"))
    assert activity_of(executable, tensors) == Activity(0, 0, 0, 1)


def event(name, told=None):
    return SimpleNamespace(name=name, _metadata_json=told)


def test_kernels_copies_and_sets_of_each_call_are_named_with_their_bytes():
    copy, kernel = "Memcpy DtoD (Device -> Device)", "void at::native::vectorized<" + 200 * "x"
    calls = by_call(
        [
            *(event(f"void at::{MARK}(long)"), event(kernel), event(kernel)),
            *(event(copy, '"stream": 7, "bytes": 4096'), event("Memset (Device)", '"stream": 7')),
            *(event(MARK), SimpleNamespace(name="fused")),  # a release that tells nothing of it
        ]
    )
    first, second = (counted(names, 3) for names in calls)
    assert (first.kernels, first.memcpys, first.memsets, first.allocations) == (2, 1, 1, 3)
    assert first.names == {
        f"{copy}, 4096 bytes": 1,
        "Memset (Device)": 1,
        kernel[:97] + "...": 2,
    }
    assert second == Activity(1, 0, 0, 3, {"fused": 1})


def test_no_more_names_are_kept_than_a_result_file_should_hold():
    found = counted([*(f"kernel{k}" for k in range(20)), "Memset (Device)"], 0)
    assert next(iter(found.names)) == "Memset (Device)"
    assert (len(found.names), found.names["others"], sum(found.names.values())) == (13, 9, 21)
