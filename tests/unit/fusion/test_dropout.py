"""Masks that a seed decides: the same on every target, in every schedule and in the backward."""

import random
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

import tilewright as tw
from emulated import Emulated
from tilewright.compile import cxx
from tilewright.compile.cache import compiled
from tilewright.device import DEVICES, spec_of
from tilewright.dispatch.prepared import reload_records
from tilewright.errors import InvalidArgument, NoImplementation
from tilewright.fusion.cuda import target
from tilewright.fusion.cuda.rows.schedule import RowSchedule
from tilewright.impl import IMPLS
from tilewright.impls.fused import graph_of
from tilewright.measure.runner import InProcess
from tilewright.measure.verify import Verifier
from tilewright.op import OPS, Workload
from tilewright.philox import WORD, philox, philox_bernoulli
from tilewright.profiling.explain import explain
from tilewright.tensor_spec import TensorSpec
from tilewright.tune import bench, tune, verify_all

H200, CPU = DEVICES["h200"], torch.device("cpu")
SEED = TensorSpec("i64", ())
runs = pytest.mark.skipif(cxx.missing() is not None, reason=str(cxx.missing()))


def masked(x, p):
    return F.dropout(x, p)


def dropped_sum(x, residual, p=0.1, training=True):
    return F.dropout(x, p, training) + residual


def dropped_norm(x, residual, weight, bias, p=0.25):
    total = F.dropout(x, p) + residual
    return F.layer_norm(total, total.shape[-1:], weight, bias)


def twice(x, weight):
    return F.dropout(F.dropout(x, 0.5) * weight, 0.25)


def centred(x):
    dropped = F.dropout(x, 0.4)
    return dropped - dropped.mean(0), dropped.sum(-1)


@pytest.fixture(autouse=True)
def fused(tmp_path, monkeypatch, forgets_functions):
    monkeypatch.setenv("TILEWRIGHT_STORE", f"sqlite:///{tmp_path}/records.db")
    reload_records()
    yield {f.__name__: tw.fuse(f) for f in (masked, dropped_sum, dropped_norm, twice, centred)}
    reload_records()


def built(w):
    spec, implementation = spec_of(None), IMPLS["fused"]
    return implementation.build(implementation.heuristic(w, spec), w, spec)


def seed(value=0x1234_5678_9ABC_DEF0):
    return torch.tensor(value)


def test_philox_gives_the_published_words():
    def words(key, *counter):
        return [int(w) for w in philox(seed(key), [torch.tensor([c]) for c in counter])]

    assert words(0, 0, 0, 0, 0) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = WORD - 1
    assert words(-1, ones, ones, ones, ones) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    found = words(0x299F31D0A4093822, *pi)
    assert found == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


@pytest.mark.parametrize("p", [0.1, 0.5, 0.93])
def test_as_many_elements_are_kept_as_the_probability_says(p, fused):
    n = 1 << 20
    kept = (fused["masked"](torch.ones(n), p) != 0).double()
    deviation = (p * (1 - p) / n) ** 0.5
    assert abs(kept.mean() - (1 - p)) < 5 * deviation
    assert abs((kept[1:] * kept[:-1]).mean() - (1 - p) ** 2) < 5 * deviation


@runs
@given(data=st.data())
@settings(max_examples=15)
def test_every_target_draws_the_mask_of_the_reference(data, fused):
    shape = data.draw(st.lists(st.integers(1, 37), min_size=1, max_size=3))
    dtype = data.draw(st.sampled_from(["f16", "bf16", "f32", "f64"]))
    pad = data.draw(st.integers(0, 3))
    key = data.draw(st.integers(-(2**63), 2**63 - 1))
    spec = TensorSpec.of(torch.empty(*shape[:-1], shape[-1] + pad)[..., : shape[-1]])
    w = OPS["masked"].workload(x=replace(spec, dtype=dtype), p=0.3, seed=SEED)
    x = w["x"].empty("cpu").fill_(1.0)
    right = philox_bernoulli(seed(key), 0, round(0.7 * WORD), shape)
    assert torch.equal(OPS["masked"].reference(x, 0.3, seed=seed(key)) != 0, right)
    assert torch.equal(built(w)(x, seed(key)) != 0, right)
    graph = graph_of(w)
    others = target.space(graph, H200).sample(random.Random(key), 2)
    for config in (target.heuristic(graph, H200), *others):
        assert torch.equal(Emulated(graph, config, H200, w)(x, seed(key)) != 0, right), config


PLAIN = RowSchedule(4, 32, 4, 1, "registers", "two_pass", 1, 1)


