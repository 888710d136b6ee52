"""Registers of a thread: what launch bounds leave it, and caps in their place."""

from __future__ import annotations

from tilewright.compile.nvrtc import capped
from tilewright.device import REGISTER_STEP

LEAST_CAP = 24
"""Compilers take no cap below what calls of functions need."""
ARITHMETIC = 40
"""What a kernel that reduces needs besides the values it keeps: addresses, counters, a step's
operands."""


def launch_bounds(block_threads: int, min_blocks: int, max_registers: int) -> str:
    """What a kernel is declared with: a cap, if it is not 0, takes the place of launch bounds."""
    bounds = f"__launch_bounds__({block_threads}, {min_blocks})"
    return capped(bounds, max_registers) if max_registers else bounds


def capped_in_vain(max_registers: int, left: int) -> str | None:
    """Why a cap does not suit a thread to whom launch bounds leave so many registers, or None."""
    if not max_registers:
        return None
    if max_registers >= left:
        return f"launch bounds leave a thread {left} registers: max_registers={max_registers}"
    if max_registers % REGISTER_STEP or max_registers < LEAST_CAP:
        return f"registers are capped at {LEAST_CAP} or more, in steps of {REGISTER_STEP}"
    return None
