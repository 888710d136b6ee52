"""The verifier's machinery: verdicts, guarded memory, examples, chunks and messages."""

import functools
import itertools
import math
import threading

import pytest
import torch

import tilewright as tw
from tilewright.errors import VerificationError
from tilewright.impl import allocate, allocator
from tilewright.impls._vendor import vendor
from tilewright.measure import expected, verify
from tilewright.measure.batch import Batch, find_batch
from tilewright.measure.examples import kinds, make_example, sample
from tilewright.measure.guard import GUARD_BYTES, POISONS, guarded
from tilewright.measure.verify import Verdict, Verifier, verification_error
from tilewright.op import OPS, Workload
from tilewright.tensor_spec import TensorSpec

CPU = torch.device("cpu")
LAYER_NORM = "layer_norm(x=f32[7,37], weight=f32[37], bias=f32[37])"


def examples_of(text, kind, seed=0):
    w = Workload.parse(text)
    random = make_example(w, "random", None, seed, CPU)
    return make_example(w, kind, find_batch(w, random.tensors), seed, CPU)


# --- verdicts ---------------------------------------------------------------------------------


def test_a_verdict_says_how_good_a_result_is_and_what_was_allowed():
    w = Workload.parse(LAYER_NORM)
    verdict = Verifier(w, CPU).check(vendor(w))
    assert verdict.ok
    assert 0.3 < verdict.max_ulp < verdict.bound_ulp < 200
    assert verdict.deterministic
    assert verdict.integer_exact is None


def test_an_expanded_result_may_lie_otherwise_in_memory_than_pytorch_s(forgets_functions):
    """PyTorch's power of a number is contiguous, a trace's lies as its argument."""

    def powers(x):
        return (1.0**x).expand(2, *x.shape)

    tw.fuse(powers)
    w = Workload.parse("powers(x=f32[4,5]@strides(1,4))")
    assert w.outputs[0].real_strides == (0, 1, 4)
    ones = torch.empty_strided((4, 5), (1, 4)).fill_(1.0)
    assert Verifier(w, CPU).check(lambda x: ones.clone().expand(2, 4, 5)).message == ""
    wrong = Verifier(w, CPU).check(lambda x: (2 * ones).expand(2, 4, 5))
    assert "got 2, reference 1" in wrong.message


def test_a_verdict_holds_each_output_against_the_truth_and_against_pytorch():
    w = Workload.parse("add_rms_norm(x=f32[9,64], residual=f32[9,64], weight=f32[64])")
    verifier = Verifier(w, CPU)

    def one_ulp_more(*tensors):
        normed, total = vendor(w)(*tensors)
        normed = normed.clone()
        largest = normed.view(-1)[normed.abs().argmax()]
        largest.copy_(torch.nextafter(largest, largest * 2))
        return normed, total

    same, more = (verifier.check(run).outputs for run in (vendor(w), one_ulp_more))
    assert [o.apart_ulp for o in same] == [0.0, 0.0]
    assert [o.apart_ulp for o in more] == [1.0, 0.0]
    assert [o.ulp for o in same] == [o.vendor_ulp for o in same] == [o.vendor_ulp for o in more]
    assert 0 < more[0].ulp <= same[0].ulp + 1
    assert more[1].ulp == same[1].ulp == 0.5
    assert all(o.vendor_within for o in same)
    assert [o.differing for o in same] == [0.0, 0.0]
    assert [o.differing for o in more] == [1 / (9 * 64), 0.0]
    assert [o.vendor_misrounded for o in more] == [o.misrounded for o in same]
    assert abs(more[0].misrounded - same[0].misrounded) <= 1 / (9 * 64)
    assert 0 < same[0].misrounded < 1
    assert same[1].misrounded == 0.0  # one addition, rounded as the truth is


def test_integers_are_checked_bit_for_bit_where_the_operator_promises_it():
    w = Workload.parse("lerp(x=f16[9,33], end=f16[9,33], weight=f16[9,33])")
    verifier = Verifier(w, CPU)
    assert verifier.check(vendor(w)).integer_exact is True

    def off_on_integers(x, end, weight):
        out = vendor(w)(x, end, weight).clone()
        if (x == x.round()).all():
            out[2, 5] = torch.nextafter(out[2, 5], torch.tensor(99.0, dtype=out.dtype))
        return out

    verdict = verifier.check(off_on_integers)
    assert verdict.integer_exact is False
    assert "exceeds 0 at (2, 5)" in verdict.message
    assert verdict.message.endswith("(on integer inputs)")


