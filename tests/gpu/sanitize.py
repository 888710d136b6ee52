"""Own kernels under NVIDIA's compute-sanitizer.

    python tests/gpu/sanitize.py                       memcheck, racecheck and initcheck of all
    python tests/gpu/sanitize.py --only sm90 --tool memcheck
    python tests/gpu/sanitize.py --list --device h200  what would run there; needs no GPU

Exit code 1 if a tool reports anything, 2 if --only and --without leave no case. Cases that cannot
run here are told. Without a GPU or the tool nothing runs, and it says so.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import torch

from compile_ahead import compile_all
from flat_index_case import FlatIndexCase
from sanitized_cases import ALL, Case
from tilewright.device import DEVICES, DeviceSpec, spec_of

TOOLS = ("memcheck", "racecheck", "initcheck")
"""Accesses out of bounds, races in shared memory, reads of memory that nothing was written to."""
REPORTED, LATE, LIMIT_S = 99, 124, 900
"""Exit codes where the tool reports something, and of `timeout`; seconds for one implementation."""
DROPPED = "it reads four sums at once, and drops those that nobody has written"
NOT_FOLLOWED = {
    "racecheck": {
        "conv2d_weight_grad_narrow_sm90": "its warps wait for one another at mbarriers, which "
        "racecheck does not follow (docs/measured_facts.md)",
        **dict.fromkeys(
            ("exchange=sent", "depthwise_fma_sm90", "x=f16[2503,"),
            "racecheck misses a barrier behind others that warps pass unequally often "
            "(docs/measured_facts.md)",
        ),
    },
    "initcheck": {
        **dict.fromkeys(("depthwise_sm90", "depthwise_fma_sm90"), DROPPED),
        "rows_sorted_torch": "it reads partial rows ahead, and drops those that nobody has written "
        "(of rows_sorted, whose kernels these are, they lie where the sort was)",
    },
}
"""By tool: cases that hold a text are not looked at, and why."""


def without(cases: Sequence[Any], texts: Sequence[str]) -> list[Any]:
    """Those that hold none of the texts."""
    return [case for case in cases if not any(text in str(case) for text in texts)]


def sanitizer() -> str | None:
    return shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path="/usr/local/cuda/bin"
    )


def run(cases: Sequence[Case | FlatIndexCase]) -> None:
    """The last one told is at work."""
    spec = spec_of(0)
    for case in cases:
        print(case, flush=True)
        case.run(spec)


def report(tool: str, program: Sequence[str], command: str) -> str | None:
    """What the tool says of a program; None if that is nothing.

    Args:
        command: compute-sanitizer.
    """
    limited = ["timeout", "--kill-after=10", str(LIMIT_S)]  # ends what the tool has started, too
    call = [*limited, command, "--tool", tool, "--error-exitcode", str(REPORTED), *program]
    # Tensors have allocations of their own, so that memcheck knows their ends.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(
        call, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )
    if done.returncode == 0:
        return None
    known = {REPORTED: "reports", LATE: f"did not end in {LIMIT_S} s"}
    how = known.get(done.returncode, f"exit code {done.returncode}")
    return f"{how}:\n{done.stdout}"


def listed(cases: Sequence[Case | FlatIndexCase], device: DeviceSpec) -> list[str]:
    """A line for each case: what runs, or why it does not."""
    refusals = [case.refusal(device) for case in cases]
    return [
        f"{case}" if why is None else f"{case}: not on {device.name}: {why}"
        for case, why in zip(cases, refusals, strict=True)
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="tell what would run")
    parser.add_argument("--device", choices=list(DEVICES), help="of --list; else the first GPU")
    parser.add_argument("--only", action="append", default=[], help="cases that hold this text")
    parser.add_argument("--without", action="append", default=[], help="cases that do not")
    parser.add_argument("--tool", action="append", choices=TOOLS, help="only this one")
    parser.add_argument("--run", metavar="I", help="one implementation's, here and by no tool")
    args = parser.parse_args(argv)
    asked = [c for c in ALL if not args.only or any(text in str(c) for text in args.only)]
    cases = without(asked, args.without)
    if not cases:
        parser.error("no case holds what --only asks for and nothing of --without")
    if args.list and args.device:
        print("\n".join(listed(cases, DEVICES[args.device])))
        return 0
    if not torch.cuda.is_available():
        print("nothing is run: torch sees no GPU")
        return 0
    spec = spec_of(0)
    if args.list:
        print("\n".join(listed(cases, spec)))
        return 0
    refused = {case: why for case in cases if (why := case.refusal(spec)) is not None}
    cases = [case for case in cases if case not in refused]
    if args.run:
        run([case for case in cases if case.implementation == args.run])
        return 0
    if (command := sanitizer()) is None:
        print("nothing is run: there is no compute-sanitizer; it comes with the CUDA toolkit")
        return 0
    for case, why in refused.items():
        print(f"{case}: not run: {why}", flush=True)
    tasks = (case.task(spec) for case in cases)
    compile_all(dict.fromkeys(task for task in tasks if task is not None))
    wrong = 0
    for tool in args.tool or TOOLS:
        left_out = NOT_FOLLOWED.get(tool, {})
        for text, why in left_out.items():
            for case in set(cases) - set(without(cases, [text])):
                print(f"{tool} {case}: not run: {why}", flush=True)
        left = without(cases, [*left_out])
        for name in dict.fromkeys(case.implementation for case in left):
            program = [sys.executable, __file__, "--run", name]
            program += [word for text in args.only for word in ("--only", text)]
            program += [word for text in (*args.without, *left_out) for word in ("--without", text)]
            found = report(tool, program, command)
            count = sum(case.implementation == name for case in left)
            print(f"{tool} {name}: {found or f'{count} clean'}", flush=True)
            wrong += found is not None
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
