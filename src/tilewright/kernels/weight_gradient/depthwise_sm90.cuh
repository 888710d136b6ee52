// The weight gradient of a depthwise convolution on sm_90, NHWC: products sum over images.
//
// Of one channel, sixteen pixels of a row of x are the rows of a product, eight of a row of grad_output its
// columns, and eight images what it sums, each in two lines, one below the other; each of its diagonals is a
// tap. Nothing is shifted from tap to tap: one product has all taps of a filter row. Nor is anything
// transposed: a lane reads eight channels of a pixel, and halves of two images side by side are operands of
// eight products.
//
// With a stride, every STRIDE_W-th pixel of x is a phase, which has every STRIDE_W-th tap of a filter row. A
// unit is a filter row and a phase. Warps share channels, units, and the pixels of a chunk. They take turns to
// have the copy engine bring rows of x into a ring, and of grad_output two lines a step: a warp more, for that
// alone, would leave all of them fewer registers.
//
// Defined before this text, besides what weight_grad_rows.cuh needs: OWN units of a warp, KEEPS,
// whether it has a row of x in registers until the next unit, ALONG warps that share a chunk, and ROWS of x in
// the ring: as many as STAGES steps in a row need.

constexpr int OCTETS = FEATURES / 8;
constexpr int UNITS = R * STRIDE_W;
constexpr int TEAMS = (UNITS + WITH_BIAS + OWN - 1) / OWN;  // the bias is summed as one more unit is
constexpr int WARPS = OCTETS * ALONG * TEAMS;
constexpr int THREADS = WARPS * 32;
constexpr int BLOCKS = CHUNK / 8 / ALONG;   // of eight pixels of grad_output, each beside sixteen of x
constexpr int COUNT = R * S + WITH_BIAS;    // sums of a channel
constexpr int FRAGMENTS = (FEATURES * COUNT + WARPS * 128 - 1) / (WARPS * 128);
constexpr int IMAGE_BYTES = FEATURES * 2;
constexpr int PIXEL_BYTES = IMAGES * IMAGE_BYTES;
constexpr int PIXELS = CHUNK + 8;           // of a row of x, in a phase
constexpr int LINE_BYTES = CHUNK * PIXEL_BYTES;
constexpr int GRADS = LINES_TOGETHER * LINE_BYTES;
constexpr int PHASE_BYTES = PIXELS * PIXEL_BYTES;
constexpr int ROW_BYTES = STRIDE_W * PHASE_BYTES;
constexpr int DOWN = LINES_TOGETHER * STRIDE_H, REACH = DOWN - STRIDE_H + R;  // of a step, in rows of x
constexpr int ROWS_AT = STAGES * GRADS, ZEROS_AT = ROWS_AT + ROWS * ROW_BYTES, BARRIERS_AT = ZEROS_AT + PIXEL_BYTES;
static_assert(IMAGES == 8 && LINES_TOGETHER == 2 && SHARES == 1 && BLOCKS * ALONG * 8 == CHUNK, "layout");
static_assert(WARPS == EXPECTED_WARPS && FRAGMENTS == EXPECTED_FRAGMENTS, "layout");
static_assert(BARRIERS_AT + 16 * STAGES == LOOP_BYTES && THREADS * 4 >= PIXEL_BYTES && STAGES > 2, "layout");
static_assert(!KEEPS || (STRIDE_H == 1 && STRIDE_W == 1), "the next unit is the next filter row");
static_assert((S - 1) / STRIDE_W <= 8 && ROWS >= R + STRIDE_H, "a diagonal for each tap, a place for each row");
static_assert(WARPS * 4096 + ALONG * FEATURES * COUNT * 4 <= LOOP_BYTES, "sums lie where operands were");

TW_DEVICE u32 full(u32 shared, int step) { return shared + BARRIERS_AT + step % STAGES * 16; }
TW_DEVICE u32 empty(u32 shared, int step) { return full(shared, step) + 8; }

