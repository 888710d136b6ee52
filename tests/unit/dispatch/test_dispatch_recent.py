"""Calls that came before are found again, and nothing else is taken for one."""

import pytest
import torch

import tilewright as tw
from tilewright.dispatch import recent
from tilewright.dispatch.recent import Recent


def run(*tensors):
    return tensors


def kept(*args, differentiable=False):
    found = Recent()
    found.keep(args, run, differentiable)
    return found


def misaligned(*shape):
    return torch.randn(torch.Size(shape).numel() + 1)[1:].view(shape)


X, W, B = torch.randn(8, 16), torch.randn(16), torch.randn(16)
ARGS = (X, (16,), W, B)


def test_a_call_of_the_same_kind_is_found_with_its_tensors():
    again = (torch.randn(8, 16), (16,), torch.randn(16), torch.randn(16))
    found_run, tensors, told = kept(*ARGS).find(again, False)
    assert found_run is run
    assert told == {}
    assert [id(t) for t in tensors] == [id(again[0]), id(again[2]), id(again[3])]


def test_what_takes_pointers_is_told_those_of_the_tensors():
    def launch(*tensors, pointers=None):
        return pointers

    launch.takes_pointers = True
    found = Recent()
    found.keep(ARGS, launch, False)
    _, tensors, told = found.find(ARGS, False)
    assert told == {"pointers": [t.data_ptr() for t in tensors]}


def test_calls_kept_before_the_last_one_are_found_until_all_is_cleared():
    found = kept(*ARGS)
    found.keep((torch.randn(4, 16), (16,)), len, False)
    assert found.find(ARGS, False)[0] is run
    assert found.find((torch.randn(4, 16), (16,)), False)[0] is len
    found.clear()
    assert found.find(ARGS, False) is None
    assert found.find((torch.randn(4, 16), (16,)), False) is None


def test_a_call_with_one_tensor_is_found():
    assert kept(X, -1).find((X.clone(), -1), False) is not None


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
    assert kept(*ARGS).find(tuple(args), False) is None


def test_a_list_that_the_caller_changes_is_another_argument():
    shape = [16]
    found = kept(X, shape)
    shape[:] = [8, 16]
    assert found.find((X, shape), False) is None
    assert found.find((X, [16]), False) is not None


def test_calls_with_zeros_are_not_kept_since_they_may_be_negative():
    assert kept(X, 0.0).find((X, 0.0), False) is None
    assert kept(X, 0.5).find((X, 0.5), False) is not None


def test_fewer_arguments_are_not_found():
    assert kept(*ARGS).find(ARGS[:3], False) is None


def test_what_ran_without_gradients_is_not_found_where_they_are_recorded():
    parameter = torch.nn.Parameter(torch.randn(16))
    with torch.no_grad():
        found = kept(X, (16,), parameter)
        assert found.find((X, (16,), parameter), False) is not None
    assert found.find((X, (16,), parameter), True) is None


def test_autocast_and_inference_tensors_are_not_found():
    with torch.autocast("cpu", torch.bfloat16):
        assert kept(*ARGS).find(ARGS, False) is not None  # made and met under the same state
    found = kept(*ARGS)
    with torch.autocast("cpu", torch.bfloat16):
        assert found.find(ARGS, False) is None
    with torch.inference_mode():
        assert found.find((torch.randn(8, 16), *ARGS[1:]), False) is None


def test_calls_alike_are_bounded_and_the_first_stay():
    found = Recent()
    for n in range(1, 4 * recent.MAX_ALIKE):
        found.keep((X, (16,), torch.randn(n)), run, False)
    assert sum(map(len, found.kept.values())) == recent.MAX_ALIKE
    assert found.find((X, (16,), torch.randn(1)), False) is not None


def test_kinds_are_bounded(monkeypatch):
    monkeypatch.setattr(recent, "MAX_KINDS", 4)
    found = Recent()
    for n in range(1, 20):
        found.keep((torch.randn(n),), run, False)
    assert len(found.kept) <= 4


def test_a_tensor_may_come_where_a_number_was():
    x, index, src = torch.zeros(5), torch.tensor([1, 3]), torch.tensor([7.0, 8.0])
    for _ in range(3):
        assert tw.scatter(x, 0, index, 2.0).tolist() == [0, 2, 0, 2, 0]
        assert tw.scatter(x, 0, index, src).tolist() == [0, 7, 0, 8, 0]


def test_a_nested_tensor_is_not_held_against_what_came_before():
    nested = torch.nested.nested_tensor([torch.randn(3, 16), torch.randn(2, 16)])
    found = kept(*ARGS)
    assert found.find((nested, *ARGS[1:]), False) is None
    for place in (2, 3):
        assert found.find((*ARGS[:place], nested, *ARGS[place + 1 :]), False) is None
    for _ in range(4):
        tw.layer_norm(*ARGS)
    mine, theirs = (f(nested, (16,), W, B) for f in (tw.layer_norm, torch.layer_norm))
    for m, t in zip(mine.unbind(), theirs.unbind(), strict=True):
        assert torch.equal(m, t)
