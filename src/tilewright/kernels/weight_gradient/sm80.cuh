// The convolution weight gradient on sm_80 and later: mma.sync from shared memory, any channel count.
//
// A step is 32 output pixels of halves, 16 of fp32 or 8 of fp64: 8, 16 or 32 threads fetch the features and
// columns of one pixel, 16 bytes each, into boxes [pixel][64] whose 16-byte chunks are swizzled by the
// pixel. Both operands are read transposed: halves by ldmatrix, wider items one by one. With ALIGNED the columns of a panel are channels of one tap and are copied
// asynchronously; without, columns are taps times channels without gaps, gathered one by one.
//
// Defined before this text, besides what common.cuh needs: ALIGNED, ALIGNED_ROWS (the same for
// grad_output), TILE_K, STAGES, MIN_BLOCKS. What follows it, for halves or for wider items, defines `products`.

typedef DTYPE::type Item;
constexpr int WIDE = 16 / sizeof(Item);   // items of a chunk
constexpr int CHUNKS = PANEL / WIDE;      // of a pixel's row in a box
static_assert(TILE_K * CHUNKS == THREADS, "a thread fetches a chunk of each box");
constexpr int BOX_BYTES = TILE_K * CHUNKS * 16;
constexpr int ROW_BOXES = TILE_M / 64;
constexpr int STAGE_BYTES = (ROW_BOXES + TILE_PANELS) * BOX_BYTES;

// Swizzled so that what a warp reads at once shares no banks: rows 0 to 7 of halves for ldmatrix, and
// 4 rows of 8 neighbouring items of fp32 (of fp64 one row is read at once).
TW_DEVICE u32 chunk_at(u32 box, int row, int chunk) {
  const int swizzle = sizeof(Item) == 2 ? row & 7 : (row & 3) * 2;
  return box + row * CHUNKS * 16 + ((chunk ^ swizzle) << 4);
}

// Where columns begin: their offset from a pixel's first tap, and the tap in rows and columns of x.
struct Column {
  int offset;
  short tap_h, tap_w;
};

// One thread's share of every step: the same chunk of the same pixel of each box.
struct Fetch {
  int pixel, q, p, n, chunk;
  TW_DEVICE Fetch(const Problem& problem, const Tile& t) {
    pixel = t.first * TILE_K + threadIdx.x / CHUNKS;
    chunk = threadIdx.x % CHUNKS;
    p = problem.divided(pixel, OUT_WIDTH);
    q = pixel - p * problem.out_width;
    n = problem.divided(p, OUT_HEIGHT);
    p -= n * problem.out_height;
  }
  TW_DEVICE void advance(const Problem& problem) {
    pixel += TILE_K;
    q += problem.walk_q, p += problem.walk_p, n += problem.walk_n;
    if (q >= problem.out_width) q -= problem.out_width, ++p;
    if (p >= problem.out_height) p -= problem.out_height, ++n;
  }
};

TW_DEVICE void copy16(u32 to, const Item* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}
TW_DEVICE void store16(u32 to, const u32 (&w)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]) : "memory");
}
// 16 bytes of items from anywhere, 0 where there is none.
template <class Index> TW_DEVICE void gather16(u32 to, const Item* from, Index index) {
  u32 w[4];
  TW_UNROLL for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(Item) >= 4) {
      constexpr int WORDS = sizeof(Item) / 4;
      const long long at = index(i / WORDS);
      w[i] = at < 0 ? 0 : __ldg((const u32*)from + at * WORDS + i % WORDS);
    } else {
      const long long low = index(2 * i), high = index(2 * i + 1);
      const u32 a = low < 0 ? 0 : __ldg(from + low), b = high < 0 ? 0 : __ldg(from + high);
      w[i] = a | b << 16;
    }
  }
  store16(to, w);
}