@runs
@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"storage": "reread"},
        {"storage": "shared", "moments": "merge"},
        {"vector": 1, "row_threads": 128, "rows_per_block": 1},
        {"stages": 2, "parameters": "shared"},
        {"stages": 1, "in_turn": True, "contiguous": True, "parameters": "registers"},
        {"rows_per_thread": 2, "rematerialize": True},
        {"vector": 8, "shifted": True},
    ],
    ids=str,
)
def test_every_kind_of_row_schedule_draws_the_same_mask(changed, fused):
    text = "dropped_norm(x=f16[9,500], residual=f16[9,500], weight=f16[500], bias=f16[500], seed=i64[])"  # noqa: E501
    w = Workload.parse(text)
    config = replace(PLAIN, **changed)
    verdict = Verifier(w, CPU).check(Emulated(graph_of(w), config, H200, w))
    assert verdict.message == "", config


@runs
@pytest.mark.parametrize(
    "x",
    [
        "f32[6,9,7]@strides(63,1,9)",
        "f32[2,5,3,7]@channels_last",
        "bf16[2,67,3,7]@channels_last",
    ],
)
def test_masks_of_rows_that_are_no_rows_of_the_mask_are_their_own(x, forgets_functions):
    """A row of channels is contiguous in memory, and its mask's elements lie apart."""
    tw.fuse(lambda x: F.dropout(x - x.mean(1, keepdim=True), 0.3), name="dropped_channels")
    w = Workload.parse(f"dropped_channels(x={x}, seed=i64[])")
    graph = graph_of(w)
    config = target.heuristic(graph, H200)
    assert Verifier(w, CPU).check(Emulated(graph, config, H200, w)).message == ""
    shifted = [c for c in target.promising(graph, H200) if c.shifted]
    assert not shifted


WORKLOADS = [
    "dropped_sum(x=f16[33,50], residual=f16[33,50], seed=i64[])",
    "dropped_sum(x=f32[33,50]@strides(64,1), residual=f32[50], seed=i64[])",
    "dropped_sum(x=f64[7,5,3]@strides(1,7,35), residual=f64[7,1,3], seed=i64[])",
    "twice(x=f32[33,50], weight=f32[33,1], seed=i64[])",
    "centred(x=f32[40,24], seed=i64[])",
    "dropped_sum_backward(grad_output=bf16[33,50], x=bf16[33,50], residual=bf16[50], p=0.1, training=True, seed=i64[])",  # noqa: E501
    "dropped_norm_backward(grad_output=f32[9,500], x=f32[9,500], residual=f32[9,500], weight=f32[500], bias=f32[500], p=0.25, seed=i64[])",  # noqa: E501
    "twice_backward(grad_output=f32[33,50], x=f32[33,50], weight=f32[33,1], seed=i64[])",
]


@runs
@pytest.mark.parametrize("text", WORKLOADS)
def test_kernels_of_both_targets_are_right(text, fused):
    made = text.partition("_backward")[0]
    if made in fused:
        tw.dispatch.functions.operator.backward_operator(OPS[made], 1)
    w = Workload.parse(text)
    verifier = Verifier(w, CPU)
    assert verifier.check(built(w)).message == ""
    graph = graph_of(w)
    emulated = Emulated(graph, target.heuristic(graph, H200), H200, w)
    assert verifier.check(emulated).message == ""


@runs
def test_a_mask_that_is_one_element_off_is_found(fused):
    w = Workload.parse("dropped_sum(x=f32[33,50], residual=f32[33,50], seed=i64[])")
    right = built(w)

    def wrong(x, residual, seed):
        return right(x.roll(1).contiguous(), residual, seed)

    def other(x, residual, seed):
        return right(x, residual, seed + 1)

    verifier = Verifier(w, CPU)
    assert not verifier.check(wrong).ok
    assert not verifier.check(other).ok


