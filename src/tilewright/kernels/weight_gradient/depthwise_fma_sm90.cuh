// The weight gradient of a depthwise convolution on sm_90, NHWC: plain multiply-adds of what the copy engine brings.
//
// A block has FEATURES channels and walks down the image, LINES_TOGETHER lines of the output a step. A box of
// grad_output has these lines, one of x the rows that they need and earlier ones did not; zeros lie outside. A
// thread owns CHANNELS neighbouring channels, one of the lines, one of ROW_GROUPS of the filter's rows, and one of
// SHARES of the line's columns. Along those it keeps the last values of grad_output that still meet a tap; each
// pixel of x is loaded once for each of its filter rows and multiplied with all of them: with
// w + padding = STRIDE_W * m + e, tap e + STRIDE_W * j meets output m - j. m is the column, and each has its
// own pixels of x, so that chunks of a row share none.
//
// With WHOLE_ROWS a block has all channels and a row is one piece of memory, which is copied as such: boxes of
// pixels whose channels are no multiple of 64 bytes take the copy engine up to a third longer. Zeros beside the
// pixels are then written once, and rows outside the image read from a row of zeros.
//
// Defined before this text, besides what weight_grad_rows.cuh needs: CHANNELS, ROW_GROUPS, WHOLE_ROWS.

constexpr int ACROSS = FEATURES / CHANNELS;
constexpr int OWN_ROWS = (R + ROW_GROUPS - 1) / ROW_GROUPS;  // of the filter, a thread's; the last group may have fewer
constexpr bool SEVERAL = OWN_ROWS * S * CHANNELS <= 40 && KEPT <= 3;  // whether registers are left for several columns
constexpr int WORKERS = ACROSS * SHARES * LINES_TOGETHER * ROW_GROUPS;
constexpr int CONSUMERS = (WORKERS + 31) / 32;     // warps that multiply; one more has the copy engine work
constexpr int THREADS = CONSUMERS * 32 + PRODUCERS;
constexpr int COUNT = R * S + WITH_BIAS;            // sums of a channel
constexpr int WARPS = 1, FRAGMENTS = (FEATURES * COUNT + 127) / 128;  // as sums are stored
constexpr int PIXEL_BYTES = FEATURES * 2;
constexpr int LINE_BYTES = (CHUNK + KEPT - 1) * PIXEL_BYTES;
constexpr int GRADS = LINES_TOGETHER * LINE_BYTES;  // of a step
constexpr int ROW_BYTES = CHUNK * STRIDE_W * PIXEL_BYTES;
constexpr int DOWN = LINES_TOGETHER * STRIDE_H;     // rows of x in a step
constexpr int SLOTS = PRIME + STAGES;               // steps whose rows are kept or on their way
constexpr int GRAD_PLACE = (GRADS + 127) / 128 * 128, SLOT_PLACE = (DOWN * ROW_BYTES + 127) / 128 * 128;
constexpr int SLOTS_AT = STAGES * GRAD_PLACE, ZEROS_AT = SLOTS_AT + SLOTS * SLOT_PLACE;
constexpr int BARRIERS_AT = ZEROS_AT + WHOLE_ROWS * ROW_BYTES;
static_assert(WARPS == EXPECTED_WARPS && FRAGMENTS == EXPECTED_FRAGMENTS && THREADS == EXPECTED_THREADS, "layout");
static_assert(BARRIERS_AT + 16 * STAGES == LOOP_BYTES && PRODUCERS == 32 && CHUNKS_OF_X, "layout");

TW_DEVICE u32 full(u32 shared, int step) { return shared + BARRIERS_AT + step % STAGES * 16; }
TW_DEVICE u32 empty(u32 shared, int step) { return full(shared, step) + 8; }

TW_DEVICE void load_box(u32 to, const TensorMap* map, u32 barrier, int pixel, int row, int image) {
  const int channel = blockIdx.y * FEATURES;
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];"
      ::"r"(to), "l"(map), "r"(barrier), "r"(channel), "r"(pixel), "r"(row), "r"(image) : "memory");
}

TW_DEVICE void copy_row(u32 to, const u16* from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}

// Pixels of zeros before those of a row of x, and of a line.
TW_DEVICE int before_row(const Problem& b) { return b.padding_w - first_column(b) * STRIDE_W; }
TW_DEVICE int before_line(const Problem& b) { return KEPT - 1 - first_column(b); }

struct Operands {
  const TensorMap *x, *grad;
  const u16 *x_pixels, *grad_pixels;
};

