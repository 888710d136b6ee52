// The weight gradient of a convolution of few channels, by mma.sync. A warp has eight columns of each of the
// filter's rows, for all features of the block. See weight_grad_unfold.cuh.

constexpr int WARPS = OCTETS;
constexpr int BLOCKS = FEATURES / 16;
constexpr int FRAGMENTS = R * BLOCKS;
constexpr int THREADS = WARPS * SHARES * 32;
constexpr int STAGE_BYTES = GRAD_BYTES + STRIDE_H * RAW * 2;
constexpr int RING = PRIME + 2;                 // steps whose rows are kept
static_assert(WARPS == EXPECTED_WARPS && FRAGMENTS == EXPECTED_FRAGMENTS, "layout");
static_assert(STAGES * STAGE_BYTES + RING * STRIDE_H * ROW_BYTES == LOOP_BYTES, "layout");

struct Ones {
  static constexpr int COUNT = BLOCKS * 2;
  static TW_DEVICE bool here() { return threadIdx.x / 32 % WARPS == TAPS / 8 && threadIdx.x % 4 == TAPS % 8 / 2; }
  static TW_DEVICE int feature(int i) { return threadIdx.x / 32 / WARPS * FEATURES + i * 8 + threadIdx.x % 32 / 4; }
  static TW_DEVICE float& among(float4 (&sums)[FRAGMENTS], int i) {
    float4& sum = sums[i / 2];
    return i % 2 == 0 ? TAPS % 2 ? sum.y : sum.x : TAPS % 2 ? sum.w : sum.z;
  }
};

// The products of one line; `newest` is the step that brought its last rows, in the ring.
TW_DEVICE void products(float4 (&sums)[FRAGMENTS], u32 grad, u32 ring, int newest) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % WARPS, share = threadIdx.x / 32 / WARPS;
  // Two rows of the filter at a time: lanes from 16 on fetch the second one's.
  u32 from[(R + 1) / 2];
  TW_UNROLL for (int i = 0; i < (R + 1) / 2; ++i) {
    const int r = min(2 * i + (lane >> 4), R - 1), back = R - 1 - r;
    int step = newest - back / STRIDE_H;
    if (step < 0) step += RING;
    from[i] = ring + (step * STRIDE_H + STRIDE_H - 1 - back % STRIDE_H) * ROW_BYTES + (lane & 15) * PIXEL_BYTES + warp * 16;
  }
  TW_ROLLED for (int q = share * 16; q < CHUNK; q += SHARES * 16) {
    u32 a[BLOCKS][4];
    TW_UNROLL for (int m = 0; m < BLOCKS; ++m) load_transposed(a[m], grad_at(grad, q, m * 16));
    TW_UNROLL for (int i = 0; i < (R + 1) / 2; ++i) {
      u32 t[4];
      load_transposed(t, from[i] + q * PIXEL_BYTES);
      TW_UNROLL for (int m = 0; m < BLOCKS; ++m) multiply(sums[2 * i * BLOCKS + m], a[m], t[0], t[1]);
      if (2 * i + 1 < R)
        TW_UNROLL for (int m = 0; m < BLOCKS; ++m) multiply(sums[(2 * i + 1) * BLOCKS + m], a[m], t[2], t[3]);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
weight_grad(const u16* x, const u16* grad, float* partial, const __grid_constant__ Problem b) {
  extern __shared__ __align__(128) unsigned char memory[];
  unsigned char* ring = memory + STAGES * STAGE_BYTES;
  const u32 stages = shared_address(memory);
  const Lines lines(b);
  Walk ahead(b, lines.first), here(b, lines.first);
  int to_fetch = 0, fetched = 0;  // steps, and where in the stages the next one goes
  const auto fetch = [&]() {
    if (to_fetch++ < lines.steps) {
      const u32 stage = stages + fetched * STAGE_BYTES;
      copy_grad<THREADS>(threadIdx.x, stage, grad, b, ahead);
      copy_rows<THREADS>(threadIdx.x, stage + GRAD_BYTES, x, b, ahead);
      ahead.advance(b);
      fetched = fetched + 1 == STAGES ? 0 : fetched + 1;
    }
    commit_copies();
  };
  float4 sums[FRAGMENTS] = {};
  Bias<Ones>::begin();
  TW_UNROLL for (int step = 0; step < STAGES - 2; ++step) fetch();
  bool whole = false;  // whether the step before completed the rows of a line
  int stage = 0, slot = 0;  // of this step, in the stages and in the ring
  for (int step = 0; step <= lines.steps; ++step) {
    wait_for_copies<STAGES - 3>();
    __syncthreads();  // the step's rows are there, those before it are unfolded, the oldest are done with
    fetch();
    if (step < lines.steps)
      unfold<THREADS>(threadIdx.x, ring + slot * STRIDE_H * ROW_BYTES, memory + stage * STAGE_BYTES + GRAD_BYTES, b, here.chunk);
    if (whole) {
      const u32 before = stages + (stage == 0 ? STAGES - 1 : stage - 1) * STAGE_BYTES;
      products(sums, before, shared_address(ring), slot == 0 ? RING - 1 : slot - 1);
      Bias<Ones>::take_line(sums);
    }
    whole = here.prime == 0;
    here.advance(b);
    stage = stage + 1 == STAGES ? 0 : stage + 1;
    slot = slot + 1 == RING ? 0 : slot + 1;
  }
  wait_for_copies<0>();
  __syncthreads();
  Bias<Ones>::give_back(sums);
  keep<WARPS, C>(x, grad, partial, memory, b, sums);
}

TW_DEVICE Place place(int warp, int fragment, int row, int column) {
  const int r = fragment / BLOCKS, tap = warp * 8 + column;
  const int at = tap < TAPS ? r * TAPS + tap : tap == TAPS && r == 0 ? BIAS : NOWHERE;
  return {fragment % BLOCKS * 16 + row, at};
}

extern "C" __global__ void __launch_bounds__(256)
add_all_slices(const float* partial, const RESULT::type* into, const RESULT::type* into_bias, RESULT::type* out, RESULT::type* bias, const __grid_constant__ Problem b) {
  add_slices<WARPS, FRAGMENTS>(partial, into, into_bias, out, bias, b);
}
