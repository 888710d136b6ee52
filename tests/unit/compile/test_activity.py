"""What one call makes the device do."""

import re
from types import SimpleNamespace

import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import EventList, FunctionEvent, Interval

from tilewright.device import current_device
from tilewright.impl import IMPLS
from tilewright.measure.activity import MARK, Activity, activities_of, by_call, counted
from tilewright.op import Workload


def test_allocations_on_a_cpu_are_those_of_one_call():
    x = torch.randn(50, 100)
    calls = [
        lambda t: t.softmax(1),
        lambda t: t.view(-1),
        lambda t: torch.nn.functional.layer_norm(t, (100,)),
    ]
    softmax, view, norm = activities_of(calls, [x])
    assert softmax == Activity(0, 0, 0, 1)
    assert view.allocations == 0
    assert norm.allocations == 3  # the output, mean and rstd


def test_a_generated_kernel_allocates_its_output_alone():
    w = Workload.parse("rms_norm(x=f32[50,100], weight=f32[100])")
    _, spec = current_device("cpu")
    fused = IMPLS["fused"]
    executable = fused.build(fused.heuristic(w, spec), w, spec)
    tensors = w.operator.examples(w, "random", 0, torch.device("cpu"))
    assert activities_of([executable], tensors) == [Activity(0, 0, 0, 1)]


def on_device(name, id=0, start=0, told=None, annotation=False):
    return SimpleNamespace(
        name=name,
        id=id,
        device_type=DeviceType.CUDA,
        time_range=Interval(start, start + 1),
        is_user_annotation=annotation,
        _metadata_json=told,
    )


def on_host(name, id, start, end):
    return FunctionEvent(id, name, thread=1, start_us=start, end_us=end)


def test_kernels_copies_and_sets_of_each_call_are_named_with_their_bytes():
    copy, kernel = "Memcpy DtoD (Device -> Device)", "void at::native::vectorized<" + 200 * "x"
    calls = by_call(
        [
            on_device("Memset (Device)", start=4, told='"stream": 7'),
            on_device(f"void at::{MARK}(long)", start=0),
            *(on_device(kernel, start=1), on_device(kernel, start=2)),
            on_device(copy, start=3, told='"stream": 7, "bytes": 4096'),
            on_device(MARK, start=5),
            on_device("fused", start=6),
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


def test_a_copy_or_set_is_named_with_the_innermost_operator_that_launched_it():
    host = EventList(
        [
            on_host("aten::zeros", 1, 0, 20),
            on_host("aten::zero_", 7, 5, 20),  # its own id, beside a correlation id of 7
            on_host("cudaMemsetAsync", 7, 10, 12),
            on_host("aten::relu", 2, 30, 40),
            on_host("cudaLaunchKernel", 8, 31, 32),
            on_host("aten::to", 3, 50, 70),
            on_host("a range of the program", 4, 55, 65),
            on_host("cuMemcpyDtoDAsync_v2", 9, 60, 61),
            on_host("cuMemsetD8Async", 10, 80, 81),
        ]
    )
    host._build_tree()
    device = [
        on_device(MARK),
        on_device("Memset (Device)", 7, 11, '"bytes": 64'),
        on_device("relu_kernel", 8, 33),
        on_device("a range of the program", 9, 60, annotation=True),
        on_device("Memcpy DtoD (Device -> Device)", 9, 62),
        on_device("Memset (Device)", 10, 82, '"bytes": 32'),
    ]
    names = [
        "Memset (Device), 64 bytes, aten::zero_",
        "relu_kernel",
        "Memcpy DtoD (Device -> Device), aten::to",
        "Memset (Device), 32 bytes",
    ]
    assert by_call([*host, *device]) == [names]
    assert by_call(device) == [[re.sub(", aten::.*", "", name) for name in names]]
    found = counted(names, 0)
    assert (found.kernels, found.memcpys, found.memsets) == (1, 1, 2)


def test_no_more_names_are_kept_than_a_result_file_should_hold():
    found = counted([*(f"kernel{k}" for k in range(20)), "Memset (Device)"], 0)
    assert next(iter(found.names)) == "Memset (Device)"
    assert (len(found.names), found.names["others"], sum(found.names.values())) == (13, 9, 21)
