// What the convolution weight-gradient kernels share: the problem, where a tile lies, and where its
// sums go. weight_grad_combine.cuh adds those of a split reduction.
//
// The gradient is a matrix product: rows are output channels k, columns are filter taps times input
// channels, and the sum runs over output pixels (n, p, q). Columns come in panels of 64 channels of
// one tap; the last panel of a tap may be partly empty. Blocks differ by tile and by slice of the
// pixels. With more than one slice a block writes its sums to a workspace, [tile][slice], in the
// order in which its threads hold them, and these are added in the order of slices, so that a result
// never depends on timing. Blocks of a cluster hold consecutive slices of one tile; they add them
// through shared memory first, and what is left to combine are the sums of each cluster.
//
// Defined before this text: DTYPE f16, bf16, f32 or f64, RESULT (that or f32), ADDS, 1 where the
// result is added to what `out` holds; BIAS, 1 where the sums of grad_output are asked for beside it;
// TILE_M, TILE_N, THREADS, COMBINE, ADD_THREADS, CLUSTER; SENT, 1 where blocks of a cluster send each other sums;
// TAPS_INSIDE, 1 where panels of the same channels follow one another, tap by tap; GROUP, 0 or the
// channels, and features, of a group: tiles have 64 features and the channels of theirs; how warps share a
// tile: each has COLUMNS columns from WARP_COLUMN(warp) on, and BLOCKS blocks of 16 rows, STRIDE rows
// apart, from WARP_ROW(warp) on.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define TW_DEVICE __device__ __forceinline__
#define TW_UNROLL _Pragma("unroll")

struct Halves {
  typedef u16 type;
  typedef float sum;
  typedef float4 quad;
  typedef u32 pair;
  static TW_DEVICE u16 first(u32 both) { return (u16)both; }
  static TW_DEVICE u16 second(u32 both) { return (u16)(both >> 16); }
};
struct f16 : Halves {
  static constexpr u32 ONES = 0x3c003c00;
  static TW_DEVICE u32 pack(float a, float b) {
    u32 w; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(b), "f"(a)); return w;
  }
  static TW_DEVICE float widen(u16 h) { float a; asm("cvt.f32.f16 %0, %1;" : "=f"(a) : "h"(h)); return a; }
};
struct bf16 : Halves {
  static constexpr u32 ONES = 0x3f803f80;
  static TW_DEVICE u32 pack(float a, float b) {
    u32 w; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(b), "f"(a)); return w;
  }
  static TW_DEVICE float widen(u16 h) { return __uint_as_float((u32)h << 16); }
};
struct f32 {
  typedef float type;
  typedef float sum;
  typedef float4 quad;
  typedef float2 pair;
  static TW_DEVICE float first(float2 both) { return both.x; }
  static TW_DEVICE float second(float2 both) { return both.y; }
  static TW_DEVICE float2 pack(float a, float b) { return make_float2(a, b); }
  static TW_DEVICE float widen(float a) { return a; }
};
struct alignas(16) Doubles { double x, y, z, w; };
struct f64 {
  typedef double type;
  typedef double sum;
  typedef Doubles quad;
  typedef double2 pair;
  static TW_DEVICE double first(double2 both) { return both.x; }
  static TW_DEVICE double second(double2 both) { return both.y; }
  static TW_DEVICE double2 pack(double a, double b) { return {a, b}; }
  static TW_DEVICE double widen(double a) { return a; }
};
typedef RESULT::type Out;
typedef DTYPE::sum Sum;  // fp32, or fp64 of fp64
typedef DTYPE::quad Quad;
struct Results {
  Out* weight;
  Out* bias;  // only with BIAS
};

enum { LAST = 0, GRID = 1, KERNEL = 2, MARKED = 3, SERIAL = 4 };  // who adds the slices of a tile
constexpr int PANEL = 64;
constexpr int TILE_PANELS = TILE_N / PANEL;
constexpr int TILE_ELEMENTS = TILE_M * TILE_N;

enum Divisor { OUT_WIDTH, OUT_HEIGHT, PANELS_PER_TAP, TAPS, FILTER_WIDTH, SLICES, DIVISORS };
struct alignas(64) Problem {  // 128 bytes, passed by value
  int features, channels;           // K and C
  int panels, panels_per_tap;       // of all columns; ceil(C / 64)
  int row_length, filter_width;     // R * S * C, S
  int row_tiles;                    // a tile's number is column_tile * row_tiles + row_tile
  int slices, steps, longer;        // ranges of the pixels, or of all tiles' steps, or of all tiles; so many each, the first `longer` have one more
  int pixels;                       // N * P * Q
  int out_height, out_width;        // P, Q
  int walk_n, walk_p, walk_q;       // one step, in images, rows and pixels
  int height, width;                // of x
  int stride_h, stride_w, padding_h, padding_w, dilation_h, dilation_w;
  u32 multipliers[DIVISORS], shifts;  // a division takes as long as many loads are issued in

