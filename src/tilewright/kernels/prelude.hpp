// What generated C++ kernels are written in: vectors of LANES values, loads and stores of whole and
// partial vectors, masks, halves, threads; prelude_steps.hpp computes with them. g++ and clang++ take
// it for any instruction set: vectors are the compilers' own (vector_size). Headers are few, since
// each costs compile time.
//
// A half (f16, bf16) exists in memory only. In a register it is a float that holds a value of that
// type, so widening is free and every rounding is explicit. A boolean vector is a mask of integers.

#include <stdlib.h>
#include <sys/mman.h>

#define TW_INLINE inline __attribute__((always_inline))
#define TW_LAMBDA __attribute__((always_inline))
#define TW_APART __attribute__((noinline))
#if defined(__SANITIZE_ADDRESS__)
#define TW_SANITIZED 1  // the sanitizer does not see what assembly touches
#elif defined(__has_feature)
#define TW_SANITIZED __has_feature(address_sanitizer)
#endif
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wpsabi"
#endif

extern "C" int omp_get_thread_num(void);
extern "C" int omp_get_num_threads(void);

namespace {

using u8 = __UINT8_TYPE__;
using u16 = __UINT16_TYPE__;
using u32 = __UINT32_TYPE__;
using u64 = __UINT64_TYPE__;
using i32 = __INT32_TYPE__;
using i64 = __INT64_TYPE__;

#if defined(__AVX512F__)
constexpr int VECTOR_BYTES = 64;
#elif defined(__AVX__)
constexpr int VECTOR_BYTES = 32;
#else
constexpr int VECTOR_BYTES = 16;
#endif
constexpr int LANES = VECTOR_BYTES / TW_WORD_BYTES;  // the widest type of the kernel fills a vector

template <class T, int N> struct VecOf { typedef T type __attribute__((vector_size(sizeof(T) * N))); };
template <class T, int N = LANES> using Vec = typename VecOf<T, N>::type;

struct f16 { u16 bits; };
struct bf16 { u16 bits; };
struct boolean { u8 bits; };

template <class T> struct Raw { using type = T; };  // how a value of memory type T is stored
template <> struct Raw<f16> { using type = u16; };
template <> struct Raw<bf16> { using type = u16; };
template <> struct Raw<boolean> { using type = u8; };

template <class T> struct Scalar { static constexpr bool value = false; };
template <> struct Scalar<bool> { static constexpr bool value = true; };
template <> struct Scalar<float> { static constexpr bool value = true; };
template <> struct Scalar<double> { static constexpr bool value = true; };
template <> struct Scalar<i32> { static constexpr bool value = true; };
template <> struct Scalar<i64> { static constexpr bool value = true; };
template <> struct Scalar<u32> { static constexpr bool value = true; };
template <> struct Scalar<u64> { static constexpr bool value = true; };
template <class X> constexpr bool is_scalar = Scalar<X>::value;

template <class X> struct WordsOf { using type = Vec<u32>; };  // unsigned words under floats
template <> struct WordsOf<float> { using type = u32; };
template <class X> using Words = typename WordsOf<X>::type;

template <class To, class From> TW_INLINE To bits(From x) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To y;
  __builtin_memcpy(&y, &x, sizeof y);
  return y;
}

template <int N> struct Index {  // a whole number that is known when compiling
  constexpr operator int() const { return N; }
};
template <int N, int I = 0, class F> TW_INLINE void each(F body) {
  if constexpr (I < N) {
    body(Index<I>{});
    each<N, I + 1>(body);
  }
}

// ---- masks -------------------------------------------------------------------------------------

