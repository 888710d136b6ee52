// The weight gradient of a depthwise convolution on sm_90, NHWC: plain multiply-adds of what the copy engine brings.
//
// A block has FEATURES channels and walks down the image, LINES_TOGETHER lines of the output a step. A box of
// grad_output has these lines, one of x the rows that they need and earlier ones did not; zeros lie outside. A
// thread owns CHANNELS neighbouring channels, one of the lines, one of PARTS of the filter's rows, and one of
// SHARES of the line's columns. Along those it keeps the last values of grad_output that still meet a tap; each
// pixel of x is loaded once for each of its filter rows and multiplied with all of them: with
// w + padding = STRIDE_W * m + e, tap e + STRIDE_W * j meets output m - j. m is the column, and each has its
// own pixels of x, so that chunks of a row share none.
//
// Defined before this text, besides what weight_grad_rows.cuh needs: WITH_BIAS, CHANNELS, PARTS.

constexpr int ACROSS = FEATURES / CHANNELS;
constexpr int OWN_ROWS = (R + PARTS - 1) / PARTS;  // of the filter, a thread's; the last part may have fewer
constexpr bool SEVERAL = OWN_ROWS * S * CHANNELS <= 40 && KEPT <= 3;  // whether registers are left for several columns
constexpr int WORKERS = ACROSS * SHARES * LINES_TOGETHER * PARTS;
constexpr int THREADS = (WORKERS + 31) / 32 * 32;
constexpr int COUNT = R * S + WITH_BIAS;            // sums of a channel
constexpr int WARPS = 1, FRAGMENTS = (FEATURES * COUNT + 127) / 128;  // as sums are stored
constexpr int PIXEL_BYTES = FEATURES * 2;
constexpr int LINE_BYTES = (CHUNK + KEPT - 1) * PIXEL_BYTES;
constexpr int GRADS = LINES_TOGETHER * LINE_BYTES;  // of a step
constexpr int ROW_BYTES = CHUNK * STRIDE_W * PIXEL_BYTES;
constexpr int DOWN = LINES_TOGETHER * STRIDE_H;     // rows of x in a step
constexpr int SLOTS = PRIME + STAGES;               // steps whose rows are kept or on their way
constexpr int GRAD_PLACE = (GRADS + 127) / 128 * 128, SLOT_PLACE = (DOWN * ROW_BYTES + 127) / 128 * 128;
constexpr int SLOTS_AT = STAGES * GRAD_PLACE, BARRIERS_AT = SLOTS_AT + SLOTS * SLOT_PLACE;
static_assert(WARPS == EXPECTED_WARPS && FRAGMENTS == EXPECTED_FRAGMENTS && THREADS == EXPECTED_THREADS, "layout");
static_assert(BARRIERS_AT + 16 * STAGES == LOOP_BYTES && STAGES > 2 && CHUNKS_OF_X, "layout");

TW_DEVICE u32 full(u32 shared, int step) { return shared + BARRIERS_AT + step % STAGES * 16; }
TW_DEVICE u32 empty(u32 shared, int step) { return full(shared, step) + 8; }

TW_DEVICE void load_box(u32 to, const TensorMap* map, u32 barrier, int pixel, int row, int image) {
  const int channel = blockIdx.y * FEATURES;
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];"
      ::"r"(to), "l"(map), "r"(barrier), "r"(channel), "r"(pixel), "r"(row), "r"(image) : "memory");
}

// By one lane. The step's places must be free: those of one which every warp is done with.
TW_DEVICE void ask(const TensorMap* x, const TensorMap* grad, u32 shared, const Problem& b, const Walk& at, int step) {
  if (step >= STAGES) barrier_wait(empty(shared, step), (step / STAGES - 1) & 1);
  const u32 barrier = full(shared, step);
  const int m = first_column(b) + at.chunk * CHUNK;
  barrier_expect(barrier, DOWN * ROW_BYTES + (at.prime == 0 ? GRADS : 0));
  load_box(shared + SLOTS_AT + step % SLOTS * SLOT_PLACE, x, barrier, m * STRIDE_W - b.padding_w, at.first_row(b), at.n);
  if (at.prime == 0) load_box(shared + step % STAGES * GRAD_PLACE, grad, barrier, m - (KEPT - 1), at.p, at.n);
}

