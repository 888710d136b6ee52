"""Functions that C++ kernels compute for whole vectors of floats: their errors in units of the last
place (ulp), against fp64, at every exponent, and where they are hard."""

import math

import numpy as np
import pytest
import torch

from tilewright.compile import cxx
from tilewright.compile.cache import compiled
from tilewright.fusion.cpp import target
from tilewright.fusion.cpp.emit import emit
from tilewright.fusion.cpp.entry import ENTRY
from tilewright.fusion.cpp.schedule import LoopSchedule
from tilewright.fusion.ir import Access, Graph, Node
from tilewright.impl import CompileTask

pytestmark = pytest.mark.skipif(cxx.missing() is not None, reason=str(cxx.missing()))

MOST_ULP = {
    **{"log": 0.95, "log2": 1.4, "log10": 1.35, "log1p": 1.55, "exp2": 1.1, "expm1": 1.25},
    **{"tanh": 1.35, "erf": 1.65, "sin": 1.3, "cos": 1.3},
}
"""Over all floats, with fused multiply-add or without."""
ODD = ("expm1", "log1p", "tanh", "erf", "sin")
"""Or of their argument's sign, at least."""
IS_ITSELF = {"expm1": 2.0**-25, "log1p": 2.0**-25, "tanh": 2.0**-13, "sin": 2.0**-13}
"""Below which f(x) rounds to x."""
TRUTH = {op: getattr(torch, op) for op in MOST_ULP}

BASELINE = ("-march=x86-64", "-ffp-contract=off")
FLAGS = {
    "native": (),
    "baseline": BASELINE,
    "native without fused multiply-add": BASELINE[1:],
}
SPECIAL = torch.tensor([0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan])


def results(x, ops, flags=(), out=None, wide=False):
    """By one kernel, one vector after another; `wide`: its vectors are as many doubles."""
    size, schedule = (len(x),), LoopSchedule(1, 1, "nothing", False, False, threads="one")
    loaded = [Node("load", (), "f32", size, 0)]
    if wide:
        loaded += [Node("cast", (0,), "f64", size), Node("cast", (1,), "f32", size)]
    first = len(loaded)
    nodes = (*loaded, *(Node(op, (first - 1,), "f32", size) for op in ops))
    access = Access((1,), "f32", 4)
    outputs = tuple((first + k, access) for k in range(len(ops)))
    graph = Graph(nodes, size, (access,), outputs).check()
    built = compiled(CompileTask("cxx", emit(graph, schedule), (*target.FLAGS, *flags), ENTRY))
    found = {op: torch.full(size, math.nan) for op in ops}
    pointers = [t.data_ptr() for t in (x, *found.values())]
    target.LoopKernels(graph, schedule, built)(pointers, (), 1, False)
    return found


def every_exponent():
    """Floats of each exponent and sign, among them the first and the last."""
    inside = torch.randint(0, 1 << 23, (60,), generator=torch.Generator().manual_seed(0))
    mantissas = torch.cat((torch.tensor([0, 1, (1 << 23) - 2, (1 << 23) - 1]), inside))
    positive = (torch.arange(255)[:, None] << 23) + mantissas
    return torch.cat((positive, positive - (1 << 31))).flatten().int().view(torch.float32)


def hard():
    """Where functions change their formula, cancel, are near zero, overflow or are no number."""
    turns = (torch.arange(20_000, dtype=torch.float64) * (math.pi / 2)).float()
    far = (torch.randn(5000, generator=torch.Generator().manual_seed(1)) * 1e7).abs()
    positive = torch.cat((torch.linspace(0, 1.5, 20_001), torch.linspace(1.5, 130, 20_001)))
    positive = torch.cat((positive, turns, torch.nextafter(turns, SPECIAL[4]), far))
    return torch.cat((SPECIAL, positive, -positive))


def ulps(found, true):
    least, most = np.finfo(np.float32).smallest_normal, np.finfo(np.float32).max
    exponent = np.frexp(np.clip(np.abs(true), least, most))[1]
    return np.abs(found.astype(np.float64) - true) / np.ldexp(1.0, exponent - 24)


@pytest.mark.parametrize("flags", FLAGS)
def test_every_value_is_as_near_as_promised(flags):
    x = torch.cat((every_exponent(), hard()))
    for op, found in results(x, tuple(MOST_ULP), FLAGS[flags]).items():
        true = TRUTH[op](x.double())
        assert torch.equal(found.isnan(), true.isnan()), op
        beyond = true.abs() >= torch.finfo(torch.float32).max
        assert torch.equal(found[beyond], true.float()[beyond]), op
        within = ~(true.isnan() | beyond)
        errors = ulps(found[within].numpy(), true[within].numpy())
        assert errors.max() <= MOST_ULP[op], (op, x[within][int(errors.argmax())].item())


@pytest.mark.parametrize("flags", FLAGS)
def test_zeros_keep_their_sign_and_tiny_numbers_themselves(flags):
    x = every_exponent()
    for op, found in results(x, ODD, FLAGS[flags]).items():
        numbers = ~found.isnan()
        assert torch.equal(found.signbit()[numbers & (x == 0)], x.signbit()[numbers & (x == 0)])
        if op in IS_ITSELF:
            tiny = x.abs() < IS_ITSELF[op]
            assert torch.equal(found[tiny], x[tiny]), op


def test_ends_of_domains_are_pytorchs():
    below = torch.cat((SPECIAL, torch.tensor([-1e-45, -1e-30, -0.5, -1.0000001, -2.0, -1e38])))
    for op, found in results(below, tuple(MOST_ULP)).items():
        right = TRUTH[op](below.double()).float()
        exact = right.isinf() | right.isnan() | (right == 0)
        assert torch.equal(found.isnan(), right.isnan()), op
        assert torch.equal(found[exact].nan_to_num(7.0), right[exact].nan_to_num(7.0)), op
        zero = right == 0
        assert torch.equal(found.signbit()[zero], right.signbit()[zero]), op


def test_a_value_does_not_depend_on_its_neighbours():
    """Of sines a large one takes another way, of a row its end."""
    near = torch.linspace(-3000, 3000, 1003)
    alone = results(near, ("sin", "cos"))
    among = torch.stack((near, torch.full_like(near, 1e6)), 1).flatten()
    for op, found in results(among, ("sin", "cos")).items():
        assert torch.equal(found[::2], alone[op])
        assert (found[1::2] == found[1]).all()
        assert abs(found[1].item() - getattr(math, op)(1e6)) < 1e-7
    for op, found in results(near[1:], ("sin", "cos")).items():
        assert torch.equal(found, alone[op][1:])


@pytest.mark.parametrize("flags", ["native", "baseline"])
def test_vectors_of_kernels_with_doubles_give_the_same(flags):
    x = torch.cat((every_exponent()[::7], hard()[::7]))
    ops = tuple(MOST_ULP)
    both = [results(x, ops, FLAGS[flags], wide=wide) for wide in (False, True)]
    for op in ops:
        assert torch.equal(both[0][op].nan_to_num(7.0), both[1][op].nan_to_num(7.0)), op
