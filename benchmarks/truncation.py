"""By how much sums of operands of one sign come out too small, on average: a Markdown table.

Operands are the absolute values of a workload's example, as after a ReLU. A tensor core truncates
what it adds, so such sums lose a little each time.

    python benchmarks/truncation.py --impl conv2d_weight_grad_sm90 "conv2d_weight_grad(...)"
    python benchmarks/truncation.py --impl conv2d_weight_grad_sm90 --config split_k=8 "..."
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import click
import torch
from torch import Tensor

from tilewright.cli.options import ConfigValues
from tilewright.device import spec_of
from tilewright.errors import InvalidArgument
from tilewright.impl import IMPLS
from tilewright.impls._vendor import vendor
from tilewright.measure.candidate import Candidate
from tilewright.op import Workload


def shortfall(
    runs: Sequence[Callable[..., Tensor]], w: Workload, device: torch.device
) -> list[tuple[float, float]]:
    """For each run the mean over all elements of (truth - result) / truth, and of truth - result in
    ulps of the result's dtype at the truth."""
    tensors = [t.abs() for t in w.operator.examples(w, "random", 0, device)]
    (truth,) = w.operator.truth(w, tensors)
    limits = torch.finfo(w.outputs[0].torch_dtype)
    if float(truth.max()) > limits.max:
        raise InvalidArgument(
            f"{w}: sums reach {float(truth.max()):.6g}, {limits.dtype} ends at {limits.max:.6g}; "
            "take fewer pixels or out_dtype=f32"
        )
    ulp = limits.eps * torch.exp2(truth.log2().floor())
    missing = [truth - run(*tensors).double() for run in runs]
    return [(float((m / truth).mean()), float((m / ulp).mean())) for m in missing]


@click.command()
@click.argument("workloads", nargs=-1, required=True)
@click.option("--impl", "implementation", required=True)
@click.option("--config", type=ConfigValues(), default={}, help="Other knobs untuned.")
def main(workloads: tuple[str, ...], implementation: str, config: dict[str, Any]) -> None:
    index = 0 if torch.cuda.is_available() else None
    device, spec = torch.device("cpu" if index is None else "cuda"), spec_of(index)
    impl = IMPLS[implementation]
    torch.backends.cudnn.benchmark = True  # as where baselines are timed
    click.echo("| workload | own | own, ulp | PyTorch | PyTorch, ulp |\n|--|--|--|--|--|")
    for w in map(Workload.parse, workloads):
        untuned = Candidate.of(implementation, impl.heuristic(w, spec))
        chosen = Candidate.of(implementation, untuned.values | config)
        own = impl.build(chosen.resolve(w, spec), w, spec)
        cells = [f"{n:.1e}" for pair in shortfall([own, vendor(w)], w, device) for n in pair]
        click.echo(f"| {w} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