template <class To, class From> TW_INLINE To convert(From x) {
  if constexpr (is_scalar<To>) return (To)x;
  else return __builtin_convertvector(x, To);
}
template <class To, class From> TW_INLINE To mask_as(From m) {
  if constexpr (sizeof(To) == sizeof(From)) return bits<To>(m);
  else return __builtin_convertvector(m, To);
}
template <class M, class X> TW_INLINE X where(M m, X a, X b) {
  if constexpr (is_scalar<X> || is_scalar<M>) return m ? a : b;
  else return mask_as<decltype(a < b)>(m) ? a : b;
}
template <class A, class B> TW_INLINE A both(A a, B b) {
  if constexpr (is_scalar<A>) return a & b;
  else return a & mask_as<A>(b);
}
template <class A, class B> TW_INLINE A either(A a, B b) {
  if constexpr (is_scalar<A>) return a | b;
  else return a | mask_as<A>(b);
}
template <class A, class B> TW_INLINE A differing(A a, B b) {
  if constexpr (is_scalar<A>) return a != b;
  else return a ^ mask_as<A>(b);
}
template <class A> TW_INLINE A negated(A a) {
  if constexpr (is_scalar<A>) return !a;
  else return ~a;
}
template <class T> TW_INLINE Vec<T> splat(T x) { return x - Vec<T>{}; }  // -0.0 - 0.0 is -0.0
TW_INLINE Vec<i32> splat(bool x) { return Vec<i32>{} - (i32)x; }

// ---- halves ------------------------------------------------------------------------------------

// Rounding to bf16 adds to the lower half of a float, and must not carry a NaN's mantissa away. So
// in kernels that round so, what is read from wider tensors has NaNs whose lower half is zero;
// arithmetic hands those on, and makes no others.
template <class X> TW_INLINE X plain_nan(X x) { return where(x != x, X{} / X{}, x); }
template <class F> TW_INLINE Words<F> round_to_bf16(F x) {  // result in the upper 16 bits
  Words<F> u = bits<Words<F>>(x);
  return u - ((~(u >> 16) & 1u) | 0xffff8000u);  // adds 0x7fff, and 1 where that half is odd
}
template <class F> TW_INLINE F widen_f16(Words<F> h) {
  Words<F> magnitude = (h & 0x7fffu) << 13;
  F finite = bits<F>(magnitude) * 0x1p112f;
  F special = bits<F>(magnitude | 0x7f800000u);
  F x = where(magnitude >= (0x7c00u << 13), special, finite);
  return bits<F>(bits<Words<F>>(x) | ((h & 0x8000u) << 16));
}
template <class F> TW_INLINE Words<F> narrow_f16(F x) {  // result in the lower 16 bits
  Words<F> u = bits<Words<F>>(x);
  Words<F> sign = (u >> 16) & 0x8000u;
  u = u & 0x7fffffffu;
  Words<F> normal = (u - (112u << 23) + 0xfffu + ((u >> 13) & 1u)) >> 13;
  // Adding 0.5 lets the adder round what becomes a subnormal half: its last place is 2^-24.
  Words<F> tiny = bits<Words<F>>(bits<F>(u) + 0.5f) - (126u << 23);
  Words<F> huge = where(u > 0x7f800000u, u - u + 0x7e00u, u - u + 0x7c00u);
  Words<F> r = where(u < (113u << 23), tiny, normal);
  return where(u >= (143u << 23), huge, r) | sign;
}

TW_INLINE Vec<u32> words_of(Vec<u16> h) {
#if defined(__AVX512F__)
  if constexpr (LANES == 16) {  // g++ 12 takes three instructions
    Vec<u32> words;
    __asm__("vpmovzxwd %1, %0" : "=v"(words) : "vm"(h));
    return words;
  }
#endif
  return convert<Vec<u32>>(h);
}

