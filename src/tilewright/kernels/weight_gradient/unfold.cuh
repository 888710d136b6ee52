// Rows of x for kernels of few channels, NHWC: a network's first layer.
//
// Along a row of x the S taps of a pixel are S * C neighbouring numbers, and the next pixel's begin
// STRIDE_W * C further on. Each row is unfolded once, into [pixel][tap and channel], and then meets up
// to R rows of grad_output. A column of ones beside the taps gives the gradient of the bias.
//
// Defined before this text, besides what weight_grad_rows.cuh needs: C, and COPY_BYTES, which rows of
// x are multiples of.

constexpr int TAPS = S * C;                     // columns of one filter row
constexpr int OCTETS = (TAPS + 7) / 8;          // eight columns at a time are multiplied
constexpr int PIXEL_BYTES = (OCTETS | 1) * 16;  // an odd number of 16 bytes: no two of eight share banks
constexpr int ROW_BYTES = CHUNK * PIXEL_BYTES;
constexpr int COPY = COPY_BYTES / 2;            // halves
constexpr int RAW = ((CHUNK - 1) * STRIDE_W * C + OCTETS * 8 + 2 + COPY + 7) / 8 * 8;  // halves of a row as it is in x

// What a chunk of a row begins with, in halves from the row's begin, rounded down to what is copied.
TW_DEVICE int raw_begin(const Problem& b, int chunk) {
  return (chunk * CHUNK * STRIDE_W - b.padding_w) * C & ~(COPY - 1);
}

template <int THREADS> TW_DEVICE void copy_rows(int thread, u32 to, const u16* x, const Problem& b, const Walk& w) {
  const int begin = raw_begin(b, w.chunk), length = b.width * C, h = w.first_row(b);
  TW_ROLLED for (int i = thread; i < STRIDE_H * (RAW / COPY); i += THREADS) {
    const int row = i / (RAW / COPY), at = i % (RAW / COPY) * COPY, from = begin + at;
    const bool there = (unsigned)(h + row) < (unsigned)b.height && (unsigned)from < (unsigned)length;
    const long long source = ((long long)w.n * b.height + h + row) * length + from;
    copy<COPY_BYTES>(to + (row * RAW + at) * 2, x + (there ? source : 0), there);
  }
}

// From rows as they are in x to rows of pixels, each with all its taps.
template <int THREADS> TW_DEVICE void unfold(int thread, unsigned char* ring, const unsigned char* raw, const Problem& b, int chunk) {
  const int shift = (chunk * CHUNK * STRIDE_W - b.padding_w) * C - raw_begin(b, chunk);
  const int count = b.out_width - chunk * CHUNK;
  TW_ROLLED for (int i = thread; i < STRIDE_H * CHUNK; i += THREADS) {
    const int row = i / CHUNK, q = i % CHUNK, at = q * STRIDE_W * C + shift;
    const u32* from = (const u32*)(raw + row * RAW * 2) + at / 2;
    u32* to = (u32*)(ring + row * ROW_BYTES + q * PIXEL_BYTES);
    if (q >= count) {  // no pixel, whatever x holds
      TW_UNROLL for (int j = 0; j < OCTETS; ++j) *(uint4*)(to + j * 4) = make_uint4(0, 0, 0, 0);
      continue;
    }
    u32 low = from[0];
    TW_UNROLL for (int j = 0; j < OCTETS; ++j) {
      u32 words[4];
      TW_UNROLL for (int k = 0; k < 4; ++k) {
        const u32 high = from[j * 4 + k + 1];
        words[k] = __funnelshift_r(low, high, at % 2 * 16);
        low = high;
        const int first = (j * 4 + k) * 2;
        if (first == TAPS) words[k] = DTYPE::ONE;
        if (first + 1 == TAPS) words[k] = words[k] & 0xffff | (u32)DTYPE::ONE << 16;
      }
      *(uint4*)(to + j * 4) = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
}

// The column of ones. Where sums keep fp32 each line is summed by itself, and added to two numbers for each feature, which
// lie in shared memory: registers are few. A kernel's `Ones` tells which lanes have sums of it, of which features, and
// where among those they hold.
template <class Ones> struct Bias {
  static TW_DEVICE float2& of(int i) {
    __shared__ float2 features[PAIRED ? SHARES * FEATURES : 1];
    return features[Ones::feature(i)];
  }
  static TW_DEVICE void begin() {
    if (!PAIRED || !Ones::here()) return;
    TW_UNROLL for (int i = 0; i < Ones::COUNT; ++i) of(i) = make_float2(0.0f, 0.0f);
  }
  template <class Sums> static TW_DEVICE void take_line(Sums& sums) {
    if (!PAIRED || !Ones::here()) return;
    TW_UNROLL for (int i = 0; i < Ones::COUNT; ++i) {
      float& sum = Ones::among(sums, i);
      float2 two = of(i);
      asm volatile("" : "+f"(sum)::"memory");
      add_exactly(two.x, two.y, sum), sum = 0.0f;
      of(i) = two;
    }
  }
  template <class Sums> static TW_DEVICE void give_back(Sums& sums) {
    if (!PAIRED || !Ones::here()) return;
    TW_UNROLL for (int i = 0; i < Ones::COUNT; ++i) Ones::among(sums, i) = joined(of(i).x, of(i).y);
  }
};