def test_an_error_of_twice_pytorchs_plus_one_ulp_is_refused_within_the_bound():
    w = Workload.parse("layer_norm(x=f32[16,4096])")
    verifier = Verifier(w, CPU)

    def sloppy(x):
        out = vendor(w)(x).clone()
        largest = out[3].argmax()
        out[3, largest] *= 1 + 12 * 2**-23
        return out

    verdict = verifier.check(sloppy)
    assert verdict.max_ulp < verdict.bound_ulp
    assert "at (3, " in verdict.message
    assert "PyTorch's largest error is" in verdict.message


def test_fp64_results_are_not_held_against_pytorchs_whose_errors_the_truth_shares():
    w = Workload.parse("rms_norm(x=f64[16,4096])")

    def three_ulps_off(x):
        return vendor(w)(x) * (1 + 3 * 2**-52)

    assert Verifier(w, CPU).check(three_ulps_off).message == ""


def test_a_nondeterministic_result_passes_where_the_workload_allows_it():
    def wobbling(w):
        calls = itertools.count()

        def executable(*tensors):
            out = vendor(w)(*tensors).clone()
            if next(calls) % 2:
                out[0, 0] = torch.nextafter(out[0, 0], torch.tensor(9.0))
            return out

        return executable

    strict, loose = Workload.parse(LAYER_NORM), Workload.parse(LAYER_NORM + "!nondeterministic")
    refused, passed = (Verifier(w, CPU).check(wobbling(w)) for w in (strict, loose))
    assert refused.message.startswith("two runs on the same inputs differ at (0, 0): ")
    assert passed.ok
    assert (refused.deterministic, passed.deterministic) == (False, False)


def test_where_results_may_differ_an_error_counts_against_the_largest_of_several_of_pytorchs():
    def one_run_off(w, run):
        calls = itertools.count()

        def vendors(x):
            out = vendor(w)(x).clone()
            if next(calls) == run:
                out[3, out[3].argmax()] *= 1 + 12 * 2**-23
            return out

        return vendors

    w = Workload.parse("layer_norm(x=f32[16,4096])" + RACING)
    exact, off = (Verifier(w, CPU, vendor=one_run_off(w, run)) for run in (None, 3))
    assert "PyTorch's largest error is" in exact.check(one_run_off(w, 0)).message
    assert off.check(one_run_off(w, 0)).ok


@pytest.mark.parametrize("factors", [12, 30, 80])
def test_one_product_in_another_order_counts_against_pytorchs_largest_error_of_several(factors):
    source = f"index=i64[{factors}], source=f32[{factors},1], reduce=prod"
    w = Workload.parse(f"index_reduce(x=f32[1,1], dim=0, {source})")
    order = torch.randperm(factors, generator=torch.Generator().manual_seed(0))

    def permuted(x, index, source):
        return vendor(w)(x, index[order], source[order])

    for seed in range(20):
        verifier = Verifier(w, CPU, seed)
        assert verifier.check(permuted).message == ""
        off = verifier.check(lambda *tensors: permuted(*tensors) * (1 + 4 * factors * 2**-23))
        assert "exceeds" in off.message


def test_sums_of_many_beside_those_of_few_count_against_pytorchs_largest_error_of_several():
    w = Workload.parse(
        "scatter_add(x=f32[30000], dim=0, index=i64[50000], src=f32[50000])!indices=zipf"
    )
    verifier = Verifier(w, CPU)

    def permuted(x, index, src, seed, off=0.0):
        order = torch.randperm(index.numel(), generator=torch.Generator().manual_seed(seed))
        out = vendor(w)(x, index[order], src[order])
        out[index.bincount().argmax()] += off
        return out

    for seed in range(12):
        assert verifier.check(functools.partial(permuted, seed=seed)).message == ""
    off = verifier.check(functools.partial(permuted, seed=0, off=2e-3))
    assert "exceeds" in off.message