TW_DEVICE void fetch(u32 stage, const Item* x, const Item* grad, const Column* columns, int channels,
                     const Problem& p, const Tile& t, const Fetch& f) {
  const int row = threadIdx.x / CHUNKS;
  const bool inside = f.pixel < p.pixels;
  TW_UNROLL for (int box = 0; box < ROW_BOXES; ++box, stage += BOX_BYTES) {
    const int k = t.row + box * 64 + f.chunk * WIDE;
    const long long at = (long long)f.pixel * p.features + k;
    const u32 to = chunk_at(stage, row, f.chunk);
    if constexpr (ALIGNED_ROWS) {
      const bool there = inside && k < p.features;
      copy16(to, grad + (there ? at : 0), there);
    } else {
      gather16(to, grad, [&](int i) { return inside && k + i < p.features ? at + i : -1; });
    }
  }
  const int h = f.p * p.stride_h - p.padding_h, w = f.q * p.stride_w - p.padding_w;
  const long long first = (((long long)f.n * p.height + h) * p.width + w) * channels;
  const auto there = [&](const Column& c) {
    return inside && (unsigned)(h + c.tap_h) < (unsigned)p.height && (unsigned)(w + c.tap_w) < (unsigned)p.width;
  };
  TW_UNROLL for (int j = 0; j < TILE_PANELS; ++j, stage += BOX_BYTES) {
    const u32 to = chunk_at(stage, row, f.chunk);
    if constexpr (ALIGNED) {
      const Column c = columns[j * CHUNKS + f.chunk];
      const bool is = c.offset >= 0 && there(c);
      copy16(to, x + (is ? first + c.offset : 0), is);
    } else {
      gather16(to, x, [&](int i) {
        const Column c = columns[j * 64 + f.chunk * WIDE + i];
        return c.offset >= 0 && there(c) ? first + c.offset : -1ll;
      });
    }
  }
}

// The table of columns: one entry for each chunk of a panel, or for each column.
TW_DEVICE void find_columns(Column* columns, int channels, const Problem& p, const Tile& t) {
  constexpr int WIDTH = ALIGNED ? WIDE : 1;
  for (int i = threadIdx.x; i < TILE_N / WIDTH; i += THREADS) {
    const int panel = t.panel + i * WIDTH / PANEL;
    int tap, c;
    bool there = panel < p.panels;
    if constexpr (ALIGNED) {
      tap = p.divided(panel, PANELS_PER_TAP);
      c = (panel - tap * p.panels_per_tap) * PANEL + i * WIDTH % PANEL;
      there = there && c < channels;
    } else {
      const int column = t.panel * PANEL + i;
      tap = column / channels;
      c = column - tap * channels;
      there = column < p.row_length;
    }
    const int r = p.divided(tap, FILTER_WIDTH), s = tap - r * p.filter_width;
    const int tap_h = r * p.dilation_h, tap_w = s * p.dilation_w;
    columns[i] = {there ? (tap_h * p.width + tap_w) * channels + c : -1, (short)tap_h, (short)tap_w};
  }
}

// What one step adds to a warp's sums, and to those of the bias if it holds them.
TW_DEVICE void products(Sum (&sums)[BLOCKS][COLUMNS / 2], Sum (&bias)[BLOCKS][4], u32 stage, int warp);

// `channels` is C; p.channels is what a panel's columns are counted up to.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
weight_grad(const Item* x, const Item* grad, Out* weight, Out* bias, Sum* partial, u32* counters, int channels,
            const __grid_constant__ Problem p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  __shared__ Panel panels[TILE_PANELS];
  __shared__ Column columns[ALIGNED ? TILE_N / WIDE : TILE_N];
  const u32 stages = shared_address(memory);
  const Tile t(p);
  const int warp = threadIdx.x / 32;
  find_panels(panels, p, t);
  find_columns(columns, channels, p, t);
  Fetch f(p, t);
  __syncthreads();
  for (int s = 0; s < STAGES - 1; ++s) {
    if (s < t.steps) fetch(stages + s * STAGE_BYTES, x, grad, columns, channels, p, t, f);
    f.advance(p);
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
  Sum sums[BLOCKS][COLUMNS / 2] = {}, bias_sums[BLOCKS][4] = {};
  for (int i = 0; i < t.steps; ++i) {
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
    __syncthreads();  // this step is there, and nobody reads the one before any more
    const int ahead = i + STAGES - 1;
    if (ahead < t.steps) fetch(stages + ahead % STAGES * STAGE_BYTES, x, grad, columns, channels, p, t, f);
    f.advance(p);
    asm volatile("cp.async.commit_group;" ::: "memory");
    products(sums, bias_sums, stages + i % STAGES * STAGE_BYTES, warp);
  }
  asm volatile("cp.async.wait_group 0;" ::: "memory");
  leave_padding_out(x, grad, p, t, channels, panels, warp, sums);
  const Results out = {weight, bias};
  keep<THREADS>(out, partial, counters, memory, panels, p, t, warp, sums, bias_sums);
  combine(out, partial, counters, memory, panels, p, t);
}
