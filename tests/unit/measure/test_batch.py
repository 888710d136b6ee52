"""Along which dim an operator treats every slice by itself."""

import math

import pytest
import torch
from torch.nn import functional as F

import tilewright as tw
from counted import BY_LABELS
from tilewright.measure.batch import Batch, find_batch
from tilewright.op import OPS, Workload


def batch_of(text):
    w = Workload.parse(text)
    return find_batch(w, w.operator.examples(w, "random", 0, "cpu"))


@pytest.mark.parametrize(
    ("text", "batch"),
    [
        ("layer_norm(x=f32[32,16], weight=f32[16])", Batch(-2, 32)),
        ("layer_norm(x=f32[16,16], weight=f32[16])", Batch(-2, 16)),
        ("softmax(x=f32[32,5,7], dim=1)", Batch(-3, 32)),
        ("softmax(x=f32[64,48], dim=0)", Batch(-1, 48)),
        ("softmax(x=f32[64])", Batch()),
        ("lerp(x=f32[2,1,1], end=f32[2,3,40], weight=f32[3,1])", Batch(-1, 40)),
        ("lerp(x=f32[1], end=f32[640], weight=0.5)", Batch(-1, 640)),
        ("rms_norm(x=f32[1,64])", Batch()),
        ("layer_norm(x=f32[4,30,6], normalized_shape=[30,6])", Batch(-3, 4)),
    ],
)
def test_the_batch_dim_is_one_that_the_operator_does_not_mix(text, batch):
    assert batch_of(text) == batch


def first_of_seven(x, padding):
    """Of each window of seven rows, among so many rows of zeros on both sides."""
    weight = torch.eye(1, 7).to(x)[None]
    return F.conv1d(x.t()[:, None], weight, padding=padding)[:, 0].t()


OF_SLICES = {
    "rows": lambda x: (x - x.mean(-1, keepdim=True)) * x.exp(),
    "halves of rows": lambda x: torch.cat([-x[:, 20:], x[:, :20]], 1),
    "rolled rows": lambda x: x.roll(2, 1),
    "whole slices": lambda x: x[:, None].expand(-1, 2, -1).sum(1),
    "heads": lambda x: x.view(-1, 4, 10).softmax(-1).view(-1, 40),
    "positions in rows": lambda x: x * torch.arange(x.shape[1]),
    "a single row": lambda x: x.softmax(0),
    "shifted rows": lambda x: x.roll(2, 0),
    "rows shifted by way of more": lambda x: first_of_seven(first_of_seven(x, 6), 0),
    "rows and others": lambda x: torch.cat([x[9:], 2 * x[:9]]),
    "some rows": lambda x: x.slice_scatter(2 * x[5:9], 0, 5, 9),
    "a far row": lambda x: x.select_scatter(x[3] * 2, 0, 50),
    "every other row": lambda x: torch.cat([x[::2], x[1::2]]),
    "pairs of rows": lambda x: (
        x.unflatten(0, (-1, 2)).sum(1, keepdim=True).expand(-1, 2, -1).flatten(0, 1)
    ),
    "rows by position": lambda x: x.where(torch.arange(x.shape[0])[:, None] < 70, 0),
    "as many as there are": lambda x: (x / max(x.shape[0], 64)).softmax(-1),
    "their logarithm": lambda x: (x * max(1.0, math.log(x.shape[0], 64))).softmax(-1),
    "all within a norm": lambda x: x * torch.clamp(50 / (x.norm() + 1e-6), max=1.0),
    "any too large": lambda x: torch.where((x.abs() > 4).any(), x * 0.5, x),
    "how many are large": lambda x: x.softmax(1) / (x > 3).sum().clamp(min=1),
    "their size": lambda x: x * min(1.0, 1000 / x.numel()),
    "a corner": lambda x: x.tril(5),
    "no more than some": lambda x: x.softmax(1).cumsum(0) if len(x) > 50 else x.softmax(1),
}
BY_ROWS = list(OF_SLICES)[:6]
NEITHER = list(OF_SLICES)[-8:]


@pytest.mark.parametrize("name", OF_SLICES)
@pytest.mark.usefixtures("forgets_functions")
def test_a_fused_function_has_no_batch_dim_along_which_it_goes_by_places(name):
    """Of a shift by two rows two rows alone see nothing."""
    tw.fuse(OF_SLICES[name], name="sliced")
    w, _ = OPS["sliced"].workload_of(torch.zeros(80, 40))
    tensors = w.operator.examples(w, "random", 0, "cpu")
    expected = Batch(-2, 80) if name in BY_ROWS else Batch(-1, 40)
    if name in NEITHER:
        expected = Batch()
    assert find_batch(w, tensors) == expected


@pytest.mark.usefixtures("forgets_functions")
def test_labels_that_name_no_element_of_two_slices_do_not_show_a_batch_dim():
    tw.fuse(BY_LABELS["into one row"], name="labelled")
    labels = torch.full((30,), 7)
    w, _ = OPS["labelled"].workload_of(torch.zeros(30, 40), labels)
    assert find_batch(w, [torch.rand(30, 40), labels]) == Batch()