RACING = "!nondeterministic"
INDEX_ADD = "index_add(x=f32[5,8], dim=0, index=i64[90], source=f32[90,8])"


@pytest.mark.parametrize("dtype", ["i32", "i64"])
def test_sums_of_integers_are_exact_in_any_order_where_results_may_differ(dtype):
    w = Workload.parse(INDEX_ADD.replace("f32", dtype) + RACING)
    verifier = Verifier(w, CPU)
    verdict = verifier.check(vendor(w))
    assert (verdict.message, verdict.max_ulp, verdict.integer_exact) == ("", 0.0, True)
    assert "one of 40 such elements" in verifier.check(lambda *t: vendor(w)(*t) + 1).message


def test_a_kernel_of_pytorch_may_race_where_ours_may_not():
    w = Workload.parse(INDEX_ADD)
    calls = iter(range(100))

    def executable(*tensors):
        out = vendor(w)(*tensors)
        if next(calls) % 2:
            out[0, 0] = torch.nextafter(out[0, 0], torch.tensor(9.0))
        return out

    verifier = Verifier(w, CPU)
    assert verifier.check(executable, may_race=True).ok
    assert "two runs on the same inputs differ" in verifier.check(executable).message


def test_a_donated_tensor_is_guarded_given_anew_to_each_run_and_must_come_back():
    w = Workload.parse(f"{INDEX_ADD}!donate=x")
    verifier = Verifier(w, CPU)

    def past_its_end(x, index, source):
        x.as_strided((1,), (1,), x.storage_offset() + x.numel()).fill_(1.0)
        return vendor(w)(x, index, source)

    assert verifier.check(vendor(w)).message == ""
    assert verifier.check(lambda x, *rest: vendor(w)(x.clone(), *rest)).message == (
        "returned memory of its own, not the donated x"
    )
    assert "past its end" in verifier.check(past_its_end).message


def test_the_last_of_several_writes_to_one_place_is_the_only_right_one():
    w = Workload.parse("scatter(x=f32[5,8], dim=0, index=i64[90,8], src=f32[90,8])")

    def first_wins(x, dim, index, src):
        return torch.scatter(x, dim, index.flip(0), src.flip(0))

    verdict = Verifier(w, CPU, vendor=lambda *t: first_wins(t[0], 0, *t[1:])).check(
        lambda *t: first_wins(t[0], 0, *t[1:])
    )
    assert not verdict.ok
    assert Verifier(w, CPU).check(vendor(w)).ok


def test_nan_that_leaks_into_a_neighbouring_row_is_refused():
    w = Workload.parse("rms_norm(x=f32[64,32])")

    def leaking(x):
        out = vendor(w)(x).clone()
        bad = out.isnan().any(1)
        out[torch.roll(bad, 1)] = float("nan")
        return out

    verdict = Verifier(w, CPU).check(leaking)
    assert "got nan" in verdict.message
    assert "(on special inputs)" in verdict.message


def test_a_maximum_that_skips_nan_is_refused():
    w = Workload.parse("softmax(x=f32[64,32])")

    def skipping(x):
        clean = torch.where(x.isnan(), -torch.inf, x)
        return vendor(w)(clean)

    assert "reference nan" in Verifier(w, CPU).check(skipping).message


def test_what_an_executable_raises_is_passed_on():
    def broken(*tensors):
        raise VerificationError("from inside")

    with pytest.raises(VerificationError, match="from inside"):
        Verifier(Workload.parse(LAYER_NORM), CPU).check(broken)


@pytest.mark.parametrize("text", ["layer_norm(x=f32[0,8])", "softmax(x=f16[3,0])"])
def test_an_empty_workload_has_nothing_to_be_wrong_about(text):
    w = Workload.parse(text)
    verdict = Verifier(w, CPU).check(vendor(w))
    assert verdict.ok
    assert verdict.max_ulp == 0.0


def test_pytorchs_result_is_accepted_where_it_is_worse_than_the_bound():
    w = Workload.parse("softmax(x=bf16[8,33,12], dim=1)")
    found = expected.expect(
        w,
        Batch(),
        tensors := w.operator.examples(w, "random", 0, "cpu"),
        [torch.softmax(tensors[0].float(), 1).bfloat16() * 1.02],
        keep_truth=True,
    )
    assert found[0].vendor_ulp > 2
    assert found[0].widened
    assert found[0].bound_ulp >= found[0].vendor_ulp


