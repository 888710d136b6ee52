// The weight gradient of a depthwise convolution, NHWC: plain multiply-adds in one pass over x and
// grad_output.
//
// A thread owns two neighbouring channels and walks stretches of the output's rows. Along one it keeps
// the last values of grad_output that still meet a tap; every pixel of x is loaded once for each of
// the R rows of the filter and multiplied with all of them: with u = w + padding = stride * m + e, tap
// t of a row meets output m - j where t * dilation = e + stride * j. What lies outside x or the output is left out, not multiplied
// by 0. Sums are added over the block's threads of one channel, then over slices, in fixed order.
//
// Defined before this text: DTYPE f16 or bf16, RESULT (these or f32), R, S, STRIDE_W, DILATION_H and _W,
// PAIRED, 1 where two channels are read by one aligned access, THREADS, MIN_BLOCKS, and BIAS, 1 where
// the sums of grad_output are asked for beside the taps'.

typedef unsigned short u16;
typedef unsigned int u32;

#define TW_DEVICE __device__ __forceinline__
#define TW_UNROLL _Pragma("unroll")

struct f16 {
  typedef u16 type;
  static TW_DEVICE float2 widen(u32 w) {
    float2 v;
    asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.f32.f16 %0, l;\ncvt.f32.f16 %1, h;\n}" : "=f"(v.x), "=f"(v.y) : "r"(w));
    return v;
  }
  static TW_DEVICE u16 narrow(float a) { u16 h; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(a)); return h; }
  static TW_DEVICE float value(u16 h) { return widen(h).x; }
};
struct bf16 {
  typedef u16 type;
  static TW_DEVICE float2 widen(u32 w) { return make_float2(__uint_as_float(w << 16), __uint_as_float(w & 0xffff0000u)); }
  static TW_DEVICE u16 narrow(float a) { u16 h; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(a)); return h; }
  static TW_DEVICE float value(u16 h) { return widen(h).x; }
};
struct f32 {
  typedef float type;
  static TW_DEVICE float narrow(float a) { return a; }
  static TW_DEVICE float value(float a) { return a; }
};

constexpr int TAPS = R * S;
constexpr int SUMS = TAPS + BIAS;                   // of a channel; the bias's is the last
constexpr int KEPT = (S - 1) * DILATION_W / STRIDE_W + 1;  // values of grad_output that meet a pixel of x

struct alignas(64) Problem {  // 128 bytes, passed by value
  int channels, pairs;        // C; pairs of channels in a block
  int walks;                  // N * P * stretches
  int out_height, out_width, height, width;
  int stride_h, padding_h, padding_w;
  int slices;
  int stretches, stretch;     // of a row; outputs in each
};

// A thread's channels of one pixel; of an odd number of channels the last thread has one.
TW_DEVICE float2 load(const u16* pixel, bool two) {
  if (PAIRED) return DTYPE::widen(__ldg((const u32*)pixel));
  return DTYPE::widen(__ldg(pixel) | (two ? (u32)__ldg(pixel + 1) << 16 : 0u));
}

// Outputs m - j for j < KEPT meet the pixels of x from STRIDE_W * m on. GUARDED: some of them may not
// be among the `count` from `begin` on.
template <bool GUARDED>
TW_DEVICE void meet(float2 (&sums)[SUMS], const float2 (&kept)[KEPT], const u16* row, bool two, int rows_in,
                    const Problem& p, int m, int begin, int count) {
  TW_UNROLL for (int e = 0; e < STRIDE_W; ++e) {
    const int w = STRIDE_W * m + e - p.padding_w;
    if ((unsigned)w >= (unsigned)p.width) continue;
    TW_UNROLL for (int r = 0; r < R; ++r) {
      if (!(rows_in >> r & 1)) continue;
      const float2 v = load(row + ((long long)r * DILATION_H * p.width + w) * p.channels, two);
      TW_UNROLL for (int t = 0; t < S; ++t) {
        const int j = (t * DILATION_W - e) / STRIDE_W;
        if (t * DILATION_W != e + STRIDE_W * j) continue;
        if (GUARDED && (unsigned)(m - j - begin) >= (unsigned)count) continue;
        float2& sum = sums[r * S + t];
        sum.x = fmaf(v.x, kept[j].x, sum.x);
        sum.y = fmaf(v.y, kept[j].y, sum.y);
      }
    }
  }
}

