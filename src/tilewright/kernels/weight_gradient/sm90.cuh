// The convolution weight gradient on sm_90: the copy engine walks the pixels, wgmma multiplies.
//
// One warp loads, four or eight multiply. A step is TILE_K output pixels: boxes of 64 features of
// grad_output, and for each panel of columns a box of 64 channels of x at the tap's place, both
// [pixel][64] with swizzled rows of 128 bytes. Pixels are the summed dim of the product, so both
// operands are read transposed. Pixels outside x, and past the last one, read as 0.
//
// The pixels of x under a filter of one tap and stride 1 are a matrix, and may be copied as one
// (MATRIX). With SHARE 2, blocks of two neighbouring row tiles form a cluster there: each has the copy
// engine write half of the boxes of x to the shared memory of both.
//
// With HALO, taps share one copy of x: pixels come as one stream, in which rows and images are
// divided by zeros (walked in im2col mode, too, with a filter of one tap and bounds that are wider than
// the image), and a tap is a number of pixels by which x is ahead of grad_output. Chunks of TILE_K
// pixels of x fill a ring; columns of neighbouring taps are the same rows of shared memory, one row on.
//
// With STREAM_K a block has segments of several tiles, or WHOLE ones, one after the other: stages go round through all of
// them, so that the next segment's pixels come while sums of the last one are written.
//
// Defined before this text, besides what common.cuh needs: TILE_K, STAGES, WARPGROUPS_M,
// WARPGROUPS_N, MATRIX, SHARE, HALO, chunks by which the last tap is ahead, WARM, PENDING, steps
// whose products may be under way when the next one is waited for, STREAM_K, WHOLE, MIN_BLOCKS, and `multiply`, one
// wgmma of 64 x COLUMNS x 16, or, for the bias, of 64 x 8 x 16, and `begin`, which adds it to nothing. A warpgroup has
// BLOCKS times 64 rows.

constexpr int BOX_BYTES = TILE_K * 128;
constexpr int ROW_BOXES = TILE_M / 64;
constexpr int STAGE_BYTES = (ROW_BOXES + (HALO ? 0 : TILE_PANELS)) * BOX_BYTES;
// Chunks of x: those of the steps under way, and HALO more. Behind the last one the first lies once
// more, for what begins in the last one and ends in the first.
constexpr int RING = HALO ? STAGES + HALO : 0;
constexpr int OPERAND_BYTES = STAGES * STAGE_BYTES + (HALO ? RING + 1 : 0) * BOX_BYTES;
constexpr int CONSUMERS = WARPGROUPS_M * WARPGROUPS_N * 4;  // warps
static_assert(THREADS == CONSUMERS * 32 + 32 && COLUMNS * WARPGROUPS_N == TILE_N, "tile");
static_assert(BLOCKS * WARPGROUPS_M == ROW_BOXES && TILE_M * STAGED_ROW <= OPERAND_BYTES, "tile");
static_assert(SHARE == 1 || (CLUSTER == 1 && TILE_PANELS % SHARE == 0), "who shares boxes adds no slices");
static_assert(CLUSTER == 1 || SENT || (TILE_ELEMENTS + BIAS_QUADS * 4) * 4 <= OPERAND_BYTES, "sums of a cluster's block");
static_assert(!STREAM_K || (CLUSTER == 1 && SHARE == 1 && !WARM), "blocks that take segments of tiles stand alone");
static_assert(GROUP == 0 || (TILE_M == 64 && 64 % OWN == 0 && !STREAM_K && SHARE == 1 && !WARM), "a tile has the channels of its own groups");
static_assert(HALO == 0 || (!MATRIX && COLUMNS == 3 * PANEL), "a warpgroup has the three taps of a filter row");

// ---- barriers in shared memory -----------------------------------------------------------------

// At the same barrier of each block that shares boxes.
TW_DEVICE void barrier_arrive_everywhere(u32 barrier) {
  TW_UNROLL for (int r = 0; r < SHARE; ++r)
    asm volatile("{\n.reg .u32 a;\nmapa.shared::cluster.u32 a, %0, %1;\n"
                 "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [a];\n}" ::"r"(barrier), "r"(r) : "memory");
}

// ---- copies ------------------------------------------------------------------------------------

TW_DEVICE void load_rows(u32 to, const TensorMap* map, u32 barrier, int column, int pixel) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
      ::"r"(to), "l"(map), "r"(barrier), "r"(column), "r"(pixel) : "memory");
}
TW_DEVICE void load_pixels(u32 to, const TensorMap* map, u32 barrier, int c, int w, int h, int n, u16 tap_w, u16 tap_h) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6}], [%2], {%7, %8};"
      ::"r"(to), "l"(map), "r"(barrier), "r"(c), "r"(w), "r"(h), "r"(n), "h"(tap_w), "h"(tap_h) : "memory");
}

