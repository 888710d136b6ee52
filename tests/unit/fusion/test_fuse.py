"""tw.fuse: a person's function as one operator, with gradients, refusals and fallbacks."""

import functools

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import tilewright as tw
from emulated import Emulated
from tilewright.compile import cxx
from tilewright.device import DEVICES, spec_of
from tilewright.dispatch.call import operators
from tilewright.errors import CompileError, InvalidArgument, NoImplementation
from tilewright.fusion.cuda import target
from tilewright.impl import IMPLS
from tilewright.impls.fused import graph_of
from tilewright.measure.verify import Verifier
from tilewright.op import Workload

H200 = DEVICES["h200"]
pytestmark = [
    pytest.mark.skipif(cxx.missing() is not None, reason=str(cxx.missing())),
    pytest.mark.usefixtures("records_of_its_own"),
]


def by_type_of_number(x, number):
    return x / number if isinstance(number, float) else x * number + isinstance(number, bool)


@pytest.mark.parametrize("numbers", [(2, 2.0), (2.0, 2), (1, True, 1.0), (True, 1.0, 1)])
def test_numbers_that_are_equal_but_of_other_types_are_other_calls(numbers):
    fused, x = tw.fuse(by_type_of_number), torch.randn(4, 8)
    for number in numbers * 3:
        assert torch.equal(fused(x, number), by_type_of_number(x, number)), number


def gelu_of_sum(x, bias):
    return F.gelu(x + bias)


