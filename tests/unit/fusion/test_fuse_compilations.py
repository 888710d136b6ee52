"""tw.fuse: how much is compiled for calls of many shapes, and what runs until it is."""

import pytest
import torch
from dispatching import record
from torch.nn import functional as F

import tilewright as tw
from tilewright import device
from tilewright.compile import cxx
from tilewright.dispatch import prepared
from tilewright.dispatch.prepared import FREE_COMPILATIONS, HOT_CALLS, state
from tilewright.fusion.cpp import target
from tilewright.impl import IMPLS
from tilewright.space import config_dict
from tilewright.store import Store

pytestmark = [
    pytest.mark.skipif(cxx.missing() is not None, reason=str(cxx.missing())),
    pytest.mark.usefixtures("records_of_its_own"),
]


@pytest.fixture
def binaries(tmp_path, monkeypatch):
    """How many were compiled."""
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    return lambda: len(list((tmp_path / "cache").glob("*/*.so")))


def told_of_compilations(recwarn):
    return [m for r in recwarn if "kernels were compiled for calls of" in (m := str(r.message))]


def test_200_widths_compile_so_many_kernels_and_no_more(binaries, recwarn):
    def scaled_softmax(x, w):
        return torch.softmax(x * w, -1) * w

    fused = tw.fuse(scaled_softmax)

    def check(rows, n):
        x, w = torch.randn(rows, n), torch.randn(n)
        torch.testing.assert_close(fused(x, w), scaled_softmax(x, w))

    for n in range(100, 300):
        check(3, n)
    assert binaries() == FREE_COMPILATIONS
    for n in (100, 110, 131):  # other rows of what was compiled
        built = len(state.built)
        check(2, n)
        assert (binaries(), len(state.built)) == (FREE_COMPILATIONS, built + 1)
    for _ in range(HOT_CALLS - 1):
        assert binaries() == FREE_COMPILATIONS
        check(3, 299)
    assert binaries() == FREE_COMPILATIONS + 1
    (told,) = told_of_compilations(recwarn)
    assert all(word in told for word in ("scaled_softmax on cpu", "Tune", "pad", "scalars="))


def test_one_shape_too_many_has_results_with_memory_of_their_own(binaries, monkeypatch, recwarn):
    monkeypatch.setattr(prepared, "FREE_COMPILATIONS", 1)
    fused = tw.fuse(lambda x: (x, x.softmax(-1)), name="beside_its_argument")
    for n in (8, 9):
        x = torch.zeros(2, n)
        same, _ = fused(x)
        assert binaries() == 1
        assert len(told_of_compilations(recwarn)) == (n == 9)
        same += 1
        assert not x.any()


def test_so_it_has_of_halves(binaries, monkeypatch):
    monkeypatch.setattr(prepared, "FREE_COMPILATIONS", 0)
    h, y = torch.randn(7, 13).bfloat16(), torch.zeros(7, 13)
    scaled, same = tw.fuse(lambda h, y: (h * 2, y), name="beside_a_half")(h, y)
    one, two = tw.fuse(lambda h: (h > 0,) * 2, name="mask_twice")(h)
    assert binaries() == 0
    assert torch.equal(scaled, h * 2)
    same += 1
    assert not y.any()
    one.fill_(True)
    assert torch.equal(two, h > 0)


def test_source_is_written_once_for_a_build(monkeypatch):
    """Its first call asks whether a kernel is compiled already, and builds it."""
    written = []

    def emit(graph, config):
        written.append(graph)
        return emitted(graph, config)

    emitted = target.emit
    monkeypatch.setattr(target, "emit", emit)
    fused = tw.fuse(lambda x: x.exp().sum(-1), name="written_once")
    for rows in (5, 6, 7):
        x = torch.randn(rows, 11)
        torch.testing.assert_close(fused(x), x.exp().sum(-1))
    assert len(written) == 3