  // n / d, for 0 <= n < 2^31: n times 2^(31 + shift) / d, rounded up; five bits of `shifts` for each d.
  TW_DEVICE int divided(int n, Divisor d) const { return (int)((u64)(u32)n * multipliers[d] >> (31 + (shifts >> 5 * d & 31))); }
};

// Blocks: row tiles, the CLUSTER slices of one group side by side; column tiles; groups of slices.
struct Tile {
  int tile, row, panel;     // row: first feature; panel: first panel of columns
  int groups, group, rank;  // of CLUSTER slices each; this one's group, and its place there
  int first, steps;         // of the slice, counted in blocks of TILE_K pixels
  TW_DEVICE Tile(const Problem& p, int row_tile, int place, int first_group) {
    groups = p.slices / CLUSTER, group = first_group, rank = place;
    tile = blockIdx.y * p.row_tiles + row_tile;
    panel = blockIdx.y * TILE_PANELS;
    row = row_tile * TILE_M;
    const int slice = group * CLUSTER + rank;
    steps = p.steps + (slice < p.longer);
    first = slice * p.steps + min(slice, p.longer);
  }
  // Whole: who takes a segment of it says which steps.
  TW_DEVICE Tile(const Problem& p, int number) : tile(number), groups(1), group(0), rank(0) {
    const int column = number / p.row_tiles;
    panel = column * TILE_PANELS;
    row = (number - column * p.row_tiles) * TILE_M;
  }
  TW_DEVICE Tile(const Problem& p) : Tile(p, blockIdx.x / CLUSTER, blockIdx.x % CLUSTER, blockIdx.z) {}
};

// 64 columns of a tile: where their first one lies in a row of the gradient [K, R, S, C], and how
// many of its channels exist; none for a panel past the last one. With groups they are those of a
// tap, from the tile's first feature on, and `at` is where a row's own group begins.
struct Panel {
  int at, channels;
};
// With groups, whether a tile's row and channel are of the same one; and where its channels begin.
constexpr int OWN = GROUP > 0 ? GROUP : 1 << 20;
TW_DEVICE bool of_one_group(int row, int c) { return row / OWN == c / OWN; }
TW_DEVICE int before_group(int row) { return row / OWN * OWN; }

// By the block's first threads, before they meet at a barrier.
TW_DEVICE void find_panels(Panel* panels, const Problem& p, const Tile& t) {
  if (threadIdx.x >= TILE_PANELS) return;
  const int panel = t.panel + threadIdx.x;
  if (GROUP > 0) {
    panels[threadIdx.x] = {panel * GROUP, panel < p.panels ? p.channels - t.row : 0};
    return;
  }
  int tap = p.divided(panel, PANELS_PER_TAP), place = panel - tap * p.panels_per_tap;
  if (TAPS_INSIDE) {
    place = p.divided(panel, TAPS);
    tap = panel - p.divided(place * p.panels, PANELS_PER_TAP);
  }
  const int c = place * PANEL;
  panels[threadIdx.x] = {tap * p.channels + c, panel < p.panels ? p.channels - c : 0};
}
TW_DEVICE long long row_of(const Problem& p, int k) { return (long long)k * p.row_length - before_group(k % 64); }

// Where a warp's sums lie. A fragment is 16 x 8, as mma and wgmma leave it: lane / 4 is its row,
// lane % 4 its pair of columns; the second pair is 8 rows below.
struct Fragment {
  int row, column;
  TW_DEVICE Fragment(int warp, int block, int j, int lane) {
    row = WARP_ROW(warp) + block * STRIDE + lane / 4;
    column = WARP_COLUMN(warp) + j * 8 + lane % 4 * 2;
  }
};
constexpr int FRAGMENTS = COLUMNS / 8;
constexpr int QUADS = TILE_ELEMENTS / 4;  // of a tile: what its lanes hold of its fragments

// The bias's gradient: a column of ones beside the first column of tiles, whose products the warps of
// its first columns hold as they hold others. Behind the tile's quads they have those of its rows.
// Tensor cores cut off of a long sum, and PyTorch uses none for this one. So where it stays fp32, a few pixels are
// summed by themselves, and their sums in two numbers (weight_grad_long_sum.cuh).
constexpr bool PAIRED = BIAS && sizeof(Out) == 4;
constexpr int BIAS_QUADS = BIAS ? TILE_M / 4 << PAIRED : 0;
TW_DEVICE bool sums_bias(int warp) { return BIAS && blockIdx.y == 0 && WARP_COLUMN(warp) == 0; }
TW_DEVICE int quads_here() { return BIAS && blockIdx.y == 0 ? QUADS + BIAS_QUADS : QUADS; }