// To the same place of each block that shares boxes; their barriers at `barrier` hear of it.
TW_DEVICE void load_rows_everywhere(u32 to, const TensorMap* map, u32 barrier, int column, int pixel) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%3, %4}], [%2], %5;"
      ::"r"(to), "l"(map), "r"(barrier), "r"(column), "r"(pixel), "h"((u16)((1 << SHARE) - 1)) : "memory");
}

// Where a step's first pixel lies in the output. Steps follow one another without a division: one
// thread computes addresses for all, and a division would cost it more than a copy.
struct Walk {
  int q, p, n;
  TW_DEVICE Walk(const Problem& problem, int pixel) {
    p = problem.divided(pixel, OUT_WIDTH);
    q = pixel - p * problem.out_width;
    n = problem.divided(p, OUT_HEIGHT);
    p -= n * problem.out_height;
  }
  TW_DEVICE void advance(const Problem& problem) {
    q += problem.walk_q, p += problem.walk_p, n += problem.walk_n;
    if (q >= problem.out_width) q -= problem.out_width, ++p;
    if (p >= problem.out_height) p -= problem.out_height, ++n;
  }
};

#if HALO
// As below; of x one box for each step, and HALO of them ahead of the first step: the ring begins anew.
TW_DEVICE void produce(const TensorMap* x, const TensorMap* grad, const Problem& p, const Tile& t, int done,
                       u32 stages, u32 full, u32 empty) {
  const int place = p.divided(t.panel, TAPS), channel = place * PANEL + (GROUP > 0 ? t.row : 0);
  const int tap_row = p.divided(t.panel - p.divided(place * p.panels, PANELS_PER_TAP), FILTER_WIDTH);
  Walk grads(p, t.first * TILE_K), pixels(p, t.first * TILE_K + tap_row * p.dilation_h * p.out_width);
  if (threadIdx.x % 32 != 0) return;
  const u32 ring = stages + STAGES * STAGE_BYTES;
  int slot = 0;
  if (done > 0) barrier_wait(empty + (done - 1) % STAGES * 8, (done - 1) / STAGES & 1);
  for (int i = done; i < done + t.steps; ++i) {
    const int stage = i % STAGES, chunks = i == done ? HALO + 1 : 1;
    if (i >= STAGES) barrier_wait(empty + stage * 8, (i / STAGES - 1) & 1);
    const u32 bar = full + stage * 8;
    barrier_expect(bar, STAGE_BYTES + (chunks + (slot == 0)) * BOX_BYTES);
    TW_UNROLL for (int box = 0; box < ROW_BOXES; ++box)
      load_pixels(stages + stage * STAGE_BYTES + box * BOX_BYTES, grad, bar, t.row + box * 64, grads.q, grads.p, grads.n, 0, 0);
    grads.advance(p);
    for (int c = 0; c < chunks; ++c) {
      const int w = pixels.q - p.padding_w, h = pixels.p - p.padding_h;
      load_pixels(ring + slot * BOX_BYTES, x, bar, channel, w, h, pixels.n, 0, 0);
      if (slot == 0) load_pixels(ring + RING * BOX_BYTES, x, bar, channel, w, h, pixels.n, 0, 0);
      slot = slot + 1 == RING ? 0 : slot + 1;
      pixels.advance(p);
    }
  }
}
#else
// Run by one warp, of which one lane copies, after `done` steps of other tiles.
TW_DEVICE void produce(const TensorMap* x, const TensorMap* grad, const Problem& p, const Tile& t, int done,
                       u32 stages, u32 full, u32 empty) {
  const int lane = threadIdx.x % 32;
  // Lane j knows panel j. A panel past the last one repeats it: its sums are dropped.
  const int panel = min(t.panel + lane, p.panels - 1), tap = p.divided(panel, PANELS_PER_TAP);
  const int tap_row = p.divided(tap, FILTER_WIDTH), first_channel = (panel - tap * p.panels_per_tap) * PANEL + (GROUP > 0 ? t.row : 0);
  const int offset = (tap - tap_row * p.filter_width) * p.dilation_w | tap_row * p.dilation_h << 16;
  int channel[TILE_PANELS], offsets[TILE_PANELS];
  TW_UNROLL for (int j = 0; j < TILE_PANELS; ++j) {
    channel[j] = __shfl_sync(~0u, first_channel, j);
    offsets[j] = __shfl_sync(~0u, offset, j);
  }
  Walk walk(p, t.first * TILE_K);
  if (lane != 0) return;
  for (int i = done; i < done + t.steps; ++i) {
    const int stage = i % STAGES;
    if (i >= STAGES) barrier_wait(empty + stage * 8, (i / STAGES - 1) & 1);
    const u32 bar = full + stage * 8;
    u32 to = stages + stage * STAGE_BYTES;
    barrier_expect(bar, STAGE_BYTES);
    const int pixel = (t.first + i - done) * TILE_K;
    TW_UNROLL for (int box = 0; box < ROW_BOXES; ++box, to += BOX_BYTES)
      load_rows(to, grad, bar, t.row + box * 64, pixel);
    const int w = walk.q * p.stride_w - p.padding_w, h = walk.p * p.stride_h - p.padding_h;
    TW_UNROLL for (int j = 0; j < TILE_PANELS; ++j, to += BOX_BYTES) {
      if (SHARE > 1) {
        if (blockIdx.x % SHARE == j % SHARE) load_rows_everywhere(to, x, bar, channel[j], pixel);
      } else if (MATRIX) {
        load_rows(to, x, bar, channel[j], pixel);
      } else {
        load_pixels(to, x, bar, channel[j], w, h, walk.n, (u16)offsets[j], (u16)(offsets[j] >> 16));
      }
    }
    walk.advance(p);
  }
}
#endif