// Where a step of a block lies. Rows of x come in their order, each once for a column: steps of the same images
// and chunk, one below the other. All of it follows from the step's number, so that any warp can ask for it.
struct Way {
  int n, chunk, p;
  int lowest, before;  // rows: the column's first one, and all of the block's columns before
  TW_DEVICE Way(const Problem& b, int first, int step) {
    const Walk begin(b, first), at(b, first + step);
    const int columns = (at.n - begin.n) * b.chunks + at.chunk - begin.chunk;
    n = at.n, chunk = at.chunk, p = begin.p;
    lowest = inside(b, top(b)), before = 0;
    if (columns > 0) before = bottom(b) - lowest + (columns - 1) * (bottom(b) - inside(b, -b.padding_h)), lowest = inside(b, -b.padding_h);
    p = at.p;
  }
  TW_DEVICE static int inside(const Problem& b, int h) { return min(max(h, 0), b.height); }
  TW_DEVICE int top(const Problem& b) const { return p * STRIDE_H - b.padding_h; }
  TW_DEVICE static int bottom(const Problem& b) {  // behind a column's last row
    return inside(b, (b.out_height - 1) / LINES_TOGETHER * DOWN - b.padding_h + REACH);
  }
  TW_DEVICE int slot(int h) const { return (before + h - lowest) % ROWS; }
  TW_DEVICE void advance(const Problem& b) {
    p += LINES_TOGETHER;
    if (p < b.out_height) return;
    before += bottom(b) - lowest, lowest = inside(b, -b.padding_h), p = 0;
    if (++chunk == b.chunks) chunk = 0, ++n;
  }
};

// Channels, images and pixels of a row, or of two lines.
TW_DEVICE void load_rows(u32 to, const TensorMap* map, u32 barrier, int image, int pixel, int row) {
  const int channel = blockIdx.y * FEATURES;
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];"
      ::"r"(to), "l"(map), "r"(barrier), "r"(channel), "r"(image), "r"(pixel), "r"(row) : "memory");
}

// By one lane. The step's place must be free: that of one which every warp is done with.
TW_DEVICE void ask(const TensorMap* x, const TensorMap* grad, u32 shared, const Problem& b, int first, int step) {
  const Way way(b, first, step);
  const int end = way.inside(b, way.top(b) + REACH), q = way.chunk * CHUNK, w = q * STRIDE_W - b.padding_w;
  int h = step == 0 || way.p == 0 ? way.lowest : way.inside(b, way.top(b) - DOWN + REACH);  // the first that is not there
  if (step >= STAGES) barrier_wait(empty(shared, step), (step / STAGES - 1) & 1);
  const u32 barrier = full(shared, step);
  barrier_expect(barrier, GRADS + (end - h) * ROW_BYTES);
  load_rows(shared + step % STAGES * GRADS, grad, barrier, way.n * IMAGES, q, way.p);
  for (; h < end; ++h)
    TW_UNROLL for (int phase = 0; phase < STRIDE_W; ++phase)
      load_rows(shared + ROWS_AT + way.slot(h) * ROW_BYTES + phase * PHASE_BYTES, x, barrier, way.n * IMAGES, w + phase, h);
}

TW_DEVICE uint4 read(u32 from) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from) : "memory");
  return v;
}

// Of a pixel, eight channels in eight images, as lanes hold them: pairs of images, half of an operand.
struct Half { u32 pairs[8]; };

// How a lane finds its images. Sixteen bytes of an image lie where the copy engine's swizzle put them; lanes of
// odd pixels read their second image first, so that no two of eight lanes read the same banks.
struct Lane {
  u32 first;  // bytes from the pixel's first to those of the first image
  u32 even;   // how halves of both images become a pair, of even channels
  TW_DEVICE Lane(int lane, int octet) {
    const int turned = lane / 4 & 1, image = lane % 4 + turned * 4;
    first = image * IMAGE_BYTES + ((octet ^ image * OCTETS / 8) & OCTETS - 1) * 16;
    even = turned ? 0x1054 : 0x5410;
  }
  TW_DEVICE void load(Half& to, u32 at) const {
    const uint4 a = read(at), b = read(at ^ 4 * IMAGE_BYTES ^ OCTETS * 8);  // four images on, or back
    const u32 from[2][4] = {{a.x, a.y, a.z, a.w}, {b.x, b.y, b.z, b.w}};
    TW_UNROLL for (int c = 0; c < 8; ++c) to.pairs[c] = __byte_perm(from[0][c / 2], from[1][c / 2], even + c % 2 * 0x2222);
  }
};

