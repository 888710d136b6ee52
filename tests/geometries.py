"""Layers of any geometry, the two axes by themselves, and configs from anywhere in a space."""

from hypothesis import strategies as st

from tilewright.op import Workload

CHANNELS_LAST = "@channels_last"
LAYOUTS = (CHANNELS_LAST, "")
HALVES = ("f16", "bf16")
EVERY = (*HALVES, "f32", "tf32", "f64")


def pair(value):
    return value if isinstance(value, tuple) else (value, value)


def layer(
    n, c, k, h, w, kernel, stride=1, padding=0, dilation=1, dtype="f16", more="",
    layouts=CHANNELS_LAST,
):  # fmt: skip
    """Numbers, and the layouts of x and grad_output, may be pairs; "tf32" is fp32 by TF32."""
    if dtype == "tf32":
        dtype, more = "f32", f"{more}, allow_tf32=True"
    of_x, of_grad = pair(layouts)
    geometry = {"kernel_size": kernel, "stride": stride, "padding": padding, "dilation": dilation}
    pairs = {name: list(pair(value)) for name, value in geometry.items()}
    p, q = (
        (size + 2 * pad - d * (r - 1) - 1) // s + 1
        for size, r, s, pad, d in zip((h, w), *pairs.values(), strict=True)
    )
    given = ", ".join(f"{name}={value}" for name, value in pairs.items())
    return Workload.parse(
        f"conv2d_weight_grad(x={dtype}[{n},{c},{h},{w}]{of_x},"
        f" grad_output={dtype}[{n},{k},{p},{q}]{of_grad}, {given}{more})"
    )


@st.composite
def layers(
    draw, units=(8,), depths=(None,), dtypes=HALVES, layouts=(CHANNELS_LAST,), most_images=5,
    most_size=24, most_units=20, most_kernel=4, most_dilation=2,
):  # fmt: skip
    """Channels come in `units`, and in groups of one of `depths`, as features do; None for layers
    without groups."""

    def two(low, high):
        return tuple(draw(st.integers(low, high)) for _ in range(2))

    kernel, dilation = two(1, most_kernel), two(1, most_dilation)
    size = [
        draw(st.integers((r - 1) * d + 1, most))
        for r, d, most in zip(kernel, dilation, pair(most_size), strict=True)
    ]
    unit, depth = draw(st.sampled_from(units)), draw(st.sampled_from(depths))
    channels, more = [n * unit for n in two(1, most_units)], ""
    if depth:
        groups = max(1, channels[0] // depth)
        channels, more = [groups * depth] * 2, f", groups={groups}"
    return layer(
        draw(st.integers(1, most_images)), *channels, *size, kernel, two(1, 3), two(0, 2), dilation,
        draw(st.sampled_from(dtypes)), more, tuple(draw(st.sampled_from(layouts)) for _ in "xy"),
    )  # fmt: skip


STEPS = 6


@st.composite
def configs(draw, space, start):
    """A config of the space some steps from another one."""
    config = start
    for _ in range(draw(st.integers(0, STEPS))):
        config = draw(st.sampled_from(space.neighbours(config) or [config]))
    return config
