"""Shapes of the operands of lerp that broadcast in every way."""

import itertools

import torch


def lerp_text(shape, x, end, weight, dtype="f64"):
    """Of the gradients; of lerp itself if `shape` is None."""

    def spec(sizes):
        return f"{dtype}[{','.join(map(str, sizes))}]"

    by = 0.3 if weight is None else spec(weight)
    operands = f"x={spec(x)}, end={spec(end)}, weight={by}"
    return f"lerp_backward(grad_output={spec(shape)}, {operands})" if shape else f"lerp({operands})"


SHAPES_OF_RANK_3 = list(itertools.product((1, 2), (1, 3), (1, 4)))


def patterns_of_rank_3(x):
    """Operands with dims of size 1 that broadcast to (2, 3, 4), beside `x`."""
    for end, weight in itertools.product(SHAPES_OF_RANK_3, repeat=2):
        if torch.broadcast_shapes(x, end, weight) == (2, 3, 4):
            yield end, weight
