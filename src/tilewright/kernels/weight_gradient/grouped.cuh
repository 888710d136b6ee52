// The weight gradient of a convolution in groups of 1 to 32 channels, NHWC.
//
// A block has FEATURES features and the same channels of x. 16 features meet the SPAN channels of their
// groups: with narrow groups most of a fragment belongs to no pair of one group and is dropped, which
// tensor cores outweigh. A tap is where a pixel of x lies in shared memory: nothing is unfolded.
//
// Defined before this text, besides what weight_grad_rows.cuh needs: DEPTH, the channels of a group and
// its features; ROW_GROUPS of the filter's rows, each
// of which has warps of its own where registers do not hold the sums of all.

constexpr int SPAN = DEPTH > 16 ? DEPTH : 16;
constexpr int PANELS = SPAN / 8;                // of eight channels
constexpr int ACROSS = FEATURES / 16;           // warps of one row group
constexpr int WARPS = ACROSS * ROW_GROUPS;
constexpr int ROWS = (R + ROW_GROUPS - 1) / ROW_GROUPS;   // of the filter; the last group may have fewer
constexpr int FRAGMENTS = ROWS * S * PANELS + WITH_BIAS;  // the bias's is the last, beside a column of ones
constexpr int THREADS = WARPS * SHARES * 32;
constexpr int PIXEL_BYTES = FEATURES * 2 + 16;
constexpr int PIXELS = (CHUNK - 1) * STRIDE_W + S;  // of a row of x
constexpr int ROW_BYTES = PIXELS * PIXEL_BYTES;
constexpr int RING = PRIME + STAGES;            // steps whose rows are kept or on their way
constexpr int RING_BYTES = RING * STRIDE_H * ROW_BYTES;
static_assert(WARPS == EXPECTED_WARPS && FRAGMENTS == EXPECTED_FRAGMENTS, "layout");
static_assert(STAGES * GRAD_BYTES + RING_BYTES + 16 == LOOP_BYTES, "layout");

TW_DEVICE void copy_rows(u32 to, const u16* x, const Problem& b, const Walk& at) {
  const int h = at.first_row(b), w0 = at.chunk * CHUNK * STRIDE_W - b.padding_w;
  TW_UNROLL for (int row = 0; row < STRIDE_H; ++row) {
    const bool inside = (unsigned)(h + row) < (unsigned)b.height && own_features(threadIdx.x) < b.channels;
    const long long first = ((long long)at.n * b.height + h + row) * b.width + w0;
    copy_pixels<THREADS, PIXELS, PIXEL_BYTES>(threadIdx.x, to + row * ROW_BYTES, x + first * b.channels + blockIdx.y * FEATURES, x, b.channels,
                                              inside, [&](int w) { return (unsigned)(w0 + w) < (unsigned)b.width; });
  }
}

