"""Generated C++ kernels: every step, layout and size, against PyTorch, and under sanitizers."""

import dataclasses
import itertools
import math
import os
import shutil
import subprocess

import numpy as np
import pytest
import torch

from neighbour_functions import token_shift
from random_graphs import gradients_of
from tilewright.compile import cxx
from tilewright.compile.cache import compiled
from tilewright.device import DEVICES
from tilewright.dispatch.functions.fuse import fuse
from tilewright.errors import OutOfMemory
from tilewright.fusion.cpp import target as cpp_target
from tilewright.fusion.cpp.emit import emit, loops_of, program_of
from tilewright.fusion.cpp.entry import ENTRY
from tilewright.fusion.cpp.loops import arrange
from tilewright.fusion.cpp.schedule import LoopSchedule
from tilewright.fusion.frontend.lower import lower
from tilewright.fusion.ir import Access, Graph, Node
from tilewright.fusion.passes import optimise
from tilewright.impl import IMPLS, CompileTask
from tilewright.impls.fused import graph_of
from tilewright.measure.verify import Verifier
from tilewright.op import Workload
from tilewright.tensor_spec import DTYPES

DEVICE = dataclasses.replace(DEVICES["cpu"], threads=2)
PLAIN = LoopSchedule(rows=1, unroll=1, keep="nothing", stream_stores=False, huge_pages=False)
SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 3.5, 88.9, -104.5, 1e-40, 1e30, -1e30]
SPECIAL += [math.inf, -math.inf, math.nan]

pytestmark = pytest.mark.skipif(cxx.missing() is not None, reason=str(cxx.missing()))


@pytest.fixture(autouse=True, scope="module")
def _own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


def call(graph, schedule, tensors, outputs, flags=cpp_target.FLAGS, scalars=(), threads=None):
    """Build a graph's kernel and run it on tensors; `outputs` are written in place."""
    built = compiled(CompileTask("cxx", emit(graph, schedule), flags, ENTRY))
    threads = threads or (2 if schedule.threads == "all" else 1)
    pointers = [t.data_ptr() for t in (*tensors, *outputs)]
    kernels = cpp_target.LoopKernels(graph, schedule, built)
    kernels(pointers, scalars, threads, schedule.huge_pages)
    return outputs


def run(w, schedule=None, tensors=None, **options):
    """Outputs of a workload's generated kernel, and the tensors that it was given."""
    graph = optimise(lower(w))
    schedule = schedule or cpp_target.heuristic(graph, DEVICE)
    tensors = tensors or w.operator.examples(w, "random", 0)
    outputs = [o.empty("cpu", fill=math.nan) for o in w.outputs]
    numbers = tuple(w.scalars.values())
    scalars = graph.numbers(numbers) if graph.numbers else numbers
    return call(graph, schedule, tensors, outputs, scalars=scalars, **options)


def assert_as_good_as_torch(w, outputs, tensors=None):
    """No element is further from fp64 than twice torch's worst error and two ulp; fp64 itself is
    held against torch, to a few roundings."""
    tensors = tensors or w.operator.examples(w, "random", 0)
    reference = w.operator.reference(**w.call(tensors))
    for own, torch_, true in zip(
        outputs, _tuple(reference), w.operator.truth(w, tensors), strict=True
    ):
        if own.dtype == torch.float64:
            torch.testing.assert_close(own, torch_, rtol=1e-13, atol=1e-14, equal_nan=True)
            continue
        finite = torch.isfinite(true)
        worst = (torch_.double() - true)[finite].abs().max() if finite.any() else 0.0
        ulp = torch.finfo(own.dtype).eps * true.abs() + torch.finfo(own.dtype).tiny
        error = (own.double() - true).abs()
        assert torch.equal(own.isnan(), torch_.isnan()), str(w)
        assert bool((error <= 2 * worst + 2 * ulp)[finite].all()), str(w)


def _tuple(value):
    return value if isinstance(value, tuple) else (value,)


