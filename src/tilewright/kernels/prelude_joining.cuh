// What generated CUDA kernels need to work together: reductions over threads, rows that are copied
// ahead, barriers, and clusters. It follows prelude.cuh.

// ---- reductions: first over the elements of a thread, then over the threads of a row ------------

struct Sum {
  template <class T> static TW_DEVICE T start() { return (T)0; }
  template <class T> static TW_DEVICE T join(T a, T b) { return a + b; }
};
struct Prod {
  template <class T> static TW_DEVICE T start() { return (T)1; }
  template <class T> static TW_DEVICE T join(T a, T b) { return a * b; }
};
struct Max {
  template <class T> static TW_DEVICE T start() { return (T)-TW_INFINITY; }
  template <class T> static TW_DEVICE T join(T a, T b) { return maximum(a, b); }
  template <class H> static TW_DEVICE u32 join_pair(u32 a, u32 b) { return half_max(H{}, a, b); }
};
struct Min {
  template <class T> static TW_DEVICE T start() { return (T)TW_INFINITY; }
  template <class T> static TW_DEVICE T join(T a, T b) { return minimum(a, b); }
  template <class H> static TW_DEVICE u32 join_pair(u32 a, u32 b) { return half_min(H{}, a, b); }
};

template <class OP, class T, int N> TW_DEVICE T fold(Vec<T, N> x) {
  // A tree over the vector: short dependency chains, and the order is fixed.
  TW_UNROLL for (int step = 1; step < N; step *= 2) {
    TW_UNROLL for (int i = 0; i + step < N; i += 2 * step) x.v[i] = OP::join(x.v[i], x.v[i + step]);
  }
  return x.v[0];
}

// The greatest or least of halves, two at a time.
template <class OP, class H, int N> TW_DEVICE H fold_pairs(Vec<H, N> x) {
  TW_UNROLL for (int step = 1; step < x.WORDS; step *= 2) {
    TW_UNROLL for (int i = 0; i + step < x.WORDS; i += 2 * step) x.w[i] = OP::template join_pair<H>(x.w[i], x.w[i + step]);
  }
  return H{(u16)(N > 1 ? OP::template join_pair<H>(x.w[0], x.w[0] >> 16) : x.w[0])};
}

// Of the elements of columns 0 to width - 1 only.
template <class OP, class T, int N> TW_DEVICE T fold_within(Vec<T, N> x, int column, int width, bool whole) {
  if (!whole) {
    TW_UNROLL for (int i = 0; i < N; ++i) if ((u32)(column + i) >= (u32)width) x.v[i] = OP::template start<T>();
  }
  return fold<OP>(x);
}

// The sum of where(index == positions, x, 0).
template <class I, class T, int N> TW_DEVICE T fold_named(Vec<T, N> x, I index, Vec<I, N> positions) {
  T found = Sum::start<T>();
  const auto place = place_named(index, positions);
  if (place < N) {
    TW_UNROLL for (int i = 0; i < N; ++i) if (place == i) found = x.v[i];
  }
  return found;
}
template <class I, class T, int N> TW_DEVICE T fold_named_within(Vec<T, N> x, I index, Vec<I, N> positions, int column, int width, bool) {
  T found = Sum::start<T>();
  const auto place = place_named(index, positions);
  if (place < N && (u32)(column + (int)place) < (u32)width) {
    TW_UNROLL for (int i = 0; i < N; ++i) if (place == i) found = x.v[i];
  }
  return found;
}

template <class OP, class T, int N> TW_DEVICE Vec<T, N> join_each(Vec<T, N> a, Vec<T, N> b) {
  TW_UNROLL for (int i = 0; i < N; ++i) a.v[i] = OP::join(a.v[i], b.v[i]);
  return a;
}

template <class OP, class T> TW_DEVICE T join_each(T a, T b) { return OP::join(a, b); }

template <class OP, class T, int N> TW_DEVICE Vec<T, N> join_if(bool counts, Vec<T, N> a, Vec<T, N> b) {
  TW_UNROLL for (int i = 0; i < N; ++i) a.v[i] = counts ? OP::join(a.v[i], b.v[i]) : a.v[i];
  return a;
}
template <class OP, class T> TW_DEVICE T join_if(bool counts, T a, T b) { return counts ? OP::join(a, b) : a; }

