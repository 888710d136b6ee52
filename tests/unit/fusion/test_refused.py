"""What PyTorch's kernels refuse, or promise nothing of, is refused by fused functions, in words."""

import itertools

import pytest
import torch
from torch.nn import functional as F

import tilewright as tw
from tilewright.compile import cxx
from tilewright.errors import InvalidArgument, NoImplementation
from tilewright.fusion.frontend.refused import overlap_in_part

pytestmark = pytest.mark.usefixtures("forgets_functions")
runs = pytest.mark.skipif(cxx.missing() is not None, reason=str(cxx.missing()))
X, MASK = torch.randn(4, 8), torch.rand(4, 8) > 0.5


def refused(function, *tensors, match):
    line = function.__code__.co_firstlineno
    with pytest.raises(InvalidArgument, match=rf"{match}.*test_refused\.py:{line}\)"):
        tw.fuse(function, name="refused")(*tensors)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, m: x * m.floor(),
        lambda x, m: x * m.ceil(),
        lambda x, m: x * torch.round(m),
        lambda x, m: x * m.trunc(),
        lambda x, m: x * m.softmax(-1),
        lambda x, m: x * torch.log_softmax(m, 0),
        lambda x, m: x * (1 - m),
        lambda x, m: x - m,
        lambda x, m: m - x,
        lambda x, m: x * (m - (x > 0)),
        lambda x, m: x.sub(m, alpha=2),
        lambda x, m: x * m.var(),
        lambda x, m: x * torch.std_mean(m, 0)[0],
        lambda x, m: x * F.gelu(m),
        lambda x, m: x * F.softplus(m),
        lambda x, m: x * F.glu(m, -1).sum(),
        lambda x, m: x * (m % (x > 0)),
        lambda x, m: x * m.div(x > 0, rounding_mode="trunc"),
        lambda x, m: x * m.lerp(x > 0, 0.5),
        lambda x, m: x * m.clamp(x > 0, m),
        lambda x, m: x * m.clamp(False, True),
        lambda x, m: x.addcdiv(m, m),
        lambda x, m: x * torch.add(m, m, alpha=0.5),
        lambda x, m: x * torch.dot(m[0], m[1]),
        lambda x, m: x * torch.inner(m[0], m[1]),
        lambda x, m: x * torch.vdot(m[0], m[1]),
    ],
)
def test_steps_that_pytorch_has_not_for_booleans_are_refused(function):
    with pytest.raises((RuntimeError, NotImplementedError)):
        function(X, MASK)
    refused(function, X, MASK, match=r"cast.* first: \.float\(\)|or cast: \.float\(\)")


@runs
def test_booleans_that_are_cast_are_numbers():
    function = tw.fuse(lambda x, m: x * (1 - m.float()) + m.float().softmax(-1), name="refused")
    torch.testing.assert_close(function(X, MASK), X * ~MASK + MASK.float().softmax(-1))


@runs
@pytest.mark.parametrize(
    "function",
    [
        lambda x, m: x * m.clamp(min=x > 0),
        lambda x, m: x * m.clamp(max=x > 0),
        lambda x, m: x * torch.add(m, x > 0, alpha=0),
        lambda x, m: x * torch.add(m, x > 0, alpha=2),
        lambda x, m: x * m.div(m | ~m),
        lambda x, m: x * (m % 2.5),
        lambda x, m: x.lerp(m.float(), 0.5).addcmul(m, x),
    ],
)
def test_booleans_that_pytorch_takes_are_taken(function):
    torch.testing.assert_close(tw.fuse(function, name="refused")(X, MASK), function(X, MASK))


def test_a_mask_is_not_multiplied_in_place_by_numbers():
    def function(x, m):
        return x * m.clone().mul_(x)

    with pytest.raises(RuntimeError, match="result type Float"):
        function(X, MASK)
    with pytest.raises(InvalidArgument, match=r"multiply out of place \(.*test_refused\.py:\d+\)"):
        tw.fuse(function, name="refused")(X, MASK)


def rows_moved(x):
    z = x * 1
    z[1:] = z[:-1]
    return z


def columns_moved(x):
    z = x * 1
    z[:, 1:].add_(z[:, :-1])
    return z


def transposed(x):
    z = x[:, :4] * 1
    z.copy_(z.t())
    return z


