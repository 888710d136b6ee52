"""Layers of any geometry, the two axes by themselves, and configs from anywhere in a space."""

from hypothesis import strategies as st

from tilewright.op import Workload


def pair(value):
    return value if isinstance(value, tuple) else (value, value)


def layer(n, c, k, h, w, kernel, stride=1, padding=0, dilation=1, dtype="f16", more=""):
    """The workload's text is that of tensors in channels_last; numbers may be pairs."""
    geometry = {"kernel_size": kernel, "stride": stride, "padding": padding, "dilation": dilation}
    pairs = {name: list(pair(value)) for name, value in geometry.items()}
    p, q = (
        (size + 2 * pad - d * (r - 1) - 1) // s + 1
        for size, r, s, pad, d in zip((h, w), *pairs.values(), strict=True)
    )
    given = ", ".join(f"{name}={value}" for name, value in pairs.items())
    return Workload.parse(
        f"conv2d_weight_grad(x={dtype}[{n},{c},{h},{w}]@channels_last,"
        f" grad_output={dtype}[{n},{k},{p},{q}]@channels_last, {given}{more})"
    )


@st.composite
def layers(draw, units=(8,), most_images=5, most_size=24, most_units=20):
    """Channels come in `units`."""

    def two(low, high):
        return tuple(draw(st.integers(low, high)) for _ in range(2))

    kernel, dilation = two(1, 4), two(1, 2)
    size = [
        draw(st.integers((r - 1) * d + 1, most_size)) for r, d in zip(kernel, dilation, strict=True)
    ]
    unit = draw(st.sampled_from(units))
    channels = [n * unit for n in two(1, most_units)]
    return layer(
        draw(st.integers(1, most_images)), *channels, *size, kernel, two(1, 3), two(0, 2), dilation,
        draw(st.sampled_from(["f16", "bf16"])),
    )  # fmt: skip


STEPS = 6


@st.composite
def configs(draw, space, start):
    """A config of the space some steps from another one."""
    config = start
    for _ in range(draw(st.integers(0, STEPS))):
        config = draw(st.sampled_from(space.neighbours(config) or [config]))
    return config
