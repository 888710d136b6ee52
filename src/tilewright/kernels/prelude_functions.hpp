// Functions that generated C++ kernels compute, behind prelude_steps.hpp. Scalars, doubles (but for
// exponentials) and what is rare go to libm, lane by lane. Others are computed for whole vectors of floats, without a branch
// but for sines of large angles, and are within 1.7 ulp, with fused multiply-add or without (tried
// for every argument, of sine and cosine for most, 2026-11-28); f(-0) is -0 where f(0) is 0.
// Polynomials have the least weighted error, with coefficients rounded to floats one after another,
// and those behind fitted again after each. Those of vectors are templates: the compiler spends time
// on what a kernel uses.

namespace {

// ---- lane by lane ------------------------------------------------------------------------------

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
TW_FUNCTION1(rounded_down, __builtin_floorf, __builtin_floor)
TW_FUNCTION1(rounded_up, __builtin_ceilf, __builtin_ceil)
TW_FUNCTION1(rounded_even, __builtin_rintf, __builtin_rint)
TW_FUNCTION1(truncated, __builtin_truncf, __builtin_trunc)
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

// ---- exponentials ------------------------------------------------------------------------------

template <class V, int N> TW_INLINE V polynomial(V x, const float (&coefficients)[N]) {
  V p = splat(coefficients[N - 1]);
  each<N - 1>([&](auto i) TW_LAMBDA { p = p * x + coefficients[N - 2 - i]; });
  return p;
}
template <class V> TW_INLINE Vec<u32> sign_bits(V x) { return bits<Vec<u32>>(x) & 0x80000000u; }
template <class V> TW_INLINE V with_sign(V magnitude, Vec<u32> sign) {
  return bits<V>(bits<Vec<u32>>(magnitude) | sign);
}
template <class V> TW_INLINE V magnitudes(V x) {
  return bits<V>(bits<Vec<u32>>(x) & 0x7fffffffu);
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
// 2^n * by, for n as above and a result within the normal numbers.
template <class V> TW_INLINE V power_of_two(V shifted, float by = 1) {
  return bits<V>((bits<Vec<u32>>(shifted) << 23) + bits<u32>(by));
}
// exp(x) for -87 < x < 88, or NaN.
template <class V> TW_INLINE V normal_exponential(V x) {
  using E = Exponential<float>;
  V shifted = x * 0x1.715476p0f + E::shift;
  V n = shifted - E::shift;
  V r = x - n * E::log2_high;
  r = r - n * E::log2_low;
  return polynomial(r, E::coefficients) * power_of_two(shifted);
}
template <class V> TW_INLINE V exponential2_of(V x) {
  constexpr float coefficients[] = {1.0f,           0x1.62e43p-1f,  0x1.ebfbdcp-3f, 0x1.c6af7ap-5f,
                                    0x1.3b2dd2p-7f, 0x1.5f0946p-10f, 0x1.417a5cp-13f};
  using E = Exponential<float>;
  x = smaller(splat(129.0f), larger(splat(-151.0f), x));
  V shifted = x + E::shift;
  V n = shifted - E::shift;
  return scaled<float>(polynomial(x - n, coefficients), n, shifted);
}
// With p = exp(r) - 1 it is 2^n * p + (2^n - 1). Between -0.5 and 0.5, where those would cancel,
// n = 0. What r's rounding left out goes into p; halves of 2^n are in range where that is not.
template <class V> TW_INLINE V exponential_m1_of(V x) {
  constexpr float coefficients[] = {0x1.000002p-1f, 0x1.555558p-3f,  0x1.5551cp-5f,
                                    0x1.110d0ap-7f, 0x1.6f48b4p-10f, 0x1.a53c6p-13f};
  using E = Exponential<float>;
  V within = smaller(splat(E::most), larger(splat(-18.0f), x));
  auto near = magnitudes(x) < 0.5f;
  V shifted = where(near, splat(E::shift), within * 0x1.715476p0f + E::shift);
  V n = shifted - E::shift;
  V partly = within - n * E::log2_high;
  V r = partly - n * E::log2_low;
  V rest = (partly - r) - n * E::log2_low;
  V p = r + (r * r * polynomial(r, coefficients) + rest);
  V half = power_of_two(shifted, 0.5f);
  return with_sign(where(near, p, (half * p + (half - 0.5f)) * 2.0f), sign_bits(x));
}
TW_INLINE float exponential(float x) { return __builtin_expf(x); }
TW_INLINE double exponential(double x) { return __builtin_exp(x); }
template <class V> TW_INLINE V exponential(V x) {
  if constexpr (sizeof(V) == 4 * LANES) return exponential_of<float>(x);
  else return exponential_of<double>(x);
}

// tanh(x) = x + x^3 * P(x^2) near 0, and 1 - 2 / (exp(2 x) + 1).
template <class V> TW_INLINE V hyperbolic_tangent_of(V x) {
  constexpr float coefficients[] = {-0x1.555552p-2f, 0x1.110fe8p-3f,  -0x1.b9d632p-5f,
                                    0x1.62873ep-6f,  -0x1.071314p-7f, 0x1.078acp-9f};
  V a = magnitudes(x), square = a * a;
  V near = a + a * (square * polynomial(square, coefficients));
  V twice = smaller(splat(19.0f), a + a);  // 1 beyond; NaN stays
  V far = 1.0f - 2.0f / (normal_exponential(twice) + 1.0f);
  return with_sign(where(a < 0.65f, near, far), sign_bits(x));
}
// erf(x) = x + x * P(x^2) below 0.9, and 1 - 2^Q(x): the less of 1 that is, the less must be known
// of it.
template <class V> TW_INLINE V error_function_of(V x) {
  constexpr float small[] = {0x1.06eba6p-3f,  -0x1.8126f2p-2f, 0x1.ce1ceep-4f,
                             -0x1.b6b40ep-6f, 0x1.483ee2p-8f,  -0x1.3e80ap-11f};
  constexpr float large[] = {-0x1.f77e86p-13f, -0x1.a08782p0f, -0x1.d6822ep-1f, -0x1.339e68p-3f,
                             0x1.07bbe4p-5f,   -0x1.21d63p-8f, 0x1.2bdb88p-12f};
  constexpr float powers[] = {1.0f,           0x1.62e42ap-1f, 0x1.ebf9c2p-3f,
                              0x1.c6b6d8p-5f, 0x1.3ce8aep-7f, 0x1.5bda5cp-10f};
  V a = magnitudes(x);
  V near = a + a * polynomial(a * a, small);
  V q = polynomial(smaller(splat(3.95f), a), large);  // 1 beyond; NaN stays
  V shifted = q + Exponential<float>::shift;
  V r = q - (shifted - Exponential<float>::shift);
  V far = 1.0f - polynomial(r, powers) * power_of_two(shifted);
  return with_sign(where(a < 0.9f, near, far), sign_bits(x));
}

// ---- logarithms --------------------------------------------------------------------------------

// log(2^k * (1 + f)) = k * high + (f * whole + (f * P(f) + k * low)), to any base: only the last sum
// rounds to what the result shows where k = 0, since `whole` is a power of two.
struct Natural {
  static constexpr float high = 0x1.62e4p-1f, low = 0x1.7f7d1cp-20f, whole = 1.0f;
  static constexpr float coefficients[] = {
      0.0f,           -0x1.fffff8p-2f, 0x1.55555p-2f,  -0x1.000434p-2f, 0x1.99a404p-3f,
      -0x1.542526p-3f, 0x1.227004p-3f, -0x1.0f47f4p-3f, 0x1.085546p-3f, -0x1.37fd12p-4f};
};
struct Binary {
  static constexpr float high = 1.0f, low = 0.0f, whole = 1.0f;
  static constexpr float coefficients[] = {
      0x1.c551dap-2f, -0x1.715476p-1f, 0x1.ec7026p-2f, -0x1.7156ep-2f, 0x1.278b1ep-2f,
      -0x1.eb653p-3f, 0x1.a22738p-3f,  -0x1.81cd6p-3f, 0x1.7ea876p-3f, -0x1.db900cp-4f};
};
struct Decimal {
  static constexpr float high = 0x1.344p-2f, low = 0x1.3509f8p-18f, whole = 0.5f;
  static constexpr float coefficients[] = {
      -0x1.0d213ap-4f, -0x1.bcb7b2p-3f, 0x1.287a5p-3f,   -0x1.bcbadap-4f, 0x1.63d448p-4f,
      -0x1.27c69ep-4f, 0x1.f885ccp-5f,  -0x1.d2a86cp-5f, 0x1.c8c5acp-5f,  -0x1.158d96p-5f};
};
template <class L, class V> TW_INLINE V logarithm_of_parts(V k, V f) {
  V rest = f * polynomial(f, L::coefficients) + k * L::low;
  return k * L::high + (f * L::whole + rest);
}
// k of a normal x = 2^k * (1 + f) with sqrt(1 / 2) <= 1 + f < sqrt(2).
template <class V> TW_INLINE Vec<i32> exponents(V x) {
  return (bits<Vec<i32>>(x) - bits<i32>(0x1.6a09e6p-1f)) >> 23;
}
template <class V> TW_INLINE V without_exponents(V x, Vec<i32> k) {
  return bits<V>(bits<Vec<i32>>(x) - (k << 23));
}
// y where x is positive and finite; else what a logarithm of x is.
template <class V> TW_INLINE V logarithm_or_special(V x, V y) {
  const float infinity = __builtin_inff();
  V special = where(x < 0, splat(__builtin_nanf("")), x);  // infinity and NaN stay
  special = where(x == 0, splat(-infinity), special);
  return where(both(x > 0, x < infinity), y, special);
}
template <class L, class V> TW_INLINE V logarithm_of(V x) {
  auto subnormal = x < 0x1p-126f;
  V normal = where(subnormal, x * 0x1p23f, x);
  Vec<i32> k = exponents(normal);
  V f = without_exponents(normal, k) - 1.0f;
  V exponent = convert<V>(k);
  exponent = where(subnormal, exponent - 23.0f, exponent);
  return logarithm_or_special(x, logarithm_of_parts<L>(exponent, f));
}
// That of the rounded sum 1 + x, with what its rounding left out.
template <class V> TW_INLINE V logarithm1p_of(V x) {
  V sum = x + 1.0f, added = sum - 1.0f;
  V rest = (1.0f - (sum - added)) + (x - added);
  Vec<i32> k = exponents(sum);
  V scale = bits<V>((128 - k) << 23);  // 2^(1 - k): 2^-128 is not normal
  V f = (without_exponents(sum, k) - 1.0f) + rest * scale * 0.5f;
  V y = logarithm_of_parts<Natural>(convert<V>(k), f);
  return with_sign(logarithm_or_special(sum, y), sign_bits(x));
}

// ---- angles ------------------------------------------------------------------------------------

// sin(r + low + turns * pi / 2) for |r| <= pi / 4 and what its rounding left out.
template <class V> TW_INLINE V sine_of_turned(V r, V low, Vec<u32> turns) {
  constexpr float sines[] = {-0x1.555546p-3f, 0x1.11076ap-7f, -0x1.994c32p-13f};
  constexpr float cosines[] = {0x1.55554ap-5f, -0x1.6c0c1ap-10f, 0x1.99e0eep-16f};
  V square = r * r;
  V sine = r + (r * (square * polynomial(square, sines)) + low);
  V rest = square * square * polynomial(square, cosines) - r * low;
  V cosine = (1.0f - 0.5f * square) + rest;
  V either = where((turns & 1u) != 0u, cosine, sine);
  return bits<V>(bits<Vec<u32>>(either) ^ ((turns & 2u) << 30));
}
// sin(a + ahead * pi / 2) for any a >= 0: by fp64 up to 2^24, by libm beyond.
template <class V> TW_APART void sines_of_far(V& a, u32 ahead) {
  V r, low;
  Vec<u32> turns;
  for (int k = 0; k < LANES; ++k) {
    const double shifted = a[k] * 0x1.45f306dc9c883p-1 + 0x1.8p52, n = shifted - 0x1.8p52;
    const double left = (a[k] - n * 0x1.921fb54p0) - n * 0x1.10b4611a62633p-30;
    // Rounded to a float, by hand: g++ 12 leaves out casts there and back.
    const double high = bits<double>((bits<u64>(left) + (1 << 28)) >> 29 << 29);
    r[k] = (float)high;
    low[k] = (float)(left - high);
    turns[k] = (u32)bits<u64>(shifted) + ahead;
  }
  V y = sine_of_turned(r, low, turns);
  for (int k = 0; k < LANES; ++k)
    if (a[k] > 0x1p24f) y[k] = ahead ? __builtin_cosf(a[k]) : __builtin_sinf(a[k]);
  a = y;
}
template <int Step, class M> TW_INLINE bool any(M m) {
  if constexpr (Step == 0) return m[0];
  else return any<Step / 2>(m | exchanged<Step, i32>(m));
}
// sin(a + ahead * pi / 2) for a >= 0. Fewer than 2^11 quarter turns are taken off exactly: pi / 2 is
// in three parts of 13 bits and a rest. Where there are more, others of a vector stay as they are.
template <class V> TW_INLINE V sine_ahead(V a, u32 ahead) {
  const float shift = Exponential<float>::shift;
  V shifted = a * 0x1.45f306p-1f + shift;
  V n = shifted - shift;
  V left = a - n * 0x1.921p0f;
  left = left - n * 0x1.f6ap-13f;
  V partly = left - n * 0x1.11p-26f;
  V rest = (left - partly) - n * 0x1.11p-26f;
  rest = n * 0x1.68c234p-39f - rest;
  V r = partly - rest;
  V y = sine_of_turned(r, (partly - r) - rest, bits<Vec<u32>>(shifted) + ahead);
  auto is_far = a > 3200.0f;
  if (__builtin_expect(any<LANES / 2>(is_far), 0)) {
    sines_of_far(a, ahead);
    y = where(is_far, a, y);
  }
  return y;
}
template <class V> TW_INLINE V sine_of(V x) {
  V y = sine_ahead(magnitudes(x), 0);
  return bits<V>(bits<Vec<u32>>(y) ^ sign_bits(x));
}
template <class V> TW_INLINE V cosine_of(V x) { return sine_ahead(magnitudes(x), 1); }

// ---- of whole vectors --------------------------------------------------------------------------

#define TW_VECTORS1(name, of_floats, for_float, for_double)                                 \
  TW_INLINE float name(float x) { return for_float(x); }                                    \
  TW_INLINE double name(double x) { return for_double(x); }                                 \
  template <class V> TW_INLINE V name(V x) {                                                \
    if constexpr (sizeof(V) == 4 * LANES) return of_floats(x);                              \
    else for (int k = 0; k < LANES; ++k) x[k] = name(x[k]);                                 \
    return x;                                                                               \
  }
TW_VECTORS1(logarithm, logarithm_of<Natural>, __builtin_logf, __builtin_log)
TW_VECTORS1(logarithm2, logarithm_of<Binary>, __builtin_log2f, __builtin_log2)
TW_VECTORS1(logarithm10, logarithm_of<Decimal>, __builtin_log10f, __builtin_log10)
TW_VECTORS1(logarithm1p, logarithm1p_of, __builtin_log1pf, __builtin_log1p)
TW_VECTORS1(exponential2, exponential2_of, __builtin_exp2f, __builtin_exp2)
TW_VECTORS1(exponential_m1, exponential_m1_of, __builtin_expm1f, __builtin_expm1)
TW_VECTORS1(hyperbolic_tangent, hyperbolic_tangent_of, __builtin_tanhf, __builtin_tanh)
TW_VECTORS1(error_function, error_function_of, __builtin_erff, __builtin_erf)
TW_VECTORS1(sine, sine_of, __builtin_sinf, __builtin_sin)
TW_VECTORS1(cosine, cosine_of, __builtin_cosf, __builtin_cos)

}  // namespace