template <class OP, int THREADS, class T> TW_DEVICE T reduce_by_shuffles(T x) {
  TW_UNROLL for (int mask = THREADS / 2; mask > 0; mask /= 2)
    x = OP::join(x, __shfl_xor_sync(0xffffffffu, x, mask));
  return x;
}
// One instruction finds the greatest or least integer of a warp. Of numbers as integers in the same
// order, any NaN is beyond all others.
TW_DEVICE int in_order(float x, int nan) {
  const int bits = __float_as_int(x);
  return x != x ? nan : bits < 0 ? bits ^ 0x7fffffff : bits;
}
TW_DEVICE float out_of_order(int x) { return __int_as_float(x < 0 ? x ^ 0x7fffffff : x); }
template <class OP, class T> TW_DEVICE T reduce_whole(OP, T x) { return reduce_by_shuffles<OP, 32>(x); }
TW_DEVICE float reduce_whole(Max, float x) { return out_of_order(__reduce_max_sync(0xffffffffu, in_order(x, 0x7fffffff))); }
TW_DEVICE float reduce_whole(Min, float x) { return out_of_order(__reduce_min_sync(0xffffffffu, in_order(x, ~0x7fffffff))); }

template <class OP, int THREADS, class T> TW_DEVICE T reduce_warp(T x) {
  return THREADS == 32 ? reduce_whole(OP{}, x) : reduce_by_shuffles<OP, THREADS>(x);
}

// What all threads of a block hold, in a fixed order; thread 0 has the result. `shared` has room
// for one value per warp.
template <class OP, int THREADS, class T> TW_DEVICE T join_block(T x, T* shared) {
  x = reduce_warp<OP, 32>(x);
  if (THREADS == 32) return x;
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
  __syncthreads();
  if (threadIdx.x < 32) {
    x = threadIdx.x < THREADS / 32 ? shared[threadIdx.x] : OP::template start<T>();
    x = reduce_warp<OP, 32>(x);
  }
  __syncthreads();
  return x;
}

template <class V> TW_DEVICE V from_other_lane(V v, int mask) {
  union { V value; u32 words[(sizeof(V) + 3) / 4]; } bits = {v};
  TW_UNROLL for (u32& word : bits.words) word = __shfl_xor_sync(0xffffffffu, word, mask);
  return bits.value;
}
// What the SHARES threads of each of LANES lanes hold, in a fixed order; share 0 has the result, or
// all have: by shuffles within warps, which then halve, and the last eight join in turn, since every
// halving takes two barriers. `shared` has room for half of the warps' values, or for seven.
template <class OP, int LANES, int SHARES, bool ALL, class V> TW_DEVICE V join_shares(V v, V* shared, int x, int y) {
  constexpr int OF_WARP = LANES < 32 ? 32 / LANES : 1, MANY = SHARES / OF_WARP, FEW = MANY < 8 ? MANY : 8;
  TW_UNROLL for (int mask = 16; mask >= LANES; mask /= 2) v = join_each<OP>(v, from_other_lane(v, mask));
  const int z = y / OF_WARP;
  const bool first = y % OF_WARP == 0;
  TW_UNROLL for (int half = MANY / 2; half >= FEW; half /= 2) {
    if (first && z >= half && z < 2 * half) shared[(z - half) * LANES + x] = v;
    __syncthreads();
    if (z < half) v = join_each<OP>(v, shared[z * LANES + x]);
    __syncthreads();
  }
  if (FEW > 1) {
    if (first && z > 0 && z < FEW) shared[(z - 1) * LANES + x] = v;
    __syncthreads();
    TW_UNROLL for (int i = 1; i < FEW; ++i) if (y == 0) v = join_each<OP>(v, shared[(i - 1) * LANES + x]);
    __syncthreads();
  }
  if (ALL) {
    if (y == 0) shared[x] = v;
    __syncthreads();
    v = shared[x];
    __syncthreads();
  }
  return v;
}