template <class H> TW_INLINE Vec<float> widen_all(Vec<u16> h);
template <> TW_INLINE Vec<float> widen_all<bf16>(Vec<u16> h) {
#if defined(__AVX512BW__)
  if constexpr (LANES == 16) {  // one instruction: each goes to an upper half, beside a zero
    Vec<u32> words;
    Vec<u16, 32> from = {0, 0, 0, 1, 0, 2, 0, 3, 0, 4, 0, 5, 0, 6, 0, 7,
                         0, 8, 0, 9, 0, 10, 0, 11, 0, 12, 0, 13, 0, 14, 0, 15};
    __asm__("vpermw %g1, %2, %0 %{%3%}%{z%}" : "=v"(words) : "v"(h), "v"(from), "Yk"(0xaaaaaaaau));
    return bits<Vec<float>>(words);
  }
#endif
  return bits<Vec<float>>(words_of(h) << 16);
}
template <> TW_INLINE Vec<float> widen_all<f16>(Vec<u16> h) {
#if defined(__F16C__)
  if constexpr (sizeof(h) >= 16) {
    Vec<float> x;
    __asm__("vcvtph2ps %1, %0" : "=v"(x) : "v"(h));
    return x;
  }
#endif
  return widen_f16<Vec<float>>(words_of(h));
}
template <class H> TW_INLINE Vec<u16> narrow_all(Vec<float> x);
template <> TW_INLINE Vec<u16> narrow_all<bf16>(Vec<float> x) {
  Vec<u32> words = round_to_bf16(x);
#if defined(__AVX512BW__)
  if constexpr (LANES == 16) {  // one instruction: the upper halves
    Vec<u16> h;
    Vec<u16, 32> from = {1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31};
    __asm__("vpermw %1, %2, %g0" : "=v"(h) : "v"(words), "v"(from));
    return h;
  }
#endif
  return convert<Vec<u16>>(words >> 16);
}
template <> TW_INLINE Vec<u16> narrow_all<f16>(Vec<float> x) {
#if defined(__F16C__)
  if constexpr (sizeof(Vec<u16>) >= 16) {
    Vec<u16> h;
    __asm__("vcvtps2ph $0, %1, %0" : "=v"(h) : "v"(x));  // 0: to nearest even
    return h;
  }
#endif
  return convert<Vec<u16>>(narrow_f16(x));
}

// Rounding to a half that stays in a register.
template <class H, class F> TW_INLINE F rounded(F x) {
  if constexpr (sizeof(H) != 2) return x;
  else if constexpr (__is_same(H, bf16)) return bits<F>(round_to_bf16(x) & 0xffff0000u);
  else if constexpr (is_scalar<F>) return widen_f16<F>(narrow_f16(x));
  else return widen_all<f16>(narrow_all<f16>(x));
}

// ---- memory ------------------------------------------------------------------------------------

// Which lanes of a vector exist: all, or the first n at the end of a row.
struct All {
  static constexpr i64 n = LANES;
};
struct First {
  i64 n;
};

// The first n elements of a vector, without touching what lies beyond them.
#if defined(__AVX512BW__) && defined(__AVX512VL__) && !TW_SANITIZED
#define TW_MASKED(V, instruction, ...)                                                      \
  constexpr int size = sizeof(V) / LANES;                                                   \
  const u64 mask = (1ull << n) - 1;                                                         \
  if constexpr (size == 1) __asm__ volatile(instruction("8") __VA_ARGS__);                  \
  else if constexpr (size == 2) __asm__ volatile(instruction("16") __VA_ARGS__);            \
  else if constexpr (size == 4) __asm__ volatile(instruction("32") __VA_ARGS__);            \
  else __asm__ volatile(instruction("64") __VA_ARGS__);
#define TW_LOAD_FIRST(bits) "vmovdqu" bits " (%1), %0 %{%2%}%{z%}"
#define TW_STORE_FIRST(bits) "vmovdqu" bits " %1, (%0) %{%2%}"
constexpr int LEAST_MASKED = 16;
#else
#define TW_MASKED(V, instruction, ...) (void)n;
constexpr int LEAST_MASKED = 1 << 30;
#endif
template <class T, class V> TW_INLINE V load_first(const T* p, i64 n) {
  V v = {};
  if constexpr (sizeof(V) >= LEAST_MASKED) {
    TW_MASKED(V, TW_LOAD_FIRST, : "=v"(v) : "r"(p), "Yk"(mask) : "memory")
  } else {
    for (i64 k = 0; k < n; ++k) __builtin_memcpy((T*)&v + k, p + k, sizeof(T));
  }
  return v;
}
template <class T, class V> TW_INLINE void store_first(T* p, V v, i64 n) {
  if constexpr (sizeof(V) >= LEAST_MASKED) {
    TW_MASKED(V, TW_STORE_FIRST, : : "r"(p), "v"(v), "Yk"(mask) : "memory")
  } else {
    for (i64 k = 0; k < n; ++k) __builtin_memcpy(p + k, (T*)&v + k, sizeof(T));
  }
}