// A step's places must be free: those of one which every warp is done with.
TW_DEVICE void ask(const Operands& from, u32 shared, const Problem& b, const Walk& at, int step) {
  if (step >= STAGES) barrier_wait(empty(shared, step), (step / STAGES - 1) & 1);
  const u32 barrier = full(shared, step), rows = shared + SLOTS_AT + step % SLOTS * SLOT_PLACE, lines = shared + step % STAGES * GRAD_PLACE;
  const int top = at.first_row(b);
  if constexpr (WHOLE_ROWS) {
    const int first = max(top, 0), end = min(top + DOWN, b.height), count = at.prime == 0 ? min(LINES_TOGETHER, b.out_height - at.p) : 0;
    const u32 row_bytes = b.width * PIXEL_BYTES, line_bytes = b.out_width * PIXEL_BYTES;
    barrier_expect(barrier, max(end - first, 0) * row_bytes + count * line_bytes);
    const u16* row = from.x_pixels + ((long long)at.n * b.height + first) * b.width * FEATURES;
    for (int h = first; h < end; ++h, row += b.width * FEATURES)
      copy_row(rows + (h - top) * ROW_BYTES + before_row(b) * PIXEL_BYTES, row, row_bytes, barrier);
    const u16* line = from.grad_pixels + ((long long)at.n * b.out_height + at.p) * b.out_width * FEATURES;
    for (int i = 0; i < count; ++i, line += b.out_width * FEATURES)
      copy_row(lines + i * LINE_BYTES + before_line(b) * PIXEL_BYTES, line, line_bytes, barrier);
  } else {
    const int m = first_column(b) + at.chunk * CHUNK;
    barrier_expect(barrier, DOWN * ROW_BYTES + (at.prime == 0 ? GRADS : 0));
    load_box(rows, from.x, barrier, m * STRIDE_W - b.padding_w, top, at.n);
    if (at.prime == 0) load_box(lines, from.grad, barrier, m - (KEPT - 1), at.p, at.n);
  }
}

// Zeros for all of `count` lines that lie `apart`, but for `pixels` of each: by the threads that multiply, while
// the first copies are on their way.
TW_DEVICE void write_zeros(unsigned char* at, int count, int apart, int all, int before, int pixels) {
  const int beside = (all - pixels) * PIXEL_BYTES / 16;
  for (int i = threadIdx.x; i < count * beside; i += CONSUMERS * 32) {
    const int line = i / beside, byte = i % beside * 16;
    *(uint4*)(at + line * apart + byte + (byte < before * PIXEL_BYTES ? 0 : pixels * PIXEL_BYTES)) = make_uint4(0, 0, 0, 0);
  }
}
TW_DEVICE void surround_with_zeros(unsigned char* memory, const Problem& b) {
  for (int i = 0; i < STAGES; ++i)
    write_zeros(memory + i * GRAD_PLACE, LINES_TOGETHER, LINE_BYTES, CHUNK + KEPT - 1, before_line(b), b.out_width);
  for (int i = 0; i < SLOTS; ++i)
    write_zeros(memory + SLOTS_AT + i * SLOT_PLACE, DOWN, ROW_BYTES, CHUNK * STRIDE_W, before_row(b), b.width);
  write_zeros(memory + ZEROS_AT, 1, 0, CHUNK * STRIDE_W, 0, 0);
}

TW_DEVICE void load(float (&to)[CHANNELS], u32 from) {
  u32 pairs[CHANNELS / 2];
  if constexpr (CHANNELS == 4)
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(pairs[0]), "=r"(pairs[1]) : "r"(from) : "memory");
  else
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(pairs[0]) : "r"(from) : "memory");
  TW_UNROLL for (int i = 0; i < CHANNELS / 2; ++i) DTYPE::widen(to[2 * i], to[2 * i + 1], pairs[i]);
}

// A thread's share of the work.
struct Role {
  int channel, share, line, row_group;
  bool works;
  TW_DEVICE Role() {
    const int team = threadIdx.x / ACROSS;
    channel = threadIdx.x % ACROSS * CHANNELS;
    share = team % SHARES, line = team / SHARES % LINES_TOGETHER, row_group = team / SHARES / LINES_TOGETHER;
    works = threadIdx.x < WORKERS;
  }
};

struct Sums {
  float taps[OWN_ROWS][S][CHANNELS], bias[CHANNELS];
};

