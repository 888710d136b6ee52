// The weight gradient of a depthwise convolution, NHWC, by tensor cores.
//
// A warp has eight channels and sixteen pixels of a row, and walks down the image. The last lines of
// grad_output stay in registers; each row of x meets all of them as it passes: two lines are the sixteen
// rows of a product, one below the other, and the same eight channels of x its columns, of which each row
// needs one. So x is read from shared memory once for each tap of a filter row, not once for each tap.
//
// Of what weight_grad_rows.cuh needs SHARES are the sixteens of a line.

constexpr int WARPS = FEATURES / 8;
constexpr int LINES = PRIME + 1;                // of grad_output, that one row of x meets
constexpr int PAIRS = (LINES + 1) / 2;
constexpr int FRAGMENTS = STRIDE_H * PAIRS * S + WITH_BIAS;  // the bias's is the last, beside a column of ones
constexpr int THREADS = WARPS * SHARES * 32;
constexpr int PIXELS = (CHUNK - 1) * STRIDE_W + S;  // of a row of x
constexpr int ROW_BYTES = PIXELS * GRAD_STRIDE;
constexpr int STAGE_BYTES = GRAD_BYTES + STRIDE_H * ROW_BYTES;
static_assert(WARPS == EXPECTED_WARPS && FRAGMENTS == EXPECTED_FRAGMENTS && SHARES * 16 == CHUNK, "layout");
static_assert(STAGES * STAGE_BYTES + 16 == LOOP_BYTES, "layout");

// A block's way: each line brings its rows of x, and PRIME more steps the rows below a chunk's last line.
struct Way {
  Walk at;                    // n, chunk, and p, which goes on past the last line
  int line, end, draining;
  TW_DEVICE Way(const Problem& b, const Lines& lines)
      : at(b, lines.first), line(lines.first), end(lines.end), draining(0) {}
  TW_DEVICE bool brings_line() const { return draining == 0; }
  TW_DEVICE void advance(const Problem& b) {
    ++at.p;
    if (draining == 0) {
      if (++line < end && line % b.out_height != 0) return;
      draining = PRIME + 1;
    }
    if (--draining > 0) return;
    at = Walk(b, line);
  }
};

