"""Calls of fused functions that are equal to others in Python and yet not the same; what fp32 does
not tell apart."""

import dataclasses
import enum
from decimal import Decimal
from typing import NamedTuple

import pytest
import torch

from tilewright.compile import cxx
from tilewright.dispatch.functions.fuse import fuse
from tilewright.errors import NoImplementation
from tilewright.op import OPS
from tilewright.tensor_spec import TensorSpec

pytestmark = pytest.mark.skipif(cxx.missing() is not None, reason=str(cxx.missing()))


@pytest.fixture
def fused():
    made = []

    def make(function, **options):
        name = f"told_apart{len(made)}"
        made.append(name)
        return fuse(function, name=name, **options)

    yield make
    for name in made:
        OPS.remove(name)


@pytest.mark.parametrize("sequence", [tuple, list])
@pytest.mark.parametrize("numbers", [(0.0, -0.0), (2.0, 2), (2, 2.5, 2), (-0.0, 0, 0.0)])
def test_numbers_within_a_sequence_that_are_equal(fused, sequence, numbers):
    f, x = fused(lambda x, k: x / k[0]), torch.ones(3)
    for number in numbers * 2:
        for _ in range(3):
            assert torch.equal(f(x, sequence([number])), x / number), number


def test_what_has_a_gradient_depends_on_a_numbers_type(fused):
    """A way to differentiate that was found for one number would drop another's gradient."""

    def function(x, n):
        return x.detach() * n if n is True else x * n

    f = fused(function)
    for n in (1, True, 1.0, -0.0, 0.0, 0, False, True):
        x = torch.ones(4, 8, requires_grad=True)
        out = f(x, n)
        assert out.requires_grad == function(x, n).requires_grad, n
        if out.requires_grad:
            out.sum().backward()
            assert torch.equal(x.grad, torch.full_like(x, float(n)))


def test_a_boolean_within_a_sequence_is_no_number(fused):
    f, m = fused(lambda m, k: m * k[0]), torch.tensor([True, False])
    for number in (True, 1.0, True, 1.0):
        for _ in range(3):
            found = f(m, (number,))
            assert found.dtype == (m * number).dtype
            assert torch.equal(found, m * number)


@pytest.mark.parametrize("given", [((1, 2), 3), (None, 3), ("no", 3)])
def test_sequences_of_other_things_than_numbers(fused, given):
    f, x = fused(lambda x, t: x * t[1]), torch.ones(3)
    assert torch.equal(f(x, given), 3 * x)
    assert torch.equal(f(x, (given[0], 4)), 4 * x)


@pytest.mark.parametrize("number", [3.0, -0.0, True])
def test_a_word_is_no_number_that_is_written_so(fused, number):
    f, x = fused(lambda x, p: x - 2.0 if isinstance(p, str) else x + p), torch.ones(4)
    for p in (number, str(number)) * 2:
        right = x - 2.0 if isinstance(p, str) else x + p
        assert torch.equal(f(x, p), right)


class Mode(enum.IntEnum):
    ON = 1


class Other(enum.IntEnum):
    ON = 1


class Word(enum.StrEnum):
    ON = "on"


@dataclasses.dataclass(frozen=True)
class Settings:
    name: str
    scale: object = dataclasses.field(default=1.0, compare=False)


@dataclasses.dataclass(frozen=True)
class Holder:
    held: object


@dataclasses.dataclass(eq=False)
class Scale:
    name: str

    def by(self, number):
        self.number = number
        return self


class Pair(NamedTuple):
    one: object


def by_kind(x, o):
    return {Mode: x.exp(), Other: x.sin(), int: x + 1, Word: x * 2, str: x * 3}[type(o)]


EQUALS = {
    "enums": (by_kind, [Mode.ON, Other.ON, 1]),
    "words": (by_kind, [Word.ON, "on"]),
    "what is not compared": (lambda x, o: x * o.scale, [Settings("a", 2.0), Settings("a", 5.0)]),
    "in a tuple": (lambda x, o: x * o[0].scale, [(Settings("a", 2.0),), (Settings("a", 5.0),)]),
    "zeros that are held": (lambda x, o: x / o.held, [Holder(0.0), Holder(-0.0), Holder(0)]),
    "numbers that are held": (lambda x, o: x * o.held, [Holder(1), Holder(1.0), Holder(True)]),
    "and in these": (lambda x, o: x * o.held.held, [Holder(Holder(1)), Holder(Holder(1.0))]),
    "beside its fields": (lambda x, o: x * o.number, [Scale("a").by(2), Scale("a").by(5)]),
    "tuples that are held": (
        lambda x, o: x * (2 if hasattr(o.held, "one") else 3),
        [Holder(Pair(1)), Holder((1,))],
    ),
    "named": (lambda x, o: x * o[0], [Pair(1), Pair(1.0)]),
    "sets": (lambda x, o: x * next(iter(o)), [frozenset({1}), frozenset({1.0})]),
    "complex": (lambda x, o: x / o.real, [complex(0.0, 0), complex(-0.0, 0)]),
    "decimals": (lambda x, o: x + 2 if isinstance(o, Decimal) else x + 3, [Decimal(1), 1]),
}


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("what", EQUALS)
def test_objects_that_are_equal_and_are_others(fused, what, recorded):
    function, objects = EQUALS[what]
    whole = torch.ones(3, dtype=torch.int32)
    x = torch.ones(3, requires_grad=True) if recorded else whole
    f = fused(function)
    for _ in range(3):
        for o in objects:
            own, right = f(x, o), function(x, o)
            assert own.dtype == right.dtype
            torch.testing.assert_close(own.detach(), right.detach())


def test_a_keyword_is_no_word_given_by_place(fused):
    def act(kind="relu", x=None):
        return x.relu() if kind == "relu" else x * 100

    f, x = fused(act), -torch.ones(3)
    for _ in range(2):
        assert torch.equal(f(x=x), torch.zeros(3))
        assert torch.equal(f("x", x), 100 * x)


def test_workloads_tell_numbers_within_tuples_apart(fused):
    fused(lambda x, k: x * k[0])
    x, numbers = TensorSpec("f32", (3,)), (0.0, -0.0, 1, 1.0, True)
    made = [OPS["told_apart0"].workload(x=x, k=(number,)) for number in numbers]
    assert len(set(made)) == len(made)


def test_integers_have_no_negative_zero(fused):
    f = fused(lambda x: (x.int(), 1 / x.int().float(), x.long().float()))
    x = torch.tensor([-0.5, -0.0, 0.0, -3.7, 3.7])
    right = (x.int(), 1 / x.int().float(), x.long().float())
    for mine, expected in zip(f(x), right, strict=True):
        assert torch.equal(mine, expected)
        assert torch.equal(mine.signbit(), expected.signbit())


@pytest.mark.parametrize("count", [lambda m: m.sum(), lambda m: m.sum(0)])
def test_counts_are_exact_or_refused(fused, count):
    f, m = fused(count), torch.ones(2**24 + 3, dtype=torch.bool)
    assert f(m[: 2**24]).item() == 2**24
    with pytest.raises(NoImplementation, match="a count of 16777219 elements in f32"):
        f(m)
    assert fused(count, fallback=True)(m).item() == 2**24 + 3