// The products of `count` columns: rows of x from the first one on, and the line from KEPT - 1 columns before. The
// bias's sums are those of the columns, and of the ones before where they are `leading`.
TW_DEVICE void multiply_columns(Sums& sums, u32 line, u32 (&rows)[OWN_ROWS], int count, const Role& role, bool leading) {
  const bool with_bias = WITH_BIAS && role.row_group == 0;
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
      if (r >= R - (ROW_GROUPS - 1) * OWN_ROWS && role.row_group == ROW_GROUPS - 1) break;
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

TW_DEVICE void produce(const Operands& from, u32 shared, const Problem& b) {
  const Lines lines(b);
  Walk at(b, lines.first);
  for (int step = 0; step < lines.steps; ++step, at.advance(b)) ask(from, shared, b, at, step);
}

TW_DEVICE void consume(Sums& sums, u32 shared, const Problem& b) {
  const Role role;
  const Lines lines(b);
  const int begin = CHUNK * role.share / SHARES, columns = CHUNK * (role.share + 1) / SHARES - begin;
  const u32 own_grads = shared + role.line * LINE_BYTES + begin * PIXEL_BYTES + role.channel * 2;
  const u32 own_pixels = shared + begin * STRIDE_W * PIXEL_BYTES + role.channel * 2;
  Walk here(b, lines.first);
  int slot = 0, stage = 0, parity = 0;  // of this step
  for (int step = 0; step < lines.steps; ++step) {
    barrier_wait(full(shared, stage), parity);
    if (here.prime == 0 && role.works && here.p + role.line < b.out_height) {
      u32 rows[OWN_ROWS];
      TW_UNROLL for (int r = 0; r < OWN_ROWS; ++r) {
        // Of the row, counted from the step's first one: PRIME slots before it, too, are there.
        const int below = role.line * STRIDE_H + min(role.row_group * OWN_ROWS + r, R - 1), row = below - (R - STRIDE_H) + PRIME * DOWN;
        int at = slot - PRIME + row / DOWN;
        if (at < 0) at += SLOTS;
        rows[r] = own_pixels + SLOTS_AT + at * SLOT_PLACE + row % DOWN * ROW_BYTES;
        if (WHOLE_ROWS && (unsigned)(here.p * STRIDE_H - b.padding_h + below) >= (unsigned)b.height) rows[r] = own_pixels + ZEROS_AT;
      }
      const bool leading = here.chunk == 0 && role.share == 0;
      multiply_columns(sums, own_grads + stage * GRAD_PLACE, rows, columns, role, leading);
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(empty(shared, stage));
    here.advance(b);
    slot = slot + 1 == SLOTS ? 0 : slot + 1;
    stage = stage + 1 == STAGES ? 0 : stage + 1, parity ^= stage == 0;
  }
}

// A block's sums, those of its lines and shares added in order, one filter row of each row group at a time.
TW_DEVICE void keep(const u16* x, const u16* grad, float* partial, unsigned char* memory, const Problem& b, const Sums& sums) {
  release_next();
  const Role role;
  float* const shared = (float*)memory;
  float* const to = partial + ((long long)blockIdx.y * b.slices + blockIdx.x) * FRAGMENTS * 128;
  const auto add = [&](int channel, int value, int row_group) {  // `value`: of those that a thread has in shared memory
    const float* from = shared + (value * CHANNELS + channel % CHANNELS) * THREADS + channel / CHANNELS + row_group * LINES_TOGETHER * SHARES * ACROSS;
    float sum = from[0];
    for (int i = 1; i < LINES_TOGETHER * SHARES; ++i) sum += from[i * ACROSS];
    return sum;
  };
  TW_UNROLL for (int r = 0; r < OWN_ROWS; ++r) {
    __syncthreads();
    TW_UNROLL for (int s = 0; s < S; ++s)
      TW_UNROLL for (int c = 0; c < CHANNELS; ++c) shared[(s * CHANNELS + c) * THREADS + threadIdx.x] = sums.taps[r][s][c];
    __syncthreads();
    for (int i = threadIdx.x; i < ROW_GROUPS * FEATURES * S; i += THREADS) {
      const int channel = i % FEATURES, s = i / FEATURES % S, row_group = i / FEATURES / S;
      const int row = row_group * OWN_ROWS + r, k = blockIdx.y * FEATURES + channel;
      if (row >= R) continue;
      float sum = add(channel, s, row_group);
      if (sum != sum && k < b.features) sum = sum_again<1>(x, grad, b, k, row * S + s);
      to[place_of_sum(channel * COUNT + row * S + s)] = sum;
    }
  }
  if (!WITH_BIAS) return;
  __syncthreads();
  TW_UNROLL for (int c = 0; c < CHANNELS; ++c) shared[c * THREADS + threadIdx.x] = sums.bias[c];
  __syncthreads();
  for (int i = threadIdx.x; i < FEATURES; i += THREADS) {
    const float* from = shared + i % CHANNELS * THREADS + i / CHANNELS;
    float sum = from[0], rest = 0.0f;
    for (int j = 1; j < LINES_TOGETHER * SHARES; ++j) add_exactly(sum, rest, from[j * ACROSS]);
    to[place_of_sum(i * COUNT + R * S)] = joined(sum, rest);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
weight_grad(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap grad,
            const u16* x_pixels, const u16* grad_pixels, float* partial, const __grid_constant__ Problem b) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const u32 shared = shared_address(memory);
  Sums sums = {};
  if (threadIdx.x / 32 < CONSUMERS) {
    if constexpr (WHOLE_ROWS) surround_with_zeros(memory, b);
    asm volatile("bar.sync 2, %0;" ::"n"(THREADS) : "memory");
    consume(sums, shared, b);
  } else {
    const bool asks = threadIdx.x % 32 == 0;
    if (asks) {
      for (int i = 0; i < STAGES; ++i) barrier_init(full(shared, i), 1), barrier_init(empty(shared, i), CONSUMERS);
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncwarp();
    asm volatile("bar.arrive 2, %0;" ::"n"(THREADS) : "memory");
    if (asks) produce({&x, &grad, x_pixels, grad_pixels}, shared, b);
  }
  keep(x_pixels, grad_pixels, partial, memory, b, sums);
}