def test_results_that_leave_the_dtype_do_not_excuse_the_errors_of_others():
    w = Workload.parse("lerp(x=f16[8,33], end=f16[8,33], weight=f16[8,33])")
    tensors = w.operator.examples(w, "random", 0, "cpu")
    for t, value in zip(tensors, (60000.0, -60000.0, 2.0), strict=True):
        t[2, 5] = value
    right = torch.lerp(*tensors)
    assert right[2, 5] == -math.inf
    (found,) = expected.expect(w, Batch(), tensors, [right], keep_truth=True)
    assert found.floor < 4
    assert found.worst_ulp(right) == found.vendor_ulp < 2
    wrong = right.clone()
    wrong[3, 7] += 1
    assert found.worst_ulp(wrong) > 100
    wrong = right.clone()
    wrong[2, 5] = -65504
    assert found.mismatch(wrong).index == (2, 5)
    assert found.worst_ulp(wrong) > 100


def test_nothing_is_measured_where_pytorchs_result_is_not_a_number():
    w = Workload.parse("softmax(x=f16[8,33])")
    tensors = w.operator.examples(w, "random", 0, "cpu")
    right = torch.softmax(tensors[0], -1)
    strange, other = right.clone(), right.clone()
    strange[2, 5], other[2, 5] = math.nan, math.inf
    (found,) = expected.expect(w, Batch(), tensors, [strange], keep_truth=True)
    assert found.mismatch(other) is None
    assert found.worst_ulp(other) == found.worst_ulp(right) < 2


def test_the_same_seed_gives_the_same_verdict_and_another_seed_other_inputs():
    w = Workload.parse(LAYER_NORM)
    first, again, other = (Verifier(w, CPU, seed).check(vendor(w)) for seed in (1, 1, 2))
    assert first == again
    assert first.max_ulp != other.max_ulp


# --- chunks and samples -----------------------------------------------------------------------


def test_chunks_change_nothing(monkeypatch):
    w = Workload.parse("layer_norm(x=f16[50,37], weight=f16[37])")
    verdict = Verifier(w, CPU).check(vendor(w))
    monkeypatch.setitem(expected.CHUNK_ELEMENTS, "cpu", 100)
    assert Verifier(w, CPU).check(vendor(w)) == verdict


def test_a_sample_names_the_coordinate_in_the_whole_tensor(monkeypatch):
    monkeypatch.setattr("tilewright.measure.examples.SAMPLE_ELEMENTS", 37 * 8)
    w = Workload.parse("layer_norm(x=f32[80,37])")
    verifier = Verifier(w, CPU)
    assert verifier.check(vendor(w)).ok

    def wrong_on_specials(x):
        out = vendor(w)(x).clone()
        if x.isnan().any():
            out[79, 3] = 7.0
        return out

    assert "at (79, 3): got 7" in verifier.check(wrong_on_specials).message


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


def test_special_values_stay_in_their_rows():
    x = examples_of("softmax(x=f32[64,32])", "special").tensors[0]
    assert 4 <= (~x.isfinite()).any(1).sum() <= 8
    assert (x == -torch.inf).all(1).sum() == 1


# --- guarded memory ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32", "f64"])
def test_poison_is_nan_first_and_large_then(dtype):
    spec = TensorSpec(dtype, (3, 5))
    for poison, seen in zip(POISONS, (torch.isnan, lambda t: t.abs() > 1e4), strict=True):
        with guarded(poison):
            t = allocate(spec, CPU)
        assert seen(t).all()


def test_guarded_memory_keeps_layout_and_alignment():
    spec = TensorSpec("f16", (2, 3, 4, 5), (60, 1, 15, 3))
    with guarded(POISONS[0]):
        t = allocate(spec, CPU)
    assert TensorSpec.of(t) == spec


@pytest.mark.parametrize("shift", [-1, -GUARD_BYTES, 15, 15 + GUARD_BYTES - 1])
def test_a_single_byte_written_outside_is_found(shift):
    with guarded(POISONS[0]) as memory:
        t = allocator.empty_strided((15,), (1,), dtype=torch.uint8, device=CPU)
        t.zero_()
        assert memory.damage() is None
        t.as_strided((1,), (1,), t.storage_offset() + shift).zero_()
        place = f"{shift - 15} bytes past its end" if shift > 0 else "before its start"
        assert place in memory.damage()


