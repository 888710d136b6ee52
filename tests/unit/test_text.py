"""The text form of workloads: it round-trips, and what cannot be read is quoted."""

import contextlib

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from tilewright.errors import InvalidArgument
from tilewright.op import OPS, Op, Workload
from tilewright.suite import SUITES
from tilewright.tensor_spec import DTYPES, HALVES, TensorSpec, channels_last_strides
from tilewright.text import parse_value, value_text

FLOATS = ("f16", "bf16", "f32", "f64")
sizes = st.integers(0, 1500)  # five of them are still fewer elements than a machine addresses
shapes = st.lists(sizes, max_size=5).map(tuple)
scalars = st.floats(-1e30, 1e30) | st.integers(-9, 9) | st.just(float("inf"))

words = st.from_regex(r"[A-Za-z_]\w{0,8}", fullmatch=True).filter(
    lambda word: word.lower() not in ("none", "true", "false", "nan", "inf", "infinity")
)
elements = st.integers() | st.floats() | st.booleans() | st.none() | words


@pytest.fixture(scope="module")
def scaled():
    """An operator with parameters that are tuples: of anything, and of numbers."""

    def scaled(x, anything=(), numbers: "tuple[float, ...]" = (1, 2.0)):
        return x

    yield OPS.add("scaled", Op("scaled", scaled, flops=lambda w: 0))
    OPS.remove("scaled")


@st.composite
def specs(draw, dtypes=tuple(DTYPES), shape=None):
    """Tensors of any layout: contiguous, channels last, strided, expanded; any base alignment."""
    shape = draw(shapes) if shape is None else shape
    layouts = [None, tuple(draw(st.integers(0, 99)) for _ in shape)]
    if len(shape) == 4:
        layouts.append(channels_last_strides(shape))
    dtype = draw(st.sampled_from(dtypes))
    align = draw(st.sampled_from([a for a in (1, 2, 4, 8, 16) if a >= DTYPES[dtype].itemsize]))
    return TensorSpec(dtype, shape, draw(st.sampled_from(layouts)), align)


def beside(x):
    """Dtypes that a parameter may have beside x."""
    return (x.dtype, "f32") if x.dtype in HALVES else (x.dtype,)


@st.composite
def normalizations(draw):
    x = draw(specs(FLOATS, draw(st.lists(sizes, min_size=1, max_size=4).map(tuple))))
    op = draw(st.sampled_from(["layer_norm", "rms_norm", "bias_layer_norm"]))
    given = {"x": x}
    shape = x.shape[-1:]
    if op != "bias_layer_norm":
        shape = x.shape[draw(st.integers(0, len(x.shape) - 1)) :]
        given["normalized_shape"] = shape
    names = {"layer_norm": ["weight", "bias"], "rms_norm": ["weight"]}
    for name in names.get(op, ["bias0", "bias1", "weight", "bias"]):
        if op == "bias_layer_norm" or draw(st.booleans()):
            given[name] = draw(specs(beside(x), shape))
    if draw(st.booleans()):
        given["eps"] = draw(st.floats(0, 1))
    return op, given


@st.composite
def softmaxes(draw):
    x = draw(specs(FLOATS))
    rank = max(x.rank, 1)
    return "softmax", {"x": x, "dim": draw(st.integers(-rank, rank - 1))}


@st.composite
def lerps(draw):
    shape = draw(shapes)
    narrowed = st.lists(st.booleans(), min_size=len(shape), max_size=len(shape)).map(
        lambda keep: tuple(n if k else 1 for n, k in zip(shape, keep, strict=True))
    )
    x = draw(specs(FLOATS, draw(narrowed)))
    weight = draw(scalars | narrowed.flatmap(lambda s: specs((x.dtype,), s)))
    return "lerp", {"x": x, "end": draw(specs((x.dtype,), shape)), "weight": weight}


@st.composite
def workloads(draw):
    op, given = draw(normalizations() | softmaxes() | lerps())
    tensors = [name for name, value in given.items() if isinstance(value, TensorSpec)]
    flags = draw(st.sets(st.sampled_from(["relaxed", "nondeterministic"])))
    for listing in ("donate",):
        if names := draw(st.sets(st.sampled_from(tensors))):
            flags.add(f"{listing}={','.join(n for n in tensors if n in names)}")
    return Workload.parse(f"{op}({arguments(given)})" + "".join(f"!{f}" for f in flags))


def arguments(given):
    def text(value):
        return f"[{','.join(map(str, value))}]" if isinstance(value, tuple) else str(value)

    return ", ".join(f"{name}={text(value)}" for name, value in given.items())


@given(specs())
def test_a_tensor_survives_its_text(spec):
    assert parse_value("x", str(spec), TensorSpec) == spec


def typed(values):
    """Values that are told apart where Python holds them equal: 1, 1.0 and True, 0.0 and -0.0."""
    return [(type(v), repr(v)) for v in values]


