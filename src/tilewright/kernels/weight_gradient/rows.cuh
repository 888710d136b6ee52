// What the weight-gradient kernels that walk rows share: few channels, and groups of them.
//
// A block owns FEATURES output channels and walks lines: rows of the output, in chunks of CHUNK pixels.
// From one line to the next most rows of x that meet the filter stay, so they live in a ring in shared
// memory: a step brings STRIDE_H new ones, and the line's chunk of grad_output. The first PRIME steps in
// an image (or in another chunk of its rows) only bring rows. The block's warps share the result and,
// in SHARES shares, the pixels of a line; sums of shares are added through shared memory, those of
// blocks, slices, by a second kernel, both in fixed order.
//
// Defined before this text: DTYPE and RESULT (f16, bf16 or f32), R, S, STRIDE_H, STRIDE_W, FEATURES, CHUNK, whether
// these are CHUNKS_OF_X, which have no pixel of x in common, or none of grad_output, IMAGES that a line is of,
// LINES_TOGETHER in a step, WITH_BIAS, 1 where the sums of grad_output are asked for, STAGES, SHARES, MIN_BLOCKS, and for the kernel that follows what it needs. That kernel
// defines WARPS of a share, FRAGMENTS of a warp, and where a fragment's sums belong (`place`); EXPECTED_WARPS,
// EXPECTED_FRAGMENTS and LOOP_BYTES are what its caller takes them, and its shared memory, to be.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define TW_DEVICE __device__ __forceinline__
#define TW_UNROLL _Pragma("unroll")
#define TW_ROLLED _Pragma("unroll 1")  // where sums leave no registers for several turns at once

struct f16 {
  typedef u16 type;
  static TW_DEVICE u16 narrow(float a) { u16 h; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(a)); return h; }
  static TW_DEVICE float widen(u16 h) { float a; asm("cvt.f32.f16 %0, %1;" : "=f"(a) : "h"(h)); return a; }
  static TW_DEVICE void widen(float& low, float& high, u32 pair) {
    asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.f32.f16 %0, l;\ncvt.f32.f16 %1, h;\n}" : "=f"(low), "=f"(high) : "r"(pair));
  }
  static constexpr u16 ONE = 0x3c00;
};
struct bf16 {
  typedef u16 type;
  static TW_DEVICE u16 narrow(float a) { u16 h; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(a)); return h; }
  static TW_DEVICE float widen(u16 h) { return __uint_as_float((u32)h << 16); }
  static TW_DEVICE void widen(float& low, float& high, u32 pair) {
    low = __uint_as_float(pair << 16), high = __uint_as_float(pair & 0xffff0000u);
  }
  static constexpr u16 ONE = 0x3f80;
};
struct f32 {
  typedef float type;
  static TW_DEVICE float narrow(float a) { return a; }
  static TW_DEVICE float widen(float a) { return a; }
};

// Results that keep fp32 have slices added without rounding, and so the bias's sums, which PyTorch adds without
// tensor cores: these cut off of a long sum.
constexpr bool FP32 = sizeof(RESULT::type) == 4;
constexpr bool PAIRED = WITH_BIAS && FP32;

// Steps before a line's rows are all there.
constexpr int PRIME = (R - 1 + (LINES_TOGETHER - 1) * STRIDE_H) / (LINES_TOGETHER * STRIDE_H);
constexpr int GRAD_STRIDE = FEATURES * 2 + 16;  // bytes of a pixel: no two of eight share banks
constexpr int GRAD_BYTES = CHUNK * GRAD_STRIDE;
constexpr int KEPT = (S + STRIDE_W - 1) / STRIDE_W;  // pixels of a line that meet one of x

struct alignas(64) Problem {  // 128 bytes, passed by value
  int lines, chunks;          // N / IMAGES * chunks * P / LINES_TOGETHER; chunks of a row of the output
  int channels, features;     // C, K
  int height, width, out_height, out_width;
  int padding_h, padding_w;
  int slices;
  int row_length;             // of the result: R * S * C / groups
  int images;                 // N
};

// A pixel of x is one of STRIDE_W in a column; that many after the first one, q meets taps of the columns from q on.
TW_DEVICE int first_column(const Problem& b) { return min(b.padding_w / STRIDE_W, KEPT - 1); }