// The products of one line of `count` pixels; `newest` is the step that brought its last rows.
TW_DEVICE void products(float4 (&sums)[FRAGMENTS], u32 grad, u32 ring, u32 zeros, int newest, int count) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % ACROSS, share = threadIdx.x / 32 / WARPS;
  const int first = threadIdx.x / 32 % WARPS / ACROSS * ROWS, rows = min(R - first, ROWS);
  // Two panels at a time: lanes from 16 on fetch the second one's.
  const int own = (lane & 15) * STRIDE_W * PIXEL_BYTES + (warp * 16 / SPAN * SPAN + (lane >> 4) * 8) * 2;
  u32 from[ROWS];
  TW_UNROLL for (int r = 0; r < ROWS; ++r) {
    const int back = max(R - 1 - first - r, 0);
    int step = newest - back / STRIDE_H;
    if (step < 0) step += RING;
    from[r] = ring + (step * STRIDE_H + STRIDE_H - 1 - back % STRIDE_H) * ROW_BYTES + own;
  }
  TW_ROLLED for (int q = share * 16; q < CHUNK; q += SHARES * 16) {
    u32 a[4];
    load_transposed(a, grad_at(grad, q, warp * 16));
    if constexpr (PAIRED) add_pixels(sums[FRAGMENTS - 1], a);
    else if (WITH_BIAS) multiply(sums[FRAGMENTS - 1], a, DTYPE::ONE * 0x10001u, DTYPE::ONE * 0x10001u);
    const bool there = q + (lane & 15) < count;  // what meets no pixel is 0, whatever x holds
    TW_UNROLL for (int r = 0; r < ROWS; ++r) {
      if (R % ROW_GROUPS != 0 && r >= rows) break;
      TW_UNROLL for (int s = 0; s < S; ++s)
        TW_UNROLL for (int panel = 0; panel < PANELS; panel += 2) {
          u32 t[4];
          load_transposed(t, there ? from[r] + (q * STRIDE_W + s) * PIXEL_BYTES + panel * 16 : zeros);
          multiply(sums[(r * S + s) * PANELS + panel], a, t[0], t[1]);
          multiply(sums[(r * S + s) * PANELS + panel + 1], a, t[2], t[3]);
        }
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
weight_grad(const u16* x, const u16* grad, float* partial, const __grid_constant__ Problem b) {
  extern __shared__ __align__(128) unsigned char memory[];
  const u32 stages = shared_address(memory), ring = stages + STAGES * GRAD_BYTES, zeros = ring + RING_BYTES;
  if (threadIdx.x < 4) ((u32*)(memory + STAGES * GRAD_BYTES + RING_BYTES))[threadIdx.x] = 0;
  const Lines lines(b);
  Walk ahead(b, lines.first), here(b, lines.first);
  int to_fetch = 0, fetched = 0, filled = 0;  // steps; where in the stages and in the ring the next one goes
  const auto fetch = [&]() {
    if (to_fetch++ < lines.steps) {
      copy_grad<THREADS>(threadIdx.x, stages + fetched * GRAD_BYTES, grad, b, ahead);
      copy_rows(ring + filled * STRIDE_H * ROW_BYTES, x, b, ahead);
      ahead.advance(b);
      fetched = fetched + 1 == STAGES ? 0 : fetched + 1;
      filled = filled + 1 == RING ? 0 : filled + 1;
    }
    commit_copies();
  };
  float4 sums[FRAGMENTS] = {};
  TW_UNROLL for (int step = 0; step < STAGES - 1; ++step) fetch();
  int stage = 0, slot = 0;  // of this step, in the stages and in the ring
  for (int step = 0; step < lines.steps; ++step) {
    wait_for_copies<STAGES - 2>();
    __syncthreads();  // the step's rows are there, the oldest are done with
    fetch();
    if (here.prime == 0)
      products(sums, stages + stage * GRAD_BYTES, ring, zeros, slot, b.out_width - here.chunk * CHUNK);
    here.advance(b);
    stage = stage + 1 == STAGES ? 0 : stage + 1;
    slot = slot + 1 == RING ? 0 : slot + 1;
  }
  wait_for_copies<0>();
  __syncthreads();
  keep<WARPS, DEPTH>(x, grad, partial, memory, b, sums);
}

TW_DEVICE Place place(int warp, int fragment, int row, int column) {
  const int row_group = warp / ACROSS, features = warp % ACROSS * 16, feature = features + row;
  if (WITH_BIAS && fragment == FRAGMENTS - 1) return {feature, row_group == 0 ? place_beside_ones(column) : NOWHERE};
  const int channel = features / SPAN * SPAN + fragment % PANELS * 8 + column, tap = row_group * ROWS * S + fragment / PANELS;
  const bool there = feature / DEPTH == channel / DEPTH && tap < R * S;
  return {feature, there ? tap * DEPTH + channel % DEPTH : NOWHERE};
}

extern "C" __global__ void __launch_bounds__(256)
add_all_slices(const float* partial, const RESULT::type* into, const RESULT::type* into_bias, RESULT::type* out, RESULT::type* bias, const __grid_constant__ Problem b) {
  add_slices<WARPS, FRAGMENTS>(partial, into, into_bias, out, bias, b);
}
