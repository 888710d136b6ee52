"""The verifier's machinery: verdicts, chunks and messages."""

import functools
import itertools
import math

import pytest
import torch

import tilewright as tw
from tilewright.errors import VerificationError
from tilewright.impls._vendor import vendor
from tilewright.measure import expected, verify
from tilewright.measure.batch import Batch
from tilewright.measure.verify import Verdict, Verifier, verification_error
from tilewright.op import Workload

CPU = torch.device("cpu")
LAYER_NORM = "layer_norm(x=f32[7,37], weight=f32[37], bias=f32[37])"


# --- verdicts -----------------------------------------------------------------------------------


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


# --- chunks and samples -------------------------------------------------------------------------


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


# --- messages -----------------------------------------------------------------------------------


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
