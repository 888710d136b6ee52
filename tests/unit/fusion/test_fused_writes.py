"""Writes to slices of what a fused function made, and their gradients, on both targets."""

import pytest
import torch
from fused_on_cpu import assert_verified

import tilewright as tw
from tilewright.compile import cxx
from tilewright.dispatch.functions.operator import backward_operator
from tilewright.errors import InvalidArgument, NoImplementation
from tilewright.fusion.frontend.trace import trace_reference
from tilewright.op import OPS, Workload
from tilewright.tensor_spec import TensorSpec

pytestmark = [
    pytest.mark.skipif(cxx.missing() is not None, reason=str(cxx.missing())),
    pytest.mark.usefixtures("forgets_functions"),
]


def scaled_head(x):
    y = x.clone()
    y[:, :3] *= 2
    return y


def moved_column(x):
    y = x.clone()
    y[:, 0] = x[:, 1]
    return y


def box_of_another(x):
    y = x.clone()
    y[1:3, 2:5] = x[0:2, 0:3] * 2
    return y.sum(0)


def column_of_a_transpose(x):
    y = x.exp() + 1
    y.t()[1:3].mul_(3)
    return y


def twice_the_same(x):
    y = x * 2
    y[..., 0].copy_(x[..., 1])
    y[..., 0].add_(1)
    return y


def every_other_of_nothing(x):
    y = torch.empty_like(x)
    y[:, ::2] = x[:, ::2] * 2
    y[:, 1::2] = x[:, ::2].exp()
    return y


def row_over_pieces(x):
    y = x * 2
    y[:, 1:3] += x[:, :2]
    y[0] *= x[1]
    return y


def nothing_where_masked(x):
    y = x.exp()
    y = y * torch.tensor(2.0) + torch.tensor([0.1], dtype=torch.float64)
    y[x > 0] = 0.0
    y[:, x[0] > 1] = torch.tensor(3)
    y[:, 0] = 0
    return y


def mean_where_masked(x):
    y = x * 2
    y[x > 0] = x.mean()
    y[x[:, 0] > 1] = x[0, 0].double()
    y[:, 2:5][x[:, :3] < 0] = x[1, 1]
    return y


def stretch_of_merged_dims(x):
    y = x * 2
    y.view(-1)[3:9] = x.view(-1)[:6]
    return y


def rows_of_merged_dims(x):
    y = x * 2
    y.view(-1)[3:27] = x.view(-1)[20:44].exp()
    y.view(-1)[10:30] += 1
    return y


def every_seventh_of_merged_dims(x):
    y = x.exp() + 1
    y.view(-1)[::7] = 0.5
    return y.sum(0)


def twice_in_merged_dims(x):
    y = x * 2
    y.view(-1)[3:27].mul_(3)
    y.view(2, 3, 10)[:, 1] *= 3
    y.flatten(0, 1)[5] += 1
    return y


def across_what_was_written(x):
    y = x * 2
    y.view(-1)[3:27].mul_(3)
    y.view(-1)[8:33].mul_(3)
    y.view(-1)[1:58:2] += 1
    return y


def added_across_rows_that_were_cut(x):
    y = x.exp() + 1
    y.view(-1)[13:43] *= 2
    y.view(-1)[8:49] += x.view(-1)[9:50]
    return y


def read_between_writes(x):
    y = x * 1
    y.view(-1)[20:38:3] *= 2
    z = y.view(-1)[3:42] + 1
    y.view(-1)[51:56] = x.view(-1)[41:46].exp()
    return y, torch.cat([z, x.view(-1)[:5]])


def read_across_what_was_written(x):
    y = x * 1
    y[1:3, 2:5] *= 2
    return (y.view(-1)[7:39] * 3).exp()


WRITES = [
    *(scaled_head, moved_column, box_of_another, column_of_a_transpose, twice_the_same),
    *(every_other_of_nothing, row_over_pieces, nothing_where_masked, mean_where_masked),
    *(stretch_of_merged_dims, rows_of_merged_dims, every_seventh_of_merged_dims),
    *(twice_in_merged_dims, across_what_was_written, added_across_rows_that_were_cut),
    *(read_across_what_was_written, read_between_writes),
]