@given(st.lists(elements).map(tuple))
def test_a_tuple_survives_its_text(values):
    again = parse_value("x", value_text(values), TensorSpec)
    assert isinstance(again, tuple)
    assert typed(again) == typed(values)


@given(st.lists(elements).map(tuple), st.lists(st.integers() | st.floats()).map(tuple))
def test_a_workload_with_tuples_survives_its_text(scaled, anything, numbers):
    w = scaled.workload(x=TensorSpec("f32", (8, 16)), anything=anything, numbers=numbers)
    again = Workload.parse(str(w))
    assert again == w
    assert str(again) == str(w)
    assert typed(again["anything"]) == typed(anything)
    assert typed(again["numbers"]) == typed(numbers)


@pytest.mark.parametrize(
    ("numbers", "text"),
    [((1, 2.0), ""), ((1.0, 2.0), ", numbers=[1.0,2.0]"), ((), ", numbers=[]")],
)
def test_a_tuple_is_shown_unless_it_is_the_default_with_its_types(scaled, numbers, text):
    w = scaled.workload(x=TensorSpec("f32", (8, 16)), numbers=numbers)
    assert str(w) == f"scaled(x=f32[8,16]{text})"


@given(workloads())
def test_a_workload_survives_its_text(w):
    again = Workload.parse(str(w))
    assert again == w
    assert hash(again) == hash(w)
    assert str(again) == str(w)


@given(workloads(), st.randoms())
def test_the_order_of_arguments_and_flags_does_not_matter(w, rng):
    parts = [f"{name}={value}" for name, value in w.tensors.items()]
    scalars = [(n, v) for n, v in w.args if n not in w.tensors and v is not None]
    parts += [f"{n}={list(v) if isinstance(v, tuple) else v}" for n, v in scalars]
    rng.shuffle(parts)
    flags = list(w.flags)
    rng.shuffle(flags)
    text = f" {w.op} ( {' , '.join(parts)} ) " + "".join(f" ! {flag}" for flag in flags)
    assert Workload.parse(text) == w


@pytest.mark.parametrize("suite", list(SUITES))
def test_the_texts_of_a_suite_are_written_as_their_workloads_are(suite):
    for text, w in zip(SUITES[suite].texts, SUITES[suite].workloads(), strict=True):
        assert str(w) == text


@pytest.mark.parametrize(
    ("text", "short"),
    [
        ("layer_norm(x=f32[4,8], normalized_shape=[8], eps=1e-5)", "layer_norm(x=f32[4,8])"),
        ("layer_norm(x=f32[4,8]@strides(8,1), weight=None)", "layer_norm(x=f32[4,8])"),
        ("layer_norm(x=f32[4,8], normalized_shape=8)", "layer_norm(x=f32[4,8])"),
        ("softmax(x=f32[4,8]@align16, dim=1)", "softmax(x=f32[4,8])"),
        ("softmax(x=f32[4,8], dim=0)", "softmax(x=f32[4,8], dim=-2)"),
        ("lerp(x=f32[], end=f32[8], weight=1)", "lerp(x=f32[], end=f32[8], weight=1.0)"),
        (
            "softmax(x=f16[2,3,4,5]@strides(60,1,15,3)@align2)",
            "softmax(x=f16[2,3,4,5]@channels_last@align2)",
        ),
        (
            "layer_norm(x=f16[2,8], weight=f16[8])!donate=weight,x!donate=x, weight",
            "layer_norm(x=f16[2,8], weight=f16[8])!donate=x,weight",
        ),
    ],
)
def test_an_argument_is_shown_only_where_it_differs_from_its_default(text, short):
    assert str(Workload.parse(text)) == short


