// What the convolution weight-gradient kernels share: the problem, where a tile lies, and how the
// partial sums of a split reduction are combined.
//
// The gradient is a matrix product: rows are output channels k, columns are filter taps times input
// channels, and the sum runs over output pixels (n, p, q). Columns come in panels of 64 channels of
// one tap; the last panel of a tap may be partly empty. Blocks differ by tile and by slice of the
// pixels. With more than one slice a block writes fp32 sums to a workspace, [tile][slice], in the
// order in which its threads hold them, and these are added in the order of slices, so that a result
// never depends on timing.
//
// Defined before this text: DTYPE f16 or bf16, TILE_M, TILE_N, THREADS, COMBINE; and how warps share
// a tile: each has COLUMNS columns from WARP_COLUMN(warp) on, and BLOCKS blocks of 16 rows, STRIDE
// rows apart, from WARP_ROW(warp) on.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define TW_DEVICE __device__ __forceinline__
#define TW_UNROLL _Pragma("unroll")

struct f16 { u16 bits; };
struct bf16 { u16 bits; };
TW_DEVICE u32 pack(f16, float a, float b) {
  u32 w; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(b), "f"(a)); return w;
}
TW_DEVICE u32 pack(bf16, float a, float b) {
  u32 w; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(b), "f"(a)); return w;
}

enum { LAST = 0, GRID = 1, KERNEL = 2 };  // who adds the slices of a tile
constexpr int PANEL = 64;
constexpr int TILE_PANELS = TILE_N / PANEL;
constexpr int TILE_ELEMENTS = TILE_M * TILE_N;

struct alignas(64) Problem {  // 128 bytes, passed by value; whatever would take a division comes along
  int features, channels;           // K and C
  int panels, panels_per_tap;       // of all columns; ceil(C / 64)
  int row_length, filter_width;     // R * S * C, S
  int row_tiles, tiles;             // a tile's number is column_tile * row_tiles + row_tile
  int slices, steps, longer;        // parts of the pixels; steps of each, the first `longer` have one more
  int pixels;                       // N * P * Q
  int out_height, out_width;        // P, Q
  int walk_n, walk_p, walk_q;       // one step, in images, rows and pixels
  int height, width;                // of x
  int stride_h, stride_w, padding_h, padding_w, dilation_h, dilation_w;
};

struct Tile {
  int tile, slice, row, panel;  // row: first feature; panel: first panel of columns
  int first, steps;             // of the slice, counted in blocks of TILE_K pixels
  TW_DEVICE Tile(const Problem& p) {
    slice = blockIdx.x / p.tiles;
    tile = blockIdx.x - slice * p.tiles;
    panel = tile / p.row_tiles;
    row = (tile - panel * p.row_tiles) * TILE_M;
    panel *= TILE_PANELS;
    steps = p.steps + (slice < p.longer);
    first = slice * p.steps + min(slice, p.longer);
  }
};

// 64 columns of a tile: where their first one lies in a row of the gradient [K, R, S, C], and how
// many of its channels exist; none for a panel past the last one.
struct Panel {
  int at, channels;
};
// By the block's first threads, before they meet at a barrier.
TW_DEVICE void find_panels(Panel* panels, const Problem& p, const Tile& t) {
  if (threadIdx.x >= TILE_PANELS) return;
  const int panel = t.panel + threadIdx.x, tap = panel / p.panels_per_tap;
  const int c = (panel - tap * p.panels_per_tap) * PANEL;
  panels[threadIdx.x] = {tap * p.channels + c, panel < p.panels ? p.channels - c : 0};
}
TW_DEVICE long long row_of(const Problem& p, int k) { return (long long)k * p.row_length; }

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

// ---- results: directly, or as partial sums -----------------------------------------------------

