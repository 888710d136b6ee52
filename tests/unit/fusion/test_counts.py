"""Numbers that say how many rows there are are given to kernels, and change no bit."""

import pytest
import torch
from torch.nn import functional as F

import tilewright as tw
from on_targets import TARGETS, emitted, executable, made, right, written
from tilewright.impls import fused
from tilewright.op import OPS, Workload


def mean_loss(x, y):
    return F.mse_loss(x, y)


def unbiased(x):
    return x.var(0)


def blended(x, alpha):
    return (x * alpha).mean(0)


def doubled(x):
    return (x * 2).mean(0)


def batch_mean(x, y):
    return F.kl_div(x, y, reduction="batchmean")


@pytest.fixture(scope="module", autouse=True)
def _fused():
    before = set(OPS)
    for function in (mean_loss, unbiased, doubled, batch_mean):
        tw.fuse(function)
    tw.fuse(blended, scalars=["alpha"])
    yield
    for name in set(OPS) - before:
        OPS.remove(name)


def losses(n):
    return written("mean_loss", x=(n, 48), y=(n, 48))


WORKLOADS = {
    "a loss": losses,
    "its gradients": lambda n: written("mean_loss_backward", grad_output=(), x=(n, 48), y=(n, 48)),
    "of the batch": lambda n: written("batch_mean", x=(n, 48), y=(n, 48)),
    "a variance": lambda n: written("unbiased", x=(n, 48)),
    "its gradient": lambda n: written("unbiased_backward", grad_output=(48,), x=(n, 48)),
    "beside a number": lambda n: Workload.parse(f"blended(x=f32[{n},48], alpha=0.3)"),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", WORKLOADS)
def test_one_kernel_serves_any_number_of_rows_with_the_bits_of_one_of_its_own(
    name, target, monkeypatch
):
    found, sources = {}, set()
    for n in (331, 333, 335):
        w = WORKLOADS[name](n)
        sources.add(emitted(target, w)[2].source)
        found[n] = executable(target, w)(*positive(w))
    assert len(sources) == 1
    with monkeypatch.context() as m:
        m.setattr(fused, "give_counts", lambda graph, sizes: graph)
        fused.graph_of.cache_clear()
        for n, given in found.items():
            w = WORKLOADS[name](n)
            tensors = positive(w)
            written_out = executable(target, w)(*tensors)
            sources.add(emitted(target, w)[2].source)
            for a, b, exact in zip(
                *map(_as_tuple, (given, written_out, right(w, tensors))), strict=True
            ):
                assert torch.equal(a, b)
                torch.testing.assert_close(a.double(), exact, rtol=1e-5, atol=1e-5)
    fused.graph_of.cache_clear()
    assert len(sources) == 4


BY_CHANCE = [
    "rms_norm(x=f16[64,768])",
    "layer_norm(x=f32[768,768])",
    "rms_norm(x=f16[8192,4096])",  # 2 / 8192
    "rms_norm(x=f32[8192,1024])",  # its epsilon
    "rms_norm(x=f16[769,768])",
    "rms_norm(x=f32[1,7168])",
]


@pytest.mark.parametrize("text", BY_CHANCE)
def test_the_width_of_a_row_is_compiled_in(text):
    assert fused.graph_of(Workload.parse(text)).scalars == ()


def test_a_few_rows_are_no_count():
    """The 2 is none of two rows, and their own is compiled in with it."""
    graphs = [fused.graph_of(written("doubled", x=(n, 48))) for n in (2, 9)]
    assert [len(g.scalars) for g in graphs] == [0, 1]


def test_other_numbers_of_a_call_are_given_before_it():
    w = WORKLOADS["beside a number"](331)
    graph = fused.graph_of(w)
    assert graph.scalars == ("f32", "f32")
    assert graph.numbers((0.3,)) == (0.3, 331.0)
    assert graph.numbers((0.7,)) == (0.7, 331.0)


def positive(w):
    return [t.abs() + 0.1 for t in made(w, 0)]


def _as_tuple(outputs):
    return (outputs,) if isinstance(outputs, torch.Tensor) else outputs