TW_DEVICE void copy_step(u32 to, const u16* x, const u16* grad, const Problem& b, const Way& way) {
  const Walk& at = way.at;
  const int q0 = at.chunk * CHUNK, w0 = q0 * STRIDE_W - b.padding_w, h = at.p * STRIDE_H - b.padding_h;
  const bool own = own_features(threadIdx.x) < b.features;
  const long long line = ((long long)at.n * b.out_height + at.p) * b.out_width + q0;
  if (way.brings_line())
    copy_pixels<THREADS, CHUNK, GRAD_STRIDE>(threadIdx.x, to, grad + line * b.features + blockIdx.y * FEATURES, grad, b.features, own,
                                             [&](int q) { return q0 + q < b.out_width; });
  TW_UNROLL for (int row = 0; row < STRIDE_H; ++row) {
    const bool inside = own && (unsigned)(h + row) < (unsigned)b.height;
    const long long first = ((long long)at.n * b.height + h + row) * b.width + w0;
    copy_pixels<THREADS, PIXELS, GRAD_STRIDE>(threadIdx.x, to + GRAD_BYTES + row * ROW_BYTES, x + first * b.channels + blockIdx.y * FEATURES, x,
                                              b.channels, inside, [&](int w) { return (unsigned)(w0 + w) < (unsigned)b.width; });
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
weight_grad(const u16* x, const u16* grad, float* partial, const __grid_constant__ Problem b) {
  extern __shared__ __align__(128) unsigned char memory[];
  const u32 stages = shared_address(memory), zeros = stages + STAGES * STAGE_BYTES;
  if (threadIdx.x < 4) ((u32*)(memory + STAGES * STAGE_BYTES))[threadIdx.x] = 0;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % WARPS, q = threadIdx.x / 32 / WARPS * 16;
  const int pixel = (lane & 15) + q;
  const Lines lines(b);
  Way ahead(b, lines), here(b, lines);
  int to_fetch = 0, fetched = 0;
  const auto fetch = [&]() {
    if (to_fetch++ < lines.steps) {
      copy_step(stages + fetched * STAGE_BYTES, x, grad, b, ahead);
      ahead.advance(b);
      fetched = fetched + 1 == STAGES ? 0 : fetched + 1;
    }
    commit_copies();
  };
  float4 sums[FRAGMENTS] = {};
  u32 kept[LINES + 1][2] = {};  // the newest line first; one more, so that there is a second one of each pair
  TW_UNROLL for (int step = 0; step < STAGES - 1; ++step) fetch();
  int stage = 0;
  for (int step = 0; step < lines.steps; ++step) {
    wait_for_copies<STAGES - 2>();
    __syncthreads();
    fetch();
    const u32 from = stages + stage * STAGE_BYTES;
    TW_UNROLL for (int d = LINES - 1; d > 0; --d)
      TW_UNROLL for (int i = 0; i < 2; ++i) kept[d][i] = kept[d - 1][i];  // zeros when a chunk begins
    kept[0][0] = kept[0][1] = 0;
    if (here.brings_line()) {
      u32 t[4];
      load_transposed(t, from + pixel * GRAD_STRIDE + warp * 16);
      kept[0][0] = t[0], kept[0][1] = t[1];
      const u32 a[4] = {t[0], 0, t[1], 0};
      if constexpr (PAIRED) add_pixels(sums[FRAGMENTS - 1], a);
      else if (WITH_BIAS) multiply(sums[FRAGMENTS - 1], a, DTYPE::ONE * 0x10001u, DTYPE::ONE * 0x10001u);
    }
    const bool there = pixel < b.out_width - here.at.chunk * CHUNK;  // what meets no pixel is 0, whatever x holds
    TW_UNROLL for (int row = 0; row < STRIDE_H; ++row) {
      const u32 own = from + GRAD_BYTES + row * ROW_BYTES + (pixel * STRIDE_W + (lane >> 4)) * GRAD_STRIDE + warp * 16;
      TW_UNROLL for (int s = 0; s < S; s += 2) {
        u32 t[4];  // lanes from 16 on fetch the next tap's pixels
        load_transposed(t, there && s + (lane >> 4) < S ? own + s * GRAD_STRIDE : zeros);
        TW_UNROLL for (int pair = 0; pair < PAIRS; ++pair) {
          const u32 a[4] = {kept[2 * pair][0], kept[2 * pair + 1][0], kept[2 * pair][1], kept[2 * pair + 1][1]};
          multiply(sums[(row * PAIRS + pair) * S + s], a, t[0], t[1]);
          if (s + 1 < S) multiply(sums[(row * PAIRS + pair) * S + s + 1], a, t[2], t[3]);
        }
      }
    }
    here.advance(b);
    stage = stage + 1 == STAGES ? 0 : stage + 1;
  }
  wait_for_copies<0>();
  __syncthreads();
  keep<WARPS, 1, true>(x, grad, partial, memory, b, sums);
}

TW_DEVICE Place place(int warp, int fragment, int row, int column) {
  const int feature = warp * 8 + row % 8;
  if (WITH_BIAS && fragment == FRAGMENTS - 1) return {feature, row < 8 ? place_beside_ones(column) : NOWHERE};
  const int s = fragment % S, pair = fragment / S % PAIRS, line = pair * 2 + row / 8;
  const int r = fragment / S / PAIRS + line * STRIDE_H;
  return {feature, column == row % 8 && line < LINES && r < R ? r * S + s : NOWHERE};
}

extern "C" __global__ void __launch_bounds__(256)
add_all_slices(const float* partial, const RESULT::type* into, const RESULT::type* into_bias, RESULT::type* out, RESULT::type* bias, const __grid_constant__ Problem b) {
  add_slices<WARPS, FRAGMENTS>(partial, into, into_bias, out, bias, b);
}
