"""Fused functions in inference mode, below torch.compile and compiled autograd, in transforms."""

import re

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import tilewright as tw
from tilewright.compile import cxx
from tilewright.dispatch.call import operators
from tilewright.errors import InvalidArgument, InvalidType

pytestmark = [
    pytest.mark.skipif(cxx.missing() is not None, reason=str(cxx.missing())),
    pytest.mark.usefixtures("records_of_its_own"),
]
BACKENDS = ("eager", "aot_eager")


class Plain(Tensor):
    """A subclass that is nothing else."""


def dropped(x, w):
    return F.dropout(x, 0.5) * w


def dropped_channels(x, w):
    return F.dropout2d(x[None, None], 0.5)[0, 0] + w


def dropped_alike(x, w):
    return F.alpha_dropout(x, 0.5) * w


# ---- inference mode ------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [dropped, dropped_channels, dropped_alike])
@pytest.mark.parametrize("mode", ["inference", "below autograd"])
def test_what_draws_may_be_called_first_where_autograd_is_left_out(function, mode):
    fused, x, w = tw.fuse(function), torch.randn(6, 8), torch.randn(8)
    left_out = {
        "inference": torch.inference_mode,
        "below autograd": torch._C._AutoDispatchBelowAutograd,
    }[mode]
    with left_out():
        first = fused(x, w)
    assert first.shape == x.shape
    found = fused(x.requires_grad_(), w)
    assert type(found.grad_fn).__name__ == "GeneratedBackward"
    found.sum().backward()
    assert x.grad.shape == x.shape


@pytest.mark.parametrize("function", [dropped, dropped_channels, dropped_alike])
@pytest.mark.parametrize("run_by", ["kernels", "autocast", "aten", "disabled"])
def test_a_seed_gives_its_mask_in_inference_mode_whoever_runs_the_function(function, run_by):
    fused, x, w = tw.fuse(function), torch.randn(6, 8), torch.randn(8)
    seed = torch.tensor(5)
    right = fused(x, w, seed=seed)
    try:
        with torch.inference_mode():
            if run_by == "autocast":
                with torch.autocast("cpu"):
                    found = fused(x, w, seed=seed)
            elif run_by == "aten":
                with tw.use("aten"):
                    found = fused(x, w, seed=seed)
            else:
                if run_by == "disabled":
                    tw.disable()
                found = fused(x, w, seed=seed)
    finally:
        tw.enable()
    torch.testing.assert_close(found, right)


def test_gradients_that_inference_mode_does_not_record_are_not_recorded():
    fused, x = tw.fuse(lambda x, w: (x * w).exp(), name="scaled_exp"), torch.randn(4)
    w = torch.randn(4, requires_grad=True)
    with torch.inference_mode(), torch.enable_grad():
        found = fused(x, w)
    assert not found.requires_grad
    assert found.grad_fn is None
    assert fused(x, w).requires_grad


# ---- memory of results ---------------------------------------------------------------------------