@runs
def test_the_backward_draws_the_mask_of_its_forward(fused):
    x, residual = (torch.randn(6, 7, dtype=torch.float64, requires_grad=True) for _ in range(2))
    given = seed(3)
    call = lambda x, residual: fused["dropped_sum"](x, residual, 0.4, seed=given)  # noqa: E731
    assert torch.autograd.gradcheck(call, (x, residual))
    assert torch.autograd.gradgradcheck(call, (x, residual))
    torch.manual_seed(0)
    out = fused["dropped_sum"](x, residual, 0.4)
    assert type(out.grad_fn).__name__ == "GeneratedBackward"
    (found,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(found != 0, (out - residual) != 0)


@runs
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("create_graph", [False, True])
def test_gradients_in_batches_have_the_mask_of_the_forward(create_graph, fused):
    x, residual = (torch.randn(6, 7, requires_grad=True) for _ in range(2))
    out, weights = fused["dropped_sum"](x, residual, 0.4), torch.randn(3, 6, 7)

    def gradients(weight, **how):
        return torch.autograd.grad(out, (x, residual), weight, retain_graph=True, **how)

    each = tuple(torch.stack(g) for g in zip(*map(gradients, weights), strict=True))
    many = gradients(weights, is_grads_batched=True, create_graph=create_graph)
    torch.testing.assert_close(many, each)
    torch.testing.assert_close(torch.vmap(gradients)(weights), each)


@pytest.mark.parametrize("form", ["grad", "jvp", "vmap of grad"])
def test_a_seed_may_be_made_inside_of_function_transforms(form, fused):
    x, function = torch.randn(6, 8), fused["masked"]
    mask = function(torch.ones(8), 0.5, seed=torch.tensor(3))

    def seeded(x):
        return function(x, 0.5, seed=torch.tensor(3))

    def gradient(x):
        return torch.func.grad(lambda x: seeded(x).sum())(x)

    if form == "vmap of grad":
        found = torch.func.vmap(gradient)(x)
    else:
        row = x[0]
        found = gradient(row) if form == "grad" else torch.func.jvp(seeded, (row,), (row / row,))[1]
    torch.testing.assert_close(found, mask.expand_as(found))


def test_a_seed_for_each_call_of_vmap_is_refused_in_words(fused):
    def seeded(x, seed):
        return fused["masked"](x, 0.5, seed=seed)

    with pytest.raises(InvalidArgument, match="seed is mapped over by vmap"):
        torch.func.vmap(seeded)(torch.randn(3, 8), torch.arange(3))


@runs
def test_a_seeded_generator_repeats_a_run_and_two_calls_differ(fused):
    x, residual = torch.randn(40, 50), torch.zeros(40, 50)
    torch.manual_seed(5)
    runs = [fused["dropped_sum"](x, residual) for _ in range(2)]
    torch.manual_seed(5)
    again = [fused["dropped_sum"](x, residual) for _ in range(2)]
    assert all(map(torch.equal, runs, again))
    assert not torch.equal(*runs)


@runs
def test_what_draws_nothing_leaves_the_generator_alone(fused):
    x, residual = torch.randn(4, 5), torch.randn(4, 5)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    assert torch.equal(fused["dropped_sum"](x, residual, 0.5, False), x + residual)
    assert torch.equal(fused["dropped_sum"](x, residual, p=0.0), x + residual)
    assert torch.equal(fused["dropped_sum"](x, residual, 1.0), residual)
    assert torch.equal(torch.get_rng_state(), before)


@runs
@pytest.mark.parametrize("p", [1e-12, 1 - 1e-12])
def test_a_mask_that_all_pass_or_none_is_drawn_all_the_same(p, fused):
    """Masks have 32 bits."""
    x, residual = torch.randn(4, 5, requires_grad=True), torch.randn(4, 5)
    out = fused["dropped_sum"](x, residual, p)
    passed = float(p < 0.5)
    torch.testing.assert_close(out, passed * x + residual)
    (found,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(found, torch.full((4, 5), passed))


@runs
def test_two_masks_of_one_function_differ(fused):
    x = torch.ones(200, 50)
    out = fused["twice"](x, torch.ones(200, 1), seed=seed())
    kept = enumerate((0.5, 0.75))
    expected = [philox_bernoulli(seed(), k, round(q * WORD), (200, 50)) for k, q in kept]
    assert torch.equal(out != 0, expected[0] & expected[1])


@runs
def test_a_mask_beside_its_own_transpose_and_over_transposed_dims_is_the_same_mask(fused):
    mask = philox_bernoulli(seed(), 0, round(0.5 * WORD), (9, 9)).float() * 2
    both = tw.fuse(lambda x: (lambda d: d - 3 * d.t())(F.dropout(x, 0.5)), name="both")
    assert torch.equal(both(torch.ones(9, 9), seed=seed()), mask - 3 * mask.t())
    turned = tw.fuse(lambda x: F.dropout(x.t(), 0.5), name="turned")
    mask = philox_bernoulli(seed(), 0, round(0.5 * WORD), (5, 9)).float() * 2
    assert torch.equal(turned(torch.ones(9, 5), seed=seed()), mask)


@runs
def test_feature_dropout_drops_whole_channels(fused):
    channels = tw.fuse(lambda x: F.dropout2d(x, 0.5) * 2, name="channels")
    out = channels(torch.ones(8, 16, 5, 3))
    kept = out.flatten(2).ne(0)
    assert (kept.all(-1) | ~kept.any(-1)).all()
    assert 30 < kept.all(-1).sum() < 98


@runs
def test_pytorch_draws_where_it_runs_the_function(fused):
    call = fused["dropped_sum"]
    x, residual = torch.randn(40, 50), torch.randn(40, 50)
    tw.disable()
    try:
        torch.manual_seed(1)
        own = call(x, residual)
    finally:
        tw.enable()
    torch.manual_seed(1)
    assert torch.equal(own, dropped_sum(x, residual))
    torch.manual_seed(1)
    compiled = torch.compile(call, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x, residual), own)


@runs
def test_what_is_asked_for_by_name_draws_by_the_seed_or_is_refused(fused):
    x, residual = torch.randn(40, 50), torch.randn(40, 50)
    own = fused["dropped_sum"](x, residual, seed=seed())
    with tw.use("aten"):
        torch.testing.assert_close(fused["dropped_sum"](x, residual, seed=seed()), own)
    with (
        tw.use("inductor"),
        pytest.raises(NoImplementation, match="would not be those of the seed"),
    ):
        fused["dropped_sum"](x, residual)


def test_what_cannot_be_drawn_is_named_with_its_line():
    def noisy(x):
        return x + torch.randn_like(x)

    line = noisy.__code__.co_firstlineno + 1
    with pytest.raises(NoImplementation, match=rf"randn_like.*test_dropout\.py:{line}"):
        tw.fuse(noisy)(torch.ones(3))


def test_a_seed_of_another_kind_is_refused(fused):
    x = torch.ones(3)
    with pytest.raises(InvalidArgument, match=r"seed=i64\[1\], .* should be an int64 scalar"):
        fused["masked"](x, 0.5, seed=torch.ones(1, dtype=torch.int64))


@runs
def test_verifying_holds_no_baseline_against_the_seeds_mask(fused):
    w = Workload.parse("dropped_sum(x=f32[33,50], residual=f32[33,50], seed=i64[])")
    with InProcess("cpu") as runner:
        found = verify_all(w, runner=runner)
    assert [(name, verdict.ok) for name, _, verdict in found] == [("fused", True)]


@runs
def test_measuring_what_draws_asks_for_a_seed_in_the_workload(fused):
    text = "dropped_sum(x=f32[33,50], residual=f32[33,50]{})"
    w, completed = Workload.parse(text.format("")), text.format(", seed=i64[]")
    asked = "it draws masks, which follow from a seed where they are verified; write "
    for measure in (verify_all, lambda w: tune([w]), lambda w: bench([w])):
        with pytest.raises(InvalidArgument, match=re.escape(asked + completed)):
            measure(w)
    assert explain(w, "cpu", measure=False).reason.endswith(f"was given no seed: {completed}")
    assert explain(Workload.parse(completed), "cpu", measure=False).chosen == "fused"


@pytest.mark.parametrize("device", ["a100", "h200", "b200"])
@pytest.mark.parametrize(
    "text",
    [
        "dropped_sum(x=f16[8192,5140], residual=f16[8192,5140], seed=i64[])",
        "dropped_norm(x=f16[8192,5140], residual=f16[8192,5140], weight=f16[5140], bias=f16[5140], seed=i64[])",  # noqa: E501
        "dropped_norm(x=bf16[8192,12288], residual=bf16[8192,12288], weight=bf16[12288], bias=bf16[12288], seed=i64[])",  # noqa: E501
        "dropped_norm_backward(grad_output=f16[8192,4096], x=f16[8192,4096], residual=f16[8192,4096], weight=f16[4096], bias=f16[4096], p=0.25, seed=i64[])",  # noqa: E501
        "centred(x=f32[8192,1024], seed=i64[])",
        "twice(x=f16[8192,768], weight=f16[8192,1], seed=i64[])",
    ],
)
def test_the_heuristics_kernels_compile_without_spilling(text, device, fused):
    tw.dispatch.functions.operator.backward_operator(OPS["dropped_norm"], 1)
    graph, spec = graph_of(Workload.parse(text)), DEVICES[device]
    log = compiled(target.task(graph, target.heuristic(graph, spec), spec)).log
    assert set(re.findall(r"(\d+) bytes spill stores", log)) == {"0"}
