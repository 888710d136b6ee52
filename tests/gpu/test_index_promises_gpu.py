"""What operators with an index promise on a GPU, untuned and by each kernel: no call waits for the
device, zeros and NaN are PyTorch's, any drawn shape is right, and so are tensors beyond 2^31."""

import math

import pytest
import torch
from hypothesis import given, settings

import tilewright as tw
from compile_ahead import compile_all
from indexing import gathers, moves
from tilewright.device import spec_of
from tilewright.dispatch.prepared import HOT_CALLS
from tilewright.impl import IMPLS
from tilewright.measure.verify import Verifier
from tilewright.op import Workload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]
CUDA = torch.device("cuda:0")
NAN, INF = math.nan, math.inf


def own(w):
    """The names of our kernels that serve the workload on this GPU."""
    found = (i for i in IMPLS.values() if i.backend == "cuda" and i.op and i.serves(w.op))
    return [i.name for i in found if i.unsupported(w, spec_of(0)) is None]


# --- no call waits -------------------------------------------------------------------------------


def calls(dtype, strided=False, differentiable=False):
    """Every operator with an index on tensors of that dtype, by name."""
    torch.manual_seed(0)
    like = {"device": CUDA, "dtype": dtype}
    x = torch.zeros(16, 300, **like).t() if strided else torch.zeros(300, 16, **like)
    src = torch.randint(1, 3, (5000, 16), device=CUDA).to(dtype).requires_grad_(differentiable)
    index = torch.randint(300, (5000,), device=CUDA)
    columns, few = index[:, None].repeat(1, 16), index[:, None].expand(5000, 16)
    into = x * 1
    found = {
        "gather": lambda: tw.gather(src, 0, columns),
        "scatter": lambda: tw.scatter(x, 0, columns, src),
        "scatter of rows": lambda: tw.scatter(x, 0, few, src),
        "scatter of a number": lambda: tw.scatter(x, 0, columns, 2.0),
        "scatter_add": lambda: tw.scatter_add(x, 0, columns, src),
        "scatter_add of rows": lambda: tw.scatter_add(x, 0, few, src),
        "index_add": lambda: tw.index_add(x, 0, index, src),
        "index_put": lambda: tw.index_put(x, (index,), src),
        "index_put by two": lambda: tw.index_put(x, (index, index % 16), src[:, 0]),
        "index_put that adds": lambda: tw.index_put(x, (index,), src, True),
        **{
            f"{name} {reduce}": lambda name=name, reduce=reduce: getattr(tw, name)(
                x, 0, columns if name == "scatter_reduce" else index, src, reduce
            )
            for name in ("scatter_reduce", "index_reduce")
            for reduce in ("prod", "mean", "amax", "amin")
        },
    }
    if not differentiable:
        found |= {
            "scatter_": lambda: tw.scatter_(into, 0, columns, src),
            "scatter_add_": lambda: tw.scatter_add_(into, 0, columns, src),
            "index_add_": lambda: tw.index_add_(into, 0, index, src),
            "index_put_": lambda: tw.index_put_(into, (index,), src, True),
        }
    if dtype.is_floating_point:
        table = torch.randn(300, 16, **like).requires_grad_(differentiable)
        found["embedding"] = lambda: tw.embedding(index, table)
        found["embedding_backward"] = lambda: tw.embedding_backward(src.detach(), index, 300)
    return found


def waits(call):
    """Whether it returns after what the device had to do before. PyTorch names its own waits."""
    busy = torch.cuda.Event()
    torch.cuda.synchronize()
    torch.cuda._sleep(400_000_000)  # a fifth of a second
    busy.record()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
        return busy.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def assert_never_waits(call):
    """A call that waits does so every time, and one whose host is busy otherwise does not."""
    for _ in range(HOT_CALLS + 1):  # until what runs is built, and memory is there
        call()
    assert not all(waits(call) for _ in range(3))
    torch.cuda.synchronize()
    tw.check()


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
def test_no_call_waits_for_the_device(dtype, strided):
    tw.reload_records("sqlite://")
    try:
        for name, call in calls(dtype, strided).items():
            print(name)  # shown where it fails
            assert_never_waits(call)
    finally:
        tw.reload_records()


