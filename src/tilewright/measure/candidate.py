"""What a runner is asked about and what it answers: candidates, outcomes, the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from tilewright.build import Resources
from tilewright.device import DeviceSpec
from tilewright.errors import CompileError, CompileTimeout, InvalidMeasurement, WorkerDied
from tilewright.impl import IMPLS
from tilewright.measure.verify import Verdict
from tilewright.op import Workload


@dataclass(frozen=True)
class Candidate:
    """An implementation with one config, by name and values: it crosses process borders.

    Values are in the order of their names, so that a config read from a record is equal.
    """

    implementation: str
    config: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, implementation: str, config: Any) -> Candidate:
        """From a Config dataclass or a mapping of its values."""
        values = config if isinstance(config, Mapping) else asdict(config)
        return cls(implementation, tuple(sorted(values.items())))

    @property
    def values(self) -> dict[str, Any]:
        return dict(self.config)

    def resolve(self, w: Workload, device: DeviceSpec) -> Any:
        """The Config dataclass of these values. Raises InvalidArgument for an unknown knob."""
        return IMPLS[self.implementation].space(w, device).config(self.values)

    def __str__(self) -> str:
        return f"{self.implementation}({','.join(f'{n}={v}' for n, v in self.config)})"


AsCalled = Callable[[Workload, Sequence[Sequence[Tensor]]], list[Callable[[], Any]]]
"""Gives the call of an operator as a person writes it. It crosses process borders, so it is a
module's function or a partial of one."""

COPY = Candidate("copy")
"""Not an implementation: `out.copy_(x)` on the workload's main tensor, timed beside the others."""


@dataclass(frozen=True)
class Outcome:
    """What became of one candidate before it was timed.

    Attributes:
        status: "ok", or compile_error, launch_error, wrong_result, timeout, invalid.
        message: why, unless ok.
        build_s: seconds that building took, compilation included.
        fatal: the process that ran it can run no other candidate (a lost CUDA context).
    """

    status: str
    message: str = ""
    verdict: Verdict | None = None
    resources: Resources | None = None
    workspace_bytes: int = 0
    build_s: float = 0.0
    fatal: bool = False

    @classmethod
    def of_error(cls, error: Exception, fatal: bool = False) -> Outcome:
        status = next((s for kind, s in _STATUSES if isinstance(error, kind)), "launch_error")
        return cls(status, f"{type(error).__name__}: {error}", fatal=fatal)


class WorkerHung(WorkerDied):
    """The measuring process did not answer within its limit and was killed."""


_STATUSES = (
    (CompileTimeout, "timeout"),
    (WorkerHung, "timeout"),
    (CompileError, "compile_error"),
    (InvalidMeasurement, "invalid"),
)


@dataclass(frozen=True)
class Description:
    """The device a runner measures on; `key`, `info` and `versions` as records carry them."""

    device: str
    spec: DeviceSpec
    key: str
    info: dict[str, Any]
    versions: dict[str, str]


@dataclass(frozen=True)
class Limits:
    """What physics says of one workload, in microseconds; 0 where unknown.

    `floor_us` is read off measured ceilings; a time below `hard_limit_us` is a broken measurement.
    """

    floor_us: float
    hard_limit_us: float