// How many elements of a row lanes side by side hold, `first` the first vector of the first of them:
// in TURNS turns, STEP vectors apart, of which every lane takes part in the first FULL. Warps follow
// one another WARP_STEP vectors apart.
template <int VECTOR, int VECTORS, int TURNS, int FULL, int STEP, int WARP_STEP> struct Shares {
  static constexpr bool EVEN = FULL == TURNS;
  static TW_DEVICE int of(int first, int lanes) {
    int held = FULL * lanes;
    TW_UNROLL for (int k = FULL; k < TURNS; ++k) {
      const int left = VECTORS - first - k * STEP;
      held += left <= 0 ? 0 : left < lanes ? left : lanes;
    }
    return held * VECTOR;
  }
  static TW_DEVICE int of_warp(int warp) { return of(warp * WARP_STEP, 32); }
};

// Mean and m2 of COUNT warps' partials as one (Chan, Golub and LeVeque, 1983), without a
// division: all counts are known. Lanes WIDTH apart see the same partials, and find the same bits.
template <class T> struct alignas(2 * sizeof(T)) Moments { T mean, m2; };
template <class SHARES, int COUNT, int WIDTH, class T> TW_DEVICE Moments<T> join_moments(const Moments<T>* partials, T count, T inverse) {
  constexpr bool FEW = COUNT <= 8;
  const int first = FEW ? 0 : threadIdx.x % WIDTH, step = FEW ? 1 : WIDTH;
  T sum = 0, m2 = 0;
  TW_UNROLL for (int i = first; i < COUNT; i += step) sum += (T)SHARES::of_warp(i) * partials[i].mean;
  const T mean = average(FEW ? sum : reduce_warp<Sum, WIDTH>(sum), count, inverse);
  TW_UNROLL for (int i = first; i < COUNT; i += step) {
    const T apart = partials[i].mean - mean;
    m2 += partials[i].m2 + (T)SHARES::of_warp(i) * apart * apart;
  }
  return {mean, FEW ? m2 : reduce_warp<Sum, WIDTH>(m2)};
}

// The sum and m2 of a lane with one vector more, the `turn` vectors before being as long. Of two sums
// that hold a and b elements, m2 grows by (b * sum_a - a * sum_b)^2 / (a * b * (a + b)).
template <class T, int N> TW_DEVICE void add_vector(T& sum, T& m2, const Vec<T, N>& x, int turn) {
  const T added = fold<Sum>(x);
  const auto apart = sub(x, added * (T)(1.0 / N));
  m2 += fold<Sum>(mul(apart, apart));
  if (turn > 0) {
    const T off = sum - (T)turn * added;
    m2 += off * ((T)(1.0 / ((double)N * turn * (turn + 1))) * off);
  }
  sum += added;
}