#if WARM
// Ask the L2 cache for what the first stages will hold: the copy engine has yet to read its maps then.
// Run by the warps that multiply.
TW_DEVICE void warm(const u16* x, const u16* grad, const Problem& p, const Tile& t) {
  const auto ask = [](const u16* line) { asm volatile("prefetch.global.L2 [%0];" ::"l"(line)); };
  int channel[TILE_PANELS], below[TILE_PANELS], right[TILE_PANELS];
  TW_UNROLL for (int j = 0; j < TILE_PANELS; ++j) {
    const int panel = min(t.panel + j, p.panels - 1), tap = p.divided(panel, PANELS_PER_TAP);
    const int tap_row = p.divided(tap, FILTER_WIDTH);
    channel[j] = (panel - tap * p.panels_per_tap) * PANEL;
    below[j] = tap_row * p.dilation_h - p.padding_h;
    right[j] = (tap - tap_row * p.filter_width) * p.dilation_w - p.padding_w;
  }
  const int count = min(t.steps, STAGES) * TILE_K;
  for (int i = threadIdx.x; i < count; i += CONSUMERS * 32) {
    const int pixel = t.first * TILE_K + i;
    if (pixel >= p.pixels) return;
    TW_UNROLL for (int box = 0; box < ROW_BOXES; ++box)
      if (t.row + box * 64 < p.features) ask(grad + (long long)pixel * p.features + t.row + box * 64);
    const Walk at(p, pixel);
    TW_UNROLL for (int j = 0; j < TILE_PANELS; ++j) {
      const int h = at.p * p.stride_h + below[j], w = at.q * p.stride_w + right[j];
      if (h < 0 || h >= p.height || w < 0 || w >= p.width) continue;
      ask(x + (((long long)at.n * p.height + h) * p.width + w) * p.channels + channel[j]);
    }
  }
}
#endif

// ---- products ----------------------------------------------------------------------------------

// A matrix of pixels x 64 halves for each box, pixels in groups of 8 that are 1024 bytes apart;
// `apart`: bytes from one 64 columns to the next. The swizzle goes by the address: any row may be the first.
// Addresses come in units of 16 bytes here, as `units` gives them, so that a step only adds.
TW_DEVICE u64 descriptor(u32 address, u32 apart = BOX_BYTES / 16) {
  constexpr u32 LAYOUT = 1u << 30 | 1024 / 16;
  return (u64)LAYOUT << 32 | (apart << 16) + address;
}
TW_DEVICE u32 units(u32 address) { return (address & 0x3ffff) / 16; }
// Where a warpgroup finds its columns of x.
#if HALO
struct Columns {
  u32 ring, apart;  // in units
  int row;  // of the ring: the step's first pixel under the filter row's first tap
  TW_DEVICE Columns(const Problem& p, u32 stages, int group)
      : ring(units(stages + STAGES * STAGE_BYTES)), apart(p.dilation_w * 8),
        row((WARPGROUPS_N > 1 ? group / WARPGROUPS_M : 0) * p.dilation_h * p.out_width) {}
  TW_DEVICE u64 of(u32, int k) const {
    const int at = row + k * 16;
    return descriptor(ring + (at < RING * TILE_K ? at : at - RING * TILE_K) * 8, apart);
  }
  TW_DEVICE void advance() { row += row + TILE_K < RING * TILE_K ? TILE_K : TILE_K - RING * TILE_K; }
};
#else
struct Columns {
  u32 first;
  TW_DEVICE Columns(const Problem&, u32, int group)
      : first((ROW_BOXES + (WARPGROUPS_N > 1 ? group / WARPGROUPS_M : 0) * (COLUMNS / PANEL)) * (BOX_BYTES / 16)) {}
  TW_DEVICE u64 of(u32 stage, int k) const { return descriptor(stage + first + k * 128); }
  TW_DEVICE void advance() {}
};
#endif
// 8 columns of 16 ones, in whatever order.
TW_DEVICE u64 ones_descriptor(u32 address) {
  constexpr u64 LAYOUT = ((u64)(128 >> 4) << 32) | ((u64)(128 >> 4) << 16);
  return LAYOUT | ((address & 0x3ffff) >> 4);
}
TW_DEVICE void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
TW_DEVICE void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LATER> TW_DEVICE void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LATER) : "memory");
}

