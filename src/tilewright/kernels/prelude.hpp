// What generated C++ kernels are written in: vectors of LANES values, loads and stores of whole and
// partial vectors, casts, functions and reductions. g++ and clang++ take it for any instruction set:
// vectors are the compilers' own (vector_size). Headers are few, since each costs compile time.
//
// A half (f16, bf16) exists in memory only. In a register it is a float that holds a value of that
// type, so widening is free and every rounding is explicit. A boolean vector is a mask of integers.

#include <stdlib.h>
#include <sys/mman.h>

#define TW_INLINE inline __attribute__((always_inline))
#define TW_LAMBDA __attribute__((always_inline))
#if defined(__SANITIZE_ADDRESS__)
#define TW_SANITIZED 1  // the sanitizer does not see what assembly touches
#elif defined(__has_feature)
#define TW_SANITIZED __has_feature(address_sanitizer)
#endif
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wpsabi"
#endif

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
template <class A> TW_INLINE A negated(A a) {
  if constexpr (is_scalar<A>) return !a;
  else return ~a;
}
template <class T> TW_INLINE Vec<T> splat(T x) { return x - Vec<T>{}; }  // -0.0 - 0.0 is -0.0
TW_INLINE Vec<i32> splat(bool x) { return Vec<i32>{} - (i32)x; }

// ---- halves ------------------------------------------------------------------------------------