// Mean and m2 of THREADS lanes, from each lane's sum and m2. That m2 grows waits for sums only, whose
// shuffles run ahead. Weighted once for each half, nothing overflows that need not.
constexpr double ROOTS_OF_HALVES[5] = {1, 0.7071067811865476, 0.5, 0.3535533905932738, 0.25};  // of 2^-i
template <int THREADS, class T> struct Weights { T own[5], other[5]; };
template <class SHARES, int THREADS, class T> TW_DEVICE Weights<THREADS, T> weights_of_lanes(int first) {
  Weights<THREADS, T> found = {};
  const int start = first & -THREADS, most = SHARES::of(start, 1), held = SHARES::of(start, THREADS);
  if (held == 0) return found;
  const T one = reciprocal_root((T)(2 * most));
  TW_UNROLL for (int i = 0; 1 << i < THREADS; ++i) found.own[i] = found.other[i] = one * (T)ROOTS_OF_HALVES[i];
  if (held == most * THREADS) return found;
  TW_UNROLL for (int i = 0; 1 << i < THREADS; ++i) {
    const int lanes = 1 << i, mine = first & -lanes;
    const T a = SHARES::of(mine, lanes), b = SHARES::of(mine ^ lanes, lanes);
    const T scale = a * b > 0 ? reciprocal_root(a * b * (a + b)) : 0;
    found.own[i] = b * scale, found.other[i] = a * scale;
  }
  return found;
}
TW_DEVICE float quick_inverse(float x) { return __fdividef(1.0f, x); }
TW_DEVICE double quick_inverse(double x) { return 1 / x; }
TW_DEVICE float rounded_product(float a, float b) { return __fmul_rn(a, b); }
TW_DEVICE double rounded_product(double a, double b) { return __dmul_rn(a, b); }
template <class SHARES, int THREADS, class T>
TW_DEVICE Moments<T> join_lanes(T sum, T m2, T count, T inverse, const Weights<THREADS, T>& weights) {
  TW_UNROLL for (int i = 0; 1 << i < THREADS; ++i) {
    const T other = __shfl_xor_sync(0xffffffffu, sum, 1 << i);
    T grown;
    if (SHARES::EVEN) {
      const T apart = sum - other;
      grown = apart * ((T)(0.5 / SHARES::of(0, 1 << i)) * apart);
    } else {  // by rounded products: both halves find the same bits
      const T apart = rounded_product(weights.own[i], sum) - rounded_product(weights.other[i], other);
      grown = apart * apart;
    }
    m2 = (m2 + __shfl_xor_sync(0xffffffffu, m2, 1 << i)) + grown;
    sum += other;
  }
  return {average(sum, count, inverse), m2};
}

// What was rounded of the mean, `off` and `squares` the sums of deviations from it and of their
// squares. What is left of these may be their own rounding.
TW_DEVICE void correct(Moments<float>& found, float off, float squares, float count, float inverse) {
  const float missed = off * inverse, rest = squares - missed * off;
  found = {found.mean + missed, rest < count * 0x1p-23f * squares ? 0 : rest};
}

// The greatest of COUNT partials, and the sum of exponentials below it of all of them (Milakov
// and Gimelshein, 2018). HOW relates a partial's greatest value to the row's, as its terms are related
// to the partial's. A partial without any term that counts leaves NaN, or nothing, below -infinity.
template <class T> struct alignas(2 * sizeof(T)) Scaled { T greatest, sum; };
template <class HOW, int COUNT, int WIDTH, class T> TW_DEVICE Scaled<T> join_scaled(const Scaled<T>* partials) {
  constexpr bool FEW = COUNT <= 8;
  const int first = FEW ? 0 : threadIdx.x % WIDTH, step = FEW ? 1 : WIDTH;
  T greatest = Max::start<T>(), sum = 0;
  TW_UNROLL for (int i = first; i < COUNT; i += step) greatest = maximum(greatest, partials[i].greatest);
  if (!FEW) greatest = reduce_warp<Max, WIDTH>(greatest);
  TW_UNROLL for (int i = first; i < COUNT; i += step) {
    const T of_row = partials[i].sum * HOW::factor(partials[i].greatest, greatest);
    sum += partials[i].greatest == Max::start<T>() && partials[i].greatest != greatest ? 0 : of_row;
  }
  return {greatest, FEW ? sum : reduce_warp<Sum, WIDTH>(sum)};
}
struct Exact {
  template <class T> static TW_DEVICE T factor(T partial, T row) { return exponential(partial - row); }
};
struct Quick {
  static TW_DEVICE float factor(float partial, float row) { return quick_exponential(partial - row); }
};
struct Raised {
  static TW_DEVICE float factor(float partial, float row) { return quick_exponential((partial - TW_RAISE) - (row - TW_RAISE)); }
};
struct Shifted {  // by rounded products: neither may become part of a fused multiply-add
  static TW_DEVICE float factor(float partial, float row) { return power_of_two(__fmul_rn(partial, TW_LOG2_E) - __fmul_rn(row, TW_LOG2_E)); }
};

// ---- tensor cores as adders: a warp's halves and their squares, exact products summed in fp32 ------