@pytest.mark.parametrize("function", [rows_moved, columns_moved, transposed])
def test_a_write_to_what_it_reads_elsewhere_is_refused(function):
    line = function.__code__.co_firstlineno + 2
    with pytest.raises(InvalidArgument, match=rf"writes to memory .*clone\(\).*refused.py:{line}"):
        tw.fuse(function, name="refused")(X)


def halves_added(x):
    z = x * 1
    z[:, :4] += z[:, 4:]
    z[1:] = z[:-1].clone()
    z.add_(z)
    return z


def into_zeros(x):
    z = torch.zeros_like(x)
    z[1:] = x[:-1].exp()
    return z


def into_others(x):
    zeros = torch.zeros(8, 8, device=x.device)
    zeros[:4] = x
    ones = torch.ones(4, 9, dtype=x.dtype)
    ones[:, 1:] *= x
    full = torch.full((4, 16), 0.5)
    full[:, 2:10].copy_(x.exp())
    empty = torch.empty(4, 16)
    empty[:, :8], empty[:, 8:] = x, x * 2
    return zeros, ones, full, empty, torch.full((4, 8), True), torch.full((4, 8), 2) * x


@runs
@pytest.mark.parametrize("function", [halves_added, into_zeros, into_others])
def test_writes_beside_what_they_read_are_pytorchs(function):
    found = []
    for called in (tw.fuse(function, name="refused"), function):
        x = X.clone().requires_grad_()
        out = called(x)
        outs = out if isinstance(out, tuple) else (out,)
        assert [o.dtype for o in outs if not o.is_floating_point()] in ([], [torch.bool])
        found.append((*outs, *torch.autograd.grad(sum(o.square().sum() for o in outs), x)))
    torch.testing.assert_close(*found)


def test_overlap_is_what_the_elements_addresses_say():
    base = torch.arange(60)
    views = [
        base.as_strided(shape, stride, offset)
        for shape, stride in itertools.product([(3, 4), (4, 3)], [(4, 1), (1, 4), (8, 2), (0, 1)])
        for offset in (0, 1, 4, 12, 20)
    ]
    for a, b in itertools.product(views, views):
        same = a.shape == b.shape and torch.equal(a, b)
        meet = bool(torch.isin(a.flatten(), b.flatten()).any())
        assert overlap_in_part(a, b) == (meet and not same), (a, b)
    assert not overlap_in_part(base, torch.arange(60))
    column = base.view(6, 10)
    assert not overlap_in_part(column[:, :1], column[:, 0].view(6, 1))
    assert not overlap_in_part(column.t()[0:1], column[:, 0].view(1, -1))
    assert not overlap_in_part(column[:, :1], column[:, 1].view(6, 1))
    assert overlap_in_part(column[:5, :1], column[1:, :1])


@runs
def test_a_column_may_be_added_to_itself():
    def function(x):
        h = x * 1
        h[:, :1].add_(h[:, 0].view(-1, 1))
        return h * h

    found = []
    for called in (tw.fuse(function, name="refused"), function):
        x = X.clone().requires_grad_()
        out = called(x)
        found.append((out, *torch.autograd.grad(out.sum(), x)))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize(
    ("scalars", "eps"), [((), torch.tensor(1e-3)), (("eps",), torch.tensor(1e-3)), (("eps",), 1e-3)]
)
def test_a_number_that_a_step_takes_from_a_tensor_is_named(scalars, eps):
    function = tw.fuse(
        lambda x, eps: torch.nn.functional.layer_norm(x, (8,), eps=eps),
        name="refused",
        scalars=scalars,
    )
    with pytest.raises(NoImplementation, match=r"eps.*Python number.*leave it out of scalars"):
        function(X, eps)


def asks_whether_it_is_differentiated(x):
    return x * 2 if x.requires_grad else x * 3


def asks_in_a_function_of_its_own(x):
    return x * _factor(x)


def _factor(x):
    return 2 if x.grad_fn is None else 3