// A warp's share of the work.
struct Role {
  int lane, octet, along, team;
  TW_DEVICE Role() {
    const int warp = threadIdx.x / 32;
    lane = threadIdx.x % 32, octet = warp % OCTETS, along = warp / OCTETS % ALONG, team = warp / OCTETS / ALONG;
  }
  TW_DEVICE int unit(int k) const { return team * OWN + k; }
};

// A row of x under a warp's pixels.
struct Row { Half pixels[BLOCKS + 1]; };

TW_DEVICE void consume(float4 (&sums)[OWN][8], const TensorMap* x, const TensorMap* grad, unsigned char* memory, const Problem& b) {
  const u32 shared = shared_address(memory);
  const Role role;
  const Lane lane(role.lane, role.octet);
  const u32 zeros = shared + ZEROS_AT + lane.first, own = shared + (role.along * BLOCKS * 8 + role.lane / 4) * PIXEL_BYTES + lane.first;
  const Lines lines(b);
  const int steps = lines.end - lines.first;
  Way here(b, lines.first, 0);
  // Asked for as early as it may be without waiting for a warp that is only a step behind.
  const auto ask_in_turn = [&](int step) {
    if (step < steps && step % WARPS == threadIdx.x / 32 && role.lane == 0) ask(x, grad, shared, b, lines.first, step);
  };
  for (int step = 0; step < STAGES - 2; ++step) ask_in_turn(step);
  for (int step = 0; step < steps; ++step) {
    ask_in_turn(step + STAGES - 2);
    barrier_wait(full(shared, step), step / STAGES & 1);
    Half grads[2][BLOCKS];
    TW_UNROLL for (int i = 0; i < 2 * BLOCKS; ++i)
      lane.load(grads[i / BLOCKS][i % BLOCKS], own + step % STAGES * GRADS + i / BLOCKS * LINE_BYTES + i % BLOCKS * 8 * PIXEL_BYTES);
    Row upper, lower;  // of x, under the step's two lines
    TW_UNROLL for (int k = 0; k < OWN; ++k) {
      const int unit = role.unit(k), phase = unit / R, h = here.top(b) + unit % R;
      if (WITH_BIAS && unit == UNITS) {
        constexpr u32 ONES = DTYPE::ONE * 0x10001u;
        const u32 ones[4] = {ONES, ONES, ONES, ONES};
        if constexpr (!FP32) {
          TW_UNROLL for (int i = 0; i < BLOCKS; ++i)
            TW_UNROLL for (int c = 0; c < 8; ++c) multiply(sums[k][c], ones, grads[0][i].pairs[c], grads[1][i].pairs[c]);
        } else {  // all sixteen rows are the same: the lower eight keep what the upper were rounded by
          TW_UNROLL for (int c = 0; c < 8; ++c) {
            float4 few = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            TW_UNROLL for (int i = 0; i < BLOCKS; ++i) multiply(few, ones, grads[0][i].pairs[c], grads[1][i].pairs[c]);
            add_exactly(sums[k][c].x, sums[k][c].z, few.x), add_exactly(sums[k][c].y, sums[k][c].w, few.y);
          }
        }
      } else if (unit < UNITS) {
        const auto inside = [&](int h) { return (unsigned)h < (unsigned)b.height; };
        const auto load = [&](Row& to, int h) {
          u32 pixels = inside(h) ? own + ROWS_AT + here.slot(h) * ROW_BYTES + phase * PHASE_BYTES : zeros;
          const u32 apart = inside(h) ? 8 * PIXEL_BYTES : 0;
          TW_UNROLL for (int i = 0; i <= BLOCKS; ++i, pixels += apart) lane.load(to.pixels[i], pixels);
        };
        if (KEEPS && k > 0) upper = lower;
        else load(upper, h);
        load(lower, h + STRIDE_H);
        if (!inside(h) && !inside(h + STRIDE_H)) continue;
        TW_UNROLL for (int i = 0; i < BLOCKS; ++i)
          TW_UNROLL for (int c = 0; c < 8; ++c) {
            const u32 a[4] = {upper.pixels[i].pairs[c], upper.pixels[i + 1].pairs[c], lower.pixels[i].pairs[c], lower.pixels[i + 1].pairs[c]};
            multiply(sums[k][c], a, grads[0][i].pairs[c], grads[1][i].pairs[c]);
          }
      }
    }
    __syncwarp();
    if (role.lane == 0) barrier_arrive(empty(shared, step));
    here.advance(b);
  }
}

