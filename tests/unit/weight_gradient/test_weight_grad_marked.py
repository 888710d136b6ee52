"""Blocks that mark the places of their sums and add each other's, phase by phase on a CPU."""

import pytest
import torch
from convolutions import weight_grad, with_bias
from epilogue_on_cpu import epilogue_on_cpu
from tensor_cores_on_cpu import without_a_gpu

from tilewright.compile import cxx, nvrtc
from tilewright.impls.weight_gradient import _launch
from tilewright.impls.weight_gradient._model import MARKED

pytestmark = pytest.mark.skipif(
    nvrtc.missing() is not None or cxx.missing() is not None, reason="a compiler is missing"
)
KERNEL = """
extern "C" __global__ void __launch_bounds__(THREADS) weight_grad(const u16* x, const u16* grad,
    Out* weight, Out* bias, float* partial, u32* counters, int phase,
    const __grid_constant__ Problem p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  __shared__ Panel panels[TILE_PANELS];
  const Tile t(p);
  const Results out = {weight, bias};
  const int warp = threadIdx.x / 32;
  find_panels(panels, p, t);
  __syncthreads();
#if COMBINE == 3
  if (phase == 0) mark_places<THREADS>(partial, t);
  __syncthreads();
  if (phase == 0 && threadIdx.x == 0) tell_marked(counters, t);
#endif
  float sums[BLOCKS][COLUMNS / 2], bias_sums[BLOCKS][4];
  const int seed = t.tile * 7 + t.group * 13 + threadIdx.x * 5;
  const auto some = [&](int i) { return (seed + i * 3) % 31 - 15.0f / (1 + t.group); };
  for (int m = 0; m < BLOCKS; ++m) {
    for (int j = 0; j < COLUMNS / 2; ++j) sums[m][j] = some(m * 5 + j);
    for (int j = 0; j < 4; ++j) bias_sums[m][j] = some(m * 3 - j);
  }
  sums[0][1] = threadIdx.x % 9 == 0 ? NAN : INFINITY;
  if (phase == 1)
    keep<THREADS>(out, partial, counters, memory, panels, p, t, warp, sums, bias_sums);
  if (phase == 2) meet_groups(out, partial, counters, panels, p, t);
}
"""
"""Sums are numbers of no meaning."""
PLAIN = weight_grad("9,72,10,9", "9,136,10,9", "kernel_size=3, padding=1")
LAYERS = [PLAIN, with_bias(PLAIN), with_bias(PLAIN, "f16"), with_bias(PLAIN, "f32")]


def combined(w, tile, split_k, combine):
    run = epilogue_on_cpu(w, KERNEL, *tile, 64, 4, split_k=split_k, combine=combine, phases=3)
    found = run(*(t for t in w.operator.examples(w, "random", 0, "cpu")))
    return found if isinstance(found, tuple) else (found,)


@pytest.mark.parametrize(("tile", "splits"), [((64, 64), (2, 5, 12)), ((128, 128), (3, 8))])
@pytest.mark.parametrize("w", LAYERS, ids=str)
def test_marked_places_give_the_bits_of_a_second_kernel(w, tile, splits, monkeypatch):
    zeros = without_a_gpu(monkeypatch, _launch)
    for split_k in splits:
        pairs = zip(*(combined(w, tile, split_k, how) for how in (MARKED, "kernel")), strict=True)
        for marked, expected in pairs:
            assert expected.isfinite().sum() > expected.numel() / 2
            assert torch.equal(marked.isnan(), expected.isnan())
            assert torch.equal(marked.nan_to_num(0.0), expected.nan_to_num(0.0))
        assert not zeros.any()