// ---- clusters ------------------------------------------------------------------------------------

TW_DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
#if __CUDA_ARCH__ >= 900
TW_DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
// For who has read, and wrote nothing for the others: no fence.
TW_DEVICE void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
TW_DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
#endif

// ---- results: directly, or as partial sums -----------------------------------------------------

// Where a tile's sums of one group of slices lie in the workspace.
TW_DEVICE Quad* partial_of(Sum* partial, const Tile& t, int group) {
  return (Quad*)partial + ((long long)t.tile * t.groups + group) * (QUADS + BIAS_QUADS);
}

// To a row's sum of the bias: the first two, or the last two, of those that a lane holds.
TW_DEVICE void add_to_bias(Sum* sum, Sum v) {
  if constexpr (PAIRED) add_exactly(sum[0], sum[1], v);
  else sum[0] += v;
}
// to(row, sum, rest) for each row of the tile whose bias sum this thread holds.
template <class To> TW_DEVICE void each_bias(int warp, const Sum (&bias)[BLOCKS][4], To to) {
  if (!sums_bias(warp) || threadIdx.x % 4 > 0) return;
  TW_UNROLL for (int m = 0; m < BLOCKS; ++m) {
    const Fragment f(warp, m, 0, threadIdx.x % 32);
    to(f.row, bias[m][0], bias[m][1]);
    to(f.row + 8, bias[m][2], bias[m][3]);
  }
}
TW_DEVICE void store_bias(Out* bias, const Problem& p, int k, Sum sum, Sum rest) {
  if (k >= p.features) return;
  if constexpr (PAIRED) sum = joined(sum, rest);
  if constexpr (ADDS) sum += RESULT::widen(bias[k]);
  bias[k] = RESULT::first(RESULT::pack(sum, 0));
}

#if COMBINE == 3  // MARKED
// Blocks of a tile meet when they begin, not when they end: each has marked the places of its sums by
// then, and who adds them loads until no mark is left. So nobody waits for stores to be done, and then for
// others to hear of it. No sum has a mark's bits: NaN is 0x7fffffff or, widened from halves, ends in zeros.
static_assert(CLUSTER == 1 && sizeof(Sum) == 4, "fp32 sums of single blocks are marked");
constexpr u32 MARK = 0xffffffff;
template <int MARKERS> TW_DEVICE void mark_places(Sum* partial, const Tile& t) {
  uint4* group = (uint4*)partial_of(partial, t, t.group);
  for (int i = threadIdx.x; i < quads_here(); i += MARKERS) group[i] = make_uint4(MARK, MARK, MARK, MARK);
}
TW_DEVICE bool is_marked(const Quad& v) {
  const uint4& w = (const uint4&)v;
  return (w.x == MARK) | (w.y == MARK) | (w.z == MARK) | (w.w == MARK);
}
TW_DEVICE void put_quad(Quad* to, const Quad& v) {
  asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}
TW_DEVICE Quad load_quad(const Quad* from) {
  Quad v;
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(from) : "memory");
  return v;
}
#else
TW_DEVICE bool is_marked(const Quad&) { return false; }
TW_DEVICE void put_quad(Quad* to, const Quad& v) { *to = v; }
// Past L1, which other blocks' sums do not reach.
TW_DEVICE float4 load_quad(const float4* from) { return __ldcg(from); }
TW_DEVICE Doubles load_quad(const Doubles* from) {
  const double2 low = __ldcg((const double2*)from), high = __ldcg((const double2*)from + 1);
  return {low.x, low.y, high.x, high.y};
}
#endif

// The sums of this warp, as fp32, among those of its tile: whole lines at a time.
TW_DEVICE void store_sums(Quad* tile, int warp, const Sum (&d)[BLOCKS][COLUMNS / 2], const Sum (&bias)[BLOCKS][4]) {
  each_bias(warp, bias, [&](int row, Sum sum, Sum rest) {
    volatile Sum* to = (Sum*)(tile + QUADS) + (row << PAIRED);
    if constexpr (PAIRED) {
      // Few bits of each slice add up without rounding, whoever adds them; its other bits, to much less.
      const Sum few = __uint_as_float(__float_as_int(sum) & 0xfffc0000u);
      to[1] = sum - few + rest, sum = few;
    }
    to[0] = sum;
  });
  Quad* own = tile + warp * BLOCKS * FRAGMENTS * 32 + threadIdx.x % 32;
  TW_UNROLL for (int m = 0; m < BLOCKS; ++m)
    TW_UNROLL for (int j = 0; j < FRAGMENTS; ++j)
      put_quad(own + (m * FRAGMENTS + j) * 32, Quad{d[m][j * 4], d[m][j * 4 + 1], d[m][j * 4 + 2], d[m][j * 4 + 3]});
}