TW_DEVICE void walk(float2 (&sums)[SUMS], const u16* x, const u16* grad, bool two, const Problem& p, int number) {
  const int row = number / p.stretches, begin = (number - row * p.stretches) * p.stretch;
  const int count = min(p.stretch, p.out_width - begin), end = begin + count;
  const int n = row / p.out_height, h = (row - n * p.out_height) * p.stride_h - p.padding_h;
  int rows_in = 0;
  TW_UNROLL for (int r = 0; r < R; ++r) rows_in |= ((unsigned)(h + r * DILATION_H) < (unsigned)p.height) << r;
  x += ((long long)n * p.height + h) * p.width * p.channels;
  grad += (long long)row * p.out_width * p.channels;
  float2 kept[KEPT] = {};
  int m = begin;
  const auto next = [&]() {
    TW_UNROLL for (int j = KEPT - 1; j > 0; --j) kept[j] = kept[j - 1];
    if (m >= end) return;
    kept[0] = load(grad + (long long)m * p.channels, two);
    if (BIAS) sums[SUMS - 1].x += kept[0].x, sums[SUMS - 1].y += kept[0].y;
  };
  const int full = min(begin + KEPT - 1, end);
  for (; m < full; ++m) next(), meet<true>(sums, kept, x, two, rows_in, p, m, begin, count);
  _Pragma("unroll 4") for (; m < end; ++m) next(), meet<false>(sums, kept, x, two, rows_in, p, m, begin, count);
  for (; m < end + KEPT - 1; ++m) next(), meet<true>(sums, kept, x, two, rows_in, p, m, begin, count);
}

// Blocks: x slices of the walks, y blocks of channels. Sums go to partial[slice][tap][channel].
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
weight_grad(const u16* x, const u16* grad, float* partial, const __grid_constant__ Problem p) {
  __shared__ float2 shared[8][THREADS];
  const int together = THREADS / p.pairs, sub = threadIdx.x / p.pairs;  // walks at once
  const int pair = blockIdx.y * p.pairs + threadIdx.x % p.pairs, slice = blockIdx.x;
  const bool works = sub < together && 2 * pair < p.channels, two = 2 * pair + 1 < p.channels;
  float2 sums[SUMS] = {};
  const int first = (int)((long long)p.walks * slice / p.slices), end = (int)((long long)p.walks * (slice + 1) / p.slices);
  if (works)
    for (int i = first + sub; i < end; i += together) walk(sums, x + 2 * pair, grad + 2 * pair, two, p, i);
  float* own = partial + (long long)slice * SUMS * p.channels + 2 * pair;
  TW_UNROLL for (int tap = 0; tap < SUMS; tap += 8) {
    __syncthreads();
    TW_UNROLL for (int i = 0; i < 8 && tap + i < SUMS; ++i) shared[i][threadIdx.x] = sums[tap + i];
    __syncthreads();
    if (works && sub == 0)
      TW_UNROLL for (int i = 0; i < 8 && tap + i < SUMS; ++i) {
        float2 total = shared[i][threadIdx.x];
        for (int other = 1; other < together; ++other) {
          const float2 v = shared[i][threadIdx.x + other * p.pairs];
          total.x += v.x, total.y += v.y;
        }
        float* to = own + (long long)(tap + i) * p.channels;
        if (PAIRED) {
          *(float2*)to = total;
        } else {
          to[0] = total.x;
          if (two) to[1] = total.y;
        }
      }
  }
}

// A warp adds 32 channels of one tap for every eighth slice; the block's eight warps, in order. The
// sum may be added to another gradient.
extern "C" __global__ void __launch_bounds__(256)
add_all_slices(const float* partial, const RESULT::type* into, const RESULT::type* into_bias, RESULT::type* out,
               RESULT::type* bias, const __grid_constant__ Problem p) {
  constexpr bool FP32 = sizeof(RESULT::type) == 4;  // slices are added without rounding
  __shared__ float shared[8][32], rests[FP32 ? 8 : 1][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int c = blockIdx.x * 32 + lane, tap = blockIdx.y;
  float sum = 0.0f, rest = 0.0f;
  const auto add = [&](float v) {
    if constexpr (FP32) add_exactly(sum, rest, v);
    else sum += v;
  };
  if (c < p.channels)
    _Pragma("unroll 8") for (int s = warp; s < p.slices; s += 8)
      add(__ldcg(partial + ((long long)s * SUMS + tap) * p.channels + c));
  shared[warp][lane] = sum;
  if (FP32) rests[warp][lane] = rest;
  __syncthreads();
  if (warp > 0 || c >= p.channels) return;
  TW_UNROLL for (int i = 1; i < 8; ++i) {
    add(shared[i][lane]);
    if (FP32) rest += rests[i][lane];
  }
  if (FP32) sum = joined(sum, rest);
  if (tap == TAPS) {
    bias[c] = RESULT::narrow(into_bias ? sum + RESULT::value(into_bias[c]) : sum);
  } else {
    const int at = c * TAPS + tap;
    out[at] = RESULT::narrow(into ? sum + RESULT::value(into[at]) : sum);
  }
}
