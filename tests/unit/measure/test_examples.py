"""What candidates are verified on, and the faults that it shows."""

import pytest
import torch

import tilewright as tw
from tilewright.measure.batch import Batch, find_batch
from tilewright.measure.examples import kinds, make_example, sample
from tilewright.measure.verify import Verifier
from tilewright.op import OPS, Workload

CPU = torch.device("cpu")


def examples_of(text, kind, seed=0):
    w = Workload.parse(text)
    random = make_example(w, "random", None, seed, CPU)
    return make_example(w, kind, find_batch(w, random.tensors), seed, CPU)


def test_a_large_workload_compares_the_first_the_last_and_slices_between():
    w = Workload.parse("layer_norm(x=f16[8192,65536])")
    slices = sample(w, Batch(-2, 8192), CPU)
    assert slices.tolist()[0] == 0
    assert slices.tolist()[-1] == 8191
    assert len(slices) == 32


def test_few_rows_get_the_complement_of_the_heavy_example():
    few, many = (Workload.parse(f"rms_norm(x=f32[{n},64])") for n in (2, 64))
    assert list(kinds(few, Batch(-2, 2))) == ["random", "uneven", "heavy", "light", "special"]
    assert list(kinds(many, Batch(-2, 64))) == ["random", "uneven", "heavy", "special"]
    backward = Workload.parse("softmax_backward(grad_output=f32[64,64], output=f32[64,64])")
    assert list(kinds(backward, Batch(-2, 64))) == ["random", "heavy", "special"]


def test_each_element_is_heavy_in_the_heavy_example_or_in_its_complement():
    text = "rms_norm(x=f32[1,4096])"
    heavy, light = (examples_of(text, kind).tensors[0] for kind in ("heavy", "light"))
    assert (torch.maximum(heavy.abs(), light.abs()) >= 0.35).all()
    assert ((heavy.abs() >= 0.35) ^ (light.abs() >= 0.35)).float().mean() > 0.99
    assert torch.equal(heavy.sign(), -light.sign())


@pytest.mark.parametrize("kind", ["heavy", "light"])
def test_the_greatest_and_the_least_of_rows_and_columns_stand_at_their_ends(kind):
    x = examples_of("softmax(x=f32[8,64])", kind).tensors[0]
    for reduced in (x.amax(1), x.amin(1)):
        assert ((reduced == x[:, 0]) | (reduced == x[:, -1])).all()
    assert (x[:, 1:-1].abs() < 0.75).all()


def test_special_values_stay_in_their_rows():
    x = examples_of("softmax(x=f32[64,32])", "special").tensors[0]
    assert 4 <= (~x.isfinite()).any(1).sum() <= 8
    assert (x == -torch.inf).all(1).sum() == 1


def uneven_rows(t):
    """What was done to each row of a tensor."""

    def done(row):
        least, size, most = row.min(), row.abs().median(), row.max()
        if most > 2000:
            return "peak"
        if most <= -1:
            return "below zero"
        if least > 900:
            return "far"
        if size < 1e-3:
            return "small" if size else "zero"
        return "large" if size > 10 else "as it was"

    return [done(row) for row in t]


def test_uneven_rows_are_of_every_kind_and_of_another_one_in_another_tensor():
    text = "lerp(x=f32[64,32], end=f32[64,32], weight=0.3)"
    x, end = map(uneven_rows, examples_of(text, "uneven").tensors)
    for rows in (x, end):
        changed = {kind: rows.count(kind) for kind in rows if kind != "as it was"}
        assert changed == {"peak": 1, "large": 1, "below zero": 2, "far": 2, "zero": 2, "small": 2}
    assert all(a != b for a, b in zip(x, end, strict=True) if a != "as it was")
    assert [x[0], x[-1]] == ["large", "peak"]
    assert end.index("large") > 0


def test_few_uneven_rows_are_the_first_kinds_and_the_last():
    (x,) = examples_of("softmax(x=f32[4,32])", "uneven").tensors
    assert uneven_rows(x) == ["large", "far", "zero", "peak"]


def test_of_few_rows_some_are_special_in_a_second_tensor():
    text = "add_layer_norm(x=f32[{n},32], residual=f32[{n},32], weight=f32[32], bias=f32[32])"
    x, residual, *_ = examples_of(text.format(n=8), "special").tensors
    assert [bool(row.isfinite().all()) for row in x] == [False] * 6 + [True] * 2
    assert (x == -torch.inf).all(1).tolist() == [False] * 5 + [True] + [False] * 2
    assert [bool(row.isnan().any()) for row in residual] == [False] * 6 + [True, False]
    assert [bool((row == torch.inf).any()) for row in residual] == [False] * 7 + [True]
    x, residual, *_ = examples_of(text.format(n=5), "special").tensors
    assert not x.isfinite().all(1).any()
    assert residual.isfinite().all()