// Eight rows of the warp's values above eight rows of ones, times the values: the diagonal of the
// upper half holds sums of squares, each row of the lower half the sums of the values. Two of them,
// taken in turn, so that one product need not wait for the one before.
struct Gram { float c[2][4]; };
template <class H> TW_DEVICE void multiply(float (&c)[4], u32 x);
template <class H> TW_DEVICE void multiply(float (&c)[4], u32 x, u32 y);
#define TW_GRAM(H, NAME, ONES)                                                                       \
  template <> TW_DEVICE void multiply<H>(float (&c)[4], u32 x) {                                     \
    asm("mma.sync.aligned.m16n8k8.row.col.f32." NAME "." NAME ".f32 {%0, %1, %2, %3}, {%4, %5}, {%4}, {%0, %1, %2, %3};" \
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(x), "r"(ONES));                       \
  }                                                                                                  \
  template <> TW_DEVICE void multiply<H>(float (&c)[4], u32 x, u32 y) {                              \
    asm("mma.sync.aligned.m16n8k16.row.col.f32." NAME "." NAME ".f32 {%0, %1, %2, %3}, {%4, %6, %5, %6}, {%4, %5}, {%0, %1, %2, %3};" \
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(x), "r"(y), "r"(ONES));               \
  }
TW_GRAM(f16, "f16", 0x3c003c00u)
TW_GRAM(bf16, "bf16", 0x3f803f80u)

template <class H, int N> TW_DEVICE void add_halves(Gram& g, int turn, const Vec<H, N>& x) {
  if constexpr (N == 2) multiply<H>(g.c[turn % 2], x.w[0]);
  else { TW_UNROLL for (int i = 0; i < N / 2; i += 2) multiply<H>(g.c[(i / 2 + turn) % 2], x.w[i], x.w[i + 1]); }
}
// The warp's moments; false where the mean is so far from zero that m2 lost digits.
TW_DEVICE bool moments_of(const Gram& g, float count, float inverse, Moments<float>& found) {
  const int row = threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
  const float diagonal = row == column ? g.c[0][0] + g.c[1][0] : row == column + 1 ? g.c[0][1] + g.c[1][1] : 0.0f;
  const float squares = reduce_warp<Sum, 32>(diagonal);
  const float sum = reduce_warp<Sum, 4>((g.c[0][2] + g.c[1][2]) + (g.c[0][3] + g.c[1][3]));
  found = {average(sum, count, inverse), squares - sum * (sum * inverse)};
  return squares <= 4.0f * found.m2 && squares < TW_INFINITY;
}

// ---- barriers in shared memory that open when the bytes announced for them have arrived ------------

TW_DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
TW_DEVICE void barrier_init(u64* b) { asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(b)) : "memory"); }
TW_DEVICE void barrier_expect(u64* b, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(b)), "r"(bytes) : "memory");
}
TW_DEVICE void barrier_wait(u64* b, u32 parity) {
  asm volatile(
      "{\n.reg .pred open;\nagain:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 open, [%0], %1;\n"
      "@open bra done;\nbra again;\ndone:\n}" ::"r"(shared_address(b)), "r"(parity) : "memory");
}
// All threads of the block know the barriers that some of them made, and so does the copy engine.
TW_DEVICE void barriers_known() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  __syncthreads();
}
// By the copy engine: 16-byte aligned, a multiple of 16 bytes; the barrier hears of them.
TW_DEVICE void copy_bulk(void* to, const void* from, u32 bytes, u64* arrived) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(arrived)) : "memory");
}

// ---- a queue of rows on their way: each thread copies, and later reads, slots of its own -----------

template <int BYTES> TW_DEVICE void copy_async(u32 to, const void* from) {
  if constexpr (BYTES == 16) asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
  else asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(BYTES) : "memory");
}
template <int N, int BYTES, class T> TW_DEVICE void enqueue(Vec<T, N>* slot, const T* p) {
  const auto to = shared_address(slot);
  TW_UNROLL for (int i = 0; i < N * (int)sizeof(T) / BYTES; ++i) copy_async<BYTES>(to + i * BYTES, (const u8*)p + i * BYTES);
}
// Where `left` elements are left of the tensor. A copy that fills up with zeros is no way out: memcheck
// tells of a read of all bytes.
template <int N, int BYTES, class T> TW_DEVICE void enqueue(Vec<T, N>* slot, const T* p, int left) {
  if (left >= N) enqueue<N, BYTES>(slot, p);
  else *slot = load_within<N, BYTES, false>(p, 0, max(left, 0), false);
}
TW_DEVICE void close_batch() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LATER> TW_DEVICE void await_batch() { asm volatile("cp.async.wait_group %0;" ::"n"(LATER) : "memory"); }