X = "x=f32[4,8]"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot read workload ''; expected the form layer_norm(x=f16[8192,5140]"),
        ("softmax", "cannot read workload 'softmax'; expected the form"),
        ("softmax(x=f32[4,8]", "cannot read workload 'softmax(x=f32[4,8]'"),
        ("(x=f32[4])", "cannot read workload"),
        (f"sofmax({X})", "unknown operator 'sofmax'; did you mean softmax"),
        ("softmax(f32[4,8])", "argument 'f32[4,8]' has no name; write name=value"),
        (f"softmax({X}, x=f32[4])", "softmax: argument 'x' is given twice"),
        (f"softmax({X}, axis=0)", "softmax: unknown argument 'axis'; known: x, dim"),
        ("softmax()", "softmax: argument 'x' is missing"),
        ("softmax(x=f32[4,8)", "x='f32[4,8' is neither a tensor such as f16[8192,768], a number"),
        ("softmax(x=f32[4;8])", "x='f32[4;8]' is neither a tensor"),
        ("softmax(x=f32[-4])", "x='f32[-4]' is neither a tensor"),
        ("softmax(x=f33[4])", "softmax: x: unknown dtype 'f33'; did you mean f32"),
        ("softmax(x=f32[4,8]@align3)", "layout '@align3' is not one of @channels_last (rank 4), @"),
        ("softmax(x=f32[4,8]@diagonal)", "layout '@diagonal' is not one of"),
        ("softmax(x=f32[4,8]@channels_last)", "layout '@channels_last' is not one of"),
        ("softmax(x=f32[1,2,3,4]@channels_last(3))", "layout '@channels_last(3)' is not one of"),
        ("softmax(x=f32[4,8]@strides(1))", "1 strides [1] for a tensor of rank 2: give one stride"),
        ("softmax(x=f32[4,8]@strides(-8,1))", "negative stride in [-8, 1]"),
        ("softmax(x=i64[4,8])", "softmax: x is i64, expected one of f16, bf16, f32, f64"),
        ("softmax(x=3)", "softmax: x=3 should be "),
        (f"softmax({X}, dim=2)", "dim=2 is out of range for x of rank 2: use -2 to 1"),
        (f"softmax({X}, dim=0.5)", "softmax: dim=0.5 should be int"),
        (f"softmax({X}, dim=last)", "softmax: dim=last should be int"),
        (f"softmax({X}, dim=None)", "softmax: dim=None should be int"),
        (f"layer_norm({X}, normalized_shape=[4])", "normalized_shape=[4] does not end x's shape"),
        (f"layer_norm({X}, normalized_shape=[a])", "normalized_shape=[a] should be tuple[int"),
        (f"layer_norm({X}, normalized_shape=[8.0])", "normalized_shape=[8.0] should be tuple[int"),
        (f"layer_norm({X}, normalized_shape=[8;])", "is neither a tensor such as f16[8192,768], a"),
        (f"layer_norm({X}, normalized_shape=[8,,2])", "is neither a tensor such as f16[8192,768]"),
        (f"scaled({X}, numbers=[True,2.0])", "numbers=[True,2.0] should be tuple[float, ...]"),
        (f"layer_norm({X}, weight=f32[4])", "weight has shape [4], but a row of x is [8]"),
        (f"layer_norm({X}, weight=f16[8])", "weight is f16 beside x of f32; convert it to f32"),
        ("lerp(x=f32[4], end=f32[3], weight=0)", "x [4], end [3] do not broadcast: aligned"),
        ("lerp(x=f32[4], end=f16[4], weight=0)", "end is f16, but x is f32; convert one of them"),
        (f"softmax({X})!relaxt", "softmax: unknown flag '!relaxt'; known: "),
        (f"softmax({X})!", "softmax: unknown flag '!'; known: "),
        (f"softmax({X})!donate=dim", "'!donate=dim' should name tensor arguments: x"),
        (f"softmax({X})!donate", "'!donate=' should name tensor arguments: x"),
        (f"softmax({X})!relaxed=x", "softmax: unknown flag '!relaxed=x'; known: "),
    ],
)
def test_an_error_names_what_was_wrong(scaled, text, message):
    with pytest.raises(InvalidArgument) as caught:
        Workload.parse(text)
    assert message in str(caught.value)
    assert caught.value.exit_code == 2


@given(st.text(max_size=60))
@example("softmax(x=f32[99999999999999999999999])")
@example("softmax(x=f32[4]@strides(99999999999999999999))")
@example("a(" * 500 + ")" * 500)
def test_any_text_is_read_or_refused(text):
    with contextlib.suppress(InvalidArgument):
        Workload.parse(text)


@given(workloads(), st.integers(0, 10_000), st.text(min_size=1, max_size=2))
def test_a_workload_with_a_slip_is_read_or_refused(w, at, slip):
    text = str(w)
    at %= len(text)
    changed = text[:at] + slip + text[at + 1 :]
    assume(changed != text)
    with contextlib.suppress(InvalidArgument):
        again = Workload.parse(changed)
        assert Workload.parse(str(again)) == again


@pytest.mark.parametrize(
    "x",
    [
        "f32[99999999999,99999999999]",
        "f32[0,99999999999999999999]",
        "f32[4,4]@strides(9223372036854775807,1)",
        "f32[1099511627776,1099511627776]@strides(0,0)",
    ],
)
def test_what_no_memory_holds_is_refused_where_it_is_written(x):
    with pytest.raises(InvalidArgument, match=r"softmax: x: .* spans \d+ elements, more than"):
        Workload.parse(f"softmax(x={x})")


def test_more_dims_than_pytorchs_kernels_take_are_refused_where_they_are_written():
    def of_rank(rank: int) -> Workload:
        return Workload.parse(f"softmax(x=f32[{','.join(['1'] * rank)}])")

    assert of_rank(64).main.rank == 64
    with pytest.raises(InvalidArgument, match="x: f32 of 65 dims: PyTorch's kernels take 64 at"):
        of_rank(65)
