// The convolution weight gradient on sm_80 and later: mma.sync from shared memory, any channel count.
//
// A step is 32 output pixels: eight threads fetch the features and columns of one pixel, 16 bytes
// each, into boxes [pixel][64] whose 16-byte chunks are swizzled by the pixel. Both operands are read
// transposed by ldmatrix. With ALIGNED the columns of a panel are channels of one tap and are copied
// asynchronously; without, columns are taps times channels without gaps, gathered one by one.
//
// Defined before this text, besides what weight_grad.cuh needs: ALIGNED, ALIGNED_ROWS (the same for
// grad_output), STAGES, MIN_BLOCKS.

constexpr int STEP = 32;  // pixels
constexpr int BOX_BYTES = STEP * 128;
constexpr int ROW_BOXES = TILE_M / 64;
constexpr int STAGE_BYTES = (ROW_BOXES + TILE_PANELS) * BOX_BYTES;
static_assert(THREADS == STEP * 8, "tile");

TW_DEVICE u32 chunk_at(u32 box, int row, int chunk) { return box + row * 128 + ((chunk ^ (row & 7)) << 4); }

// Where columns begin: their offset from a pixel's first tap, and the tap in rows and columns of x.
struct Column {
  int offset;
  short tap_h, tap_w;
};

// One thread's part of every step: the same chunk of the same pixel of each box.
struct Fetch {
  int pixel, q, p, n, chunk;
  TW_DEVICE Fetch(const Problem& problem, const Tile& t) {
    pixel = t.first * STEP + threadIdx.x / 8;
    chunk = threadIdx.x % 8;
    p = pixel / problem.out_width;
    q = pixel - p * problem.out_width;
    n = p / problem.out_height;
    p -= n * problem.out_height;
  }
  TW_DEVICE void advance(const Problem& problem) {
    pixel += STEP;
    q += problem.walk_q, p += problem.walk_p, n += problem.walk_n;
    if (q >= problem.out_width) q -= problem.out_width, ++p;
    if (p >= problem.out_height) p -= problem.out_height, ++n;
  }
};

TW_DEVICE void copy16(u32 to, const u16* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}
TW_DEVICE void store16(u32 to, const u32 (&w)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]) : "memory");
}
// Eight halves from anywhere, 0 where there is none.
template <class Index> TW_DEVICE void gather16(u32 to, const u16* from, Index index) {
  u32 w[4];
  TW_UNROLL for (int i = 0; i < 4; ++i) {
    const long long low = index(2 * i), high = index(2 * i + 1);
    const u32 a = low < 0 ? 0 : __ldg(from + low), b = high < 0 ? 0 : __ldg(from + high);
    w[i] = a | b << 16;
  }
  store16(to, w);
}

TW_DEVICE void fetch(u32 stage, const u16* x, const u16* grad, const Column* columns, int channels,
                     const Problem& p, const Tile& t, const Fetch& f) {
  const int row = threadIdx.x / 8;
  const bool inside = f.pixel < p.pixels;
  TW_UNROLL for (int box = 0; box < ROW_BOXES; ++box, stage += BOX_BYTES) {
    const int k = t.row + box * 64 + f.chunk * 8;
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
      const Column c = columns[j * 8 + f.chunk];
      const bool is = c.offset >= 0 && there(c);
      copy16(to, x + (is ? first + c.offset : 0), is);
    } else {
      gather16(to, x, [&](int i) {
        const Column c = columns[j * 64 + f.chunk * 8 + i];
        return c.offset >= 0 && there(c) ? first + c.offset : -1ll;
      });
    }
  }
}