FAULTS = {
    "the greatest without the last column": (
        lambda x: x.amax(-1), lambda x: x[:, :-1].amax(-1)),
    "the greatest without the first column": (
        lambda x: x.amax(-1), lambda x: x[:, 1:].amax(-1)),
    "the greatest without the last row": (lambda x: x.amax(0), lambda x: x[:-1].amax(0)),
    "the least of all without the first row": (lambda x: x.amin(), lambda x: x[1:].amin()),
    "the greatest of all without the last row": (lambda x: x.amax(), lambda x: x[:-1].amax()),
    "the greatest begun at zero": (lambda x: x.amax(-1), lambda x: x.amax(-1).clamp(min=0)),
    "the last place for the first": (
        lambda x: x.argmax(-1), lambda x: x.shape[1] - 1 - x.flip(1).argmax(1)),
    "none for any": (lambda x: (x > 30).any(-1), lambda x: (x != x).any(-1)),
    "overflow of a logarithm of sums": (
        lambda x: x.logsumexp(-1), lambda x: x.exp().sum(-1).log()),
    "overflow of softplus": (
        lambda x: torch.nn.functional.softplus(x), lambda x: x.exp().log1p()),
    "a sign of zero": (
        lambda x: x.sign(), lambda x: torch.where(x >= 0, 1.0, -1.0).where(~x.isnan(), x.sign())),
    "zero is greater than zero": (lambda x: x > 0, lambda x: x >= 0),
    "a row of zeros by its norm": (
        lambda x: torch.nn.functional.normalize(x, dim=-1),
        lambda x: x / x.norm(dim=-1, keepdim=True)),
    "another epsilon": (
        lambda x: torch.nn.functional.rms_norm(x, x.shape[1:], eps=1e-6),
        lambda x: torch.nn.functional.rms_norm(x, x.shape[1:], eps=1.1e-6)),
    "a variance in one pass": (
        lambda x: x.var(-1),
        lambda x: (x.square().mean(-1) - x.mean(-1).square()) * (x.shape[1] / (x.shape[1] - 1))),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_uneven_rows_show_what_random_ones_hide(name, forgets_functions):
    right, wrong = FAULTS[name]
    tw.fuse(right, name="planted")
    w, _ = OPS["planted"].workload_of(torch.zeros(64, 100))
    verifier = Verifier(w, CPU)
    assert verifier.check(right).message == ""
    assert verifier.check(wrong).message != ""


def test_each_index_names_any_element_of_its_own_tensor(forgets_functions):
    def summed(t, u, i, j):
        return t[i] + u[j]

    tw.fuse(summed, name="summed")
    i = torch.zeros(500, dtype=torch.int64)
    w, _ = OPS["summed"].workload_of(torch.zeros(10), torch.zeros(1000), i, i)
    verifier = Verifier(w, CPU)
    assert verifier.check(summed).message == ""
    assert verifier.check(lambda t, u, i, j: summed(t, u, i, j.clamp(max=900))).message != ""


def test_labels_are_of_all_classes_beside_a_shorter_row_of_positions(forgets_functions):
    def loss(x, labels):
        first = (x[:, :8] * torch.arange(8)).mean()
        return torch.nn.functional.cross_entropy(x, labels) + first

    tw.fuse(loss, name="loss")
    w, _ = OPS["loss"].workload_of(torch.zeros(64, 100), torch.zeros(64, dtype=torch.int64))
    labels = w.operator.examples(w, "random", 0, CPU)[1]
    assert labels.max() > 90
    assert labels.min() < 10


def test_seeds_have_all_their_bits(forgets_functions):
    tw.fuse(lambda x: torch.nn.functional.dropout(x, 0.5), name="seeded_by_all_bits")
    w = OPS["seeded_by_all_bits"].workload_of(torch.zeros(64, 100))[0].with_seed()
    seeds = [int(w.operator.examples(w, "random", n, CPU)[1]) for n in range(4)]
    assert any(s > 2**40 for s in seeds)
    assert any(s < -(2**40) for s in seeds)


def test_of_an_index_that_floats_decide_none_is_nan(forgets_functions):
    def bucketed(x, table):
        return table[(x.sigmoid() * 64).long().clamp(0, 63)]

    tw.fuse(bucketed, name="bucketed")
    w, _ = OPS["bucketed"].workload_of(torch.zeros(2000), torch.zeros(64))
    assert list(kinds(w, Batch())) == ["random", "heavy", "light"]
    assert Verifier(w, CPU).check(bucketed).message == ""


def test_nan_is_put_into_every_tensor_that_has_slices(forgets_functions):
    tw.fuse(lambda x, y: torch.maximum(x, y), name="larger")
    w, _ = OPS["larger"].workload_of(torch.zeros(64, 100), torch.zeros(64, 100))
    verifier = Verifier(w, CPU)
    for wrong in (lambda x, y: torch.where(y > x, y, x), lambda x, y: torch.where(x > y, x, y)):
        assert "(on special inputs)" in verifier.check(wrong).message