// The sums of this warp, as fp32 in the workspace: whole lines at a time.
TW_DEVICE void store_partial(float* partial, const Problem& p, const Tile& t, int warp,
                             const float (&d)[BLOCKS][COLUMNS / 2]) {
  float4* own = (float4*)partial + ((long long)t.tile * p.slices + t.slice) * (TILE_ELEMENTS / 4);
  own += warp * BLOCKS * FRAGMENTS * 32 + threadIdx.x % 32;
  TW_UNROLL for (int m = 0; m < BLOCKS; ++m)
    TW_UNROLL for (int j = 0; j < FRAGMENTS; ++j)
      own[(m * FRAGMENTS + j) * 32] = make_float4(d[m][j * 4], d[m][j * 4 + 1], d[m][j * 4 + 2], d[m][j * 4 + 3]);
}

// Two neighbouring channels, from `c` of the panel on.
TW_DEVICE void store_pair(u16* to, const Problem& p, const Panel& panel, int c, float a, float b) {
  const u32 both = pack(DTYPE{}, a, b);
  if (p.channels % 2 == 0) {
    if (c < panel.channels) *(u32*)(to + c) = both;
  } else {
    if (c < panel.channels) to[c] = (u16)both;
    if (c + 1 < panel.channels) to[c + 1] = (u16)(both >> 16);
  }
}

