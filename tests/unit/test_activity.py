"""What one call makes the device do."""

import torch

from tilewright.device import current_device
from tilewright.impl import IMPLS
from tilewright.measure.activity import Activity, activity_of
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