TW_DEVICE void load(float (&to)[CHANNELS], u32 from) {
  u32 pairs[CHANNELS / 2];
  if constexpr (CHANNELS == 4)
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(pairs[0]), "=r"(pairs[1]) : "r"(from) : "memory");
  else
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(pairs[0]) : "r"(from) : "memory");
  TW_UNROLL for (int i = 0; i < CHANNELS / 2; ++i) DTYPE::widen(to[2 * i], to[2 * i + 1], pairs[i]);
}

// A thread's part of the work.
struct Role {
  int channel, share, line, part;
  bool works;
  TW_DEVICE Role() {
    const int team = threadIdx.x / ACROSS;
    channel = threadIdx.x % ACROSS * CHANNELS;
    share = team % SHARES, line = team / SHARES % LINES_TOGETHER, part = team / SHARES / LINES_TOGETHER;
    works = threadIdx.x < WORKERS;
  }
};

struct Sums {
  float taps[OWN_ROWS][S][CHANNELS], bias[CHANNELS];
};

// The products of `count` columns: rows of x from the first one on, and the line from KEPT - 1 columns before. The
// bias's sums are those of the columns, and of the ones before where they are `leading`.
TW_DEVICE void multiply_columns(Sums& sums, u32 line, u32 (&rows)[OWN_ROWS], int count, const Role& role, bool leading) {
  const bool with_bias = WITH_BIAS && role.part == 0;
  float kept[KEPT][CHANNELS];  // output m at m modulo KEPT
  TW_UNROLL for (int j = 1; j < KEPT; ++j) {
    load(kept[KEPT - j], line + (KEPT - 1 - j) * PIXEL_BYTES);
    if (with_bias && leading)
      TW_UNROLL for (int c = 0; c < CHANNELS; ++c) sums.bias[c] += kept[KEPT - j][c];
  }
  const auto multiply_one = [&](int i) {  // `i`: the column modulo KEPT
    load(kept[i], line + (i + KEPT - 1) * PIXEL_BYTES);
    if (with_bias)
      TW_UNROLL for (int c = 0; c < CHANNELS; ++c) sums.bias[c] += kept[i][c];
    TW_UNROLL for (int r = 0; r < OWN_ROWS; ++r) {
      if (r >= R - (PARTS - 1) * OWN_ROWS && role.part == PARTS - 1) break;
      TW_UNROLL for (int e = 0; e < STRIDE_W; ++e) {
        float pixel[CHANNELS];
        load(pixel, rows[r] + (i * STRIDE_W + e) * PIXEL_BYTES);
        TW_UNROLL for (int j = 0; e + STRIDE_W * j < S; ++j)
          TW_UNROLL for (int c = 0; c < CHANNELS; ++c)
            sums.taps[r][e + STRIDE_W * j][c] = fmaf(pixel[c], kept[(i - j + KEPT) % KEPT][c], sums.taps[r][e + STRIDE_W * j][c]);
      }
    }
  };
  const auto advance = [&]() {
    line += KEPT * PIXEL_BYTES, count -= KEPT;
    TW_UNROLL for (int r = 0; r < OWN_ROWS; ++r) rows[r] += KEPT * STRIDE_W * PIXEL_BYTES;
  };
  if constexpr (SEVERAL)
    for (; count >= KEPT; advance()) TW_UNROLL for (int i = 0; i < KEPT; ++i) multiply_one(i);
  for (; count > 0; advance())
    TW_UNROLL for (int i = 0; i < KEPT; ++i) {
      if (i >= count) break;
      multiply_one(i);
    }
}

