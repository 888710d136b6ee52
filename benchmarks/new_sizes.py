"""What a call takes whose number of rows is new, with a kernel that another number built.

    python benchmarks/new_sizes.py [--device cpu]

A layer norm of a sum, [rows, 256] of fp32, and its gradients: the first call of each number of
rows, and another of it. In milliseconds, median of 30.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

import tilewright as tw

WARM_UP = (8, 16, 24, 33, 40, 400)
ROWS = range(50, 80)


@tw.fuse
def residual_norm(x: Tensor, r: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x + r, x.shape[-1:], w, b)


def milliseconds(step: Callable[[], object]) -> float:
    began = time.perf_counter()
    step()
    return 1e3 * (time.perf_counter() - began)


def calls(rows: int, device: str, learning: bool) -> tuple[float, float]:
    """Of the first call, and of another."""
    x, r, w, b = (
        torch.randn(*shape, device=device, requires_grad=learning)
        for shape in ((rows, 256), (rows, 256), (256,), (256,))
    )

    def step() -> None:
        out = residual_norm(x, r, w, b)
        if learning:
            out.backward(x.detach())
        if device == "cuda":
            torch.cuda.synchronize()

    return milliseconds(step), milliseconds(step)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    device = parser.parse_args().device
    for learning in (False, True):
        fourth = [calls(rows, device, learning)[0] for rows in WARM_UP][3]
        new, again = zip(*(calls(rows, device, learning) for rows in ROWS), strict=True)
        what = "with gradients" if learning else "forward"
        times = f"new {statistics.median(new):.1f}, again {statistics.median(again):.3f}"
        print(f"{what}: {times}; the fourth, which is traced with symbols, {fourth:.0f}")


if __name__ == "__main__":
    main()