template <class T> TW_INLINE auto widen(typename Raw<T>::type raw) {
  if constexpr (__is_same(T, bf16)) return bits<float>((u32)raw << 16);
  else if constexpr (__is_same(T, f16)) return widen_f16<float>((u32)raw);
  else if constexpr (__is_same(T, boolean)) return raw != 0;
  else return raw;
}
template <class T> TW_INLINE auto widen_raw(Vec<typename Raw<T>::type> raw) {
  if constexpr (sizeof(T) == 2) return widen_all<T>(raw);
  else if constexpr (__is_same(T, boolean)) return convert<Vec<i32>>(raw) != 0;
  else return raw;
}
template <class T, class X> TW_INLINE typename Raw<T>::type narrow(X x) {
  if constexpr (__is_same(T, bf16)) return (u16)(round_to_bf16(x) >> 16);
  else if constexpr (__is_same(T, f16)) return (u16)narrow_f16(x);
  else return x;
}
template <class T, class X> TW_INLINE Vec<typename Raw<T>::type> narrow_raw(X x) {
  if constexpr (sizeof(T) == 2) return narrow_all<T>(x);
  else if constexpr (__is_same(T, boolean)) return convert<Vec<u8>>(x & 1);
  else return x;
}

template <class T> TW_INLINE auto load(const T* p) {
  typename Raw<T>::type raw;
  __builtin_memcpy(&raw, p, sizeof raw);
  return widen<T>(raw);
}
template <class T, class Lanes> TW_INLINE auto load(const T* p, Lanes lanes) {
  using V = Vec<typename Raw<T>::type>;
  V raw;
  if constexpr (__is_same(Lanes, All)) __builtin_memcpy(&raw, p, sizeof raw);
  else raw = load_first<T, V>(p, lanes.n);
  return widen_raw<T>(raw);
}
template <class T, class Lanes> TW_INLINE auto gather(const T* p, i64 stride, Lanes lanes) {
  Vec<typename Raw<T>::type> raw = {};
  for (i64 k = 0; k < lanes.n; ++k) __builtin_memcpy((T*)&raw + k, p + k * stride, sizeof(T));
  return widen_raw<T>(raw);
}
template <class T, class X> TW_INLINE void store(T* p, X x) {
  typename Raw<T>::type raw = narrow<T>(x);
  __builtin_memcpy(p, &raw, sizeof raw);
}
template <class T, class X, class Lanes> TW_INLINE void store(T* p, X x, Lanes lanes) {
  Vec<typename Raw<T>::type> raw = narrow_raw<T>(x);
  if constexpr (__is_same(Lanes, All)) __builtin_memcpy(p, &raw, sizeof raw);
  else store_first(p, raw, lanes.n);
}
template <class T, class X, class Lanes> TW_INLINE void scatter(T* p, i64 stride, X x, Lanes lanes) {
  Vec<typename Raw<T>::type> raw = narrow_raw<T>(x);
  for (i64 k = 0; k < lanes.n; ++k) __builtin_memcpy(p + k * stride, (T*)&raw + k, sizeof(T));
}
// ---- positions: whole numbers that are computed where others are read ----------------------------

// What stands for a pointer to them.
template <class T> struct Positions {
  i64 first;
  TW_INLINE Positions operator+(i64 step) const { return {first + step}; }
};
template <class T> TW_INLINE T load(Positions<T> p) { return (T)p.first; }
template <class T, class Lanes> TW_INLINE auto gather(Positions<T> p, i64 stride, Lanes) {
  Vec<T> r;
  for (int k = 0; k < LANES; ++k) r[k] = (T)(p.first + k * stride);
  return r;
}
template <class T, class Lanes> TW_INLINE auto load(Positions<T> p, Lanes lanes) {
  return gather(p, 1, lanes);
}