// The tile's results, rounded and gathered in shared memory, so that rows are written in whole
// lines. Rows there are 16 bytes longer than they need: no two of a fragment share banks.
constexpr int STAGED_ROW = TILE_N * 2 + 16;
TW_DEVICE void gather(unsigned char* staged, int warp, const float (&d)[BLOCKS][COLUMNS / 2]) {
  TW_UNROLL for (int m = 0; m < BLOCKS; ++m)
    TW_UNROLL for (int j = 0; j < FRAGMENTS; ++j) {
      const Fragment f(warp, m, j, threadIdx.x % 32);
      unsigned char* to = staged + f.row * STAGED_ROW + f.column * 2;
      *(u32*)to = pack(DTYPE{}, d[m][j * 4], d[m][j * 4 + 1]);
      *(u32*)(to + 8 * STAGED_ROW) = pack(DTYPE{}, d[m][j * 4 + 2], d[m][j * 4 + 3]);
    }
}
template <int STORERS>
TW_DEVICE void store_gathered(u16* out, const unsigned char* staged, const Panel* panels, const Problem& p, const Tile& t) {
  constexpr int CHUNKS = TILE_M * TILE_N / 8;  // of 8 channels
  const bool wide = p.channels % 8 == 0;
  for (int i = threadIdx.x; i < CHUNKS; i += STORERS) {
    const int row = i / 8 % TILE_M, index = i / 8 / TILE_M, c = i % 8 * 8;
    const Panel panel = panels[index];
    if (t.row + row >= p.features || c >= panel.channels) continue;
    u16* to = out + row_of(p, t.row + row) + panel.at + c;
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

// ---- combining slices --------------------------------------------------------------------------

// Add the slices of one part of a tile and write the result. A thread has up to sixteen loads under
// way, of four places and four slices. Where a part has fewer places than the block has threads,
// 2, 4 or 8 neighbouring lanes take turns with the slices of a place; the order of adding is fixed.
TW_DEVICE void add_slices(u16* out, const float* partial, const Panel* panels, const Problem& p,
                          const Tile& t, int part, int parts) {
  constexpr int QUADS = TILE_ELEMENTS / 4;
  const int first = QUADS * part / parts, end = QUADS * (part + 1) / parts;
  int lanes = 1;
  while (lanes < 8 && 2 * lanes <= p.slices && (end - first) * 2 * lanes <= (int)blockDim.x) lanes *= 2;
  const int stride = blockDim.x / lanes, turn = threadIdx.x % lanes;
  const float4* base = (const float4*)partial + (long long)t.tile * p.slices * QUADS;
  for (int begin = first; begin < end; begin += 4 * stride) {
    const int quad = begin + threadIdx.x / lanes;
    float4 sum[4] = {};
    for (int s = turn; s < p.slices; s += 4 * lanes) {
      float4 v[4][4];
      TW_UNROLL for (int j = 0; j < 4; ++j)
        TW_UNROLL for (int i = 0; i < 4; ++i)
          v[i][j] = s + j * lanes < p.slices && quad + i * stride < end
                        ? __ldcg(base + (long long)(s + j * lanes) * QUADS + quad + i * stride)
                        : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      TW_UNROLL for (int j = 0; j < 4; ++j)
        TW_UNROLL for (int i = 0; i < 4; ++i)
          sum[i].x += v[i][j].x, sum[i].y += v[i][j].y, sum[i].z += v[i][j].z, sum[i].w += v[i][j].w;
    }
    for (int distance = lanes / 2; distance > 0; distance /= 2)
      TW_UNROLL for (int i = 0; i < 4; ++i) {
        sum[i].x += __shfl_xor_sync(~0u, sum[i].x, distance);
        sum[i].y += __shfl_xor_sync(~0u, sum[i].y, distance);
        sum[i].z += __shfl_xor_sync(~0u, sum[i].z, distance);
        sum[i].w += __shfl_xor_sync(~0u, sum[i].w, distance);
      }
    TW_UNROLL for (int i = 0; i < 4; ++i) {
      const int at = quad + i * stride, fragment = at / 32;
      if (at >= end || turn > 0) break;
      const Fragment f(fragment / (BLOCKS * FRAGMENTS), fragment / FRAGMENTS % BLOCKS, fragment % FRAGMENTS, at % 32);
      const Panel panel = panels[f.column / PANEL];
      const int k = t.row + f.row, c = f.column % PANEL;
      if (k < p.features) store_pair(out + row_of(p, k) + panel.at, p, panel, c, sum[i].x, sum[i].y);
      if (k + 8 < p.features) store_pair(out + row_of(p, k + 8) + panel.at, p, panel, c, sum[i].z, sum[i].w);
    }
  }
}

// After every thread of the block wrote its partial sums. A counter is 0 before and after.
TW_DEVICE void combine(u16* out, const float* partial, u32* counters, const Panel* panels,
                       const Problem& p, const Tile& t) {
  if (p.slices == 1 || COMBINE == KERNEL) return;
  __shared__ u32 arrived;
  u32* counter = counters + t.tile;
  __syncthreads();
  if (threadIdx.x == 0) {  // its fences order what the whole block wrote, and will read
    __threadfence();
    if (COMBINE == LAST) {
      arrived = atomicInc(counter, p.slices - 1);
    } else {
      atomicAdd(counter, 1);
      while (*(volatile u32*)counter < p.slices) {}
    }
    __threadfence();
  }
  __syncthreads();
  if (COMBINE == LAST) {
    if (arrived == p.slices - 1) add_slices(out, partial, panels, p, t, 0, 1);
  } else {  // all blocks run at once, so each could wait for the tile's others; now it adds a part
    add_slices(out, partial, panels, p, t, t.slice, p.slices);
    if (threadIdx.x == 0 && atomicAdd(counter, 1) == 2 * p.slices - 1) *(volatile u32*)counter = 0;
  }
}

// What a warp does with its sums once the last product is done: the result is written, or partial
// sums. `staged` is the shared memory that the operands were in; the block's first ADDERS threads
// hold sums.
template <int ADDERS>
TW_DEVICE void keep(u16* out, float* partial, unsigned char* staged, const Panel* panels, const Problem& p,
                    const Tile& t, int warp, const float (&d)[BLOCKS][COLUMNS / 2]) {
  if (p.slices > 1) return store_partial(partial, p, t, warp, d);
  asm volatile("bar.sync 1, %0;" ::"n"(ADDERS) : "memory");  // nobody reads operands any more
  gather(staged, warp, d);
  asm volatile("bar.sync 1, %0;" ::"n"(ADDERS) : "memory");
  store_gathered<ADDERS>(out, staged, panels, p, t);
}

// The kernel that adds all slices where COMBINE is KERNEL: blockIdx.y is the part of a tile.
extern "C" __global__ void __launch_bounds__(256) add_all_slices(u16* out, const float* partial, Problem p) {
  __shared__ Panel panels[TILE_PANELS];
  const Tile t(p);  // the grid has as many blocks in x as there are tiles: slice 0 of each
  find_panels(panels, p, t);
  __syncthreads();
  add_slices(out, partial, panels, p, t, blockIdx.y, gridDim.y);
}