def test_other_threads_allocate_as_before_and_several_may_guard_at_once():
    plain = allocator.on
    inside, done = threading.Barrier(3), threading.Barrier(3)
    found = {}

    def work(name, poison):
        with guarded(poison) if poison else threading.Lock():
            inside.wait()
            t = allocator.empty_strided((4,), (1,), dtype=torch.uint8, device=CPU)
            found[name] = (t.storage_offset(), t.tolist())
            done.wait()

    plan = {"a": 0x11, "b": 0x22, "none": 0}
    threads = [threading.Thread(target=work, args=item) for item in plan.items()]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert found["a"] == (GUARD_BYTES, [0x11] * 4)
    assert found["b"] == (GUARD_BYTES, [0x22] * 4)
    assert found["none"][0] == 0
    assert allocator.on is plain


def test_an_input_written_between_its_rows_is_refused_and_restored():
    w = Workload.parse("rms_norm(x=f32[4,8]@strides(12,1))")
    verifier = Verifier(w, CPU)

    def executable(x):
        out = vendor(w)(x)
        x.as_strided((1,), (1,), x.storage_offset() + 9).fill_(3.0)
        return out

    assert "between the elements of an input" in verifier.check(executable).message
    assert verifier.check(vendor(w)).ok


# --- messages ---------------------------------------------------------------------------------


def test_the_error_names_subject_coordinate_values_and_how_to_reproduce_it():
    w = Workload.parse(LAYER_NORM)

    def wrong(*tensors):
        out = vendor(w)(*tensors).clone()
        out[2, 5] = 12.25
        return out

    verdict = Verifier(w, CPU, seed=3).check(wrong)
    error = verification_error(w, "fused", "block_threads=128,rows=2", verdict, 3)
    first, second = str(error).split("\n")
    assert first.startswith(f"layer_norm.fused is wrong on {w} with block_threads=128 rows=2: ")
    assert "at (2, 5): got 12.25, reference " in first
    assert first.endswith("(seed 3)")
    assert second == (
        f'  reproduce: tilewright verify "{w}" --impl fused '
        "--config block_threads=128,rows=2 --seed 3"
    )


def test_the_error_of_an_implementation_without_tunables_has_no_config():
    verdict = Verdict(False, 9.0, 2.0, None, True, "9 ulp exceeds 2 at (0): got 1, reference 2")
    text = str(verification_error(Workload.parse(LAYER_NORM), "aten", "", verdict, 0))
    assert "with" not in text.split(":")[0]
    assert "--config" not in text


def test_checking_is_quick_enough_to_check_hundreds_of_candidates():
    import time

    w = Workload.parse("rms_norm(x=f32[64,4096], weight=f32[4096])")
    verifier = Verifier(w, CPU)
    run = vendor(w)
    verifier.check(run)
    start = time.thread_time()  # others may keep the processor busy meanwhile
    verifier.check(run)
    assert time.thread_time() - start < 1.0


def test_cudnn_searches_for_the_vendor_alone(monkeypatch):
    """Its kernels for the fp64 truth are each run once or twice."""
    searched = []
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    for name in ("find_batch", "expect"):
        original = getattr(verify, name)

        def watched(*args, name=name, original=original, **kwargs):
            searched.append((name, torch.backends.cudnn.benchmark))
            return original(*args, **kwargs)

        monkeypatch.setattr(verify, name, watched)

    def vendor(x):
        searched.append(("vendor", torch.backends.cudnn.benchmark))
        return torch.softmax(x, -1)

    Verifier(Workload.parse("softmax(x=f32[4,8])"), torch.device("cpu"), vendor=vendor)
    assert set(searched) == {("vendor", True), ("find_batch", False), ("expect", False)}
    assert torch.backends.cudnn.benchmark


# --- results in memory of their own -----------------------------------------------------------