def casts_on_a_gpu(x):
    torch.set_autocast_enabled("cuda", True)  # as torch.autocast does where there is one
    try:
        return torch.softmax(x, -1)
    finally:
        torch.set_autocast_enabled("cuda", False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("function", "why"),
    [
        (asks_whether_it_is_differentiated, r"\.requires_grad of a tensor differs between calls"),
        (asks_in_a_function_of_its_own, r"\.grad_fn of a tensor differs between calls"),
        (casts_on_a_gpu, r"autocast of a GPU inside a function is not traced"),
    ],
)
def test_what_a_trace_for_all_calls_would_get_wrong_is_refused(function, why, dtype):
    x = X.to(dtype)
    with pytest.raises(NoImplementation, match=rf"{why}.*test_refused\.py:\d+\)"):
        tw.fuse(function, name="refused")(x)
    alone = tw.fuse(function, name="refused", fallback=True)
    assert torch.equal(alone(x), function(x))


@runs
def test_autocast_around_a_trace_is_none_inside_of_it():
    function = tw.fuse(lambda x: F.layer_norm(x, (8,)) * 2, name="refused")
    torch.set_autocast_enabled("cuda", True)
    try:
        found = tw.choose(tw.Workload.parse("refused(x=f32[4,8])"), "cpu")
    finally:
        torch.set_autocast_enabled("cuda", False)
    assert found.implementation == "fused"
    torch.testing.assert_close(function(X), F.layer_norm(X, (8,)) * 2)


@runs
@runs
@pytest.mark.parametrize("function", [torch.nansum, torch.nanmean])
def test_nansum_over_no_dims_is_refused_and_without_dims_is_one_over_all(function):
    with pytest.raises(InvalidArgument, match=r"are those over all, .* leave dim out"):
        tw.fuse(lambda x: function(x, ()), name="refused")(X)
    whole = tw.fuse(lambda x: function(x), name="taken")(X)
    torch.testing.assert_close(whole, function(X))


def test_logsumexp_over_no_dims_is_one_over_all_that_keeps_them():
    def function(x):
        return torch.logsumexp(x, ())

    with pytest.raises(RuntimeError, match="doesn't match the broadcast shape"):
        function(X)
    with pytest.raises(InvalidArgument, match=r"give dim=\(0, 1\), or keepdim=True \(.*py:\d+\)"):
        tw.fuse(function, name="refused")(X)
    keeping = tw.fuse(lambda x: torch.logsumexp(x, (), keepdim=True), name="taken")
    torch.testing.assert_close(keeping(X), X.logsumexp((0, 1), keepdim=True))


def scaled_fp8(x):
    scale = x.abs().amax(-1, keepdim=True) / 448.0
    return (x / scale).to(torch.float8_e4m3fn), scale


@runs
def test_a_cast_to_fp8_beside_other_results_is_refused_in_words_or_falls_back():
    with pytest.raises(NoImplementation, match=r"a cast to torch\.float8_e4m3fn; .*:\d+"):
        tw.fuse(scaled_fp8, name="refused")(X)
    found = tw.fuse(scaled_fp8, name="refused", fallback=True)(X)
    for own, right in zip(found, scaled_fp8(X), strict=True):
        assert own.dtype == right.dtype
        assert torch.equal(own.float(), right.float())


@runs
def test_complex_numbers_are_refused_with_what_is_taken_instead():
    with pytest.raises(NoImplementation, match="real arithmetic on their two parts is taken"):
        tw.fuse(lambda x: torch.view_as_complex(x.unflatten(-1, (-1, 2))).abs(), name="refused")(X)


@runs
@pytest.mark.parametrize("number", [1j, 2 + 0j])
def test_a_product_with_a_complex_number_is_none_of_whole_numbers(number):
    fused = tw.fuse(lambda x, a: x * a, name="refused")
    with pytest.raises(NoImplementation, match=r"mul.*complex64: of complex numbers, real arith"):
        fused(X, number)


def differences(x):
    """Of neighbours two apart, weighed along the other dim, as Sobel's filter has them."""
    right, left = x[..., 2:], x[..., :-2]
    below, above = x[..., 2:, :], x[..., :-2, :]
    across = right[..., :-2, :] + 2 * right[..., 1:-1, :] + right[..., 2:, :]
    across = across - left[..., :-2, :] - 2 * left[..., 1:-1, :] - left[..., 2:, :]
    down = below[..., :-2] + 2 * below[..., 1:-1] + below[..., 2:]
    return across, down - above[..., :-2] - 2 * above[..., 1:-1] - above[..., 2:]


