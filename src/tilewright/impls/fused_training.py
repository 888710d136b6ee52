"""A training step as two of our kernels' calls: the forward, then the gradients."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from tilewright.device import DeviceSpec
from tilewright.impl import IMPLS, Executable, Implementation
from tilewright.op import OPS, Workload
from tilewright.ops._training import halves, saved_names
from tilewright.space import ConfigSpace, config_text, param

SCHEDULES = 12
"""Schedules of a half to choose among: the untuned one, and those that its search begins with."""


class FusedTraining(Implementation):
    """The generated kernels of the forward and of the backward, one after the other.

    The forward leaves the statistics that the backward takes. A config names a schedule for each.
    """

    name = "fused_training"
    backend = "fused"
    op = (
        *("layer_norm_training", "rms_norm_training", "bias_layer_norm_training"),
        *("add_layer_norm_training", "add_rms_norm_training"),
        *("softmax_training", "lerp_training"),
    )

    @dataclass(frozen=True)
    class Config:
        forward: str = param("")
        backward: str = param("")

    def unsupported(self, w: Workload, device: DeviceSpec) -> str | None:
        reasons = [(h, IMPLS["fused"].unsupported(h, device)) for h in halves(w)]
        return next((f"{h.op}: {reason}" for h, reason in reasons if reason), None)

    def space(self, w: Workload, device: DeviceSpec) -> ConfigSpace[Any]:
        forward, backward = (tuple(_schedules(h, device)) for h in halves(w))
        return ConfigSpace(self.Config, {"forward": forward, "backward": backward})

    def heuristic(self, w: Workload, device: DeviceSpec) -> Any:
        return self.Config(*(next(iter(_schedules(h, device))) for h in halves(w)))

    def describe(self, config: Any, w: Workload, device: DeviceSpec) -> list[str]:
        lines = []
        for name, half in zip(("forward", "backward"), halves(w), strict=True):
            schedule = _schedules(half, device)[getattr(config, name)]
            described = IMPLS["fused"].describe(schedule, half, device)
            lines += [f"{name}, {line}" for line in described]
        return lines

    def build(self, config: Any, w: Workload, device: DeviceSpec) -> Executable:
        forward, backward = halves(w)
        fused = IMPLS["fused"]
        return TrainingStep(
            w,
            fused.build(_schedules(forward, device)[config.forward], forward, device),
            fused.build(_schedules(backward, device)[config.backward], backward, device),
        )


@functools.lru_cache(maxsize=256)
def _schedules(half: Workload, device: DeviceSpec) -> dict[str, Any]:
    """By text, the untuned schedule first."""
    fused = IMPLS["fused"]
    space, untuned = fused.space(half, device), fused.heuristic(half, device)
    promising = [c for c in fused.promising(half, device) if c in space]
    likely = [untuned, *(promising or space.neighbours(untuned))]
    return {config_text(c).replace(",", " "): c for c in likely[:SCHEDULES]}


class TrainingStep(Executable):
    """One call of the forward's kernels, one of the backward's."""

    def __init__(self, w: Workload, forward: Executable, backward: Executable):
        first, second = halves(w)
        self.forward, self.backward = forward, backward
        self.resources = backward.resources
        given = list(w.tensors)
        self.takes = [given.index(n) for n in first.tensors]
        names = [*given, *saved_names(w)]
        self.outputs = len(OPS[str(w.operator.training_of)].returns)
        self.gives = [names.index(n) for n in second.tensors]

    @property
    def workspace_bytes(self) -> int:  # type: ignore[override]
        return self.forward.workspace_bytes + self.backward.workspace_bytes

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = self.forward(*[tensors[i] for i in self.takes])
        saved = (found,) if isinstance(found, torch.Tensor) else found
        every = (*tensors, *saved)
        gradients = self.backward(*[every[i] for i in self.gives])
        outs = saved[: self.outputs]
        return *outs, *((gradients,) if isinstance(gradients, torch.Tensor) else gradients)
