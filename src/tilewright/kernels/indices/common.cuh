// What the kernels for indices share: element types, vectors of one thread, reductions.
// The source that includes this defines T (stored element), A (type of sums), INDEX (of the
// index), VEC (elements of one access) and REDUCE. Needs no headers.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define TW_DEVICE __device__ __forceinline__
#define TW_UNROLL _Pragma("unroll")
#define FULL_WARP 0xffffffffu

struct f16 { u16 bits; };
struct bf16 { u16 bits; };

TW_DEVICE float widen(f16 h) { float f; asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h.bits)); return f; }
TW_DEVICE float widen(bf16 h) { return __uint_as_float((u32)h.bits << 16); }
template <class E> TW_DEVICE E widen(E x) { return x; }

template <class To> struct Narrow { template <class From> static TW_DEVICE To of(From x) { return (To)x; } };
template <> struct Narrow<f16> {
  static TW_DEVICE f16 of(float x) { f16 h; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h.bits) : "f"(x)); return h; }
};
template <> struct Narrow<bf16> {
  static TW_DEVICE bf16 of(float x) { bf16 h; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h.bits) : "f"(x)); return h; }
};

template <class E, int N> struct alignas(N * sizeof(E) < 16 ? N * sizeof(E) : 16) Pack { E v[N]; };

template <int N, class E> TW_DEVICE Pack<E, N> load(const E* p) { return *(const Pack<E, N>*)p; }
template <int N, class E> TW_DEVICE void store(E* p, const Pack<E, N>& x) { *(Pack<E, N>*)p = x; }

// ---- reductions: REDUCE is one of these ---------------------------------------------------------

#define SUM 0
#define PROD 1
#define AMAX 2
#define AMIN 3

template <class S> struct Limits;
template <> struct Limits<float> {
  static TW_DEVICE float least() { return __int_as_float(0xff800000); }
  static TW_DEVICE float most() { return __int_as_float(0x7f800000); }
};
template <> struct Limits<double> {
  static TW_DEVICE double least() { return __longlong_as_double(0xfff0000000000000ll); }
  static TW_DEVICE double most() { return __longlong_as_double(0x7ff0000000000000ll); }
};
template <> struct Limits<int> {
  static TW_DEVICE int least() { return -2147483647 - 1; }
  static TW_DEVICE int most() { return 2147483647; }
};
template <> struct Limits<i64> {
  static TW_DEVICE i64 least() { return -9223372036854775807ll - 1; }
  static TW_DEVICE i64 most() { return 9223372036854775807ll; }
};

template <class S> TW_DEVICE S neutral() {
  if (REDUCE == PROD) return S(1);
  if (REDUCE == AMAX) return Limits<S>::least();
  if (REDUCE == AMIN) return Limits<S>::most();
  return S(0);
}
// NaN wins, as in PyTorch.
template <class S> TW_DEVICE S reduce(S a, S b) {
  if (REDUCE == PROD) return a * b;
  if (REDUCE == AMAX) return a != a ? a : (b != b || b > a) ? b : a;
  if (REDUCE == AMIN) return a != a ? a : (b != b || b < a) ? b : a;
  return a + b;
}
template <class S, int N> TW_DEVICE Pack<S, N> reduce(Pack<S, N> a, const Pack<S, N>& b) {
  TW_UNROLL for (int i = 0; i < N; ++i) a.v[i] = reduce(a.v[i], b.v[i]);
  return a;
}
// What changes nothing, not even minus zero, to which a sum with zero would be plus zero.
template <class S, int N> TW_DEVICE Pack<S, N> nothing() {
  Pack<S, N> r;
  TW_UNROLL for (int i = 0; i < N; ++i) {
    if constexpr (REDUCE == SUM) r.v[i] = (S)-0.0;
    else if constexpr (REDUCE == PROD) r.v[i] = S(1);
    else r.v[i] = neutral<S>();
  }
  return r;
}

// ---- values as words, of at most four bytes -------------------------------------------------------

template <class E> TW_DEVICE u32 bits_of(E x) {
  union { E value; u32 word; } u;
  u.word = 0;
  if (sizeof(E) <= 4) u.value = x;
  return u.word;
}
template <class E> TW_DEVICE E of_bits(u32 word) {
  union { E value; u32 word; } u;
  u.word = word;
  return u.value;
}

// ---- kernels that overlap -----------------------------------------------------------------------

// The kernel after this one in the stream may start, if it was launched to overlap.
TW_DEVICE void release_next() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// Until the kernel before this one has ended and what it wrote can be read.
TW_DEVICE void await_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// At the start of a kernel that reads nothing before.
TW_DEVICE void follow_previous() {
  release_next();
  await_previous();
}
// The same for one that may not be wanted at all: a kernel before it has left a zero at `wanted`, if
// that is not null.
TW_DEVICE bool follow_wanted(const u32* wanted) {
  follow_previous();
  return !wanted || *wanted;
}

// ---- indices ------------------------------------------------------------------------------------

#define NONE_SKIPPED (-9223372036854775807ll - 1)

// The place that an index names; `places`, which is none, for one to skip or out of range. `fault`
// lies in host memory: whoever reads it next learns of it.
TW_DEVICE u32 place_of(INDEX index, u32 places, i64 skipped, int* fault) {
  if ((i64)index == skipped) return places;
  if ((u64)(i64)index < places) return (u32)index;
  *(volatile int*)fault = 1;
  return places;
}

// Of a mean: integers round towards minus infinity, as PyTorch's do.
template <class S> TW_DEVICE S divided(S sum, S terms) { return sum / terms; }
template <> TW_DEVICE int divided(int sum, int terms) { return sum / terms - (sum % terms != 0 && sum < 0); }
template <> TW_DEVICE i64 divided(i64 sum, i64 terms) { return sum / terms - (sum % terms != 0 && sum < 0); }