def size(a, b):
    return (a * a + b * b + 1e-6).sqrt()


@runs
def test_what_follows_many_slices_is_fused_with_them_or_as_a_function_of_its_own():
    x = torch.randn(2, 9, 9, requires_grad=True)
    (right,) = torch.autograd.grad(size(*differences(x)).sum(), x)
    whole = tw.fuse(lambda x: size(*differences(x)), name="edges")
    (found,) = torch.autograd.grad(whole(x).sum(), x)
    torch.testing.assert_close(found, right)
    edges = tw.fuse(size, name="size_of_edges")(*tw.fuse(differences)(x))
    (found,) = torch.autograd.grad(edges.sum(), x)
    torch.testing.assert_close(found, right)


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (lambda x, i: x.exp().lgamma() * i, r"aten\.lgamma\.default of the reference is none of"),
        (lambda x, i: x[i].exp(), r"aten\.index\.Tensor .*: of indexing, slices are taken"),
    ],
)
def test_it_is_said_what_kernels_have_not(function, told):
    places = torch.arange(4) if "index" in told else torch.ones(4, 1)
    with pytest.raises(NoImplementation, match=told):
        tw.fuse(function, name="has_not")(X, places)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.gelu(x),
        lambda x: F.silu(x),
        lambda x: F.mish(x),
        lambda x: F.hardswish(x),
        lambda x: F.hardsigmoid(x),
        lambda x: F.softplus(x),
        lambda x: F.logsigmoid(x),
        lambda x: F.celu(x),
        lambda x: F.hardshrink(x),
        lambda x: F.glu(x),
        lambda x: torch.lerp(x, x + 1, 0.5),
        lambda x: F.huber_loss(x, x + 1),
        lambda x: torch.logaddexp(x, x),
        lambda x: x.round(decimals=-1),
        lambda x: (x + 1).round_(decimals=1),
        lambda x: F.binary_cross_entropy(x.clamp(0, 1), x.clamp(0, 1)),
        lambda x: F.batch_norm(x.reshape(2, 3), x[:3], x[:3]),
        lambda x: F.prelu(-x, x[:1]),
        lambda x: F.soft_margin_loss(x, x),
    ],
)
def test_steps_that_pytorch_has_not_for_whole_numbers_are_refused(function):
    whole = torch.arange(6)
    with pytest.raises(RuntimeError):
        function(whole)
    refused(function, whole, match=r"PyTorch has no .* of torch.int64; cast it first: \.float\(\)")


@pytest.mark.parametrize(
    "function",
    [
        lambda x, i: x & x,
        lambda x, i: x | 1,
        lambda x, i: i ^ x,
        lambda x, i: (x > 0) | x,
        lambda x, i: x.clone().__iand__(i),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_bits_of_floats_are_refused(function, dtype):
    x, whole = torch.randn(6).to(dtype), torch.arange(6)
    with pytest.raises((NotImplementedError, RuntimeError)):
        function(x, whole)
    refused(function, x, whole, match=r"PyTorch has no bitwise_\w+ of torch\.float(16|32); comp")


@runs
def test_bits_of_masks_are_taken():
    def bits(x, i):
        return x * (((i > 3) | (x > 0)) ^ True) + (x > 0).bitwise_and(x < 1)

    x, whole = torch.randn(6), torch.arange(6)
    torch.testing.assert_close(tw.fuse(bits, name="refused")(x, whole), bits(x, whole))


@pytest.mark.parametrize(
    "function",
    [
        lambda i: torch.add(i, i, alpha=1.5),
        lambda i: i.clone().add_(i, alpha=1.5),
        lambda i: i.clone().sub_(3, alpha=0.5),
        lambda i: torch.rsub(i, i, alpha=0.5),
    ],
)
def test_whole_numbers_times_a_float_are_not_added(function):
    whole = torch.arange(6)
    with pytest.raises(RuntimeError):
        function(whole)
    refused(function, whole, match=r"PyTorch adds no whole numbers .* times a float; cast them")


NARROW, WIDE = torch.rand(4, 6), torch.rand(4, 6, dtype=torch.float64)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: F.layer_norm(x, (6,), y[0]),
        lambda x, y: F.group_norm(x, 2, y[0]),
        lambda x, y: F.batch_norm(x, None, None, y[0], training=True),
        lambda x, y: F.binary_cross_entropy(x, y),
        lambda x, y: F.cross_entropy(x, torch.zeros(4, dtype=torch.long), y[0]),
        lambda x, y: F.cross_entropy(x[..., None], torch.zeros(4, 1, dtype=torch.long), y[0]),
        lambda x, y: torch.heaviside(x, y),
        lambda x, y: x.clone().heaviside_(y),
    ],
)
@pytest.mark.parametrize(("x", "y"), [(NARROW, WIDE), (NARROW, NARROW.half())])
def test_floats_of_several_dtypes_are_refused_where_pytorch_refuses_them(function, x, y):
    with pytest.raises(RuntimeError):
        function(x, y)
    refused(function, x, y, match=rf"is of one dtype: cast {y.dtype} by \.to\({x.dtype}\)")


