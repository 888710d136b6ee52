"""Calls that came before are found again, and nothing else is taken for one."""

import weakref

import pytest
import torch

import tilewright as tw
from tilewright.compile import cxx
from tilewright.device import spec_of
from tilewright.dispatch import recent
from tilewright.dispatch.recent import MISSED, Recent
from tilewright.impl import IMPLS, Executable
from tilewright.op import Workload


def run(*tensors):
    return tensors


def kept(*args):
    calls = Recent()
    calls.keep(args, run, False)
    return calls


def result(calls, args, differentiable=False):
    """As public operators ask for it."""
    found = calls.last(args, differentiable)
    return calls.earlier(args, differentiable) if found is MISSED else found


def misaligned(*shape):
    return torch.randn(torch.Size(shape).numel() + 1)[1:].view(shape)


X, W, B = torch.randn(8, 16), torch.randn(16), torch.randn(16)
ARGS = (X, (16,), W, B)


def test_a_call_of_the_same_kind_is_answered_with_its_tensors():
    again = (torch.randn(8, 16), (16,), torch.randn(16), torch.randn(16))
    assert [*map(id, result(kept(*ARGS), again))] == [id(again[0]), id(again[2]), id(again[3])]


def test_what_takes_pointers_is_told_those_of_the_tensors():
    def launch(*tensors, pointers=None):
        return tensors, pointers

    launch.takes_pointers = True
    calls = Recent()
    calls.keep(ARGS, launch, False)
    assert result(calls, ARGS) == ((X, W, B), [t.data_ptr() for t in (X, W, B)])


def test_what_runs_by_addresses_alone_is_told_nothing_else():
    class Launch(Executable):
        def by_addresses(self, device):
            return lambda *addresses: (device, addresses)

    calls = Recent()
    calls.keep(ARGS, Launch(), False)
    assert result(calls, ARGS) == (X.device, tuple(t.data_ptr() for t in (X, W, B)))


WIDE = ", ".join(f"{n}=f32[256,4096]" for n in ("grad_output", "end", "weight"))


@pytest.mark.skipif(cxx.missing() is not None, reason=str(cxx.missing()))
@pytest.mark.parametrize(
    "text",
    [
        "softmax(x=f32[8,16])",
        f"lerp_backward({WIDE}, x=f32[256,4096], grads=[x,end])",
        f"lerp_backward({WIDE}, x=f32[1], grads=[x])",  # it joins sums of threads
    ],
)
def test_a_kernel_for_the_cpu_runs_by_addresses(text):
    w, fused, spec = Workload.parse(text), IMPLS["fused"], spec_of(None)
    built = fused.build(fused.heuristic(w, spec), w, spec)
    tensors = w.operator.examples(w, "random", 0)
    run = built.by_addresses(torch.device("cpu"))
    found, right = run(*[t.data_ptr() for t in tensors]), built(*tensors)
    if len(w.outputs) == 1:
        found, right = [found], [right]
    assert all(torch.equal(own, o) for own, o in zip(found, right, strict=True))
    gone = weakref.ref(built)
    del built, run
    assert gone() is None  # without a collection of cycles


def test_calls_kept_before_the_last_one_are_answered_until_all_is_cleared():
    calls, other = kept(*ARGS), (torch.randn(4, 16), (16,))
    calls.keep(other, lambda x: "other", False)
    assert len(result(calls, ARGS)) == 3
    assert result(calls, other) == "other"
    calls.clear()
    assert result(calls, ARGS) is MISSED
    assert result(calls, other) is MISSED


def test_equal_arguments_are_others_where_their_types_differ():
    calls, one = kept(X, (1, 2), 1), 1
    assert result(calls, (X, (one, 2), 1)) is not MISSED
    for others in (((True, 2), 1), ((1, 2.0), 1), ([1, 2], 1), ((1, 2), True), ((1, 2), 1.0)):
        assert result(calls, (X, *others)) is MISSED


def test_a_call_with_one_tensor_is_found():
    assert result(kept(X, -1), (X.clone(), -1)) is not MISSED