// A block's way through its lines, one step after the other.
struct Walk {
  int n, chunk, p, prime;
  TW_DEVICE Walk(const Problem& b, int line) : prime(PRIME) {
    const int column = (b.out_height + LINES_TOGETHER - 1) / LINES_TOGETHER, strip = line / column;
    p = (line - strip * column) * LINES_TOGETHER;
    n = strip / b.chunks;
    chunk = strip - n * b.chunks;
  }
  TW_DEVICE void advance(const Problem& b) {
    if (prime > 0) {
      --prime;
    } else if ((p += LINES_TOGETHER) >= b.out_height) {
      p = 0, prime = PRIME;
      if (++chunk == b.chunks) chunk = 0, ++n;
    }
  }
  TW_DEVICE int first_row(const Problem& b) const {  // of those that this step brings
    return (p - prime * LINES_TOGETHER) * STRIDE_H - b.padding_h + R - STRIDE_H;
  }
};
struct Lines {
  int first, end, steps;
  TW_DEVICE Lines(const Problem& b) {
    first = (int)((long long)b.lines * blockIdx.x / b.slices);
    end = (int)((long long)b.lines * (blockIdx.x + 1) / b.slices);
    const int column = (b.out_height + LINES_TOGETHER - 1) / LINES_TOGETHER;
    steps = end - first + PRIME * ((end - 1) / column - first / column + 1);
  }
};

TW_DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
// Asynchronous copies of BYTES; zeros where there is nothing.
template <int BYTES> TW_DEVICE void copy(u32 to, const u16* from, bool there) {
  if constexpr (BYTES == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(BYTES), "r"(there ? BYTES : 0) : "memory");
}
TW_DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT> TW_DEVICE void wait_for_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory"); }

