// COUNT sums of each channel of a block, one behind the other: what becomes of them.

TW_DEVICE Place place(int warp, int fragment, int row, int column) {
  const int i = (warp * FRAGMENTS + fragment) * 128 + row * 8 + column, at = i % COUNT;
  return {i / COUNT, i >= FEATURES * COUNT ? NOWHERE : at == R * S ? BIAS : at};
}

extern "C" __global__ void __launch_bounds__(256)
add_all_slices(const float* partial, const RESULT::type* into, const RESULT::type* into_bias, RESULT::type* out, RESULT::type* bias, const __grid_constant__ Problem b) {
  add_slices<WARPS, FRAGMENTS>(partial, into, into_bias, out, bias, b);
}