template <class F> TW_INLINE Words<F> round_to_bf16(F x) {  // result in the upper 16 bits
  Words<F> u = bits<Words<F>>(x);
  Words<F> up = u + 0x7fffu + ((u >> 16) & 1u);
  return where(x != x, up - up + 0x7fc00000u, up);
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
  return convert<Vec<u16>>(round_to_bf16(x) >> 16);
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

// ---- steps -------------------------------------------------------------------------------------

// To a register type, or to a half: rounded, still a float. A wider float rounds to fp32 first.
template <class To, class X> TW_INLINE auto cast(X x) {
  if constexpr (__is_same(To, boolean)) return x != 0;
  else if constexpr (sizeof(To) == 2) return rounded<To>(cast<float>(x));
  else if constexpr (__is_same(X, bool) || is_scalar<X>) return (To)x;
  else return convert<Vec<To>>(x);
}
template <class To, class M> TW_INLINE Vec<To> cast_mask(M m) { return convert<Vec<To>>(m & 1); }

template <class X> TW_INLINE X maximum(X a, X b) { return where(either(a > b, a != a), a, b); }
template <class X> TW_INLINE X minimum(X a, X b) { return where(either(a < b, a != a), a, b); }
template <class X> TW_INLINE X added(X a, X b) { return a + b; }
template <class X> TW_INLINE X multiplied(X a, X b) { return a * b; }

#define TW_FUNCTION1(name, for_float, for_double)                                           \
  TW_INLINE float name(float x) { return for_float(x); }                                    \
  TW_INLINE double name(double x) { return for_double(x); }                                 \
  template <class V> TW_INLINE V name(V x) {                                                \
    for (int k = 0; k < LANES; ++k) x[k] = name(x[k]);                                      \
    return x;                                                                               \
  }
#define TW_FUNCTION2(name, for_float, for_double)                                           \
  TW_INLINE float name(float x, float y) { return for_float(x, y); }                        \
  TW_INLINE double name(double x, double y) { return for_double(x, y); }                    \
  template <class V> TW_INLINE V name(V x, V y) {                                           \
    for (int k = 0; k < LANES; ++k) x[k] = name(x[k], y[k]);                                \
    return x;                                                                               \
  }
TW_FUNCTION1(absolute, __builtin_fabsf, __builtin_fabs)
TW_FUNCTION1(square_root, __builtin_sqrtf, __builtin_sqrt)
TW_FUNCTION1(logarithm, __builtin_logf, __builtin_log)
TW_FUNCTION1(logarithm2, __builtin_log2f, __builtin_log2)
TW_FUNCTION1(logarithm1p, __builtin_log1pf, __builtin_log1p)
TW_FUNCTION1(exponential2, __builtin_exp2f, __builtin_exp2)
TW_FUNCTION1(exponential_m1, __builtin_expm1f, __builtin_expm1)
TW_FUNCTION1(hyperbolic_tangent, __builtin_tanhf, __builtin_tanh)
TW_FUNCTION1(error_function, __builtin_erff, __builtin_erf)
TW_FUNCTION1(sine, __builtin_sinf, __builtin_sin)
TW_FUNCTION1(cosine, __builtin_cosf, __builtin_cos)
TW_FUNCTION1(rounded_down, __builtin_floorf, __builtin_floor)
TW_FUNCTION1(rounded_up, __builtin_ceilf, __builtin_ceil)
TW_FUNCTION1(rounded_even, __builtin_rintf, __builtin_rint)
TW_FUNCTION1(truncated, __builtin_truncf, __builtin_trunc)
TW_FUNCTION2(power, __builtin_powf, __builtin_pow)
TW_INLINE i32 absolute(i32 x) { return x < 0 ? -x : x; }
TW_INLINE i64 absolute(i64 x) { return x < 0 ? -x : x; }

template <class X> TW_INLINE X sign_of(X x) {
  X zero = {};
  return where(x > 0, zero + 1, where(x < 0, zero - 1, zero));  // NaN: 0, as in torch
}

// exp(x) = 2^n * exp(r) with n whole and |r| <= log(2) / 2: r by a log(2) in two parts, exp(r) by a
// polynomial that interpolates it at Chebyshev's nodes (relative error 6e-9, 2e-17), 2^n in two
// factors so that subnormal results round once and large ones overflow. Within 1 ulp; NaN stays.
template <class T> struct Exponential;
template <> struct Exponential<float> {
  using Int = i32;
  static constexpr float least = -105.0f, most = 89.0f, shift = 0x1.8p23f;
  static constexpr float log2_high = 0x1.62e4p-1f, log2_low = 0x1.7f7d1cp-20f;
  static constexpr int degree = 6, mantissa = 23, bias = 127;
  static constexpr float coefficients[] = {
      1.0f, 1.0f, 0x1p-1f, 0x1.5554dcp-3f, 0x1.55551ap-5f, 0x1.120b6ep-7f, 0x1.6d110ap-10f};
};
template <> struct Exponential<double> {
  using Int = i64;
  static constexpr double least = -746.0, most = 710.0, shift = 0x1.8p52;
  static constexpr double log2_high = 0x1.62e42feep-1, log2_low = 0x1.a39ef35793c76p-33;
  static constexpr int degree = 11, mantissa = 52, bias = 1023;
  static constexpr double coefficients[] = {
      1.0, 1.0, 0x1.0000000000001p-1, 0x1.5555555555556p-3, 0x1.5555555553d63p-5,
      0x1.11111111109b3p-7, 0x1.6c16c1788bd9p-10, 0x1.a01a01a7c41d5p-13, 0x1.a019b90d2ae7ap-16,
      0x1.71de0dae63bb3p-19, 0x1.289185613a3d6p-22, 0x1.af38a9b0ec855p-26};
};
// p * 2^n for a whole n = shifted - shift, which is also in the low bits of `shifted`.
template <class T> TW_INLINE Vec<T> scaled(Vec<T> p, Vec<T> n, Vec<T> shifted) {
  using E = Exponential<T>;
  using Ints = Vec<typename E::Int>;
#if defined(__AVX512F__)
  if constexpr (sizeof(p) == 64) {
    if constexpr (sizeof(T) == 4) __asm__("vscalefps %1, %0, %0" : "+v"(p) : "v"(n));
    else __asm__("vscalefpd %1, %0, %0" : "+v"(p) : "v"(n));
    return p;
  }
#endif
  Ints whole = bits<Ints>(shifted) - bits<Ints>(splat(E::shift));
  Ints half = whole >> 1;
  Vec<T> first = bits<Vec<T>>((half + E::bias) << E::mantissa);
  Vec<T> second = bits<Vec<T>>((whole - half + E::bias) << E::mantissa);
  return p * first * second;
}
template <class T> TW_INLINE Vec<T> exponential_of(Vec<T> x) {
  using E = Exponential<T>;
  x = where(x < E::least, splat(E::least), x);
  x = where(x > E::most, splat(E::most), x);
  Vec<T> shifted = x * (T)0x1.71547652b82fep0 + E::shift;
  Vec<T> n = shifted - E::shift;
  Vec<T> r = x - n * E::log2_high;
  r = r - n * E::log2_low;
  Vec<T> p = splat(E::coefficients[E::degree]);
  each<E::degree>([&](auto i) TW_LAMBDA { p = p * r + E::coefficients[E::degree - 1 - i]; });
  return scaled<T>(p, n, shifted);
}
TW_INLINE float exponential(float x) { return __builtin_expf(x); }
TW_INLINE double exponential(double x) { return __builtin_exp(x); }
template <class V> TW_INLINE V exponential(V x) {
  if constexpr (sizeof(V) == 4 * LANES) return exponential_of<float>(x);
  else return exponential_of<double>(x);
}

// ---- sweeps and reductions ---------------------------------------------------------------------

// body(lanes, j, u) for the vectors that begin at j, in groups of `Unroll` with u = 0, 1, ...
template <int Unroll, class F> TW_INLINE void sweep(i64 begin, i64 end, F body) {
  i64 j = begin;
  for (; j + Unroll * LANES <= end; j += Unroll * LANES)
    each<Unroll>([&](auto u) TW_LAMBDA { body(All{}, j + u * LANES, u); });
  if constexpr (Unroll > 1)
    for (; j + LANES <= end; j += LANES) body(All{}, j, Index<0>{});
  if (j < end) body(First{end - j}, j, Index<0>{});
}
// A long sum in three levels: blocks of 64 vectors in a row, groups of 32 blocks, and the groups.
// Its rounding errors then grow as those of a short one.
template <int Unroll> constexpr i64 BLOCK = 64 * Unroll * LANES;
constexpr i64 TURNS = 32;
template <class V, int Unroll, class F>
TW_INLINE void raise(V (&from)[Unroll], V (&to)[Unroll], V start, F join) {
  for (int u = 0; u < Unroll; ++u) {
    to[u] = join(to[u], from[u]);
    from[u] = start;
  }
}
template <class V, class T> TW_INLINE V live(V v, T identity, First lanes) {
  for (i64 k = lanes.n; k < LANES; ++k) v[k] = identity;
  return v;
}
template <class V, class T> TW_INLINE V live(V v, T, All) { return v; }

// Lane k from lane k ^ Step. It must not go through memory, or g++ keeps all of v there.
#if defined(__clang__)
template <int Step, class T> TW_INLINE Vec<T> exchanged(Vec<T> v) {
  Vec<T> r;
  for (int k = 0; k < LANES; ++k) r[k] = v[k ^ Step];
  return r;
}
#else
template <int... K> struct Lanes {
  template <int Step, class V> static TW_INLINE V exchanged(V v) {
    return __builtin_shuffle(v, decltype(v < v){(K ^ Step)...});
  }
};
template <int Step, class T> TW_INLINE Vec<T> exchanged(Vec<T> v) {
  return Lanes<__integer_pack(LANES)...>::template exchanged<Step>(v);
}
#endif
template <class T, int Step, class F> TW_INLINE T fold_lanes(Vec<T> v, F f) {
  if constexpr (Step == 0) return v[0];
  else return fold_lanes<T, Step / 2>(f(v, exchanged<Step, T>(v)), f);
}
// One value from `Unroll` accumulators, always in the same order.
template <class T, int Unroll, class F> TW_INLINE T fold(Vec<T> (&a)[Unroll], F f) {
  Vec<T> all = a[0];
  if constexpr (Unroll == 2) all = f(a[0], a[1]);
  if constexpr (Unroll == 4) all = f(f(a[0], a[1]), f(a[2], a[3]));
  return fold_lanes<T, LANES / 2>(all, f);
}

}  // namespace
