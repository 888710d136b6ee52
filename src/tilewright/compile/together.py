"""Kernels of several tasks as one source, which a compiler makes in one go.

What NVRTC starts with, and the beginning that sources have in common, take 30 ms: more than most
pointwise kernels, and paid once here. Each kernel's machine code is what it would be alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from tilewright.build import CompileTask

MOST = 8
"""Tasks at a time: more share little more, and have whoever waits for one wait for all."""

_KERNEL = re.compile(r'extern "C" __global__ void (?:__\w+__\([^()]*\) )*(\w+)\(')
_REPORT = re.compile(r"^.*Compiling entry function '([^']+)'", re.M)


def may_join(one: CompileTask, other: CompileTask) -> bool:
    """Whether two tasks can be made in one go."""
    return (
        one.compiler == other.compiler == "nvrtc"
        and one.flags == other.flags
        and 0 < one.shared == other.shared
        and one.source[: one.shared] == other.source[: one.shared]
    )


def joined(tasks: Sequence[CompileTask]) -> tuple[str, list[dict[str, str]]]:
    """The source of all tasks' kernels, and what each task's are called in it, by their names."""
    first = tasks[0]
    assert all(may_join(first, task) for task in tasks)
    parts, symbols = [first.source[: first.shared]], []
    for k, task in enumerate(tasks):
        body = task.source[task.shared :]
        own = {name: f"{name}_{k}" for name in _KERNEL.findall(body)}
        assert task.entry in own, (task.entry, own)
        parts += [f"#define {name} {symbol}" for name, symbol in own.items()]
        parts += [f"namespace of_{k} {{", body, "}"]
        parts += [f"#undef {name}" for name in own]
        symbols.append(own)
    return "\n".join(parts), symbols


def log_of(symbols: dict[str, str], log: str) -> str:
    """What a compiler reported of one task's kernels, under the names they have alone."""
    starts = [(found.start(), found[1]) for found in _REPORT.finditer(log)]
    ends = [at for at, _ in starts[1:]] + [len(log)]
    reports = {symbol: log[at:end] for (at, symbol), end in zip(starts, ends, strict=True)}
    return "".join(
        re.sub(rf"\b{symbol}\b", name, reports[symbol]) for name, symbol in symbols.items()
    ).rstrip()
