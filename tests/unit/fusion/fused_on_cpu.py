"""Fused workloads on both targets, that of GPUs emulated."""

import torch

from emulated import Emulated
from tilewright.device import DEVICES, spec_of
from tilewright.fusion.cuda import target
from tilewright.impl import IMPLS
from tilewright.impls.fused import graph_of
from tilewright.measure.verify import Verifier

H200 = DEVICES["h200"]


def assert_verified(w, lucky=False):
    """Untuned kernels of both targets against fp64.

    `lucky`: PyTorch's own rounding errors on a few elements, small by luck, are no bound.
    """
    fused, spec = IMPLS["fused"], spec_of(None)
    assert fused.unsupported(w, spec) is None, fused.unsupported(w, spec)
    graph = graph_of(w)
    built = fused.build(fused.heuristic(w, spec), w, spec)
    for kernel in (built, Emulated(graph, target.heuristic(graph, H200), H200, w)):
        found = Verifier(w, torch.device("cpu")).check(kernel)
        excused = lucky and "PyTorch's largest error" in found.message
        assert found.ok or excused, found.message