@pytest.mark.parametrize(
    ("place", "other"),
    [
        (0, torch.randn(8, 16, dtype=torch.float64)),
        (0, torch.randn(16, 8).t()),
        (0, torch.randn(9, 16)),
        (0, misaligned(8, 16)),
        (0, torch.randn(8, 16, requires_grad=True)),
        (0, torch.randn(8, 16, dtype=torch.complex64).conj().imag),
        (0, torch.randn(8, 16, device="meta")),
        (1, [16]),
        (1, (8, 16)),
        (1, torch.randn(16)),
        (2, None),
        (2, 1.0),
        (2, torch.randn(15)),
        (2, torch.randn(16).half()),
        (2, misaligned(16)),
        (3, torch.nn.Parameter(torch.randn(16), requires_grad=False)),
    ],
)
def test_a_call_that_differs_in_one_argument_is_not_found(place, other):
    args = list(ARGS)
    args[place] = other
    assert result(kept(*ARGS), tuple(args)) is MISSED


def test_a_list_that_the_caller_changes_is_another_argument():
    shape = [16]
    calls = kept(X, shape)
    shape[:] = [8, 16]
    assert result(calls, (X, shape)) is MISSED
    assert result(calls, (X, [16])) is not MISSED


def test_calls_with_zeros_are_not_kept_since_they_may_be_negative():
    assert result(kept(X, 0.0), (X, 0.0)) is MISSED
    assert result(kept(X, 0.5), (X, 0.5)) is not MISSED


def test_a_tensor_that_comes_twice_leaves_room_for_others():
    calls = Recent()
    for _ in range(recent.MAX_ALIKE):
        calls.keep((X, X), run, False)
    assert not calls.kept
    calls.keep((X, torch.randn(8, 16)), run, False)
    assert result(calls, (X, X)) is MISSED
    assert result(calls, (X, torch.randn(8, 16))) is not MISSED


class Sizes(tuple):
    pass


def test_sequences_of_a_kind_of_their_own_are_exact_too():
    assert result(kept(X, Sizes((1,))), (X, Sizes((1,)))) is not MISSED
    assert result(kept(X, Sizes((1,))), (X, Sizes((True,)))) is MISSED
    assert result(kept(X, Sizes((0.0,))), (X, Sizes((0.0,)))) is MISSED


def test_fewer_arguments_are_not_found():
    assert result(kept(*ARGS), ARGS[:3]) is MISSED


def test_what_ran_without_gradients_is_not_found_where_they_are_recorded():
    parameter = torch.nn.Parameter(torch.randn(16))
    with torch.no_grad():
        calls = kept(X, (16,), parameter)
        assert result(calls, (X, (16,), parameter)) is not MISSED
    assert result(calls, (X, (16,), parameter), True) is MISSED


def test_autocast_and_inference_tensors_are_not_found():
    with torch.autocast("cpu", torch.bfloat16):
        assert result(kept(*ARGS), ARGS) is not MISSED  # made and met under the same state
    calls = kept(*ARGS)
    with torch.autocast("cpu", torch.bfloat16):
        assert result(calls, ARGS) is MISSED
    with torch.inference_mode():
        assert result(calls, (torch.randn(8, 16), *ARGS[1:])) is MISSED


def test_calls_alike_are_bounded_and_the_first_stay():
    calls = Recent()
    for n in range(1, 4 * recent.MAX_ALIKE):
        calls.keep((X, (16,), torch.randn(n)), run, False)
    assert sum(map(len, calls.kept.values())) == recent.MAX_ALIKE
    assert result(calls, (X, (16,), torch.randn(1))) is not MISSED


def test_kinds_are_bounded(monkeypatch):
    monkeypatch.setattr(recent, "MAX_KINDS", 4)
    calls = Recent()
    for n in range(1, 20):
        calls.keep((torch.randn(n),), run, False)
    assert len(calls.kept) <= 4


def test_a_tensor_may_come_where_a_number_was():
    x, index, src = torch.zeros(5), torch.tensor([1, 3]), torch.tensor([7.0, 8.0])
    for _ in range(3):
        assert tw.scatter(x, 0, index, 2.0).tolist() == [0, 2, 0, 2, 0]
        assert tw.scatter(x, 0, index, src).tolist() == [0, 7, 0, 8, 0]


def test_a_nested_tensor_is_not_held_against_what_came_before():
    nested = torch.nested.nested_tensor([torch.randn(3, 16), torch.randn(2, 16)])
    calls = kept(*ARGS)
    assert result(calls, (nested, *ARGS[1:])) is MISSED
    for place in (2, 3):
        assert result(calls, (*ARGS[:place], nested, *ARGS[place + 1 :])) is MISSED
    for _ in range(4):
        tw.layer_norm(*ARGS)
    mine, theirs = (f(nested, (16,), W, B) for f in (tw.layer_norm, torch.layer_norm))
    for m, t in zip(mine.unbind(), theirs.unbind(), strict=True):
        assert torch.equal(m, t)