def test_a_fused_function_gives_pytorchs_values_and_gradients():
    fused = tw.fuse(gelu_of_sum)
    x, bias = torch.randn(33, 50, requires_grad=True), torch.randn(50, requires_grad=True)
    own, right = fused(x, bias), gelu_of_sum(x, bias)
    torch.testing.assert_close(own, right)
    assert type(own.grad_fn).__name__ == "GeneratedBackward"
    weights = torch.randn_like(right)
    found = torch.autograd.grad(own, [x, bias], weights)
    expected = torch.autograd.grad(right, [x, bias], weights)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_gradients_are_right_to_second_order():
    fused = tw.fuse(lambda x, w: torch.softmax(x * w, -1).square(), name="squared_softmax")
    x = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    w = torch.randn(4, 1, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(fused, (x, w))
    assert torch.autograd.gradgradcheck(fused, (x, w))


def test_a_gradient_that_is_one_value_for_all_elements_is_one_value_of_memory(recwarn):
    fused = tw.fuse(gelu_of_sum, name="gelu_of_sum_and_more")
    added = tw.fuse(lambda x, y: x * x + y, name="square_and_more")
    x, y = torch.randn(33, 50, requires_grad=True), torch.randn(33, 50, requires_grad=True)
    (added(x, y).sum() + fused(x, y[0]).sum()).backward()
    torch.testing.assert_close(y.grad[1:], torch.ones(32, 50))
    w = Workload.parse(
        "square_and_more_backward(grad_output=f32[33,50]@strides(0,0), x=f32[33,50], y=f32[33,50])"
    )
    graph = graph_of(w)
    emulated = Emulated(graph, target.heuristic(graph, H200), H200, w)
    assert Verifier(w, torch.device("cpu")).check(emulated).message == ""
    assert not [str(r.message) for r in recwarn if "PyTorch's own kernel" in str(r.message)]


def test_a_sum_of_columns_that_are_all_the_same_is_one_value(recwarn):
    summed = tw.fuse(lambda x: x.sum(1, keepdim=True) * 2, name="sum_of_columns")
    x = torch.randn(100).as_strided((1, 3, 1, 17), (51, 17, 17, 0))
    torch.testing.assert_close(summed(x), x.sum(1, keepdim=True) * 2)
    assert not [str(r.message) for r in recwarn if "PyTorch's own kernel" in str(r.message)]


def test_an_expanded_argument_that_is_not_used_asks_for_no_axis(recwarn):
    first = tw.fuse(lambda x, y: x.abs(), name="first_of_two")
    x, y = torch.randn(1), torch.randn(1).expand(2)
    torch.testing.assert_close(first(x, y), x.abs())
    assert not [str(r.message) for r in recwarn if "PyTorch's own kernel" in str(r.message)]


class _Clipped(torch.autograd.Function):
    """Gradients pass through what was clipped, too; of the kind that vjp refuses."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(scale)
        return x.clamp(-1, 1) * scale

    @staticmethod
    def backward(ctx, gradient):
        (scale,) = ctx.saved_tensors
        return gradient * scale, None


def test_an_autograd_function_inside_has_the_gradients_that_its_author_wrote(recwarn):
    fused = tw.fuse(lambda x, scale: _Clipped.apply(x * 2, scale) + x, name="clipped")
    x = (torch.randn(4, 5) * 3).requires_grad_()
    scale = torch.randn(5, requires_grad=True)
    out = fused(x, scale)
    torch.testing.assert_close(out, (2 * x).clamp(-1, 1) * scale + x)
    found, none = torch.autograd.grad(out.sum(), [x, scale], allow_unused=True)
    torch.testing.assert_close(found, (2 * scale + 1).expand(4, 5))
    assert none is None  # an optimizer passes over what has none, not over zeros
    assert type(out.grad_fn).__name__ == "GeneratedBackward"
    assert not [str(r.message) for r in recwarn if "PyTorch's own kernel" in str(r.message)]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("implementation", ["fused", "aten"])
def test_gradients_that_are_first_asked_for_where_nothing_is_differentiated(mode, implementation):
    def kept(x, scale, mask):
        return torch.where(mask, F.silu(x) * scale, x)

    tw.fuse(kept, name=f"kept_by_{mode.__name__}_{implementation}")
    x, scale = torch.randn(4, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    mask, weights = torch.rand(4, 8) > 0.5, torch.randn(4, 8)
    expected = torch.autograd.grad(kept(x, scale, mask), [x, scale], weights)
    backward = operators[f"kept_by_{mode.__name__}_{implementation}_backward"]
    with mode(), tw.use(implementation):
        found = backward(weights.clone(), x.clone(), scale.clone(), mask.clone())
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_only_the_gradients_that_are_needed_are_computed(monkeypatch):
    built, build = [], IMPLS["fused"].build

    def noted(self, config, w, *rest):
        built.append(w)
        return build(config, w, *rest)

    monkeypatch.setattr(type(IMPLS["fused"]), "build", noted)
    fused = tw.fuse(gelu_of_sum)
    x, bias = torch.randn(8, 16), torch.randn(16, requires_grad=True)
    fused(x, bias).sum().backward()
    assert x.grad is None
    assert [w["grads"] for w in built if w.op.endswith("_backward")] == [("bias",)]
    right = bias.detach().requires_grad_()
    gelu_of_sum(x, right).sum().backward()
    torch.testing.assert_close(bias.grad, right.grad, rtol=1e-5, atol=1e-5)


def turned(x, cos, sin):
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def residual(x, branch, gamma):
    return x + gamma[:, None] * branch


def sorted_residual(x, branch):
    return x + branch.sort(-1).values


TURNED = "grad_output=f16[8,64], x=f16[8,64], cos=f16[64], sin=f16[64]"
RESIDUAL = "grad_output=f16[8,4,64], x=f16[8,4,64], branch=f16[8,4,64], gamma=f16[4]"
SORTED = "grad_output=f16[8,64], x=f16[8,64], branch=f16[8,64]"


@pytest.mark.parametrize(
    ("function", "arguments", "read"),
    [
        (turned, f"{TURNED}, grads=[x]", "grad_output cos sin"),
        (turned, f"{TURNED}, grads=[cos]", "grad_output x"),
        (turned, TURNED, "grad_output x cos sin"),
        (residual, RESIDUAL, "grad_output branch gamma"),
        (residual, f"{RESIDUAL}, grads=[x]", "grad_output"),
        (residual, f"{RESIDUAL}, grads=[branch]", "grad_output gamma"),
        (sorted_residual, f"{SORTED}, grads=[x]", "grad_output"),
        (sorted_residual, SORTED, "grad_output x branch"),  # no graph says what is read
    ],
)
def test_traffic_of_gradients_is_what_their_formulas_read(function, arguments, read):
    name = tw.fuse(function, fallback=True).__name__
    w = Workload.parse(f"{name}_backward({arguments})")
    assert w.bytes[0] == sum(w.tensors[n].distinct_bytes for n in read.split())
    assert w.bytes[1] == sum(o.numel * o.itemsize for o in w.outputs)


def test_several_outputs_of_several_shapes_and_dtypes():
    @tw.fuse
    def moments(x):
        return x - x.mean(0), x.amax((0, 1)), x > 0

    x = torch.randn(40, 24, requires_grad=True)
    own, right = moments(x), (x - x.mean(0), x.amax((0, 1)), x > 0)
    assert [t.dtype for t in own] == [t.dtype for t in right]
    torch.testing.assert_close(own, right)
    found = torch.autograd.grad(own[0].square().sum(), x)
    torch.testing.assert_close(found, torch.autograd.grad(right[0].square().sum(), x))


def test_a_boolean_mask_selects():
    masked = tw.fuse(lambda mask, x: torch.where(mask, x, -1e9).softmax(-1), name="masked_softmax")
    mask, x = torch.rand(6, 33) > 0.3, torch.randn(6, 33)
    torch.testing.assert_close(masked(mask, x), torch.where(mask, x, -1e9).softmax(-1))


def test_halves_are_computed_in_fp32_and_rounded_where_the_function_casts():
    @tw.fuse
    def rounded_twice(x, y):
        return ((x + y).half().float() * 3).half()

    w = Workload.parse("rounded_twice(x=f16[50,33], y=f16[50,33])")
    verifier = Verifier(w, torch.device("cpu"))
    fused, spec = IMPLS["fused"], spec_of(None)
    built = fused.build(fused.heuristic(w, spec), w, spec)
    assert verifier.check(built).message == ""
    x, y = (torch.randn(50, 33).half() for _ in range(2))
    wide = ((x.double() + y.double()).half().double() * 3).half()
    assert torch.equal(rounded_twice(x, y), wide)


def test_mixed_dtypes_promote_as_in_pytorch():
    scaled = tw.fuse(lambda x, w: x * w, name="scaled")
    x, w = torch.randn(8, 16, dtype=torch.bfloat16), torch.randn(16)
    own = scaled(x, w)
    assert own.dtype == torch.float32
    torch.testing.assert_close(own, x * w)


def test_a_scalar_changes_without_another_build():
    calls = []
    fused = tw.fuse(lambda x, alpha: x * alpha + 1, name="affine", scalars=["alpha"])
    x = torch.randn(64)
    build = IMPLS["fused"].build
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(IMPLS["fused"]), "build", lambda self, *a: calls.append(a) or build(*a))
        for alpha in (0.5, 0.25, -3.0, 7.5):
            torch.testing.assert_close(fused(x, alpha), x * alpha + 1)
    assert len(calls) == 1


def unsupported_step(x):
    y = x * 2
    return torch.cumsum(y, -1)


def test_a_step_that_cannot_be_fused_is_named_with_its_line():
    fused = tw.fuse(unsupported_step)
    line = unsupported_step.__code__.co_firstlineno + 2
    with pytest.raises(NoImplementation, match=rf"cumsum.*test_fuse\.py:{line}.*fallback=True"):
        fused(torch.randn(4, 5))


def writes_to_an_argument(x, y):
    x.add_(1)
    return x * y


def copies_into_an_argument(x, y):
    y.copy_(x * 2)
    return y + 1


def replaces_the_data_of_an_argument(x, y):
    x.data = x.data * 2
    return x + y


@pytest.mark.parametrize(
    "function",
    [writes_to_an_argument, copies_into_an_argument, replaces_the_data_of_an_argument],
)
def test_a_write_to_an_argument_is_refused_with_its_line_and_not_lost(function):
    line = function.__code__.co_firstlineno + 1
    with pytest.raises(NoImplementation, match=rf"write.* to .*test_fuse\.py:{line}"):
        tw.fuse(function)(torch.randn(4, 5), torch.randn(4, 5))
    given = torch.randn(2, 4, 5)
    same = given.clone()
    found = tw.fuse(function, fallback=True)(*given)
    assert torch.equal(found, function(*same))
    assert torch.equal(given, same)


def writes_to_a_copy(x, y):
    z = x.clone()
    z.add_(y).mul_(2)
    return z


def test_a_write_to_what_the_function_made_is_a_step():
    x, y = torch.randn(4, 5), torch.randn(4, 5)
    torch.testing.assert_close(tw.fuse(writes_to_a_copy)(x, y), writes_to_a_copy(x, y))


def covariance(x):
    shifted = x + 1
    return torch.cov(shifted)


def test_a_step_that_asks_a_trace_for_values_is_named_with_its_line_or_left_to_pytorch():
    line = covariance.__code__.co_firstlineno + 2
    x = torch.randn(3, 5)
    with pytest.raises(NoImplementation, match=rf"aten.equal.* \(.*test_fuse.py:{line}\)"):
        tw.fuse(covariance)(x)
    left = tw.fuse(covariance, name="left_covariance", fallback=True)
    torch.testing.assert_close(left(x), covariance(x))
    x.requires_grad_()
    (mine,) = torch.autograd.grad(left(x).sum(), x)
    torch.testing.assert_close(mine, torch.autograd.grad(covariance(x).sum(), x)[0])


def shapes_do_not_broadcast(x, y):
    z = x + 1
    return z * y


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_step_that_raises_is_named_with_its_line_and_logged_nowhere(caplog, requires_grad):
    line = shapes_do_not_broadcast.__code__.co_firstlineno + 2
    x, y = torch.randn(6, 8, requires_grad=requires_grad), torch.randn(5)
    right = rf"RuntimeError: .*\[5\].* \(.*test_fuse.py:{line}\), called with x=f32\[6,8\], y=f32"
    with pytest.raises(InvalidArgument, match=right) as caught:
        tw.fuse(shapes_do_not_broadcast)(x, y)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert not caplog.records
    with pytest.raises(RuntimeError, match="must match the size"):  # PyTorch's own
        tw.fuse(shapes_do_not_broadcast, name="left_to_pytorch", fallback=True)(x, y)


@pytest.mark.parametrize("function", [lambda x: x.softmax(3), lambda x: F.log_softmax(x, -3)])
def test_a_softmax_over_a_dim_that_is_not_there_is_named_with_its_line(function, caplog):
    with pytest.raises(IndexError):
        function(torch.randn(3, 5))
    line = function.__code__.co_firstlineno
    right = rf"IndexError: Dimension out of range \(.*\) \(.*test_fuse.py:{line}\), called with"
    with pytest.raises(InvalidArgument, match=right):
        tw.fuse(function, name="softmax_of_another_dim")(torch.randn(3, 5))
    assert not caplog.records


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])  # the second is left to PyTorch
@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (lambda x: [x * 2, x.sum()], tuple),
        (lambda x: torch.aminmax(x * 2, dim=-1), tuple),
        (lambda x: (x * 2,), torch.Tensor),
        (lambda x: [x * 2], torch.Tensor),
    ],
)
def test_several_results_are_a_tuple_whoever_computes_them(function, kind, dtype):
    x = torch.randn(3, 5).to(dtype)
    found = tw.fuse(function, name="several_results", fallback=True)(x)
    assert type(found) is kind
    right = function(x)
    pairs = zip(found, right, strict=True) if kind is tuple else [(found, right[0])]
    for mine, theirs in pairs:
        torch.testing.assert_close(mine, theirs)


def test_pytorch_runs_it_where_that_is_asked_for():
    fused = tw.fuse(unsupported_step, fallback=True)
    x = torch.randn(4, 5, requires_grad=True)
    torch.testing.assert_close(fused(x.detach()), unsupported_step(x.detach()))
    fused(x).sum().backward()
    assert x.grad is not None


def test_a_kernel_that_cannot_be_compiled_is_an_error_unless_pytorch_may_run_it(monkeypatch):
    def broken(task):
        raise CompileError("g++ rejected the source")

    monkeypatch.setattr("tilewright.impls.fused.compiled", broken)
    x = torch.randn(4, 5)
    for given in (x, x.clone().requires_grad_()):
        with pytest.raises(CompileError, match="rejected"):
            tw.fuse(gelu_of_sum)(given, x[0])
    fallen_back = tw.fuse(gelu_of_sum, fallback=True)
    with pytest.warns(RuntimeWarning, match=r"PyTorch's own kernel runs.*rejected"):
        torch.testing.assert_close(fallen_back(x, x[0]), gelu_of_sum(x, x[0]))


def test_a_name_that_is_taken_is_refused_and_a_second_definition_replaces_the_first():
    with pytest.raises(InvalidArgument, match="an operator 'softmax' already; give name="):
        tw.fuse(gelu_of_sum, name="softmax")

    def make(k):
        def times(x):
            return x * k

        return tw.fuse(times)

    x = torch.ones(3)
    assert make(2.0)(x).tolist() == [2, 2, 2]
    assert make(3.0)(x).tolist() == [3, 3, 3]


def test_a_backward_that_a_person_wrote_is_not_taken_for_the_gradients():
    bent = tw.fuse(lambda x: x.square(), name="bent")
    mine = tw.fuse(lambda x: x * 3, name="bent_backward")
    x = torch.ones(3, requires_grad=True)
    assert mine(x.detach()).tolist() == [3, 3, 3]
    with pytest.raises(InvalidArgument, match="an operator 'bent_backward' already; give name="):
        bent(x)


def test_a_function_keeps_its_name_where_another_s_gradients_would_have_it():
    mine = tw.fuse(lambda x: x * 3, name="sloped_backward")
    x = torch.ones(3)
    assert mine(x).tolist() == [3, 3, 3]
    sloped = tw.fuse(lambda x: x * 2, name="sloped")
    assert mine(x).tolist() == [3, 3, 3]
    assert sloped(x).tolist() == [2, 2, 2]
    with pytest.raises(InvalidArgument, match="an operator 'sloped_backward' already; give name="):
        sloped(x.clone().requires_grad_())


@pytest.mark.parametrize("name", ["scatter_", "index_add_"])
def test_no_function_gets_the_name_of_a_form_that_writes_in_place(name):
    with pytest.raises(InvalidArgument, match=f"an operator '{name}' already; give name="):
        tw.fuse(lambda x: x * 2, name=name)


def test_the_number_of_results_may_follow_from_an_argument():
    several = tw.fuse(lambda x, k: tuple(x * (i + 1) for i in range(k)), name="several")
    x = torch.ones(3, requires_grad=True)
    for k in (1, 3, 2, 1):
        found = torch.autograd.grad([y.sum() for y in several(x, k)], x)
        assert found[0].tolist() == [k * (k + 1) / 2] * 3


def test_a_function_whose_name_was_given_to_another_is_not_taken_for_it():
    def make(k):
        def multiple(x):
            return x * k

        return tw.fuse(multiple)

    x = torch.ones(3, requires_grad=True)
    first = make(2.0)
    out = first(x)
    assert tw.multiple(x).tolist() == [2, 2, 2]
    second = make(5.0)
    assert second(x).tolist() == tw.multiple(x).tolist() == [5, 5, 5]
    for y in (x, x.detach()):
        with pytest.raises(InvalidArgument, match=r"multiple: another function.*give each a name"):
            first(y)
    (before,) = torch.autograd.grad(out.sum(), x)
    (after,) = torch.autograd.grad(second(x).sum(), x)
    assert (before.tolist(), after.tolist()) == ([2, 2, 2], [5, 5, 5])


def test_a_function_with_type_hints_may_be_fused_again():
    def make(k):
        def typed(x: torch.Tensor) -> torch.Tensor:
            return x * k

        return tw.fuse(typed)

    make(2.0)
    again = make(3.0)
    compiled = torch.compile(lambda x: again(x) + 1, backend="eager", fullgraph=True)
    assert compiled(torch.ones(2)).tolist() == [4, 4]


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_runs_it_again(reentrant):
    fused = tw.fuse(gelu_of_sum, name=f"checkpointed{reentrant}")
    x, bias = torch.randn(8, 16, requires_grad=True), torch.randn(16)
    checkpoint(fused, x, bias, use_reentrant=reentrant).sum().backward()
    right = x.detach().clone().requires_grad_()
    gelu_of_sum(right, bias).sum().backward()
    torch.testing.assert_close(x.grad, right.grad, rtol=1e-5, atol=1e-5)


def test_a_tensor_from_outside_is_refused_with_its_line():
    scale = torch.randn(16)

    def scaled(x):
        return x * scale

    line = scaled.__code__.co_firstlineno + 1
    for x in (torch.randn(16), torch.randn(16, requires_grad=True)):
        with pytest.raises(NoImplementation, match=rf"no argument.*test_fuse\.py:{line}"):
            tw.fuse(scaled)(x)
    x = torch.randn(16)
    torch.testing.assert_close(tw.fuse(scaled, fallback=True)(x), x * scale)


def test_what_no_operator_can_be_is_refused_at_once():
    with pytest.raises(InvalidArgument, match="'<lambda>' cannot name an operator; give name="):
        tw.fuse(lambda x: x * 2)
    with pytest.raises(InvalidArgument, match=r"sums takes \*x; give each argument a name"):
        tw.fuse(lambda *x: sum(x), name="sums")
    with pytest.raises(InvalidArgument, match="halves takes 'x' by place alone"):
        tw.fuse(lambda x, /: x / 2, name="halves")
    for thing in (3, "halves"):
        with pytest.raises(InvalidArgument, match=rf"{thing!r} is no function: put @tw.fuse above"):
            tw.fuse(thing)
    for other in (functools.partial(F.gelu, approximate="tanh"), F.gelu, torch.nn.ReLU()):
        with pytest.raises(InvalidArgument, match=r"gelu|ReLU.*no function of Python's own"):
            tw.fuse(other)
    with pytest.raises(InvalidArgument, match=r"torch.float16: a dtype is no argument"):
        tw.fuse(lambda x, dtype: x.to(dtype), name="cast_to")(torch.ones(2), torch.float16)


def test_pytorch_runs_dtypes_of_which_there_are_no_kernels_where_that_is_asked_for():
    whole = (torch.arange(3, dtype=dtype) for dtype in (torch.int16, torch.uint8))
    for x in (*whole, torch.ones(3) * 1j):
        doubled = tw.fuse(lambda x: x * 2, name="doubled", fallback=True)
        assert torch.equal(doubled(x), x * 2)
        with pytest.raises((InvalidArgument, NoImplementation), match=r"int16|uint8|complex64"):
            tw.fuse(lambda x: x * 2, name="doubled_strictly")(x)


def test_an_empty_tensor_gives_an_empty_result():
    assert tw.fuse(gelu_of_sum)(torch.empty(0, 4), torch.empty(4)).shape == (0, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("of", ["prod(-1)", "prod(0, True)", "prod()", "prod(1, dtype=x.dtype)"])
def test_a_product_is_differentiated_as_in_pytorch(of, dtype):
    function = eval(f"lambda x, y: x.{of} * y")
    fused = tw.fuse(function, name=f"product{sum(map(ord, of))}")
    x, y = torch.rand(4, 6, dtype=dtype) + 0.5, torch.randn((), dtype=dtype).requires_grad_()
    for zeros in ((), (7,), (7, 9), (7, 13, 19)):  # none, one or two of a row, of a column
        x = x.detach().clone()
        x.view(-1)[list(zeros)] = 0
        x.requires_grad_()
        own, right = fused(x, y), function(x, y)
        weights = torch.randn_like(right)
        found = torch.autograd.grad(own, [x, y], weights)
        expected = torch.autograd.grad(function(x.double(), y.double()), [x, y], weights.double())
        tolerance = 2e-2 if dtype is torch.bfloat16 else 1e-5
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_a_product_of_one_factor_has_its_gradient():
    fused = tw.fuse(lambda x: x.prod(-1), name="products_of_one")
    x = torch.tensor([[0.0], [float("inf")], [2.0]], requires_grad=True)
    fused(x).backward(torch.tensor([1.0, 2.0, 3.0]))
    assert x.grad.tolist() == [[1], [2], [3]]


def test_gradients_of_products_are_kernels_that_verify():
    tw.fuse(lambda x, w: (x * w).prod(-1), name="product_of_rows")
    w = Workload.parse("product_of_rows_backward(grad_output=f32[9], x=f32[9,40], w=f32[40])")
    fused, spec = IMPLS["fused"], spec_of(None)
    verifier = Verifier(w, torch.device("cpu"))
    assert verifier.check(fused.build(fused.heuristic(w, spec), w, spec)).message == ""
    graph = graph_of(w)
    emulated = Emulated(graph, target.heuristic(graph, H200), H200, w)
    assert verifier.check(emulated).message == ""
