// What generated C++ kernels compute with, behind prelude.hpp: casts, functions, sweeps over a row
// and reductions.

namespace {

// ---- steps -------------------------------------------------------------------------------------

// To a register type, or to a half: rounded, still a float. A wider float rounds to fp32 first.
template <class To, class X> TW_INLINE auto cast(X x) {
  if constexpr (__is_same(To, boolean)) return x != 0;
  else if constexpr (sizeof(To) == 2) return rounded<To>(cast<float>(x));
  else if constexpr (__is_same(X, bool) || is_scalar<X>) return (To)x;
  else return convert<Vec<To>>(x);
}
template <class To, class M> TW_INLINE Vec<To> cast_mask(M m) { return convert<Vec<To>>(m & 1); }

// b where neither is larger (smaller), as where one is NaN. g++ 12 takes two instructions for one.
#if defined(__AVX512F__)
#define TW_EXTREME_OF(type, instruction)                                                    \
  if constexpr (__is_same(X, Vec<type>) && sizeof(X) == 64) {                               \
    X r;                                                                                    \
    __asm__(instruction " %1, %2, %0" : "=v"(r) : "v"(b), "v"(a));                          \
    return r;                                                                               \
  }
#else
#define TW_EXTREME_OF(type, instruction)
#endif
#define TW_EXTREME(name, than, instruction)                                                 \
  template <class X> TW_INLINE X name(X a, X b) {                                           \
    TW_EXTREME_OF(float, instruction "ps")                                                  \
    TW_EXTREME_OF(double, instruction "pd")                                                 \
    return where(a than b, a, b);                                                           \
  }
TW_EXTREME(larger, >, "vmax")
TW_EXTREME(smaller, <, "vmin")
template <class X> TW_INLINE X maximum(X a, X b) { return where(a != a, a, larger(a, b)); }
template <class X> TW_INLINE X minimum(X a, X b) { return where(a != a, a, smaller(a, b)); }
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
TW_FUNCTION1(logarithm10, __builtin_log10f, __builtin_log10)
TW_FUNCTION1(complementary_error_function, __builtin_erfcf, __builtin_erfc)
TW_FUNCTION1(tangent, __builtin_tanf, __builtin_tan)
TW_FUNCTION1(arc_sine, __builtin_asinf, __builtin_asin)
TW_FUNCTION1(arc_cosine, __builtin_acosf, __builtin_acos)
TW_FUNCTION1(arc_tangent, __builtin_atanf, __builtin_atan)
TW_FUNCTION1(hyperbolic_sine, __builtin_sinhf, __builtin_sinh)
TW_FUNCTION1(hyperbolic_cosine, __builtin_coshf, __builtin_cosh)
TW_FUNCTION1(area_sine, __builtin_asinhf, __builtin_asinh)
TW_FUNCTION1(area_cosine, __builtin_acoshf, __builtin_acosh)
TW_FUNCTION1(area_tangent, __builtin_atanhf, __builtin_atanh)
TW_FUNCTION2(power, __builtin_powf, __builtin_pow)
TW_INLINE i32 remainder_of_truncated(i32 x, i32 y) { return x % y; }
TW_INLINE i64 remainder_of_truncated(i64 x, i64 y) { return x % y; }
TW_FUNCTION2(remainder_of_truncated, __builtin_fmodf, __builtin_fmod)
TW_FUNCTION2(arc_tangent_of, __builtin_atan2f, __builtin_atan2)
TW_FUNCTION2(hypotenuse, __builtin_hypotf, __builtin_hypot)
TW_FUNCTION2(with_sign_of, __builtin_copysignf, __builtin_copysign)
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
  x = smaller(splat(E::most), larger(splat(E::least), x));
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
// A long sum in three levels: blocks of CHAIN vectors, groups of TURNS blocks, and the groups.
// Its rounding errors then grow as those of a short one. Where there is one block nothing is joined.
constexpr i64 CHAIN = TW_CHAIN, TURNS = 32;
template <int Unroll> constexpr i64 BLOCK = CHAIN * Unroll * LANES;
template <bool Several, class V, class F> TW_INLINE void raise(V& from, V& to, V start, F join) {
  to = Several ? join(to, from) : from;
  from = start;
}
template <bool Several, class V, int Unroll, class F>
TW_INLINE void raise(V (&from)[Unroll], V (&to)[Unroll], V start, F join) {
  for (int u = 0; u < Unroll; ++u) raise<Several>(from[u], to[u], start, join);
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