// A pointer whose origin the compiler forgets: what is read through it is not kept over a loop.
template <class T> TW_DEVICE const T* afresh(const T* p) { asm volatile("" : "+l"(p)); return p; }
// A number that the compiler takes to come from here, so that nothing computed from it goes ahead.
TW_DEVICE void after_loads(int& x) { asm volatile("" : "+r"(x)); }
// An argument of the kernel, read now: where steps of a loop read two of them as they stand, NVRTC 13.0
// spills for sm_80 under a cap of 40 registers (28 bytes, rows of lerp's gradients that blocks share).
TW_DEVICE float in_register(float x) {
  u32 bits = __float_as_uint(x);
  asm("" : "+r"(bits));
  return __uint_as_float(bits);
}
TW_DEVICE double in_register(double x) { return x; }
// Packed halves whose widened values the compiler forgets: it widens them again where they are used.
template <class H, int N> TW_DEVICE void forget_widened(Vec<H, N>& x) {
  TW_UNROLL for (int i = 0; i < x.WORDS; ++i) asm("" : "+r"(x.w[i]));
}

// The next of `count` turns; after the last one the counter is zero again.
TW_DEVICE u32 take_turn(u32* turns, i64 count) {
  const u32 turn = atomicAdd(turns, 1u);
  if (turn + 1 == count) *turns = 0;
  return turn;
}

// Until so many blocks, which all run at once, have come, for the `times`-th time; what they wrote is
// seen by all of them from then on. The counter is zero before, and again when all have left.
TW_DEVICE void meet(u32* counter, u32 blocks, u32 times = 1) {
  __syncthreads();
  if (threadIdx.x == 0) {
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
    atomicAdd(counter, 1u);
    while (*(volatile u32*)counter < times * blocks) {}
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
  }
  __syncthreads();
}
// In two steps, so that nobody waits for the counter's answer.
TW_DEVICE u32 start_leaving(u32* counter) { return threadIdx.x == 0 ? atomicAdd(counter, 1u) : 0; }
TW_DEVICE void leave(u32* counter, u32 before, u32 blocks, u32 times = 1) {
  if (before == (times + 1) * blocks - 1) *(volatile u32*)counter = 0;
}

// ---- numbers left for another block: a word of zeros, then the number and the sign that it is there