// Two neighbouring channels, from `c` of the panel on.
TW_DEVICE void store_pair(Out* to, const Problem& p, const Panel& panel, int c, Sum a, Sum b) {
  if constexpr (ADDS) {
    if (c < panel.channels) a += RESULT::widen(to[c]);
    if (c + 1 < panel.channels) b += RESULT::widen(to[c + 1]);
  }
  const RESULT::pair both = RESULT::pack(a, b);
  if (p.channels % 2 == 0) {
    if (c < panel.channels) *(RESULT::pair*)(to + c) = both;
  } else {
    if (c < panel.channels) to[c] = RESULT::first(both);
    if (c + 1 < panel.channels) to[c + 1] = RESULT::second(both);
  }
}

// What a lane holds of a fragment, rounded.
TW_DEVICE void store_fragment(const Results& out, const Panel* panels, const Problem& p, const Tile& t, const Fragment& f, Quad sum) {
  const Panel panel = panels[f.column / PANEL];
  const int k = t.row + f.row, c = f.column % PANEL;
  if (k < p.features && of_one_group(f.row, c)) store_pair(out.weight + row_of(p, k) + panel.at, p, panel, c, sum.x, sum.y);
  if (k + 8 < p.features && of_one_group(f.row + 8, c)) store_pair(out.weight + row_of(p, k + 8) + panel.at, p, panel, c, sum.z, sum.w);
}

// A quad of a tile's results, rounded.
TW_DEVICE void store_quad(const Results& out, const Panel* panels, const Problem& p, const Tile& t, int at, Quad sum) {
  if (BIAS && at >= QUADS) {
    const int k = t.row + (at - QUADS) * (PAIRED ? 2 : 4);
    if constexpr (PAIRED) {
      store_bias(out.bias, p, k, sum.x, sum.y), store_bias(out.bias, p, k + 1, sum.z, sum.w);
    } else {
      store_bias(out.bias, p, k, sum.x, 0), store_bias(out.bias, p, k + 1, sum.y, 0);
      store_bias(out.bias, p, k + 2, sum.z, 0), store_bias(out.bias, p, k + 3, sum.w, 0);
    }
    return;
  }
  const int fragment = at / 32;
  store_fragment(out, panels, p, t, Fragment(fragment / (BLOCKS * FRAGMENTS), fragment / FRAGMENTS % BLOCKS, fragment % FRAGMENTS, at % 32), sum);
}

// The tile's results, rounded and gathered in shared memory, so that rows are written in whole
// lines. Rows there are 16 bytes longer than they need: no two of a fragment share banks.
constexpr int STAGED_ROW = TILE_N * 2 + 16;
TW_DEVICE void gather(unsigned char* staged, int warp, const Sum (&d)[BLOCKS][COLUMNS / 2]) {
  TW_UNROLL for (int m = 0; m < BLOCKS; ++m)
    TW_UNROLL for (int j = 0; j < FRAGMENTS; ++j) {
      const Fragment f(warp, m, j, threadIdx.x % 32);
      unsigned char* to = staged + f.row * STAGED_ROW + f.column * 2;
      *(RESULT::pair*)to = RESULT::pack(d[m][j * 4], d[m][j * 4 + 1]);
      *(RESULT::pair*)(to + 8 * STAGED_ROW) = RESULT::pack(d[m][j * 4 + 2], d[m][j * 4 + 3]);
    }
}
template <int STORERS>
TW_DEVICE void store_gathered(Out* out, const unsigned char* staged, const Panel* panels, const Problem& p, const Tile& t) {
  constexpr int CHUNKS = TILE_M * TILE_N / 8;  // of 8 channels
  const bool wide = p.channels % 8 == 0;
  for (int i = threadIdx.x; i < CHUNKS; i += STORERS) {
    const int row = i / 8 % TILE_M, index = i / 8 / TILE_M, c = i % 8 * 8;
    const Panel panel = panels[index];
    if (t.row + row >= p.features || c >= panel.channels || !of_one_group(row, c)) continue;
    u16* to = (u16*)out + row_of(p, t.row + row) + panel.at + c;
    const uint4 words = *(const uint4*)(staged + row * STAGED_ROW + (index * PANEL + c) * 2);
    if (wide) {
      *(uint4*)to = words;
    } else {
      const u32 w[4] = {words.x, words.y, words.z, words.w};
      TW_UNROLL for (int e = 0; e < 8; ++e)
        if (c + e < panel.channels) to[e] = (u16)(w[e / 2] >> (e % 2 * 16));
    }
  }
}