template <bool WITH_BIAS>
TW_DEVICE void multiply_steps(float (&sums)[BLOCKS][COLUMNS / 2], float (&bias)[BLOCKS][4], u32 ones, Columns columns, int steps,
                              int done, int group, u32 stages, u32 full, u32 empty) {
  constexpr bool APART = WITH_BIAS && PAIRED;  // a step's sums of the bias
  const bool tells = threadIdx.x % 32 == 0;
  const auto release = [&](int stage) {
    if (!tells) return;
    if (SHARE == 1) barrier_arrive(empty + stage * 8);
    else barrier_arrive_everywhere(empty + stage * 8);
  };
  const u32 first = units(stages), rows = group % WARPGROUPS_M * BLOCKS * (BOX_BYTES / 16);
  int stage = done % STAGES, held = -1;  // held: the stage whose products are under way when the next one's begin
  u32 parity = done / STAGES & 1;
  for (; steps > 0; --steps) {
    barrier_wait(full + stage * 8, parity);
    const u32 at = first + stage * (STAGE_BYTES / 16);
    const auto features = [&](int m, int k) { return descriptor(at + rows + m * (BOX_BYTES / 16) + k * 128); };
    float of_step[BLOCKS][4];
    products_begin();
    if constexpr (APART) {  // in a group before the others, which may be under way when it is done
      TW_UNROLL for (int m = 0; m < BLOCKS; ++m) {
        begin(of_step[m], features(m, 0), ones_descriptor(ones));
        TW_UNROLL for (int k = 1; k < TILE_K / 16; ++k) multiply(of_step[m], features(m, k), ones_descriptor(ones));
      }
      products_commit();
    }
    TW_UNROLL for (int k = 0; k < TILE_K / 16; ++k)
      TW_UNROLL for (int m = 0; m < BLOCKS; ++m) {
        multiply(sums[m], features(m, k), columns.of(at, k));
        if constexpr (WITH_BIAS && !APART) multiply(bias[m], features(m, k), ones_descriptor(ones));
      }
    products_commit();
    columns.advance();
    products_wait<PENDING>();
    if constexpr (APART)
      TW_UNROLL for (int m = 0; m < BLOCKS; ++m)
        TW_UNROLL for (int i = 0; i < 4; i += 2) {
          asm volatile("" : "+f"(of_step[m][i])::"memory");
          add_to_bias(bias[m] + i, of_step[m][i]);
        }
    if (PENDING == 0) release(stage);
    else if (held >= 0) release(held);
    held = stage;
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
  products_wait<0>();
  if (STREAM_K && PENDING > 0) release(held);
  TW_UNROLL for (int m = 0; m < BLOCKS; ++m)
    TW_UNROLL for (int j = 0; j < COLUMNS / 2; ++j) asm volatile("" : "+f"(sums[m][j])::"memory");
  if constexpr (WITH_BIAS && !APART)
    TW_UNROLL for (int m = 0; m < BLOCKS; ++m)
      TW_UNROLL for (int j = 0; j < 4; ++j) asm volatile("" : "+f"(bias[m][j])::"memory");
}

TW_DEVICE void consume(float (&sums)[BLOCKS][COLUMNS / 2], float (&bias)[BLOCKS][4], u32 ones, const Problem& p, const Tile& t,
                       int done, int warp, u32 stages, u32 full, u32 empty) {
  const Columns columns(p, stages, warp / 4);
  if constexpr (BIAS)
    if (sums_bias(warp) && t.panel == 0) return multiply_steps<true>(sums, bias, ones, columns, t.steps, done, warp / 4, stages, full, empty);
  multiply_steps<false>(sums, bias, ones, columns, t.steps, done, warp / 4, stages, full, empty);
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
weight_grad(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap grad,
            const u16* x_pixels, const u16* grad_pixels, Out* weight, Out* bias, float* partial, u32* counters, const __grid_constant__ Problem p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  __shared__ u64 barriers[2 * STAGES];
  __shared__ Panel panels[(1 + STREAM_K) * TILE_PANELS];
  alignas(128) __shared__ u32 ones[BIAS ? 64 : 1];
  const Results out = {weight, bias};
  const u32 stages = (shared_address(memory) + 1023) & ~1023u;
  const u32 full = shared_address(barriers), empty = full + STAGES * 8;
  const int warp = threadIdx.x / 32;
#if STREAM_K
  const int begin = range_begin(p, blockIdx.x), end = range_begin(p, blockIdx.x + 1);
#else
  const Tile t(p);
#endif
  unsigned char* staged = memory + (stages - shared_address(memory)) + (SENT ? OPERAND_BYTES : 0);
  if (threadIdx.x == CONSUMERS * 32) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&x) : "memory");
    asm volatile("prefetch.tensormap [%0];" ::"l"(&grad) : "memory");
    for (int s = 0; s < STAGES; ++s) {
      barrier_init(full + s * 8, 1);
      barrier_init(empty + s * 8, CONSUMERS * SHARE);
    }
#if SENT
    expect_sums(staged, t.rank);
#endif
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
#if SENT
  __syncwarp();
  cluster_arrive_relaxed();  // who sends, and who has nothing to send, waits after the last product
#endif
  if (COMBINE == KERNEL) release_next();
  if (SHARE > 1) cluster_arrive(), cluster_wait();
  if (warp == CONSUMERS) {
    // It need not wait for who will wait for it.
    __syncwarp();
    asm volatile("bar.arrive 2, %0;" ::"n"(THREADS) : "memory");
#if STREAM_K
    for (int at = begin; at < end;) {
      const Tile t = segment_at(p, at);
      produce(&x, &grad, p, t, at - begin, stages, full, empty);
      __syncwarp();
      at += t.steps;
    }
#else
    produce(&x, &grad, p, t, 0, stages, full, empty);
    __syncwarp();
#endif
#if SENT
    cluster_wait();
#endif
  } else {
#if WARM
    warm(x_pixels, grad_pixels, p, t);
#endif
    if constexpr (BIAS) {
      if (threadIdx.x < 64) ones[threadIdx.x] = DTYPE::ONES;
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    const u32 beside = shared_address(ones);
#if STREAM_K
    asm volatile("bar.sync 2, %0;" ::"n"(THREADS) : "memory");
    for (int at = begin; at < end;) {
      Tile t = segment_at(p, at);
      Panel* own = panels + t.tile % 2 * TILE_PANELS;  // those of the tile before may still be read
      find_panels(own, p, t);
      asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS * 32) : "memory");
      float sums[BLOCKS][COLUMNS / 2] = {}, bias_sums[BLOCKS][4] = {};
      consume(sums, bias_sums, beside, p, t, at - begin, warp, stages, full, empty);
      asm volatile("" : "+r"(at));  // found again, rather than kept in registers meanwhile
      t = segment_at(p, at);
      own = panels + t.tile % 2 * TILE_PANELS;
      leave_padding_out(x_pixels, grad_pixels, p, t, p.channels, own, warp, sums);
      finish_segment<CONSUMERS * 32>(out, partial, counters, own, p, t, warp, sums, bias_sums);
      at += t.steps;
    }
#else
    find_panels(panels, p, t);
#if COMBINE == 3  // MARKED
    mark_places<CONSUMERS * 32>(partial, t);
#endif
    float sums[BLOCKS][COLUMNS / 2] = {}, bias_sums[BLOCKS][4] = {};
    asm volatile("bar.sync 2, %0;" ::"n"(THREADS) : "memory");
    if (COMBINE == MARKED && threadIdx.x == 0) tell_marked(counters, t);
    consume(sums, bias_sums, beside, p, t, 0, warp, stages, full, empty);
    leave_padding_out(x_pixels, grad_pixels, p, t, p.channels, panels, warp, sums);
    keep<CONSUMERS * 32>(out, partial, counters, staged, panels, p, t, warp, sums, bias_sums);
#endif
  }
#if !STREAM_K
  combine(out, partial, counters, staged, panels, p, t);
  if (SHARE > 1) cluster_arrive(), cluster_wait();  // neighbours arrive here until they are done
#endif
}