// ---- random masks: booleans that are computed where others are read ------------------------------

// Which numbers of Philox4x32-10 (Salmon et al., SC 2011) are below a threshold: word i % 4 of block
// i / 4 for element i. Lanes are computed alike, each its own block.
template <class W, class D> TW_INLINE auto philox_below(D index, u64 seed, u32 call, u32 threshold) {
  W k0 = W{} + (u32)seed, k1 = W{} + (u32)(seed >> 32);
  const D block = index >> 2;
  W x0 = convert<W>(block), x1 = convert<W>(block >> 32), x2 = W{} + call, x3 = W{};
  for (int round = 0; round < 10; ++round, k0 += 0x9e3779b9u, k1 += 0xbb67ae85u) {
    const D p = convert<D>(x0) * 0xd2511f53u, q = convert<D>(x2) * 0xcd9e8d57u;
    x0 = convert<W>(q >> 32) ^ x1 ^ k0;
    x1 = convert<W>(q);
    x2 = convert<W>(p >> 32) ^ x3 ^ k1;
    x3 = convert<W>(p);
  }
  const W word = convert<W>(index) & 3u;
  return where(word < 2u, where(word == 0u, x0, x1), where(word == 2u, x2, x3)) < threshold;
}
// What stands for a pointer to a mask's elements.
struct Mask {
  u64 seed, index;
  u32 call, threshold;
  TW_INLINE Mask operator+(i64 step) const { return {seed, index + (u64)step, call, threshold}; }
};
TW_INLINE bool load(Mask m) { return philox_below<u32>(m.index, m.seed, m.call, m.threshold); }
template <class Lanes> TW_INLINE auto gather(Mask m, i64 stride, Lanes) {
  Vec<u64> index;
  for (int k = 0; k < LANES; ++k) index[k] = m.index + (u64)(k * stride);
  return philox_below<Vec<u32>>(index, m.seed, m.call, m.threshold);
}
template <class Lanes> TW_INLINE auto load(Mask m, Lanes lanes) { return gather(m, 1, lanes); }

// Past the caches where the address allows it: what is written is not read again.
template <class T, class X, class Lanes> TW_INLINE void stream(T* p, X x, Lanes lanes) {
#if defined(__AVX__)
  using V = Vec<typename Raw<T>::type>;
  if constexpr (__is_same(Lanes, All) && sizeof(V) >= 16) {
    if ((u64)p % sizeof(V) == 0) {
      __asm__ volatile("vmovntdq %1, %0" : "=m"(*(V*)p) : "v"(narrow_raw<T>(x)));
      return;
    }
  }
#endif
  store(p, x, lanes);
}
TW_INLINE void finish_streams() {
#if defined(__AVX__)
  __asm__ volatile("sfence" ::: "memory");
#endif
}

// Fresh memory arrives in pages, zeroed by a fault each: 2 MiB pages take 512 times fewer.
TW_INLINE void advise_huge_pages(void* p, i64 bytes) {
#if defined(MADV_HUGEPAGE)
  constexpr u64 page = 2u << 20;
  u64 begin = ((u64)p + page - 1) / page * page, end = ((u64)p + (u64)bytes) / page * page;
  if (begin < end) madvise((void*)begin, end - begin, MADV_HUGEPAGE);
#endif
}

// ---- threads -----------------------------------------------------------------------------------

// Give each thread a range of n work items. One thread alone needs no OpenMP, whose half
// microsecond is more than a small kernel takes.
template <class F> TW_INLINE void share(i64 n, i64 threads, F walk) {
  if (threads < 2 || n < 2) return walk(0, n);
#pragma omp parallel num_threads(threads)
  {
    const i64 thread = omp_get_thread_num(), all = omp_get_num_threads();
    const i64 first = n * thread / all, last = n * (thread + 1) / all;
    if (first < last) walk(first, last);
  }
}

}  // namespace