def test_an_output_is_no_memory_of_another_output_nor_of_an_input(forgets_functions):
    tw.fuse(lambda x: (x * 2, x + x), name="twice")
    w, _ = OPS["twice"].workload_of(torch.zeros(5, 7))
    verifier = Verifier(w, CPU)

    def shared(x):
        out = allocate(w.outputs[0], CPU).copy_(2 * x)
        return out, out

    assert verifier.check(shared).message == "returned the memory of its output 0 as its output 1"
    into = verifier.check(lambda x: (x.mul_(2), 2 * x))
    assert into.message == "returned the memory of x as its output 0"


def test_pytorch_may_return_its_argument_where_it_does_so_itself(forgets_functions):
    tw.fuse(lambda x, y: (x, x * y), name="passed_on")
    x = torch.zeros(5, 7)
    w, _ = OPS["passed_on"].workload_of(x, x)
    assert Verifier(w, CPU).check(lambda x, y: (x, x * y)).message == ""


def test_an_input_whose_elements_changed_places_was_modified():
    w = Workload.parse("softmax(x=f32[3,40000])")

    def turned(x):
        out = x.softmax(-1)
        words = x.view(torch.int64)
        words[:, [7, 9]] = words[:, [9, 7]]
        return out

    assert "modified its input x" in Verifier(w, CPU).check(turned).message


# --- faults that few inputs show --------------------------------------------------------------


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


# --- references -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fill",
    [
        lambda x: x.new_zeros(x.shape),
        torch.ones_like,
        lambda x: torch.full_like(x, 2),
        lambda x: torch.full(x.shape, 3, dtype=x.dtype),
    ],
)
def test_floats_written_over_whole_numbers_keep_their_fractions(fill, forgets_functions):
    def over(x):
        y = fill(x)
        y[:, 1:] = x[:, :-1].sin()
        return y

    tw.fuse(over, name="over")
    w, _ = OPS["over"].workload_of(torch.zeros(64, 100))
    verifier = Verifier(w, CPU)
    assert verifier.bound_ulp < 16
    assert verifier.check(over).ok
    assert "exceeds" in verifier.check(lambda x: over(x).trunc()).message


def test_what_follows_from_anything_is_anything(forgets_functions):
    """A table is asked at 5, give or take a rounding."""

    def looked_up(x, y):
        place = ((x.nan_to_num(0.0, 0.0, 0.0) * 0).sigmoid() * 10).floor().long()[:, :1]
        return 2 * y.gather(1, place)

    tw.fuse(looked_up, name="looked_up")
    w, _ = OPS["looked_up"].workload_of(torch.zeros(50, 10), torch.zeros(50, 10))
    assert Verifier(w, CPU).check(lambda x, y: 2 * y[:, 4:5]).message == ""


@pytest.mark.parametrize(
    "turned",
    [
        lambda x, y: torch.copysign(y, (x * 0.1) * 10 - x),
        lambda x, y: torch.atan2((x * 0.1) * 10 - x, -y.abs()),
    ],
)
def test_rounding_may_turn_a_sign_that_decides(turned, forgets_functions):
    tw.fuse(turned, name="turned")
    w, _ = OPS["turned"].workload_of(torch.zeros(64, 51), torch.zeros(64, 51))
    other_way = Verifier(w, CPU).check(lambda x, y: turned(x.double(), y.double()).float())
    assert other_way.message == ""


def test_variances_of_fp32_need_not_be_as_good_as_those_pytorch_finds_in_fp64(forgets_functions):
    tw.fuse(lambda x: x.var(0), name="spread")
    w, _ = OPS["spread"].workload_of(torch.zeros(128, 64))
    verifier = Verifier(w, CPU)

    def in_fp32(x):
        return (x - x.mean(0)).square().sum(0) / 127

    assert verifier.check(in_fp32).message == ""
    assert "exceeds" in verifier.check(lambda x: in_fp32(x) * (1 + 2**-18)).message


@pytest.mark.parametrize("seed", range(3))
def test_errors_that_rows_share_count_against_pytorchs_largest_of_several_draws(
    seed, forgets_functions
):
    tw.fuse(lambda x: x / x.sum().abs(), name="shares")
    w, _ = OPS["shares"].workload_of(torch.zeros(37, 120))

    def by_columns(x):
        return x / x.sum(0).sum().abs()

    assert Verifier(w, CPU, seed).check(by_columns).message == ""