def test_200_shapes_near_a_record_compile_one_kernel_until_they_come_again(binaries):
    spec = device.current_device("cpu")[1]
    w = tw.Workload.parse("softmax(x=f32[64,1000])")
    with Store() as store:
        record(store, str(w), "fused", config_dict(IMPLS["fused"].heuristic(w, spec)))
    for n in range(1000, 800, -1):
        tw.softmax(torch.randn(64, n))
    assert binaries() == 1  # the record's own
    for _ in range(HOT_CALLS - 1):
        assert binaries() == 1
        tw.softmax(torch.randn(64, 900))
    assert binaries() == 2
    for rows in range(33, 97):
        tw.softmax(torch.randn(rows, 1000))
    assert binaries() == 2


@pytest.mark.filterwarnings("ignore:0 kernels were compiled")
def test_halves_are_computed_in_fp32_where_nothing_is_compiled_yet(binaries, monkeypatch):
    monkeypatch.setattr("tilewright.dispatch.prepared.FREE_COMPILATIONS", 0)

    def rms_over(x, y):
        return ((x * x).sum(-1, keepdim=True) / 3 + 0.5).sqrt().half().float().tanh() * y + y.sum()

    x, y = torch.full((4, 40), 300.0).half(), torch.randn(40).half().requires_grad_()
    fused, found = tw.fuse(rms_over), []
    for _ in range(HOT_CALLS):
        assert binaries() == 0
        out = fused(x, y)
        found.append((out, *torch.autograd.grad(out.float().square().sum(), y)))
    assert binaries() == 2
    assert [t.dtype for t in found[0]] == [torch.float32, torch.float16]
    for out, gradient in found:
        assert out.isfinite().all()
        torch.testing.assert_close((out, gradient), found[-1], rtol=2e-3, atol=1e-3)


@pytest.mark.filterwarnings("ignore:0 kernels were compiled")
def test_what_is_given_by_name_alone_is_kept_where_nothing_is_compiled_yet(binaries, monkeypatch):
    monkeypatch.setattr("tilewright.dispatch.prepared.FREE_COMPILATIONS", 0)

    def shifted(x, *, by, factor=1.0):
        return x * factor + by

    fused, x, by = tw.fuse(shifted), torch.randn(4, 40), torch.randn(40)
    for _ in range(HOT_CALLS):
        assert binaries() == 0
        torch.testing.assert_close(fused(x, by=by, factor=3.0), shifted(x, by=by, factor=3.0))
    assert binaries() == 1


@pytest.mark.parametrize("implementation", ["aten", "inductor"])
def test_what_is_given_by_name_alone_is_kept_by_pytorch(implementation):
    def widened(x, *, columns, value=0.0):
        return F.pad(x, (0, columns), value=value)

    fused = tw.fuse(widened)
    for x in (torch.randn(4, 5), torch.randn(4, 0)):
        with tw.use(implementation):
            found = fused(x, columns=2, value=3.0)
        torch.testing.assert_close(found, widened(x, columns=2, value=3.0))


def test_widths_of_gradients_are_bounded_and_masks_stay_those_of_the_seed(
    binaries, monkeypatch, recwarn
):
    monkeypatch.setattr("tilewright.dispatch.prepared.FREE_COMPILATIONS", 2)

    def dropped_norm(x, weight, p: float = 0.5):
        return F.layer_norm(F.dropout(x, p), (x.shape[-1],), weight)

    fused = tw.fuse(dropped_norm)
    seed = torch.tensor(3)

    def gradients(n):
        generator = torch.Generator().manual_seed(n)
        x, w = (torch.randn(*s, generator=generator, requires_grad=True) for s in ((8, n), (n,)))
        out = fused(x, w, seed=seed)
        return out, *torch.autograd.grad(out.square().sum(), [x, w])

    found = {n: gradients(n) for n in (64, 65, 66, 67, 68)}
    assert binaries() == 4
    assert len(told_of_compilations(recwarn)) == 2  # of the function, and of its gradients
    monkeypatch.setattr("tilewright.dispatch.prepared.FREE_COMPILATIONS", 100)
    for n, right in found.items():
        torch.testing.assert_close(gradients(n), right, rtol=1e-4, atol=1e-5)
    assert binaries() == 10
