"""Example tensors of a workload: what it is verified and timed on."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tilewright.tensor_spec import WHOLE, TensorSpec

SMALL = range(-3, 4)


def random_tensors(
    specs: Mapping[str, TensorSpec],
    kind: str = "random",
    seed: int = 0,
    device: torch.device | str = "cpu",
    whole: Mapping[str, range] | None = None,
) -> dict[str, torch.Tensor]:
    """Standard normal tensors, or small integers (kind="integer"); never zeros throughout. Tensors
    of whole numbers hold some of `whole`, by name."""
    generator = torch.Generator(device=device).manual_seed(seed)
    tensors = {}
    for name, spec in specs.items():
        t = spec.empty(device)
        base = _distinct(t)
        if kind == "integer" or not spec.torch_dtype.is_floating_point:
            among = (whole or {}).get(name, SMALL) if spec.dtype in WHOLE else SMALL
            values = torch.randint(
                among.start, among.stop, base.shape, generator=generator, device=device
            )
        else:
            wide = torch.float64 if spec.dtype == "f64" else torch.float32
            values = torch.randn(base.shape, generator=generator, device=device, dtype=wide)
        base.copy_(values)
        tensors[name] = t
    return tensors


def _distinct(t: torch.Tensor) -> torch.Tensor:
    """The view of `t` that holds each element once: expanded dims are narrowed to one."""
    for dim, (n, stride) in enumerate(zip(t.shape, t.stride(), strict=True)):
        if stride == 0 and n > 1:
            t = t.narrow(dim, 0, 1)
    return t
