"""Sums that zeros of the padding made NaN are computed again without it, run on a CPU."""

import pytest
import torch
from convolutions import weight_grad
from epilogue_on_cpu import epilogue_on_cpu
from tensor_cores_on_cpu import without_a_gpu

from infinities import assert_infinities_stay, with_infinities
from tilewright.compile import cxx, nvrtc
from tilewright.impls.weight_gradient import _launch
from tilewright.impls.weight_gradient._problem import problem_of
from tilewright.impls.weight_gradient._stream import halo_of
from tilewright.measure.verify import Verifier

pytestmark = pytest.mark.skipif(
    nvrtc.missing() is not None or cxx.missing() is not None, reason="a compiler is missing"
)
CPU = torch.device("cpu")
KERNEL = """
extern "C" __global__ void __launch_bounds__(THREADS) weight_grad(const u16* x, const u16* grad,
    Out* weight, Out* bias, float* partial, u32* counters, const __grid_constant__ Problem p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  __shared__ Panel panels[TILE_PANELS];
  const Tile t(p);
  const int warp = threadIdx.x / 32;
  find_panels(panels, p, t);
  __syncthreads();
  float sums[BLOCKS][COLUMNS / 2], bias_sums[BLOCKS][4] = {};
  for (int m = 0; m < BLOCKS; ++m)
    for (int j = 0; j < COLUMNS / 2; ++j) sums[m][j] = j % 2 ? NAN : EVEN_CHANNELS;
  leave_padding_out(x, grad, p, t, p.channels, panels, warp, sums);
  keep<THREADS>({weight, bias}, partial, counters, memory, panels, p, t, warp, sums, bias_sums);
  combine({weight, bias}, partial, counters, memory, panels, p, t);
}
"""
"""Of which products left nothing but NaN."""
LAYERS = [
    weight_grad("2,24,5,6", "2,40,5,6", "kernel_size=3, padding=1"),
    weight_grad(
        "1,72,9,5", "1,8,5,3", "kernel_size=3, padding=[0,2], dilation=[2,3]", dtype="bf16"
    ),
    weight_grad("2,8,4,30", "2,72,6,28", "kernel_size=3, padding=[2,0], out_dtype=f32"),
    weight_grad("3,8,6,5", "3,8,6,5", "kernel_size=[1,3], padding=[0,1]"),
    weight_grad(
        "2,24,5,6", "2,40,5,6", "kernel_size=3, padding=1, into=f32[40,24,3,3]@channels_last"
    ),
]


PLAIN = [
    weight_grad("2,24,7,6", "2,72,4,3", "kernel_size=3, stride=2, padding=1"),
    weight_grad(
        "1,72,9,5", "1,8,4,5", "kernel_size=[3,2], stride=[2,1], padding=[1,2], dilation=[2,4]"
    ),
    weight_grad("2,16,9,9", "2,8,2,2", "kernel_size=5, stride=[7,8], padding=[3,2]", dtype="bf16"),
]


def streamed(w, tile, even="NAN", **how):
    """As `mended`, where taps share a copy of x."""
    return mended(w, tile, even, halo=halo_of(problem_of(w), tile[1], 64), **how)


def mended(w, tile, even="NAN", **how):
    """The gradient that `leave_padding_out` makes of sums that are all NaN."""
    return epilogue_on_cpu(w, KERNEL.replace("EVEN_CHANNELS", even), *tile, 64, 4, **how)


@pytest.fixture(autouse=True)
def counters(monkeypatch):
    zeros = without_a_gpu(monkeypatch, _launch)
    yield zeros
    assert not zeros.any()


@pytest.mark.parametrize("w", LAYERS, ids=str)
@pytest.mark.parametrize("more", [{}, {"split_k": 2}, {"split_k": 2, "combine": "kernel"}])
def test_sums_that_are_nan_become_the_slices_without_padding(w, more):
    assert Verifier(w, CPU).check(streamed(w, (64, 192), **more)).message == ""


@pytest.mark.parametrize("w", PLAIN, ids=str)
def test_so_do_those_of_any_stride_and_filter(w):
    assert Verifier(w, CPU).check(mended(w, (64, 128), split_k=2)).message == ""
    x, grad = with_infinities(w)
    assert_infinities_stay(w, mended(w, (64, 128))(x, grad), x, grad)


@pytest.mark.parametrize("tile", [(128, 192), (64, 576)])
def test_so_do_those_of_several_warpgroups(tile):
    w = weight_grad("2,72,7,8", "2,136,7,8", "kernel_size=3, padding=1")
    assert Verifier(w, CPU).check(streamed(w, tile, split_k=2)).message == ""


def test_infinities_and_nan_stay_with_the_taps_that_meet_them():
    w = LAYERS[0]
    x, grad = w.operator.examples(w, "random", 0, CPU)
    x[0, 1, :, -1], x[1, 3, 0, 0], grad[1, 5, 2, 2] = torch.inf, torch.nan, -torch.inf
    found = streamed(w, (64, 192))(x, grad)
    truth = torch.nn.grad.conv2d_weight(x.float(), found.shape, grad.float(), padding=1)
    assert torch.equal(found.isnan(), truth.isnan())
    assert torch.equal(found.isinf(), truth.isinf())
    assert found[0, 1, :, 0].isfinite().all()
    assert found[0, 3, 2, 2].isfinite()


def test_other_sums_are_left_as_they_are():
    w = LAYERS[0]
    x, grad = w.operator.examples(w, "integer", 0, CPU)
    found = streamed(w, (64, 192), even="3")(x, grad)
    truth = torch.nn.grad.conv2d_weight(x.double(), found.shape, grad.double(), padding=1)
    assert torch.equal(found[:, 1::2].double(), truth[:, 1::2])
    assert (found[:, ::2] == 3).all()