def test_no_gradient_waits_for_the_device():
    tw.reload_records("sqlite://")

    def forward_and_backward(call):
        out = call()
        if out.requires_grad:
            out.backward(torch.ones_like(out))

    try:
        for name, call in calls(torch.float32, differentiable=True).items():
            if "prod" in name:
                continue  # PyTorch's gradient of a product looks for zeros, and waits
            print(name)
            assert_never_waits(lambda call=call: forward_and_backward(call))
    finally:
        tw.reload_records()


@pytest.mark.parametrize(
    "text",
    [
        "index_add(x=f32[300,16], dim=0, index=i64[5000], source=f32[5000,16])",
        "index_reduce(x=bf16[300,16], dim=0, index=i64[900], source=bf16[900,16], reduce=mean)",
        "scatter_add(x=f32[300,16], dim=0, index=i64[5000,16], src=f32[5000,16])",
        "scatter_add(x=f32[900,16], dim=1, index=i64[900,9], src=f32[900,9])",
        "scatter(x=f32[300,16], dim=0, index=i64[5000,16], src=f32[5000,16])",
        "scatter(x=f32[300,16], dim=0, index=i64[5000,16]@strides(1,0), src=f32[5000,16])",
        "embedding_backward(grad=f16[5000,16], index=i64[5000], num_weights=300)",
        "gather(x=f32[300,16], dim=0, index=i64[5000,16])",
    ],
)
def test_no_kernel_of_ours_waits_for_the_device(text):
    w = Workload.parse(text)
    assert own(w)
    tensors = w.operator.examples(w, "random", 0, CUDA)
    for name in own(w):
        run = IMPLS[name].build(IMPLS[name].heuristic(w, spec_of(0)), w, spec_of(0))
        assert_never_waits(lambda run=run: run(*tensors))


# --- zeros and NaN -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32", "f64"])
@pytest.mark.parametrize("included", [True, False])
@pytest.mark.parametrize("reduce", ["amax", "amin"])
@pytest.mark.parametrize(
    "text",
    [
        "index_reduce(x={t}[40,6], dim=0, index=i64[700], source={t}[700,6]",
        "index_reduce(x={t}[40,6], dim=0, index=i64[30], source={t}[30,6]",
        "scatter_reduce(x={t}[40,6], dim=0, index=i64[700,6], src={t}[700,6]",
        "scatter_reduce(x={t}[9,4000], dim=1, index=i64[9,30], src={t}[9,30]",
    ],
)
def test_the_greatest_and_the_least_of_nan_infinities_and_zeros_are_pytorchs(
    text, reduce, included, dtype
):
    w = Workload.parse(f"{text.format(t=dtype)}, reduce={reduce}, include_self={included})")
    assert own(w)
    x, index, src = w.operator.examples(w, "random", 0, "cpu")
    x[3], x[5, 2], src.view(-1)[::17], src.view(-1)[::29] = NAN, -INF, NAN, INF
    index.view(-1)[::31] = 7
    expected = w.operator.reference(**w.call([x, index, src]))
    given = [t.to(CUDA) for t in (x, index, src)]
    x.fill_(-0.0), src.fill_(-0.0)
    for name in own(w):
        run = IMPLS[name].build(IMPLS[name].heuristic(w, spec_of(0)), w, spec_of(0))
        torch.testing.assert_close(
            run(*given).cpu(), expected, rtol=0, atol=0, equal_nan=True, msg=name
        )
        zeros = run(x.to(CUDA), given[1], src.to(CUDA))
        assert not zeros.any(), name
        assert zeros.signbit().all(), name


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32", "f64"])
@pytest.mark.parametrize(
    "text",
    [
        "index_add(x={t}[40,6], dim=0, index=i64[700], source={t}[700,6])",
        "index_add(x={t}[40,6], dim=0, index=i64[5000], source={t}[5000,6])",
        "scatter_add(x={t}[40,6], dim=0, index=i64[700,6], src={t}[700,6])",
        "scatter_add(x={t}[9,4000], dim=1, index=i64[9,30], src={t}[9,30])",
    ],
)
def test_sums_of_zeros_have_the_signs_of_pytorchs(text, dtype):
    w = Workload.parse(text.format(t=dtype))
    x, index, src = w.operator.examples(w, "random", 0, CUDA)
    for name in own(w):
        run = IMPLS[name].build(IMPLS[name].heuristic(w, spec_of(0)), w, spec_of(0))
        for old, new in ((0.0, -0.0), (-0.0, 0.0), (-0.0, -0.0)):
            x.fill_(old), src.fill_(new)
            expected = w.operator.reference(**w.call([x.cpu(), index.cpu(), src.cpu()]))
            assert torch.equal(run(x, index, src).signbit().cpu(), expected.signbit()), name


