"""The host's part of a call: how much of it a tuned operator may take."""

import torch

from tilewright.measure.timing import eager

HOST_LIMIT_US, MOST_OF_PYTORCHS = 12.0, 1.5
"""Host time of a tuned call; on a slow host, of what one kernel of PyTorch's takes there."""
ROUNDS = 10
"""Of which the quickest counts: a host that was just started, or shared, is slower for seconds."""


def host_us(*calls):
    """Of each call, in turns."""
    found = [[eager([c], torch.device("cuda")).host_us for c in calls] for _ in range(ROUNDS)]
    return [min(of_a_call) for of_a_call in zip(*found, strict=True)]


def most_us(pytorchs_us):
    """What a call may take where PyTorch's softmax takes so much."""
    return max(HOST_LIMIT_US, MOST_OF_PYTORCHS * pytorchs_us)


def pytorchs_softmax():
    x = torch.zeros(64, 768, dtype=torch.float16, device="cuda")
    return lambda: torch.softmax(x, -1)