def itself_and_sine(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, x.sin()


def flattened(x: Tensor) -> Tensor:
    return x.view(-1)


def twice_and_its_transpose(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * 2
    return y, y.t()


def written(x):
    """What is left of x, and of a result, once other results were written to."""
    itself, _ = operators["itself_and_sine"](x)
    itself.mul_(10)
    operators["flattened"](x).mul_(10)
    twice, transposed = operators["twice_and_its_transpose"](x)
    twice.mul_(100)
    return x + 0, transposed + 0


@pytest.fixture
def sharing():
    for function in (itself_and_sine, flattened, twice_and_its_transpose):
        tw.fuse(function)


@pytest.mark.usefixtures("sharing")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_results_have_memory_of_their_own_below_torch_compile(backend, requires_grad, dynamic):
    torch._dynamo.reset()
    x = torch.ones(2, 3, requires_grad=requires_grad)
    compiled = torch.compile(written, backend=backend, fullgraph=True, dynamic=dynamic)
    for _ in range(2):
        left, transposed = compiled(x)
        assert (left == 1).all()
        assert (transposed == 2).all()
    assert (x == 1).all()


VIEWS = {
    "argument": lambda x: x,
    "flat": lambda x: x.view(-1),
    "row": lambda x: x[1],
    "chunk": lambda x: x.chunk(2)[1],
    "expanded": lambda x: x[None].expand(3, -1, -1),
    "contiguous": lambda x: x.contiguous(),
    "view of a view": lambda x: x.view(-1)[2:].view(2, -1),
}


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("begins", [0, 1])
@pytest.mark.parametrize("kind", VIEWS)
def test_no_kind_of_view_is_handed_out_below_torch_compile(kind, begins, mode):
    viewed = tw.fuse(VIEWS[kind], name="viewed")
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: viewed(x[begins:]), backend="eager", fullgraph=True)
    x = torch.randn(4 + begins, 6)
    with mode():
        found = compiled(x)
    torch.testing.assert_close(found, VIEWS[kind](x[begins:]))
    assert found.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


def test_graphs_of_fused_functions_may_be_remembered_by_other_processes():
    """As those that hold a function which Dynamo leaves whole are not."""
    from torch._dynamo.utils import counters

    fused = tw.fuse(lambda x: x.softmax(-1) * 2, name="doubled_softmax")
    torch._dynamo.reset()
    counters.clear()
    x = torch.randn(4, 8)
    found = torch.compile(lambda x: fused(x) + 1, fullgraph=True)(x)
    torch.testing.assert_close(found, x.softmax(-1) * 2 + 1)
    assert counters["aot_autograd"]["total"] == 1
    assert "autograd_cache_bypass" not in counters["aot_autograd"]


@pytest.mark.usefixtures("sharing")
def test_results_have_memory_of_their_own_in_transforms_and_of_subclasses():
    left, transposed = torch.vmap(written)(torch.ones(4, 2, 3))
    assert (left == 1).all()
    assert (transposed == 2).all()
    gradient = torch.func.grad(lambda x: sum(t.sum() for t in written(x)))(torch.ones(2, 3))
    assert (gradient == 3).all()
    left, _ = written(torch.ones(2, 3).as_subclass(Plain))
    assert type(left) is Plain
    assert (left == 1).all()


@pytest.mark.usefixtures("sharing")
def test_nodes_tell_graphs_that_their_results_have_memory_of_their_own():
    for name in ("itself_and_sine", "flattened", "twice_and_its_transpose"):
        node = getattr(torch.ops.tilewright, name).default
        torch.library.opcheck(node, (torch.ones(2, 3),))


# ---- graphs and autograd -------------------------------------------------------------------------


def test_what_is_traced_says_why_a_seed_stops_it_and_goes_on_by_itself():
    fused, x, w = tw.fuse(dropped), torch.randn(6, 8), torch.randn(8)
    seed = torch.tensor(5)
    right = fused(x, w, seed=seed)
    torch._dynamo.reset()

    def call(x, w, seed):
        return fused(x, w, seed=seed) + 1

    with pytest.raises(torch._dynamo.exc.Unsupported, match="draws from the seed"):
        torch.compile(call, backend="eager", fullgraph=True)(x, w, seed)
    torch._dynamo.reset()
    found = torch.compile(call, backend="eager")(x, w, seed)
    torch.testing.assert_close(found, right + 1)


def test_a_shape_may_be_trained_first_while_autograd_is_compiled():
    from torch._dynamo import compiled_autograd

    fused = tw.fuse(lambda x, w: (x * w).tanh(), name="scaled_tanh")
    x, w = torch.randn(3, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    right = torch.autograd.grad((x * w).tanh().square().sum(), (x, w))
    with compiled_autograd._enable(torch.compile(backend="eager")):
        fused(x, w).square().sum().backward()
    torch.testing.assert_close((x.grad, w.grad), right)


def scaled_by_first(x, by):
    return x * (by["a"] if isinstance(by, dict) else by[0])


@pytest.mark.parametrize(
    ("argument", "refused", "told"),
    [
        ({"a": 2.0}, InvalidType, "by is or holds what cannot be hashed (dict)"),
        ([torch.ones(4)], InvalidArgument, "by holds several tensors"),
    ],
)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_arguments_that_are_refused_are_so_whether_or_not_a_gradient_is_wanted(
    argument, refused, told, requires_grad
):
    x = torch.randn(4, requires_grad=requires_grad)
    with pytest.raises(refused, match=re.escape(told)):
        tw.fuse(scaled_by_first)(x, argument)
    falling_back = tw.fuse(scaled_by_first, fallback=True, name="scaled_or_not")
    torch.testing.assert_close(falling_back(x, argument), scaled_by_first(x, argument))


def test_a_list_of_numbers_is_taken_by_kernels_with_gradients_too():
    fused, x = tw.fuse(scaled_by_first), torch.randn(4, requires_grad=True)
    for factors in ([2.0, 1.0], [3.0, 1.0]):
        found = fused(x, factors)
        assert type(found.grad_fn).__name__ == "GeneratedBackward"
        torch.testing.assert_close(found, x * factors[0])
        assert torch.autograd.grad(found.sum(), x)[0].tolist() == [factors[0]] * 4