@pytest.mark.parametrize("function", WRITES)
def test_a_write_to_a_slice_has_pytorchs_values_and_gradients(function):
    fused = tw.fuse(function, name="writes")
    x = torch.randn(6, 10, requires_grad=True)
    own, right = (out if isinstance(out, tuple) else (out,) for out in (fused(x), function(x)))
    torch.testing.assert_close(own, right)
    weights = [torch.randn_like(out) for out in right]
    found = torch.autograd.grad(own, x, weights)
    torch.testing.assert_close(found, torch.autograd.grad(right, x, weights))
    assert type(own[0].grad_fn).__name__ == "GeneratedBackward"


VERIFIED = [
    *((f, "f32") for f in (row_over_pieces, nothing_where_masked, rows_of_merged_dims)),
    *((f, "bf16") for f in (scaled_head, mean_where_masked)),
]


@pytest.mark.parametrize(("function", "dtype"), VERIFIED)
def test_kernels_of_writes_verify(function, dtype):
    tw.fuse(function, name="writes")
    w = OPS["writes"].workload(x=TensorSpec(dtype, (6, 10)))
    assert_verified(w)
    backward = backward_operator(OPS["writes"], 1)
    assert_verified(backward.workload(grad_output=w.outputs[0], x=w.main))


def test_merged_dims_that_writes_cut_into_too_many_pieces_are_named():
    def scattered(x):
        y = x * 2
        y.view(-1)[::3] = 0
        y.view(-1)[1:990:5] *= 3
        return y

    with pytest.raises(NoImplementation, match=r"64 p.*fused_writes.py"):
        tw.fuse(scattered, name="writes")(torch.randn(100, 10))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.clone().index_put_((x > 0,), torch.ones(1)[:0]),
        lambda x: x.clone().index_put_((x > 0,), torch.ones(1).expand(1), accumulate=True),
    ],
)
def test_what_else_a_mask_may_put_is_named(function):
    with pytest.raises(NoImplementation, match=r"index_put.*fused_writes.py"):
        tw.fuse(function, name="writes")(torch.randn(4, 5))


def test_a_number_that_becomes_a_tensor_is_one_on_the_device_of_the_others():
    def made(x):
        return torch.tensor([2.0], device=x.device).expand(3) - x * torch.ones(3, device=x.device)

    tw.fuse(made, name="writes")
    w = OPS["writes"].workload(x=TensorSpec("f16", (3,)))
    x = torch.empty(3, dtype=torch.float16, device="meta")
    assert w.operator.composed(w)(x).device == x.device
    assert w.operator.truth(w, [x])[0].device == x.device


@pytest.mark.parametrize("value", [lambda x: 0.0, lambda x: x.mean()])
def test_a_mask_is_not_broadcast(value):
    def written(x):
        y = x * 2
        y[x[:, :1] > 0] = value(x)
        return y

    fused, x = tw.fuse(written, name="writes"), torch.randn(3, 5, requires_grad=True)
    for given in (x, x.detach()):
        with pytest.raises(IndexError, match="shape of the mask"):
            written(given)
        with pytest.raises(NoImplementation, match=r"aten.index_put.*fused_writes.py"):
            fused(given)


def test_a_number_from_outside_that_is_a_tensor_may_change_and_is_refused():
    scale = torch.tensor(2.0)
    with pytest.raises(NoImplementation, match=r"no argument.*fused_writes.py"):
        tw.fuse(lambda x: x * scale, name="writes")(torch.randn(4))


def test_tensors_in_a_list_are_to_be_arguments():
    both = tw.fuse(lambda pair, z=None: pair[0] * pair[1], name="writes")
    pair = [torch.randn(3), torch.randn(3)]
    for rest in ((), (torch.randn(3),)):
        with pytest.raises(InvalidArgument, match="pair holds several tensors; make each an arg"):
            both(pair, *rest)