def pointwise_graph(steps, dtype, size, out_dtypes=None):
    """A graph of `size` elements with two inputs and one output for each (op, arguments)."""
    one = (size,)
    nodes = [Node("load", (), dtype, one, 0), Node("load", (), dtype, one, 1)]
    nodes.append(Node("lt", (0, 1), "bool", one))
    nodes.append(Node("ne", (0, 0), "bool", one))
    outputs = []
    for k, (op, args) in enumerate(steps):
        out = (out_dtypes or [dtype] * len(steps))[k]
        nodes.append(Node(op, args, out, one))
        outputs.append((len(nodes) - 1, Access((1,), out, 16)))
    accesses = (Access((1,), dtype, 16),) * 2
    return Graph(tuple(nodes), (size,), accesses, tuple(outputs)).check()


UNARY = {
    **{"neg": torch.neg, "abs": torch.abs, "sqrt": torch.sqrt, "rsqrt": torch.rsqrt},
    **{"reciprocal": torch.reciprocal, "exp": torch.exp, "exp2": torch.exp2, "log": torch.log},
    **{"log2": torch.log2, "log1p": torch.log1p, "expm1": torch.expm1, "tanh": torch.tanh},
    **{"erf": torch.erf, "sin": torch.sin, "cos": torch.cos, "floor": torch.floor},
    **{"ceil": torch.ceil, "round": torch.round, "trunc": torch.trunc, "sign": torch.sign},
}
BINARY = {
    **{"add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "pow": torch.pow},
    **{"maximum": torch.maximum, "minimum": torch.minimum},
}
COMPARED = {
    **{"eq": torch.eq, "ne": torch.ne, "lt": torch.lt, "le": torch.le, "gt": torch.gt},
    **{"ge": torch.ge},
}


def special_pairs(dtype):
    pairs = torch.tensor(list(itertools.product(SPECIAL, SPECIAL)), dtype=DTYPES[dtype])
    random = torch.randn(100, 2, generator=torch.Generator().manual_seed(0), dtype=DTYPES[dtype])
    both = torch.cat([pairs, 4 * random])
    return both[:, 0].contiguous(), both[:, 1].contiguous()


@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_every_pointwise_step_gives_what_torch_gives(dtype):
    a, b = special_pairs(dtype)
    steps = [(op, (0,)) for op in UNARY] + [(op, (0, 1)) for op in BINARY]
    steps += [("where", (2, 0, 1))]
    expected = [f(a) for f in UNARY.values()] + [f(a, b) for f in BINARY.values()]
    expected += [torch.where(a < b, a, b)]
    outputs = [torch.empty_like(a) for _ in steps]
    call(pointwise_graph(steps, dtype, len(a)), PLAIN, [a, b], outputs)
    for (op, _), own, right in zip(steps, outputs, expected, strict=True):
        torch.testing.assert_close(
            own, right, equal_nan=True, rtol=4 * torch.finfo(a.dtype).eps, atol=0, msg=op
        )
        zero = right == 0
        assert torch.equal(own.signbit()[zero], right.signbit()[zero]), f"{op}: sign of zero"


@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_every_comparison_and_logical_step_gives_what_torch_gives(dtype):
    a, b = special_pairs(dtype)
    steps = [(op, (0, 1)) for op in COMPARED]
    steps += [("isnan", (0,)), ("and", (2, 3)), ("or", (2, 3)), ("not", (2,))]
    less, unequal = a < b, a != a
    expected = [f(a, b) for f in COMPARED.values()]
    expected += [a.isnan(), less & unequal, less | unequal, ~less]
    outputs = [torch.empty(len(a), dtype=torch.bool) for _ in steps]
    call(pointwise_graph(steps, dtype, len(a), ["bool"] * len(steps)), PLAIN, [a, b], outputs)
    for (op, _), own, right in zip(steps, outputs, expected, strict=True):
        assert torch.equal(own, right), op


def cast_graph(source, target, size):
    nodes = (Node("load", (), source, (size,), 0), Node("cast", (0,), target, (size,)))
    outputs = ((1, Access((1,), target, 16)),)
    return Graph(nodes, (size,), (Access((1,), source, 16),), outputs).check()


@pytest.mark.parametrize("flags", [(), ("-march=x86-64",)], ids=["native", "baseline"])
@pytest.mark.parametrize("half", ["f16", "bf16"])
def test_halves_widen_exactly_and_every_value_survives_the_way_back(half, flags):
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(DTYPES[half])
    wide = torch.empty(65536)
    call(cast_graph(half, "f32", 65536), PLAIN, [every], [wide], (*cpp_target.FLAGS, *flags))
    torch.testing.assert_close(wide, every.float(), rtol=0, atol=0, equal_nan=True)
    back = torch.empty_like(every)
    call(cast_graph("f32", half, 65536), PLAIN, [wide], [back], (*cpp_target.FLAGS, *flags))
    numbers = ~every.isnan()
    assert torch.equal(back.view(torch.int16)[numbers], every.view(torch.int16)[numbers])
    assert torch.equal(back.isnan(), every.isnan())


@pytest.mark.parametrize("flags", [(), ("-march=x86-64",)], ids=["native", "baseline"])
@pytest.mark.parametrize(
    ("source", "half"), [(s, h) for s in ("f32", "f64") for h in ("f16", "bf16")]
)
def test_narrowing_rounds_to_nearest_even_as_torch_does(source, half, flags):
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (200_003,), generator=generator)
    halves = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(DTYPES[half]).float()
    ties = (halves[1:] + halves[:-1]) / 2  # half-way between neighbours
    values = torch.cat([bits.to(torch.int32).view(torch.float32), ties]).to(DTYPES[source])
    own = torch.empty(len(values), dtype=DTYPES[half])
    call(cast_graph(source, half, len(values)), PLAIN, [values], [own], (*cpp_target.FLAGS, *flags))
    torch.testing.assert_close(own, values.to(own.dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("flags", [(), ("-march=x86-64",)], ids=["native", "baseline"])
@pytest.mark.parametrize("wide", ["f16", "f32", "f64"])
def test_a_nan_whose_mantissa_is_all_ones_stays_one_when_it_is_rounded_to_bf16(wide, flags):
    ones = {"f16": torch.int16, "f32": torch.int32, "f64": torch.int64}[wide]
    most = torch.iinfo(ones).max
    wides = torch.tensor([most, -1, most, 0], dtype=ones).view(DTYPES[wide]).repeat(20)
    nodes = (
        *(Node("load", (), wide, (80,), 0), Node("load", (), wide, (1,), 1)),
        *(Node("scalar", (), "f32", (1,), 0), Node("cast", (0,), "f32", (80,))),
        *(Node("cast", (1,), "f32", (1,)), Node("add", (3, 4), "f32", (80,))),
        *(Node("cast", (5,), "bf16", (80,)), Node("cast", (6,), "f32", (80,))),
        *(Node("mul", (7, 2), "f32", (80,)), Node("cast", (8,), "bf16", (80,))),
    )
    accesses = (Access((1,), wide, 16), Access((0,), wide, 16))
    graph = Graph(nodes, (80,), accesses, ((9, Access((1,), "bf16", 16)),), ("f32",)).check()
    own = torch.empty(80, dtype=torch.bfloat16)
    zero = torch.zeros(1, dtype=DTYPES[wide])
    call(graph, PLAIN, [wides, zero], [own], (*cpp_target.FLAGS, *flags), scalars=(1.0,))
    assert torch.equal(own.isnan(), wides.isnan())
    call(graph, PLAIN, [zero.repeat(80), wides[:1]], [own], scalars=(1.0,))
    assert own.isnan().all()


@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_the_exponential_is_within_one_ulp(dtype):
    limit = 105 if dtype == "f32" else 746
    x = torch.linspace(-limit, limit * 0.85, 300_001, dtype=DTYPES[dtype])
    own = torch.empty_like(x)
    call(pointwise_graph([("exp", (0,))], dtype, len(x)), PLAIN, [x, x], [own])
    exact = np.exp(x.numpy().astype(np.longdouble))
    with np.errstate(over="ignore"):
        rounded = exact.astype(x.numpy().dtype)
    finite = np.isfinite(rounded)
    ulp = np.spacing(np.maximum(rounded[finite], np.finfo(rounded.dtype).smallest_subnormal))
    errors = np.abs(own.numpy()[finite].astype(np.longdouble) - exact[finite]) / ulp
    assert errors.max() < 1.0
    assert np.isinf(own.numpy()[~finite]).all()


def reduction_graph(op, dtype, rows, width, columns=False):
    """`op` over the last axis of (rows, width), or over the first of (width, rows)."""
    shape, kept = ((width, rows), (1, rows)) if columns else ((rows, width), (rows, 1))
    nodes = (Node("load", (), dtype, shape, 0), Node(op, (0,), dtype, kept))
    step = (0, 1) if columns else (1, 0)
    access = Access((shape[1], 1), dtype, 16)
    return Graph(nodes, shape, (access,), ((1, Access(step, dtype, 16)),)).check()


REDUCED = {
    "sum": lambda x: x.sum(-1),
    "prod": lambda x: x.prod(-1),
    "amax": lambda x: x.amax(-1),
    "amin": lambda x: x.amin(-1),
    "mean": lambda x: x.mean(-1),
    "m2": lambda x: x.var(-1, correction=0) * x.shape[-1],
}


@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("op", REDUCED)
@pytest.mark.parametrize("width", [2, 16, 101])
def test_reductions_give_what_torch_gives_and_propagate_nan(op, width, columns):
    rows = 21
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(0))
    x[3, width // 2] = math.nan
    x[4, 0], x[5, 1] = math.inf, -math.inf
    given = x.t().contiguous() if columns else x
    graph = reduction_graph(op, "f32", rows, width, columns)
    unroll = 1 if columns else 2
    schedule = dataclasses.replace(PLAIN, rows=2, unroll=unroll, keep="values")
    (own,) = call(graph, schedule, [given], [torch.empty(rows)])
    right = REDUCED[op](x.double()).float()
    torch.testing.assert_close(own, right, rtol=1e-5, atol=1e-5, equal_nan=True)


LAYOUTS = [
    "softmax(x={d}[7,1])",
    "softmax(x={d}[3,15])",
    "softmax(x={d}[5,33])",
    "softmax(x={d}[2,3,257])",
    "softmax(x={d}[37,19], dim=0)",
    "softmax(x={d}[3,70,33], dim=1)",
    "softmax(x={d}[8,33]@strides(0,1))",
    "softmax(x={d}[8,33]@strides(80,2))",
    "layer_norm(x={d}[6,101], weight={d}[101], bias={d}[101])",
    "layer_norm(x={d}[8,33]@strides(70,2))",
    "layer_norm(x={d}[6,10]@strides(1,6), weight={d}[10])",
    "layer_norm(x={d}[2,3,4,5]@channels_last, normalized_shape=[3,4,5], weight={d}[3,4,5])",
    "rms_norm(x={d}[1,7168], weight={d}[7168])",
    "rms_norm(x={d}[8,33]@strides(1,0), weight={d}[33])",
    "bias_layer_norm(x={d}[3,3,77], bias0={d}[77], bias1={d}[77], weight={d}[77], bias={d}[77])",
    "lerp(x={d}[], end={d}[], weight=0.3)",
    "lerp(x={d}[17], end={d}[], weight=0.7)",
    "lerp(x={d}[5,1,7], end={d}[3,1], weight={d}[2,1,1,7])",
    "lerp(x={d}[40000], end={d}[40000]@strides(3), weight=0.25)",
    "lerp(x={d}[3,4,5,6]@channels_last, end={d}[3,4,5,6]@channels_last, weight={d}[4,1,1])",
]


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("text", LAYOUTS)
def test_every_layout_gives_what_torch_gives(text, dtype):
    w = Workload.parse(text.format(d=dtype))
    assert_as_good_as_torch(w, run(w))


@pytest.mark.parametrize("text", [LAYOUTS[i] for i in (2, 5, 8, 14)])
@pytest.mark.parametrize("dtype", ["f16", "f64"])
def test_the_other_dtypes_give_what_torch_gives(text, dtype):
    w = Workload.parse(text.format(d=dtype))
    assert_as_good_as_torch(w, run(w))


def test_half_rows_beside_wider_parameters_give_what_torch_gives():
    w = Workload.parse("layer_norm(x=bf16[9,130], weight=f32[130], bias=f32[130])")
    assert_as_good_as_torch(w, run(w))


@pytest.mark.parametrize(
    "text",
    [
        "bias_layer_norm(x=bf16[7,50], bias0=bf16[50], bias1=bf16[50], weight=bf16[50],"
        " bias=bf16[50])",
        "softmax(x=bf16[5,70])",
    ],
)
def test_every_schedule_gives_what_torch_gives(text):
    w = Workload.parse(text)
    kinds = itertools.product((1, 2, 4, 8), (1, 4), ("values", "bytes", "nothing"), (False, True))
    for rows, unroll, keep, stream in kinds:
        if rows * unroll <= 4 or (rows, unroll) == (8, 1):
            schedule = LoopSchedule(rows, unroll, keep, stream, prefetch=rows > 1)
            assert_as_good_as_torch(w, run(w, schedule))


@pytest.mark.parametrize("march", ["x86-64", "x86-64-v3"])
@pytest.mark.parametrize(
    "text",
    [
        "softmax(x=bf16[5,77])",
        "layer_norm(x=f16[5,77], weight=f16[77], bias=f16[77])",
        "softmax(x=f64[3,9,21], dim=1)",
        *(
            f"lerp_backward(grad_output=f32[512,{n}], x=f32[512,{n}], end=f32[512,1], "
            f"weight=f32[512,{n}])"
            for n in (1000, 4096)
        ),
    ],
)
def test_kernels_for_older_processors_give_what_torch_gives(text, march):
    w = Workload.parse(text)
    assert_as_good_as_torch(w, run(w, flags=(*cpp_target.FLAGS, f"-march={march}")))


def test_the_number_of_threads_does_not_change_a_bit():
    w = Workload.parse("softmax(x=f32[301,1000])")
    (one,), (two,) = run(w, threads=1), run(w, threads=2)
    assert torch.equal(one, two)


def test_a_number_beyond_fp32_is_infinite_in_fp32():
    w = Workload.parse("lerp(x=f32[40], end=f32[40], weight=1e39)")
    (own,) = run(w, tensors=[torch.zeros(40), torch.ones(40)])
    assert torch.equal(own, torch.full((40,), math.inf))


def test_one_binary_serves_every_number_of_rows():
    texts = [f"layer_norm(x=f32[{rows},64], weight=f32[64])" for rows in (3, 1000)]
    few, many = (optimise(lower(Workload.parse(text))) for text in texts)
    schedule = cpp_target.heuristic(few, DEVICE)
    assert emit(few, schedule) == emit(many, schedule)


def test_a_row_of_minus_infinity_gives_nan_and_leaves_other_rows_alone():
    w = Workload.parse("softmax(x=f32[3,40])")
    x = torch.randn(3, 40)
    x[1] = -math.inf
    x[2, :39] = -math.inf
    (own,) = run(w, tensors=[x])
    assert own[1].isnan().all()
    assert torch.equal(own[2], torch.softmax(x, -1)[2])


def test_a_value_that_one_product_gives_back_is_computed_again_and_not_kept():
    text = "layer_norm(x=f32[64,3000], weight=f32[3000])"
    assert arrange(optimise(lower(Workload.parse(text))), "values").kept_values == []


def test_exponentials_are_kept_between_sweeps():
    graph = optimise(lower(Workload.parse("softmax(x=f32[64,3000])")))
    loops = arrange(graph, "values")
    assert [loops.plan.graph.nodes[i].op for i in loops.kept_values] == ["exp"]


@pytest.mark.parametrize("dim", [1, 0])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_thread_that_finds_no_memory_for_what_it_keeps_is_an_error(dim, threads):
    w = Workload.parse(f"softmax(x=f32[40,3000], dim={dim})")
    graph = optimise(lower(w))
    schedule = dataclasses.replace(PLAIN, keep="values")
    text = emit(graph, schedule)
    none_left = text.replace("aligned_alloc(64, kept_bytes)", "nullptr")
    assert none_left != text
    built = compiled(CompileTask("cxx", none_left, cpp_target.FLAGS, ENTRY))
    kernels = cpp_target.LoopKernels(graph, schedule, built)
    x, out = torch.randn(40, 3000), torch.empty(40, 3000)
    with pytest.raises(OutOfMemory, match=r"no memory for the \d+ bytes") as raised:
        kernels([x.data_ptr(), out.data_ptr()], (), threads, False)
    if dim == 1:
        assert "the 12032 bytes" in str(raised.value)  # 3000 of fp32, to whole cache lines


def test_a_reduction_over_strided_memory_runs_vectors_across_columns():
    loops = arrange(optimise(lower(Workload.parse("softmax(x=f32[5,70,33], dim=1)"))), "values")
    assert (loops.kind, loops.lane) == ("columns", 2)


def test_the_heuristic_is_in_the_space_and_the_space_is_small():
    for text in LAYOUTS:
        graph = optimise(lower(Workload.parse(text.format(d="bf16"))))
        space = cpp_target.space(graph, DEVICE)
        assert cpp_target.heuristic(graph, DEVICE) in space
        assert 1 <= len(list(space)) <= 48


def test_several_vectors_of_columns_are_walked_together_where_each_thread_has_some():
    rows = {
        shape: cpp_target.heuristic(
            optimise(lower(Workload.parse(f"softmax(x=f32[{shape}], dim=1)"))), DEVICE
        ).rows
        for shape in ("1,500,4096", "1,500,70", "1,500,20", "64,50,64")
    }
    assert rows == {"1,500,4096": 4, "1,500,70": 2, "1,500,20": 1, "64,50,64": 4}


def test_the_next_rows_are_prefetched_where_several_are_read_at_once():
    w = Workload.parse("layer_norm(x=bf16[4096,768], weight=bf16[768], bias=bf16[768])")
    graph = optimise(lower(w))
    schedule = cpp_target.heuristic(graph, DEVICE)
    assert (schedule.rows, schedule.prefetch) == (4, True)
    assert "__builtin_prefetch(x0_3 + i1 + 4 * 768, 0, 2);" in emit(graph, schedule)
    single = dataclasses.replace(schedule, rows=1, unroll=4, prefetch=True)
    assert single not in cpp_target.space(graph, DEVICE)


# ---- sanitizers ----------------------------------------------------------------------------------

MAIN = """
#include <stdio.h>
int main() {{
  {allocations}
  const Given given = {{{arguments}, {scalars}2, 1}};
  {entry}(&given);
  double total = 0;
  {checks}
  printf("%g\\n", total);
}}
"""


def sanitized(graph, schedule, folder, extra_rows=0):
    """Run the kernel under AddressSanitizer and UBSan on heap blocks of exactly its tensors."""
    sizes = [
        1 + sum((n - 1) * s for n, s in zip(graph.space, access.strides, strict=True))
        for access in (*graph.inputs, *(a for _, a in graph.outputs))
    ]
    accesses = [*graph.inputs, *(a for _, a in graph.outputs)]
    names = [f"t{k}" for k in range(len(sizes))]
    blocks = [
        f"unsigned char* {name} = (unsigned char*)calloc({size}, {access.itemsize});"
        for name, size, access in zip(names, sizes, accesses, strict=True)
    ]
    checks = [f"total += {name}[0]; free({name});" for name in names]
    extents = [
        str(n + extra_rows * (name == "n0"))
        for loops, _ in loops_of(program_of(graph, schedule), schedule)
        for name, n in loops.extents.items()
    ]
    program = emit(graph, schedule) + MAIN.format(
        allocations="\n  ".join(blocks),
        entry=ENTRY,
        arguments=", ".join([*names, *extents]),
        scalars="".join("0.3, " for _ in graph.scalars),
        checks="\n  ".join(checks),
    )
    source, binary = folder / "program.cpp", folder / "program"
    source.write_text(program)
    compiler = shutil.which(os.environ.get("TILEWRIGHT_CXX", "g++")) or shutil.which("clang++")
    others = ("-shared", "-fPIC", "-O3", cxx.WITHOUT_CXX_LIBRARY)
    flags = [f for f in cpp_target.FLAGS if f not in others]
    sanitizers = ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    build = subprocess.run(
        [compiler, *flags, *sanitizers, str(source), "-o", str(binary)],
        capture_output=True,
        text=True,
    )
    if build.returncode and ("libasan" in build.stderr or "libubsan" in build.stderr):
        pytest.skip("the sanitizers' libraries are not installed")
    assert build.returncode == 0, build.stderr
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}
    return subprocess.run([str(binary)], capture_output=True, text=True, env=environment)


@pytest.mark.parametrize(
    "text",
    [
        "bias_layer_norm(x=bf16[5,37], bias0=bf16[37], bias1=bf16[37], weight=f32[37],"
        " bias=f32[37])",
        "softmax(x=f16[3,70,33], dim=1)",
        "softmax(x=f64[3,29])",
        "lerp(x=f32[3,1,1], end=f32[3,5,19], weight=f32[5,1])",
        "lerp(x=bf16[50], end=bf16[50]@strides(3), weight=0.3)",
    ],
)
def test_no_access_is_out_of_bounds_or_undefined(text, tmp_path):
    graph = optimise(lower(Workload.parse(text)))
    reduces = bool(graph.reductions)
    schedule = LoopSchedule(
        rows=2 if len(graph.space) > 1 else 1,
        unroll=2 if reduces and arrange(graph, "values").kind == "rows" else 1,
        keep="values" if reduces else "nothing",
        stream_stores=not reduces,
        prefetch=reduces,
    )
    result = sanitized(graph, schedule, tmp_path)
    assert result.returncode == 0, result.stderr


def test_the_sanitizer_would_notice_one_row_too_many(tmp_path):
    graph = optimise(lower(Workload.parse("softmax(x=f32[5,37])")))
    schedule = dataclasses.replace(PLAIN, rows=2, unroll=2, keep="values")
    result = sanitized(graph, schedule, tmp_path, extra_rows=1)
    assert "heap-buffer-overflow" in result.stderr


@pytest.mark.usefixtures("forgets_functions")
def test_a_schedule_is_for_the_largest_kernel():
    """What the first tokens have before them takes a kernel of its own, which comes first."""
    fuse(token_shift)
    w = gradients_of(Workload.parse("token_shift(x=f32[2,4096,64], mix=f32[64])"))
    config = IMPLS["fused"].heuristic(w, DEVICE)
    program = program_of(graph_of(w), config)
    first, largest, *_ = program.segments
    assert (first.graph.space, largest.graph.space) == ((2, 64), (2, 4095, 64))
    own = [k for k, (_, used) in enumerate(loops_of(program, config)) if used == config]
    assert own == [1]
    assert largest.partials == config.splits > 1
    kernels = IMPLS["fused"].build(config, w, DEVICE)
    assert Verifier(w, torch.device("cpu")).check(kernels).message == ""