@pytest.mark.parametrize(
    "function", [lambda x, y: F.huber_loss(x, y), lambda x, y: F.soft_margin_loss(x, y)]
)
@pytest.mark.parametrize(("x", "y"), [(NARROW, WIDE), (NARROW.half(), NARROW)])
def test_losses_whose_dtype_pytorch_takes_from_the_first_are_refused(function, x, y):
    assert function(x, y).dtype == x.dtype  # and the gradient of some raises
    refused(function, x, y, match=rf"is of one dtype: cast {y.dtype} by \.to\({x.dtype}\)")


@runs
@pytest.mark.parametrize(
    ("function", "x", "y"),
    [
        (lambda x, y: F.layer_norm(x, (6,), y[0]), NARROW.bfloat16(), NARROW),
        (lambda x, y: F.huber_loss(x, y), NARROW, NARROW.half()),
        (lambda x, y: F.soft_margin_loss(x, y), WIDE, NARROW),
        (lambda x, y: F.binary_cross_entropy(x, x, y), NARROW, NARROW.half()),
        (lambda x, y: torch.add(y, 2.5, alpha=1.5) * x, NARROW, torch.ones(4, 6).long()),
    ],
)
def test_what_pytorch_takes_of_several_dtypes_is_taken(function, x, y):
    torch.testing.assert_close(tw.fuse(function, name="refused")(x, y), function(x, y))


@pytest.mark.parametrize(
    ("w", "b"), [(NARROW.half(), NARROW), (NARROW, NARROW.half()), (WIDE, WIDE)]
)
def test_parameters_of_norms_of_halves_are_all_fp32_or_all_halves(w, b):
    norm = lambda x, w, b: F.layer_norm(x, (6,), w[0], b[0])  # noqa: E731
    with pytest.raises(RuntimeError):
        norm(NARROW.half(), w, b)
    refused(norm, NARROW.half(), w, b, match=r"native_layer_norm is of one dtype: cast torch.flo")


def test_a_norm_of_doubles_takes_no_parameters_of_fp32():
    norm = lambda x, w: F.layer_norm(x, (6,), w[0])  # noqa: E731
    refused(norm, WIDE, NARROW, match=r"is of one dtype: cast torch.float32 by \.to\(torch.float64")


@runs
@pytest.mark.parametrize("function", [torch.logaddexp, torch.logaddexp2])
def test_whole_numbers_beside_floats_are_promoted(function):
    whole, x = torch.arange(6), torch.randn(6)
    for a, b in ((whole, x), (x, whole)):
        found = tw.fuse(lambda a, b: function(a, b), name=f"{function.__name__}_of_both")(a, b)
        torch.testing.assert_close(found, function(a, b))


def test_extremes_of_no_elements_are_refused_in_words():
    with pytest.raises(RuntimeError, match=r"Expected reduction dim"):
        X[:0].max()
    with pytest.raises(NoImplementation, match=r"aten\.max\.default of no elements"):
        tw.fuse(lambda x: x[:0].max(), name="of_none")(X)


@runs
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_loss_over_no_elements_has_gradients_of_the_rest(reduction):
    def smooth(x):
        return F.mse_loss(x[1:], x[:-1], reduction=reduction) + x.sum()

    x = torch.randn(1, 4, requires_grad=True)
    tw.fuse(smooth, name=f"smooth_{reduction}")(x).backward()
    assert torch.equal(x.grad, torch.ones(1, 4))
