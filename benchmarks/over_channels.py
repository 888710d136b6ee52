"""Functions that reduce across the order of memory, for `tilewright bench --import`: the table of
registers in docs/row_kernels.md is of them."""

import torch

import tilewright as tw


@tw.fuse
def channel_norm(x: torch.Tensor) -> torch.Tensor:
    """A norm over the channels of images, x [N, C, ...]."""
    mean = x.mean(1, keepdim=True)
    var = x.var(1, unbiased=False, keepdim=True)
    return (x - mean) * torch.rsqrt(var + 1e-6)


@tw.fuse
def channel_gate(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """x [N, C, P], weighed by a gate [N, C, 1] and summed over channels, opens or shuts itself."""
    return x * torch.sigmoid((x * gate).sum(1, keepdim=True))