TW_DEVICE void consume(Sums& sums, const TensorMap* x, const TensorMap* grad, unsigned char* memory, const Problem& b) {
  const u32 shared = shared_address(memory);
  const Role role;
  const Lines lines(b);
  const int begin = CHUNK * role.share / SHARES, columns = CHUNK * (role.share + 1) / SHARES - begin;
  const u32 own_grads = shared + role.line * LINE_BYTES + begin * PIXEL_BYTES + role.channel * 2;
  const u32 own_pixels = shared + SLOTS_AT + begin * STRIDE_W * PIXEL_BYTES + role.channel * 2;
  Walk ahead(b, lines.first), here(b, lines.first);
  int slot = 0;  // of this step's rows
  // Asked for as early as it may be without waiting for a warp that is only a step behind.
  const auto ask_in_turn = [&](int step) {
    if (step >= lines.steps) return;
    if (step % (THREADS / 32) == threadIdx.x / 32 && threadIdx.x % 32 == 0) ask(x, grad, shared, b, ahead, step);
    ahead.advance(b);
  };
  for (int step = 0; step < STAGES - 2; ++step) ask_in_turn(step);
  for (int step = 0; step < lines.steps; ++step) {
    ask_in_turn(step + STAGES - 2);
    barrier_wait(full(shared, step), step / STAGES & 1);
    if (here.prime == 0 && role.works && here.p + role.line < b.out_height) {
      u32 rows[OWN_ROWS];
      TW_UNROLL for (int r = 0; r < OWN_ROWS; ++r) {
        // Of the row, counted from the step's first one: PRIME slots before it, too, are there.
        const int row = role.line * STRIDE_H + min(role.part * OWN_ROWS + r, R - 1) - (R - STRIDE_H) + PRIME * DOWN;
        int at = slot - PRIME + row / DOWN;
        if (at < 0) at += SLOTS;
        rows[r] = own_pixels + at * SLOT_PLACE + row % DOWN * ROW_BYTES;
      }
      const bool leading = here.chunk == 0 && role.share == 0;
      multiply_columns(sums, own_grads + step % STAGES * GRAD_PLACE, rows, columns, role, leading);
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(empty(shared, step));
    here.advance(b);
    slot = slot + 1 == SLOTS ? 0 : slot + 1;
  }
}

// A block's sums, those of its lines and shares added in order, one filter row of each part at a time.
TW_DEVICE void keep(const u16* x, const u16* grad, float* partial, unsigned char* memory, const Problem& b, const Sums& sums) {
  release_next();
  const Role role;
  float* const shared = (float*)memory;
  float* const to = partial + ((long long)blockIdx.y * b.slices + blockIdx.x) * FRAGMENTS * 128;
  const auto add = [&](int channel, int value, int part) {  // `value`: of those that a thread has in shared memory
    const float* from = shared + (value * CHANNELS + channel % CHANNELS) * THREADS + channel / CHANNELS + part * LINES_TOGETHER * SHARES * ACROSS;
    float sum = from[0];
    for (int i = 1; i < LINES_TOGETHER * SHARES; ++i) sum += from[i * ACROSS];
    return sum;
  };
  TW_UNROLL for (int r = 0; r < OWN_ROWS; ++r) {
    __syncthreads();
    TW_UNROLL for (int s = 0; s < S; ++s)
      TW_UNROLL for (int c = 0; c < CHANNELS; ++c) shared[(s * CHANNELS + c) * THREADS + threadIdx.x] = sums.taps[r][s][c];
    __syncthreads();
    for (int i = threadIdx.x; i < PARTS * FEATURES * S; i += THREADS) {
      const int channel = i % FEATURES, s = i / FEATURES % S, part = i / FEATURES / S;
      const int row = part * OWN_ROWS + r, k = blockIdx.y * FEATURES + channel;
      if (row >= R) continue;
      float sum = add(channel, s, part);
      if (sum != sum && k < b.features) sum = sum_again<1>(x, grad, b, k, row * S + s);
      to[place_of_sum(channel * COUNT + row * S + s)] = sum;
    }
  }
  if (!WITH_BIAS) return;
  __syncthreads();
  TW_UNROLL for (int c = 0; c < CHANNELS; ++c) shared[c * THREADS + threadIdx.x] = sums.bias[c];
  __syncthreads();
  for (int i = threadIdx.x; i < FEATURES; i += THREADS) to[place_of_sum(i * COUNT + R * S)] = add(i, 0, 0);
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
weight_grad(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap grad,
            const u16* x_pixels, const u16* grad_pixels, float* partial, const __grid_constant__ Problem b) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const u32 shared = shared_address(memory);
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) barrier_init(full(shared, i), 1), barrier_init(empty(shared, i), THREADS / 32);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  Sums sums = {};
  consume(sums, &x, &grad, memory, b);
  keep(x_pixels, grad_pixels, partial, memory, b, sums);
}
