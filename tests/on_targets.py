"""Fused operators of fp32 tensors on both targets: sources, and what they compute on a CPU."""

import dataclasses

import torch

from emulated import Emulated
from tilewright.compile.cache import compiled
from tilewright.device import DEVICES
from tilewright.fusion.cpp import target as cpp_target
from tilewright.fusion.cuda import target as cuda_target
from tilewright.impls.fused import ReadAgain, graph_of, is_read_again
from tilewright.op import Workload

H200 = DEVICES["h200"]
CPU = dataclasses.replace(DEVICES["cpu"], threads=4)
TARGETS = {"cuda": (cuda_target, H200), "cpp": (cpp_target, CPU)}
LENGTHS = [3 + 7 * n % 1000 for n in range(200)]


def written(operator, **shapes):
    """The workload of an operator on fp32 tensors of these shapes."""
    tensors = (f"{name}=f32[{','.join(map(str, s))}]" for name, s in shapes.items())
    return Workload.parse(f"{operator}({', '.join(tensors)})")


def emitted(target, w):
    """The graph, its untuned schedule, and the task that compiles it."""
    module, device = TARGETS[target]
    graph = graph_of(w)
    config = module.heuristic(graph, device)
    return graph, config, module.task(graph, config, device)


def right(w, tensors):
    return w.operator.reference(**w.call([t.double() for t in tensors]))


def made(w, seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(t.shape, generator=generator) for t in w.tensors.values()]


def executable(target, w):
    graph, config, task = emitted(target, w)
    if target == "cuda":
        return Emulated(graph, config, H200, w)
    kernels = cpp_target.executable(graph, config, w, compiled(task), CPU)
    return ReadAgain(kernels, graph) if is_read_again(graph) else kernels