// The table of columns: one entry for each chunk of a panel, or for each column.
TW_DEVICE void find_columns(Column* columns, int channels, const Problem& p, const Tile& t) {
  constexpr int WIDTH = ALIGNED ? 8 : 1;
  for (int i = threadIdx.x; i < TILE_N / WIDTH; i += THREADS) {
    const int panel = t.panel + i * WIDTH / PANEL;
    int tap, c;
    bool there = panel < p.panels;
    if constexpr (ALIGNED) {
      tap = panel / p.panels_per_tap;
      c = (panel - tap * p.panels_per_tap) * PANEL + i * WIDTH % PANEL;
      there = there && c < channels;
    } else {
      const int column = t.panel * PANEL + i;
      tap = column / channels;
      c = column - tap * channels;
      there = column < p.row_length;
    }
    const int r = tap / p.filter_width, s = tap - r * p.filter_width;
    const int tap_h = r * p.dilation_h, tap_w = s * p.dilation_w;
    columns[i] = {there ? (tap_h * p.width + tap_w) * channels + c : -1, (short)tap_h, (short)tap_w};
  }
}

TW_DEVICE void load_transposed(u32 (&r)[4], u32 from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(from) : "memory");
}
TW_DEVICE void multiply(float* d, const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." OPERAND "." OPERAND ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// A tensor core truncates what it adds. A result that keeps fp32 has products added by rounding sums.
TW_DEVICE void accumulate(float* d, const u32 (&a)[4], u32 b0, u32 b1) {
  if constexpr (sizeof(Out) < 4) return multiply(d, a, b0, b1);
  float of_step[4] = {};
  multiply(of_step, a, b0, b1);
  TW_UNROLL for (int i = 0; i < 4; ++i) d[i] += of_step[i];
}

TW_DEVICE void products(float (&sums)[BLOCKS][COLUMNS / 2], u32 stage, int warp) {
  const int lane = threadIdx.x % 32, in = lane & 7, second = lane >> 3 & 1, third = lane >> 4;
#pragma unroll sizeof(Out) < 4 ? STEP / 16 : 1
  for (int k = 0; k < STEP; k += 16) {
    u32 a[BLOCKS][4];
    TW_UNROLL for (int m = 0; m < BLOCKS; ++m) {
      const int row = WARP_ROW(warp) + m * STRIDE + second * 8;
      load_transposed(a[m], chunk_at(stage + row / 64 * BOX_BYTES, k + in + third * 8, row % 64 / 8));
    }
    TW_UNROLL for (int n = 0; n < COLUMNS; n += 16) {
      const int column = WARP_COLUMN(warp) + n + third * 8;
      u32 b[4];
      load_transposed(b, chunk_at(stage + (ROW_BOXES + column / 64) * BOX_BYTES, k + in + second * 8, column % 64 / 8));
      TW_UNROLL for (int m = 0; m < BLOCKS; ++m) {
        accumulate(sums[m] + n / 2, a[m], b[0], b[1]);
        accumulate(sums[m] + n / 2 + 4, a[m], b[2], b[3]);
      }
    }
  }
}

// `channels` is C; p.channels is what a panel's columns are counted up to.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
weight_grad(const u16* x, const u16* grad, Out* out, float* partial, u32* counters, int channels,
            const __grid_constant__ Problem p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  __shared__ Panel panels[TILE_PANELS];
  __shared__ Column columns[ALIGNED ? TILE_N / 8 : TILE_N];
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
  float sums[BLOCKS][COLUMNS / 2] = {};
  for (int i = 0; i < t.steps; ++i) {
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
    __syncthreads();  // this step is there, and nobody reads the one before any more
    const int ahead = i + STAGES - 1;
    if (ahead < t.steps) fetch(stages + ahead % STAGES * STAGE_BYTES, x, grad, columns, channels, p, t, f);
    f.advance(p);
    asm volatile("cp.async.commit_group;" ::: "memory");
    products(sums, stages + i % STAGES * STAGE_BYTES, warp);
  }
  asm volatile("cp.async.wait_group 0;" ::: "memory");
  keep<THREADS>(out, partial, memory, panels, p, t, warp, sums);
  combine(out, partial, counters, memory, panels, p, t);
}