// Both are written and read as one, so that nobody waits until something else has been written. Two
// words that follow one another, aligned to 16 bytes, travel together, each whole in itself.
TW_DEVICE void leave_partial(u64* word, float x) { *(volatile u64*)word = (u64)__float_as_uint(x) << 32 | 1; }
template <int WIDE> TW_DEVICE void read_words(u64* words, const u64* p) {
  if constexpr (WIDE == 2) asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(words[0]), "=l"(words[1]) : "l"(p) : "memory");
  else words[0] = *(const volatile u64*)p;
}
template <int WIDE> TW_DEVICE void write_words(u64* p, const u64* words) {
  if constexpr (WIDE == 2) asm volatile("st.relaxed.gpu.global.v2.u64 [%0], {%1, %2};" ::"l"(p), "l"(words[0]), "l"(words[1]) : "memory");
  else *(volatile u64*)p = words[0];
}
template <int WIDE, int N> TW_DEVICE void leave_partials(u64* p, const Vec<float, N>& x) {
  u64 words[N];
  TW_UNROLL for (int i = 0; i < N; ++i) words[i] = (u64)__float_as_uint(x.v[i]) << 32 | 1;
  TW_UNROLL for (int i = 0; i < N; i += WIDE) write_words<WIDE>(p + i, words + i);
}
// So many words come into L2 while the block that will write them has other work: whoever reads one
// of whose sector L2 has only what was written would wait for memory. Where other things are done by
// one thread, since ptxas would put it off.
template <int MOST> TW_DEVICE void expect_partials(const u64* words, int count) {
  TW_UNROLL for (int i = 0; i < MOST; i += 4) {
    if (i < count) { asm volatile("prefetch.global.L2 [%0];" ::"l"(words + i)); }
  }
}
// Which of COUNT blocks this one is to begin; the last one's turn makes the word zero again. What is
// added to one place by a warp, the compiler would gather first, and wait for.
template <int COUNT> TW_DEVICE u32 take_ticket(u32* tickets) { return atomicInc(tickets, COUNT - 1); }
template <int N> TW_DEVICE bool have_come(const u64 (&words)[N]) {
  bool all = true;
  TW_UNROLL for (int i = 0; i < N; ++i) all = all && (u32)words[i] != 0;
  return all;
}
// What COUNT blocks have left or will leave, `step` words apart: N numbers each, joined in order by
// SHARES threads, of which this one is number `share`. Then the words are zero again.
template <class OP, int COUNT, int SHARES, int N, int WIDE = 1> TW_DEVICE Vec<float, N> take_partials(u64* partials, i64 step, int share) {
  constexpr int EACH = (COUNT + SHARES - 1) / SHARES, MOST = N > 4 ? 1 : 8 / N, BATCH = EACH < MOST ? EACH : MOST;
  const u64 zeros[2] = {};
  Vec<float, N> x = splat<N>(OP::template start<float>());
  for (int first = share; first < COUNT; first += BATCH * SHARES) {
    u64 words[BATCH * N];
    do {
      TW_UNROLL for (int i = 0; i < BATCH * N; i += WIDE) {
        const int p = first + i / N * SHARES;
        if (p < COUNT) read_words<WIDE>(words + i, partials + p * step + i % N);
        else TW_UNROLL for (int e = 0; e < WIDE; ++e) words[i + e] = 1;
      }
    } while (!have_come(words));
    TW_UNROLL for (int i = 0; i < BATCH * N; ++i) {
      const int p = first + i / N * SHARES;
      if (p >= COUNT) break;
      x.v[i % N] = OP::join(x.v[i % N], __uint_as_float((u32)(words[i] >> 32)));
      if (i % WIDE == 0) write_words<WIDE>(partials + p * step + i % N, zeros);
    }
  }
  return x;
}
// One number of each of COUNT blocks, by the lanes of a warp.
template <class OP, int COUNT> TW_DEVICE float join_partials(u64* partials, i64 step) {
  return reduce_warp<OP, 32>(take_partials<OP, COUNT, 32, 1>(partials, step, threadIdx.x % 32).v[0]);
}

TW_DEVICE void group_sync(int group, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "r"(threads) : "memory"); }

// ---- a kernel that starts while the one before it ends -------------------------------------------

TW_DEVICE void release_next() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
TW_DEVICE void await_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// ---- clusters: blocks of neighbouring SMs that see each other's shared memory --------------------

TW_DEVICE u32 cluster_rank() { u32 r; asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return r; }
TW_DEVICE u32 remote_address(const void* local, u32 rank) {
  u32 r; asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(shared_address(local)), "r"(rank)); return r;
}

// In two steps, so that what lies between them need not wait for blocks that begin later: this block
// has made its barriers; the others have. Without the second fence ptxas waits at once.
TW_DEVICE void barriers_made() {
  asm volatile("fence.mbarrier_init.release.cluster;\nbarrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
TW_DEVICE void barriers_ready() { asm volatile("fence.acq_rel.cta;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory"); }
// Store into block `rank`'s copy of `local`, and tell its barrier.
template <class T> TW_DEVICE void store_remote(T* local, u64* barrier, u32 rank, T value) {
  const u32 to = remote_address(local, rank), tell = remote_address(barrier, rank);
  if constexpr (sizeof(T) == 8)
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f64 [%0], %1, [%2];" ::"r"(to), "d"(value), "r"(tell) : "memory");
  else
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(to), "f"(value), "r"(tell) : "memory");
}