TW_DEVICE void load_transposed(u32 (&r)[4], u32 from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(from) : "memory");
}
TW_DEVICE void multiply(float4& d, const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." OPERAND "." OPERAND ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(d.x), "+f"(d.y), "+f"(d.z), "+f"(d.w)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// PIXELS x FEATURES halves, as [pixel][feature], eight at a time, by THREADS threads. A thread keeps to its
// features, so that from one of its pixels to the next addresses differ by a constant.
//
// there: (pixel) -> whether it exists; `wide`: whether the thread's features do; `anywhere`: an address
// that can be read, for copies of nothing.
template <int THREADS, int PIXELS, int STRIDE, class There>
TW_DEVICE void copy_pixels(int thread, u32 to, const u16* first, const u16* anywhere, int length, bool wide, There there) {
  constexpr int ACROSS = FEATURES / 8, DOWN = THREADS / ACROSS;
  const int pixel = thread / ACROSS, k = thread % ACROSS * 8;
  const u16* from = first + (long long)pixel * length + k;
  const long long step = (long long)DOWN * length;
  to += pixel * STRIDE + k * 2;
  if (THREADS % ACROSS != 0 && pixel >= DOWN) return;
  TW_UNROLL for (int i = 0; i < PIXELS; i += DOWN, from += step) {
    if (i + DOWN > PIXELS && i + pixel >= PIXELS) break;
    const bool read = wide && there(i + pixel);
    copy<16>(to + i * STRIDE, read ? from : anywhere, read);
  }
}
TW_DEVICE int own_features(int thread) { return blockIdx.y * FEATURES + thread % (FEATURES / 8) * 8; }

// A line's chunk of grad_output.
template <int THREADS> TW_DEVICE void copy_grad(int thread, u32 to, const u16* grad, const Problem& b, const Walk& w) {
  if (w.prime > 0) return;
  const int q0 = w.chunk * CHUNK;
  const long long line = ((long long)w.n * b.out_height + w.p) * b.out_width + q0;
  copy_pixels<THREADS, CHUNK, GRAD_STRIDE>(thread, to, grad + line * b.features + blockIdx.y * FEATURES, grad, b.features,
                                           own_features(thread) < b.features, [&](int q) { return q0 + q < b.out_width; });
}
// Where a lane of ldmatrix finds 16 features of 16 pixels, from `k` and `q` on.
TW_DEVICE u32 grad_at(u32 stage, int q, int k) {
  const int lane = threadIdx.x % 32;
  return stage + (q + (lane & 7) + (lane >> 4) * 8) * GRAD_STRIDE + (k + (lane >> 3 & 1) * 8) * 2;
}

// Where the sum in row `row` and column `column` of a fragment (16 x 8) belongs.
struct Place {
  int feature, at;  // at: in the feature's row of the result; BIAS; REST of what is before it in a quad; or NOWHERE
};
enum { NOWHERE = -1, BIAS = -2, REST = -3 };
TW_DEVICE Place place(int warp, int fragment, int row, int column);
// Where sum `i` of those that are not an instruction's lies among fragments.
TW_DEVICE int place_of_sum(int i) {
  const int row = i / 8 % 16, column = i % 8;
  return i / 128 * 128 + (row % 8 * 4 + column / 2) * 4 + row / 8 * 2 + column % 2;
}
// Of element `i` of a fragment's quad.
TW_DEVICE Place place_in_quad(int warp, int fragment, int lane, int i) {
  return place(warp, fragment, lane / 4 + i / 2 * 8, lane % 4 * 2 + i % 2);
}

// 16 pixels' products with ones, summed by themselves. Columns are all the same: the second keeps what the first is rounded by.
TW_DEVICE void add_pixels(float4& bias, const u32 (&a)[4]) {
  constexpr u32 ONES = DTYPE::ONE * 0x10001u;
  float4 few = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  multiply(few, a, ONES, ONES);
  add_exactly(bias.x, bias.y, few.x), add_exactly(bias.z, bias.w, few.z);
}
TW_DEVICE int place_beside_ones(int column) { return column == 0 ? BIAS : FP32 && column == 1 ? REST : NOWHERE; }

// Whether one of a quad's sums belongs anywhere: the others are neither stored nor read.
TW_DEVICE bool belongs(int warp, int fragment, int lane) {
  bool any = false;
  TW_UNROLL for (int i = 0; i < 4; ++i) any |= place_in_quad(warp, fragment, lane, i).at != NOWHERE;
  return any;
}

// The sum of a block's lines for feature k and place `at` in its row of the result, until it is NaN. What lies
// outside x is left out, not multiplied by 0. Each line's pixels are summed by themselves.
template <int GROUP> TW_DEVICE float sum_again(const u16* x, const u16* grad, const Problem& b, int k, int at) {
  const Lines lines(b);
  const int tap = at / GROUP, groups = b.channels / GROUP, c = k / (b.features / groups) * GROUP + at % GROUP;
  const int below = tap / S - b.padding_h, right = tap % S - b.padding_w;
  float sum = 0.0f;
  for (int line = lines.first; line < lines.end && sum == sum; ++line) {
    const Walk w(b, line);
    const int first = w.chunk * CHUNK + (CHUNKS_OF_X ? first_column(b) - tap % S / STRIDE_W : 0);
    const int begin = max(first, 0), end = min(first + CHUNK, b.out_width);
    for (int i = 0; i < IMAGES * LINES_TOGETHER; ++i) {
      const int n = w.n * IMAGES + i / LINES_TOGETHER, p = w.p + i % LINES_TOGETHER, h = p * STRIDE_H + below;
      if (n >= b.images || p >= b.out_height || (unsigned)h >= (unsigned)b.height) continue;
      const u16* g = grad + ((long long)n * b.out_height + p) * b.out_width * b.features + k;
      const u16* pixels = x + ((long long)n * b.height + h) * b.width * b.channels + c;
      float of_line = 0.0f;
      for (int q = begin; q < end; ++q) {
        const int at_x = q * STRIDE_W + right;
        if ((unsigned)at_x < (unsigned)b.width)
          of_line += DTYPE::widen(g[(long long)q * b.features]) * DTYPE::widen(pixels[(long long)at_x * b.channels]);
      }
      sum += of_line;
    }
  }
  return sum;
}

// Zeros around x are multiplied like pixels: beside an infinity of grad_output they make NaN, in sums that
// it is no part of. So what a block's products left as NaN is summed again. LINES_BESIDE: rows of x meet lines
// of zeros beside those of a chunk, too, whatever the padding.
template <int WARPS, int GROUP, bool LINES_BESIDE, int FRAGMENTS>
TW_DEVICE void leave_padding_out(const u16* x, const u16* grad, const Problem& b, float4 (&sums)[FRAGMENTS]) {
  if (!LINES_BESIDE && (b.padding_h | b.padding_w) == 0) return;
  float all = 0.0f;  // NaN if one is
  TW_UNROLL for (int i = 0; i < FRAGMENTS; ++i) all += sums[i].x * sums[i].y + sums[i].z * sums[i].w;
  if (all == all) return;
  // What an index chooses lies in local memory; nothing else is held in registers meanwhile.
  float4 held[FRAGMENTS];
  TW_UNROLL for (int i = 0; i < FRAGMENTS; ++i) held[i] = sums[i];
  TW_ROLLED for (int i = 0; i < FRAGMENTS * 4; ++i) {
    float& sum = ((float*)held)[i];
    const Place to = place_in_quad(threadIdx.x / 32 % WARPS, i / 4, threadIdx.x % 32, i % 4);
    const int k = blockIdx.y * FEATURES + to.feature;
    if (sum != sum && k < b.features && to.at >= 0) sum = sum_again<GROUP>(x, grad, b, k, to.at);
  }
  TW_UNROLL for (int i = 0; i < FRAGMENTS; ++i) sums[i] = held[i];
}

// Sums of a block: shares are added from the last to the first, which writes them to the workspace,
// [tile of features][slice][warp][fragment][lane].
template <int WARPS, int GROUP, bool LINES_BESIDE = false, int FRAGMENTS>
TW_DEVICE void keep(const u16* x, const u16* grad, float* partial, unsigned char* memory, const Problem& b,
                    float4 (&sums)[FRAGMENTS]) {
  release_next();
  const int warp = threadIdx.x / 32 % WARPS, share = threadIdx.x / 32 / WARPS, lane = threadIdx.x % 32;
  float4* shared = (float4*)memory + warp * FRAGMENTS * 32 + lane;
  for (int adding = SHARES - 1; adding > 0; --adding) {
    __syncthreads();
    if (share == adding)
      TW_UNROLL for (int i = 0; i < FRAGMENTS; ++i) shared[i * 32] = sums[i];
    __syncthreads();
    if (share == adding - 1)
      TW_UNROLL for (int i = 0; i < FRAGMENTS; ++i) {
        const float4 v = shared[i * 32];
        sums[i].x += v.x, sums[i].y += v.y, sums[i].z += v.z, sums[i].w += v.w;
      }
  }
  if (share > 0) return;
  leave_padding_out<WARPS, GROUP, LINES_BESIDE>(x, grad, b, sums);
  float4* own = (float4*)partial + (((long long)blockIdx.y * b.slices + blockIdx.x) * WARPS + warp) * FRAGMENTS * 32 + lane;
  TW_UNROLL for (int i = 0; i < FRAGMENTS; ++i)
    if (belongs(warp, i, lane)) own[i * 32] = sums[i];
}

TW_DEVICE void add_quad(float4& sum, float4& rest, const float4& v) {
  if constexpr (FP32) {
    add_exactly(sum.x, rest.x, v.x), add_exactly(sum.y, rest.y, v.y);
    add_exactly(sum.z, rest.z, v.z), add_exactly(sum.w, rest.w, v.w);
  } else {
    sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
  }
}

// A warp adds 32 quads of every eighth slice; the block's first warp adds those of its eight, in
// order, and what the result is added to.
template <int WARPS, int FRAGMENTS>
TW_DEVICE void add_slices(const float* partial, const RESULT::type* into, const RESULT::type* into_bias, RESULT::type* out, RESULT::type* bias, const Problem& b) {
  __shared__ float4 shared[8][32], rests[FP32 ? 8 : 1][32];
  constexpr int QUADS = WARPS * FRAGMENTS * 32;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, fragment = blockIdx.x;
  const float4* from = (const float4*)partial + (long long)blockIdx.y * b.slices * QUADS + fragment * 32 + lane;
  float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f), rest = sum;
  await_previous();
  const int end = belongs(fragment / FRAGMENTS, fragment % FRAGMENTS, lane) ? b.slices : 0;
  constexpr int AT_ONCE = 17;  // a slice for each of 132 SMs in one turn of memory
  for (int first = warp; first < end; first += 8 * AT_ONCE) {
    float4 v[AT_ONCE];
    TW_UNROLL for (int i = 0; i < AT_ONCE; ++i)
      if (first + 8 * i < end) v[i] = __ldcg(from + (long long)(first + 8 * i) * QUADS);
    TW_UNROLL for (int i = 0; i < AT_ONCE; ++i)
      if (first + 8 * i < end) add_quad(sum, rest, v[i]);
  }
  shared[warp][lane] = sum;
  if (FP32) rests[warp][lane] = rest;
  __syncthreads();
  if (warp > 0) return;
  TW_UNROLL for (int i = 1; i < 8; ++i) {
    add_quad(sum, rest, shared[i][lane]);
    if (FP32) {
      const float4 v = rests[i][lane];
      rest.x += v.x, rest.y += v.y, rest.z += v.z, rest.w += v.w;
    }
  }
  const float sums[4] = {sum.x, sum.y, sum.z, sum.w}, left[4] = {rest.x, rest.y, rest.z, rest.w};
  TW_UNROLL for (int i = 0; i < 4; ++i) {
    const Place to = place_in_quad(fragment / FRAGMENTS, fragment % FRAGMENTS, lane, i);
    const int k = blockIdx.y * FEATURES + to.feature;
    if (k >= b.features || to.at == NOWHERE || (FP32 && to.at == REST)) continue;
    float value = sums[i];
    if constexpr (FP32) {
      const bool two = i % 2 == 0 && place_in_quad(fragment / FRAGMENTS, fragment % FRAGMENTS, lane, i + 1).at == REST;
      value = joined(value, two ? left[i] + sums[i + 1] : left[i]);
    }
    if (to.at == BIAS) {
      if (bias) bias[k] = RESULT::narrow(into_bias ? value + RESULT::widen(into_bias[k]) : value);
      continue;
    }
    const long long at = (long long)k * b.row_length + to.at;
    out[at] = RESULT::narrow(into ? value + RESULT::widen(into[at]) : value);
  }
}
