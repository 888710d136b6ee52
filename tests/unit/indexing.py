"""Workloads of the operators for indices, for hypothesis to choose from."""

import math

from hypothesis import strategies as st

from tilewright.indexed import DISTRIBUTIONS
from tilewright.op import Workload


@st.composite
def gathers(draw):
    """Of ranks 1 to 6, any dtype: x contiguous or with its dims the other way around, an index that
    is smaller than x, or longer along dim, and expanded over some dims."""
    shape = draw(
        st.lists(st.integers(1, 12), min_size=1, max_size=6).filter(lambda s: math.prod(s) < 3000)
    )
    dim = draw(st.integers(-len(shape), len(shape) - 1))
    length = draw(st.integers(1, 40))
    along = dim % len(shape)
    index = [
        length if d == along else draw(st.integers(max(1, n - 1), n)) for d, n in enumerate(shape)
    ]
    expanded = [draw(st.booleans()) and d != along for d in range(len(shape))]
    strides, step = [0] * len(shape), 1
    for d in reversed(range(len(shape))):
        if not expanded[d]:
            strides[d], step = step, step * index[d]
    of_x = [1]
    for n in shape[:-1]:
        of_x.append(of_x[-1] * n)
    dtype = draw(st.sampled_from(["f16", "bf16", "f32", "f64", "i32", "i64"]))
    turned = f"@strides({','.join(map(str, of_x))})" if draw(st.booleans()) else ""
    kind, spread = draw(st.sampled_from(["i32", "i64"])), draw(st.sampled_from(DISTRIBUTIONS))
    return Workload.parse(
        f"gather(x={dtype}{shape}{turned}, dim={dim}, "
        f"index={kind}{index}@strides({','.join(map(str, strides))}))!indices={spread}"
    )