# --- many shapes ---------------------------------------------------------------------------------

DRAWS = 80


def drawn(strategy):
    """The same workloads in every run."""
    found = []

    @settings(max_examples=DRAWS)
    @given(strategy)
    def collect(w):
        found.append(w)

    collect()
    return list(dict.fromkeys(found))


@pytest.mark.parametrize("strategy", [moves(), gathers()], ids=["moves", "gathers"])
def test_every_kernel_is_right_on_shapes_that_are_drawn(strategy):
    spec, workloads = spec_of(0), drawn(strategy)
    pairs = [(w, IMPLS[name]) for w in workloads for name in own(w)]
    compile_all(list({impl.task(impl.heuristic(w, spec), w, spec): None for w, impl in pairs}))
    verifiers = {w: Verifier(w, CUDA) for w in workloads}
    for w, impl in pairs:
        verdict = verifiers[w].check(impl.build(impl.heuristic(w, spec), w, spec))
        assert verdict.ok, f"{impl.name}: {verdict.message}"
        assert verdict.deterministic or impl.races
    assert len({w.main.rank for w in workloads}) >= 5
    tw.check()


# --- more than 2^31 elements ---------------------------------------------------------------------

FAR = 2**31 + 2**20


def far_workload(name):
    rows = FAR // 64
    return Workload.parse(
        {
            "a table": f"index_add(x=f16[{rows},64], dim=0, index=i64[5000], source=f16[5000,64])"
            "!donate=x",
            "rows added": f"index_add(x=f16[9000,64], dim=0, index=i64[{rows}], "
            f"source=f16[{rows},64])!donate=x",
            "an embedding": f"embedding_backward(grad=f16[5000,64], index=i64[5000], "
            f"num_weights={rows})",
        }[name]
    )


@pytest.mark.parametrize("name", ["a table", "rows added", "an embedding"])
@pytest.mark.alone
def test_sums_of_rows_beyond_32_bits_are_exact(name, needs_memory):
    needs_memory(26e9)
    w, spec = far_workload(name), spec_of(0)
    served = own(w)
    assert "rows_sorted" in served
    torch.manual_seed(0)
    rows = FAR // 64
    for impl in map(IMPLS.__getitem__, served):
        run = impl.build(impl.heuristic(w, spec), w, spec)
        if name == "rows added":  # few of them differ from zero, some beyond 2^31 elements
            source = torch.zeros(rows, 64, dtype=torch.float16, device=CUDA)
            index = torch.arange(rows, device=CUDA) % 9000
            at = torch.tensor([0, 5, 2**25 - 1, 2**25 + 3, rows - 1], device=CUDA)
            source[at] = torch.arange(1.0, 6, device=CUDA).half()[:, None]
            out = run(torch.zeros(9000, 64, dtype=torch.float16, device=CUDA), index, source)
            expected = torch.zeros(9000, 64, device=CUDA).index_add(
                0, index[at], source[at].float()
            )
            assert torch.equal(out.float(), expected), impl.name
            del source, index
        else:
            index = torch.randint(rows - 2000, rows, (5000,), device=CUDA)
            index[:9] = torch.tensor([0, 1, 2**25 - 1, 2**25, 2**25 + 1, 7, 7, rows - 1, rows - 1])
            source = torch.randint(-3, 4, (5000, 64), device=CUDA).half()
            given = (source, index)
            if name == "a table":
                given = torch.zeros(rows, 64, dtype=torch.float16, device=CUDA), index, source
            out = run(*given)
            hit, place = index.unique(return_inverse=True)
            expected = torch.zeros(len(hit), 64, device=CUDA).index_add(0, place, source.float())
            assert torch.equal(out[hit].float(), expected), impl.name
            assert int(out.count_nonzero()) == int(expected.count_nonzero()), impl.name
            del given
        del out
        torch.cuda.empty_cache()
    tw.check()