def test_a_tensor_by_default_is_to_be_given():
    def scaled(x, by=torch.ones(3)):  # noqa: B008
        return x * by

    fused = tw.fuse(scaled, name="writes")
    with pytest.raises(InvalidArgument, match="by is a tensor by default; give it in each call"):
        fused(torch.ones(3))


def test_an_argument_that_is_returned_as_it_came_is_copied():
    x = torch.randn(3)
    found = tw.fuse(lambda x: x, name="writes")(x)
    assert torch.equal(found, x)
    assert found.data_ptr() != x.data_ptr()


RESULTS_THAT_SHARE = {
    "an argument": lambda x: (x, x.softmax(-1)),
    "one result twice": lambda x: (lambda y: (y, y))(x.softmax(-1)),
    "views": lambda x: (lambda y: (y.t(), x.t(), y, x[1:]))(x.softmax(-1)),
}


def run_under_autocast(function, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return function(x)


WAYS_TO_RUN = {
    "a kernel": lambda function, x: function(x),
    "PyTorch's, under autocast": run_under_autocast,
    "PyTorch's, of no elements": lambda function, x: function(x[:, :0]),
    "PyTorch's, differentiated": lambda function, x: function(x.requires_grad_()),
}


@pytest.mark.parametrize("way", WAYS_TO_RUN)
@pytest.mark.parametrize("fallback", [False, True])
@pytest.mark.parametrize("share", RESULTS_THAT_SHARE)
def test_whoever_runs_a_function_its_results_have_memory_of_their_own(share, fallback, way):
    function = RESULTS_THAT_SHARE[share]

    def unfusible(x):
        return *function(x), x.sort(-1)[0]

    fused = tw.fuse(unfusible if fallback else function, name="writes", fallback=fallback)
    x = torch.randn(4, 5)
    found, expected = WAYS_TO_RUN[way](fused, x), WAYS_TO_RUN[way](function, x)
    for out, other in zip(found, expected, strict=False):
        torch.testing.assert_close(out, other)
    memory = {t.untyped_storage()._cdata for t in (x, *found)}
    assert len(memory) == 1 + len(found)


def test_a_call_that_fake_tensors_refuse_for_being_empty_is_pytorchs():
    def greatest(x):
        return torch.linalg.vector_norm(x, float("inf"), -1)

    fused, x = tw.fuse(greatest, name="writes"), torch.ones(0, 4, requires_grad=True)
    assert fused(x.detach()).shape == (0,)
    fused(x).sum().backward()
    assert x.grad.shape == (0, 4)
    with pytest.raises(RuntimeError, match="cannot compute the inf norm"):
        fused(torch.ones(4, 0))


def test_what_a_function_prints_is_printed_while_it_is_traced_alone(capsys):
    printing = tw.fuse(lambda x: print("traced") or x * 2, name="writes")
    printing(torch.randn(3))
    assert capsys.readouterr().out.count("traced") > 1
    printing(torch.randn(3))
    assert not capsys.readouterr().out


@pytest.mark.parametrize(("step", "first"), [("mul", 1), ("mul_", 2)])
def test_a_trace_runs_a_function_once_whether_it_writes_is_learnt_at_the_first(step, first):
    runs = []
    tw.fuse(lambda x: runs.append(1) or getattr(x + 1, step)(2), name="writes")
    for length, count in ((3, first), (4, 1)):
        runs.clear()
        steps = [
            n.target
            for n in trace_reference(Workload.parse(f"writes(x=f32[{length}])")).graph.nodes
        ]
        assert len(runs) == count
        assert torch.ops.aten.mul.Tensor in steps
        assert torch.ops.aten.mul_.Tensor not in steps


def test_a_function_with_a_seed_of_its_own_draws_nothing_of_ours():
    own = tw.fuse(lambda x, seed: torch.dropout(x, 0.5, True) * seed, name="writes")
    with pytest.raises(NoImplementation, match=r"aten\.bernoulli"):
        own(torch.ones(4), torch.tensor(3))
