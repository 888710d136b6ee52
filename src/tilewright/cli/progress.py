"""What commands show while they measure: one live line on a terminal, else plain lines."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from tilewright.cli.render import brief, duration
from tilewright.environment import idle_cores
from tilewright.measure.candidate import Candidate, Description
from tilewright.op import Workload
from tilewright.report import Row
from tilewright.tune.progress import Progress

REFRESH_PER_S = 8
SPARE_CORES = 0.3
"""So much of a core may be busy with a system's own work without a word."""


class Shown(Progress):
    """Plain lines on stderr, one for each workload finished; a context manager."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.started_s = time.monotonic()
        self.total = self.index = 0
        self.unchecked_threads = 0
        self.name, self.step = "", "starting"  # PyTorch, in a process of its own: seconds
        self.tally = self.fastest = ""

    def __enter__(self) -> Shown:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Nothing to put away."""

    def say(self, line: str) -> None:
        print(line, file=self.stream, flush=True)

    def refresh(self) -> None:
        """The state changed."""

    def device(self, device: Description, method: str) -> None:
        self.say(f"on {device.key}, timed by {method}")
        if method == "cpu":
            self.unchecked_threads = device.spec.threads

    def workload(self, w: Workload, index: int, total: int) -> None:
        self.name, self.index, self.total = brief(str(w)), index, total
        self.step = self.tally = self.fastest = ""
        self.refresh()

    def phase(self, name: str) -> None:
        if self.unchecked_threads:  # what is read from the records has no phases
            self.look_around(self.unchecked_threads)
            self.unchecked_threads = 0
        self.step = name
        self.refresh()

    def look_around(self, threads: int) -> None:
        idle = idle_cores()
        if idle is not None and idle < threads - SPARE_CORES:
            self.say(
                f"other programs leave {idle:.1f} cores to {threads} threads: times will be too "
                "long, and chance may choose; measure again when they have ended (tune: --force)"
            )

    def counts(self, compiled: int, verified: int, failed: int) -> None:
        failures = f", {failed} failed" if failed else ""
        self.tally = f"{compiled} compiled, {verified} verified{failures}"
        self.refresh()

    def best(self, candidate: Candidate, us: float) -> None:
        self.fastest = f"best {duration(us)}"
        self.refresh()

    def finished(self, w: Workload, row: Row | None, reason: str = "") -> None:
        outcome = f"{row.chosen} {duration(row.chosen_us)}" if row else f"failed: {reason}"
        self.ended(w, f"{outcome} ({self.tally})" if self.tally else outcome)

    def ended(self, w: Workload, outcome: str) -> None:
        elapsed = f"{time.monotonic() - self.started_s:.0f} s"
        self.say(f"[{self.index + 1}/{self.total}] {elapsed} {brief(str(w))}: {outcome}")


class ShownLive(Shown):
    """The same lines, and below them what is being done now."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self.live = Live(
            console=Console(file=stream, highlight=False, markup=False),
            get_renderable=self.line,
            refresh_per_second=REFRESH_PER_S,
            transient=True,
        )

    def __enter__(self) -> ShownLive:
        self.live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.live.stop()

    def say(self, line: str) -> None:
        self.live.console.print(Text(line))

    def line(self) -> Text:
        elapsed = f"{time.monotonic() - self.started_s:.0f} s"
        place = f"[{self.index + 1}/{self.total}]" if self.total else ""
        parts = (elapsed, self.step, self.tally, self.fastest)
        head = f"{place} {self.name}\n" if place else ""
        return Text(f"{head}    {' · '.join(p for p in parts if p)}")


def shown() -> Shown:
    """Live on a terminal, plain lines elsewhere; on stderr, so that results can be piped."""
    return ShownLive(sys.stderr) if sys.stderr.isatty() else Shown(sys.stderr)