// Of a unit's 16 x 8 sums in shared memory, those of its taps, or of the bias, into the table.
TW_DEVICE void sum_diagonals(float* table, const float* sums, const Role& role, int unit) {
  const bool bias = unit == UNITS;
  const int phase = unit / R, taps = bias ? 1 : (S - phase + STRIDE_W - 1) / STRIDE_W;
  for (int i = role.lane; i < 8 * taps; i += 32) {
    const int c = i % 8, tap = i / 8;
    const float* diagonal = sums + c * 128 + tap * 8;
    float sum = 0.0f;
    if (PAIRED && bias) {
      float rest = 0.0f;
      TW_UNROLL for (int j = 0; j < 8; ++j) add_exactly(sum, rest, diagonal[j]), rest += diagonal[64 + j];
      sum = joined(sum, rest);
    } else {
      TW_UNROLL for (int j = 0; j < 8; ++j) sum += diagonal[bias ? j : j * 9];
    }
    table[(role.octet * 8 + c) * COUNT + (bias ? R * S : unit % R * S + tap * STRIDE_W + phase)] = sum;
  }
}

// A block's sums, those of its chunk's shares added in order.
TW_DEVICE void keep(const u16* x, const u16* grad, float* partial, unsigned char* memory, const Problem& b, float4 (&sums)[OWN][8]) {
  release_next();
  const Role role;
  float* const own = (float*)memory + threadIdx.x / 32 * 1024;
  float* const table = (float*)memory + WARPS * 1024;
  __syncthreads();
  TW_UNROLL for (int k = 0; k < OWN; ++k) {
    if (role.unit(k) >= UNITS + WITH_BIAS) break;
    TW_UNROLL for (int c = 0; c < 8; ++c) {
      float2* const row = (float2*)(own + c * 128) + role.lane;
      row[0] = make_float2(sums[k][c].x, sums[k][c].y), row[32] = make_float2(sums[k][c].z, sums[k][c].w);
    }
    __syncwarp();
    sum_diagonals(table + role.along * FEATURES * COUNT, own, role, role.unit(k));
    __syncwarp();
  }
  __syncthreads();
  float* const to = partial + ((long long)blockIdx.y * b.slices + blockIdx.x) * WARPS * FRAGMENTS * 128;
  for (int i = threadIdx.x; i < FEATURES * COUNT; i += THREADS) {
    float sum = table[i];
    TW_UNROLL for (int j = 1; j < ALONG; ++j) sum += table[j * FEATURES * COUNT + i];
    const int k = blockIdx.y * FEATURES + i / COUNT, at = i % COUNT;
    if (sum != sum && k < b.features && at < R * S) sum = sum_again<1>(x, grad, b, k, at);
    to[place_of_sum(i)] = sum;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
weight_grad(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap grad,
            const u16* x_pixels, const u16* grad_pixels, float* partial, const __grid_constant__ Problem b) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const u32 shared = shared_address(memory);
  if (threadIdx.x < PIXEL_BYTES / 4) ((u32*)(memory + ZEROS_AT))[threadIdx.x] = 0;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) barrier_init(full(shared, i), 1), barrier_init(empty(shared, i), WARPS);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  float4 sums[OWN][8] = {};
  consume(sums, &x, &grad, memory, b);
  keep(x_pixels, grad_pixels, partial, memory, b, sums);
}
