// What generated CUDA kernels are written in: short vectors held by one thread, memory accesses of
// a stated width, and reductions over the threads that share a row. Needs no headers.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define TW_DEVICE __device__ __forceinline__
#define TW_UNROLL _Pragma("unroll")
#define TW_INFINITY __int_as_float(0x7f800000)
#define TW_LOG2_E 1.4426950408889634f
// Of exponentials, by 2^16: a factor that the sum of a row takes out again, and what is left may be no
// normal number. It is taken off the greatest, which is rounded for all of a row alike.
#define TW_RAISE 11.0903549f

// n / d for n below 2^31, or 2^63, by what fusion/extents.py makes of d.
TW_DEVICE u32 divide(u32 n, u32 factor, u32 shift) { return (u32)((u64)n * factor >> 32) >> shift; }
TW_DEVICE u64 divide(u64 n, u64 factor, u64 shift) { return __umul64hi(n, factor) >> shift; }

struct f16 { u16 bits; };
struct bf16 { u16 bits; };

// ---- short vectors: N values of one thread; halves are packed in pairs where N is even --------

// Aligned so that a vector in shared memory moves in one access.
TW_DEVICE constexpr int vector_align(int bytes) { return bytes % 16 == 0 ? 16 : bytes % 8 == 0 ? 8 : bytes % 4 == 0 ? 4 : bytes; }
template <class T, int N> struct alignas(vector_align(N * sizeof(T))) Vec {
  T v[N];
  TW_DEVICE T& operator[](int i) { return v[i]; }
  TW_DEVICE T operator[](int i) const { return v[i]; }
};
template <class H, int N> struct Packed {
  static constexpr int WORDS = (N + 1) / 2;
  alignas(vector_align(4 * WORDS)) u32 w[WORDS];
  TW_DEVICE H operator[](int i) const { return H{(u16)(w[i / 2] >> (16 * (i % 2)))}; }
};
template <int N> struct Vec<f16, N> : Packed<f16, N> {};
template <int N> struct Vec<bf16, N> : Packed<bf16, N> {};

TW_DEVICE float widen(f16 h) { float f; asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h.bits)); return f; }
TW_DEVICE float widen(bf16 h) { return __uint_as_float((u32)h.bits << 16); }
TW_DEVICE float low(f16, u32 w) { return widen(f16{(u16)w}); }
TW_DEVICE float high(f16, u32 w) { return widen(f16{(u16)(w >> 16)}); }
TW_DEVICE float low(bf16, u32 w) { return __uint_as_float(w << 16); }
TW_DEVICE float high(bf16, u32 w) { return __uint_as_float(w & 0xffff0000u); }
TW_DEVICE u32 pack(f16, float a, float b) {
  u32 w; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(b), "f"(a)); return w;
}
TW_DEVICE u32 pack(bf16, float a, float b) {
  u32 w; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(b), "f"(a)); return w;
}
template <class H> TW_DEVICE H narrow(float f) { return H{(u16)pack(H{}, f, 0.0f)}; }
TW_DEVICE u32 splat_bits(u16 bits) { return (u32)bits * 0x10001u; }

template <int N, class T> TW_DEVICE Vec<T, N> splat(T x) {
  Vec<T, N> r; TW_UNROLL for (int i = 0; i < N; ++i) r.v[i] = x; return r;
}
template <int N> TW_DEVICE Vec<f16, N> splat(f16 x) {
  Vec<f16, N> r; TW_UNROLL for (int i = 0; i < r.WORDS; ++i) r.w[i] = splat_bits(x.bits); return r;
}
template <int N> TW_DEVICE Vec<bf16, N> splat(bf16 x) {
  Vec<bf16, N> r; TW_UNROLL for (int i = 0; i < r.WORDS; ++i) r.w[i] = splat_bits(x.bits); return r;
}

// One value for a whole vector, or a vector as it is.
template <int N, class T> TW_DEVICE Vec<T, N> spread(T x) { return splat<N>(x); }
template <int N, class T> TW_DEVICE Vec<T, N> spread(Vec<T, N> x) { return x; }

// ---- casts: round to nearest even --------------------------------------------------------------

template <class To, class From> struct Cast {
  static TW_DEVICE To one(From x) { return (To)x; }
};
template <> struct Cast<float, f16> { static TW_DEVICE float one(f16 x) { return widen(x); } };
template <> struct Cast<float, bf16> { static TW_DEVICE float one(bf16 x) { return widen(x); } };
template <> struct Cast<double, f16> { static TW_DEVICE double one(f16 x) { return widen(x); } };
template <> struct Cast<double, bf16> { static TW_DEVICE double one(bf16 x) { return widen(x); } };
template <class To, class From> TW_DEVICE To cast(From x) { return Cast<To, From>::one(x); }

template <class To, class From, int N> struct CastVec {
  static TW_DEVICE Vec<To, N> all(Vec<From, N> x) {
    Vec<To, N> r; TW_UNROLL for (int i = 0; i < N; ++i) r.v[i] = cast<To>(x[i]); return r;
  }
};
template <class H, int N> struct WidenVec {
  static TW_DEVICE Vec<float, N> all(Vec<H, N> x) {
    Vec<float, N> r;
    TW_UNROLL for (int i = 0; i < N; ++i) r.v[i] = i % 2 ? high(H{}, x.w[i / 2]) : low(H{}, x.w[i / 2]);
    return r;
  }
};
template <int N> struct CastVec<float, f16, N> : WidenVec<f16, N> {};
template <int N> struct CastVec<float, bf16, N> : WidenVec<bf16, N> {};
template <class H, int N> struct NarrowVec {
  static TW_DEVICE Vec<H, N> all(Vec<float, N> x) {
    Vec<H, N> r;
    TW_UNROLL for (int i = 0; i < r.WORDS; ++i)
      r.w[i] = pack(H{}, x.v[2 * i], 2 * i + 1 < N ? x.v[(2 * i + 1) % N] : 0.0f);
    return r;
  }
};
template <int N> struct CastVec<f16, float, N> : NarrowVec<f16, N> {};
template <int N> struct CastVec<bf16, float, N> : NarrowVec<bf16, N> {};
template <class To, class From, int N> TW_DEVICE Vec<To, N> cast(Vec<From, N> x) {
  return CastVec<To, From, N>::all(x);
}
template <> struct Cast<f16, float> { static TW_DEVICE f16 one(float x) { return narrow<f16>(x); } };
template <> struct Cast<bf16, float> { static TW_DEVICE bf16 one(float x) { return narrow<bf16>(x); } };
// To fp32 first, as PyTorch does.
template <> struct Cast<f16, double> { static TW_DEVICE f16 one(double x) { return narrow<f16>((float)x); } };
template <> struct Cast<bf16, double> { static TW_DEVICE bf16 one(double x) { return narrow<bf16>((float)x); } };
template <class H, int N> struct NarrowDoubles {
  static TW_DEVICE Vec<H, N> all(Vec<double, N> x) { return cast<H>(cast<float>(x)); }
};
template <int N> struct CastVec<f16, double, N> : NarrowDoubles<f16, N> {};
template <int N> struct CastVec<bf16, double, N> : NarrowDoubles<bf16, N> {};

// ---- arithmetic --------------------------------------------------------------------------------

#define TW_HALF_OP(name, H, ptx)                                                            \
  TW_DEVICE u32 name(H, u32 a, u32 b) {                                                     \
    u32 r; asm(ptx " %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b)); return r;                    \
  }
TW_HALF_OP(half_add, f16, "add.rn.f16x2")
TW_HALF_OP(half_sub, f16, "sub.rn.f16x2")
TW_HALF_OP(half_mul, f16, "mul.rn.f16x2")
#if __CUDA_ARCH__ >= 900
TW_HALF_OP(half_add, bf16, "add.rn.bf16x2")
TW_HALF_OP(half_sub, bf16, "sub.rn.bf16x2")
TW_HALF_OP(half_mul, bf16, "mul.rn.bf16x2")
#else  // Ampere has only the fused form: a * 1 + b, b * -1 + a and a * b + -0 round alike.
TW_DEVICE u32 half_fma(u32 a, u32 b, u32 c) {
  u32 r; asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c)); return r;
}
TW_DEVICE u32 half_add(bf16, u32 a, u32 b) { return half_fma(a, 0x3f803f80u, b); }
TW_DEVICE u32 half_sub(bf16, u32 a, u32 b) { return half_fma(b, 0xbf80bf80u, a); }
TW_DEVICE u32 half_mul(bf16, u32 a, u32 b) { return half_fma(a, b, 0x80008000u); }
#endif

#define TW_BINARY(name, half_name, expression)                                              \
  TW_DEVICE float name(float a, float b) { return expression; }                             \
  TW_DEVICE double name(double a, double b) { return expression; }                          \
  TW_DEVICE u32 name(u32 a, u32 b) { return expression; }                                   \
  TW_DEVICE u64 name(u64 a, u64 b) { return expression; }                                   \
  TW_DEVICE int name(int a, int b) { return (int)name((u32)a, (u32)b); }  /* which wrap */  \
  TW_DEVICE i64 name(i64 a, i64 b) { return (i64)name((u64)a, (u64)b); }                    \
  TW_DEVICE f16 name(f16 a, f16 b) { return f16{(u16)half_name(a, a.bits, b.bits)}; }       \
  TW_DEVICE bf16 name(bf16 a, bf16 b) { return bf16{(u16)half_name(a, a.bits, b.bits)}; }   \
  template <class T, int N> TW_DEVICE Vec<T, N> name(Vec<T, N> a, Vec<T, N> b) {            \
    Vec<T, N> r; TW_UNROLL for (int i = 0; i < N; ++i) r.v[i] = name(a.v[i], b.v[i]); return r; \
  }                                                                                         \
  template <int N> TW_DEVICE Vec<f16, N> name(Vec<f16, N> a, Vec<f16, N> b) {               \
    Vec<f16, N> r;                                                                          \
    TW_UNROLL for (int i = 0; i < r.WORDS; ++i) r.w[i] = half_name(f16{}, a.w[i], b.w[i]);  \
    return r;                                                                               \
  }                                                                                         \
  template <int N> TW_DEVICE Vec<bf16, N> name(Vec<bf16, N> a, Vec<bf16, N> b) {            \
    Vec<bf16, N> r;                                                                         \
    TW_UNROLL for (int i = 0; i < r.WORDS; ++i) r.w[i] = half_name(bf16{}, a.w[i], b.w[i]); \
    return r;                                                                               \
  }                                                                                         \
  template <class T, int N> TW_DEVICE Vec<T, N> name(Vec<T, N> a, T b) { return name(a, splat<N>(b)); } \
  template <class T, int N> TW_DEVICE Vec<T, N> name(T a, Vec<T, N> b) { return name(splat<N>(a), b); }
TW_BINARY(add, half_add, a + b)
TW_BINARY(sub, half_sub, a - b)
TW_BINARY(mul, half_mul, a * b)

// Any other step: scalar function `name`, applied to each element; operands may be scalars.
template <class T, int N> TW_DEVICE T at(Vec<T, N> x, int i) { return x[i]; }
template <class T> TW_DEVICE T at(T x, int) { return x; }
template <class T> struct Width { static constexpr int value = 1; };
template <class T, int N> struct Width<Vec<T, N>> { static constexpr int value = N; };

#define TW_MAP1(name)                                                                       \
  template <class T, int N> TW_DEVICE auto name(Vec<T, N> a) {                              \
    Vec<decltype(name(a[0])), N> r;                                                         \
    TW_UNROLL for (int i = 0; i < N; ++i) r.v[i] = name(a[i]);                              \
    return r;                                                                               \
  }
#define TW_MAP2(name)                                                                       \
  template <class T, int N, class B> TW_DEVICE auto name(Vec<T, N> a, B b) {                \
    Vec<decltype(name(a[0], at(b, 0))), N> r;                                               \
    TW_UNROLL for (int i = 0; i < N; ++i) r.v[i] = name(a[i], at(b, i));                    \
    return r;                                                                               \
  }                                                                                         \
  template <class T, int N> TW_DEVICE auto name(T a, Vec<T, N> b) {                         \
    Vec<decltype(name(a, b[0])), N> r;                                                      \
    TW_UNROLL for (int i = 0; i < N; ++i) r.v[i] = name(a, b[i]);                           \
    return r;                                                                               \
  }
#define TW_FUNCTION1(name, for_float, for_double)                                           \
  TW_DEVICE float name(float a) { return for_float; }                                       \
  TW_DEVICE double name(double a) { return for_double; }                                    \
  TW_MAP1(name)
#define TW_FUNCTION2(name, for_float, for_double)                                           \
  TW_DEVICE float name(float a, float b) { return for_float; }                              \
  TW_DEVICE double name(double a, double b) { return for_double; }                          \
  TW_MAP2(name)
#define TW_COMPARE(name, sign)                                                              \
  TW_DEVICE bool name(bool a, bool b) { return a sign b; }                                  \
  TW_DEVICE bool name(float a, float b) { return a sign b; }                                \
  TW_DEVICE bool name(double a, double b) { return a sign b; }                              \
  TW_DEVICE bool name(int a, int b) { return a sign b; }                                    \
  TW_DEVICE bool name(i64 a, i64 b) { return a sign b; }                                    \
  TW_MAP2(name)

TW_DEVICE float max_nan(float a, float b) {
  float r; asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); return r;
}
TW_DEVICE float min_nan(float a, float b) {
  float r; asm("min.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); return r;
}
TW_HALF_OP(half_max, f16, "max.NaN.f16x2")
TW_HALF_OP(half_max, bf16, "max.NaN.bf16x2")
TW_HALF_OP(half_min, f16, "min.NaN.f16x2")
TW_HALF_OP(half_min, bf16, "min.NaN.bf16x2")
TW_DEVICE float power_of_two(float a) {
  float r; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(a)); return r;
}
TW_FUNCTION2(raised_exponential, power_of_two((a - (b - TW_RAISE)) * TW_LOG2_E), exp(a - (b - TW_RAISE)))
TW_FUNCTION2(shifted_exponential, power_of_two(fmaf(a, TW_LOG2_E, -(b * TW_LOG2_E))), exp(a - b))
TW_FUNCTION2(div, a / b, a / b)
TW_FUNCTION2(maximum, max_nan(a, b), a != a || b != b ? a + b : fmax(a, b))
TW_FUNCTION2(minimum, min_nan(a, b), a != a || b != b ? a + b : fmin(a, b))
TW_FUNCTION2(power, powf(a, b), pow(a, b))
TW_DEVICE int remainder_of_truncated(int a, int b) { return a % b; }
TW_DEVICE i64 remainder_of_truncated(i64 a, i64 b) { return a % b; }
TW_FUNCTION2(remainder_of_truncated, fmodf(a, b), fmod(a, b))
TW_FUNCTION2(arc_tangent_of, atan2f(a, b), atan2(a, b))
TW_FUNCTION2(hypotenuse, hypotf(a, b), hypot(a, b))
TW_FUNCTION2(with_sign_of, copysignf(a, b), copysign(a, b))
TW_FUNCTION1(neg, -a, -a)
TW_FUNCTION1(absolute, fabsf(a), fabs(a))
TW_FUNCTION1(square_root, sqrtf(a), sqrt(a))
TW_FUNCTION1(reciprocal_root, rsqrtf(a), rsqrt(a))
TW_FUNCTION1(reciprocal, 1.0f / a, 1.0 / a)
// With the same bits, of a vector at once: the compiler's own division branches for each element, for
// those whose exponent it treats apart, and puts nothing of the others in between. One step from what
// the hardware finds is exact (Markstein, IBM J. Res. Dev. 34, 1990).
TW_DEVICE float near_reciprocal(float a) {
  float r; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(a)); return r;
}
template <class T> TW_DEVICE auto reciprocals(T a) { return reciprocal(a); }
template <int N> TW_DEVICE Vec<float, N> reciprocals(Vec<float, N> a) {
  Vec<float, N> r;
  u32 least = ~0u;
  TW_UNROLL for (int i = 0; i < N; ++i) {
    const float near = near_reciprocal(a[i]);
    r.v[i] = fmaf(near, fmaf(-a[i], near, 1.0f), near);
    least = min(least, (__float_as_uint(a[i]) + (3u << 23)) & 0x7f800000u);
  }
  if (least < 4u << 23) {  // an exponent below -126 or above 125
    TW_UNROLL for (int i = 0; i < N; ++i) r.v[i] = 1.0f / a[i];
  }
  return r;
}
// A sum divided by a count, rounded once, from the product with the count's reciprocal: of equal
// values whose sum is exact, as that of halves is, it is that value.
TW_DEVICE float average(float sum, float count, float inverse) {
  const float near = sum * inverse, rest = fmaf(-near, count, sum);
  const bool exact = (__float_as_uint(count) & 0x7fffff) == 0;  // a power of two, mostly known when compiled
  return exact || rest != rest ? near : fmaf(rest, inverse, near);
}
TW_DEVICE double average(double sum, double count, double) { return sum / count; }
template <class T, int N> TW_DEVICE Vec<T, N> average(Vec<T, N> sum, T count, T inverse) {
  TW_UNROLL for (int i = 0; i < N; ++i) sum.v[i] = average(sum.v[i], count, inverse);
  return sum;
}
TW_FUNCTION1(exponential, expf(a), exp(a))
TW_FUNCTION1(quick_exponential, power_of_two(a * TW_LOG2_E), exp(a))
TW_FUNCTION1(exponential2, exp2f(a), exp2(a))
TW_FUNCTION1(logarithm, logf(a), log(a))
TW_FUNCTION1(logarithm2, log2f(a), log2(a))
TW_FUNCTION1(logarithm1p, log1pf(a), log1p(a))
TW_FUNCTION1(exponential_m1, expm1f(a), expm1(a))
TW_FUNCTION1(hyperbolic_tangent, tanhf(a), tanh(a))
TW_FUNCTION1(error_function, erff(a), erf(a))
TW_FUNCTION1(logarithm10, log10f(a), log10(a))
TW_FUNCTION1(complementary_error_function, erfcf(a), erfc(a))
TW_FUNCTION1(tangent, tanf(a), tan(a))
TW_FUNCTION1(arc_sine, asinf(a), asin(a))
TW_FUNCTION1(arc_cosine, acosf(a), acos(a))
TW_FUNCTION1(arc_tangent, atanf(a), atan(a))
TW_FUNCTION1(hyperbolic_sine, sinhf(a), sinh(a))
TW_FUNCTION1(hyperbolic_cosine, coshf(a), cosh(a))
TW_FUNCTION1(area_sine, asinhf(a), asinh(a))
TW_FUNCTION1(area_cosine, acoshf(a), acosh(a))
TW_FUNCTION1(area_tangent, atanhf(a), atanh(a))
TW_FUNCTION1(sine, sinf(a), sin(a))
TW_FUNCTION1(cosine, cosf(a), cos(a))
TW_FUNCTION1(round_down, floorf(a), floor(a))
TW_FUNCTION1(round_up, ceilf(a), ceil(a))
TW_FUNCTION1(round_even, rintf(a), rint(a))
TW_FUNCTION1(round_to_zero, truncf(a), trunc(a))
TW_FUNCTION1(sign_of, (float)((a > 0.0f) - (a < 0.0f)), (double)((a > 0.0) - (a < 0.0)))
TW_COMPARE(eq, ==)
TW_COMPARE(ne, !=)
TW_COMPARE(lt, <)
TW_COMPARE(le, <=)
TW_COMPARE(gt, >)
TW_COMPARE(ge, >=)
TW_COMPARE(logical_and, &&)
TW_COMPARE(logical_or, ||)
TW_DEVICE bool logical_not(bool a) { return !a; }
TW_MAP1(logical_not)
template <class T> TW_DEVICE bool is_nan(T a) { return a != a; }
TW_MAP1(is_nan)

template <int N, class C, class A, class B> TW_DEVICE auto where(C c, A a, B b) {
  Vec<decltype(at(a, 0)), N> r;
  TW_UNROLL for (int i = 0; i < N; ++i) r.v[i] = at(c, i) ? at(a, i) : at(b, i);
  return r;
}

// ---- memory: N elements in accesses of BYTES each; the address is aligned to BYTES --------------

struct __align__(16) Quad { u32 x, y, z, w; };
struct __align__(8) Duo { u32 x, y; };

// Inputs are read-only while a kernel runs. STREAM data is read once: it should not displace the
// parameter vectors, which every row reads again.
template <bool STREAM> TW_DEVICE Quad fetch(const Quad* p) {
  Quad q;
  if (STREAM) asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(q.x), "=r"(q.y), "=r"(q.z), "=r"(q.w) : "l"(p));
  else asm("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(q.x), "=r"(q.y), "=r"(q.z), "=r"(q.w) : "l"(p));
  return q;
}
template <bool STREAM> TW_DEVICE Duo fetch(const Duo* p) {
  Duo q;
  if (STREAM) asm("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(q.x), "=r"(q.y) : "l"(p));
  else asm("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(q.x), "=r"(q.y) : "l"(p));
  return q;
}
template <bool STREAM> TW_DEVICE u32 fetch(const u32* p) {
  u32 r;
  if (STREAM) asm("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(r) : "l"(p));
  else asm("ld.global.nc.u32 %0, [%1];" : "=r"(r) : "l"(p));
  return r;
}
template <bool STREAM> TW_DEVICE u16 fetch(const u16* p) {
  u16 r; asm("ld.global.nc.u16 %0, [%1];" : "=h"(r) : "l"(p)); return r;
}
template <bool STREAM> TW_DEVICE u8 fetch(const u8* p) {
  u16 r; asm("ld.global.nc.u8 %0, [%1];" : "=h"(r) : "l"(p)); return (u8)r;
}
template <bool STREAM> TW_DEVICE u64 fetch(const u64* p) {
  u64 r; asm("ld.global.nc.u64 %0, [%1];" : "=l"(r) : "l"(p)); return r;
}
template <int BYTES> struct Unit;
template <> struct Unit<16> { typedef Quad type; };
template <> struct Unit<8> { typedef Duo type; };
template <> struct Unit<4> { typedef u32 type; };
template <> struct Unit<2> { typedef u16 type; };
template <> struct Unit<1> { typedef u8 type; };

template <int BYTES, int COUNT> union Units {
  typename Unit<BYTES>::type units[COUNT];
  u32 words[BYTES * COUNT / 4 > 0 ? BYTES * COUNT / 4 : 1];
  u16 halves[BYTES * COUNT / 2 > 0 ? BYTES * COUNT / 2 : 1];
  u8 bytes[BYTES * COUNT];
  double doubles[BYTES * COUNT / 8 > 0 ? BYTES * COUNT / 8 : 1];
  i64 longs[BYTES * COUNT / 8 > 0 ? BYTES * COUNT / 8 : 1];
};
template <class T, int N> struct Bits {  // f32 and f64
  template <class P> static TW_DEVICE Vec<T, N> from(const P& p) {
    Vec<T, N> r;
    TW_UNROLL for (int i = 0; i < N; ++i) {
      if constexpr (sizeof(T) == 8) r.v[i] = p.doubles[i]; else r.v[i] = __uint_as_float(p.words[i]);
    }
    return r;
  }
  template <class P> static TW_DEVICE void to(P& p, const Vec<T, N>& x) {
    TW_UNROLL for (int i = 0; i < N; ++i) {
      if constexpr (sizeof(T) == 8) p.doubles[i] = x.v[i]; else p.words[i] = __float_as_uint(x.v[i]);
    }
  }
};
template <int N> struct Bits<bool, N> {
  template <class P> static TW_DEVICE Vec<bool, N> from(const P& p) {
    Vec<bool, N> r; TW_UNROLL for (int i = 0; i < N; ++i) r.v[i] = p.bytes[i] != 0; return r;
  }
  template <class P> static TW_DEVICE void to(P& p, const Vec<bool, N>& x) {
    TW_UNROLL for (int i = 0; i < N; ++i) p.bytes[i] = x.v[i];
  }
};
template <int N> struct Bits<i64, N> {
  template <class P> static TW_DEVICE Vec<i64, N> from(const P& p) {
    Vec<i64, N> r; TW_UNROLL for (int i = 0; i < N; ++i) r.v[i] = p.longs[i]; return r;
  }
  template <class P> static TW_DEVICE void to(P& p, const Vec<i64, N>& x) {
    TW_UNROLL for (int i = 0; i < N; ++i) p.longs[i] = x.v[i];
  }
};
template <int N> struct Bits<int, N> {
  template <class P> static TW_DEVICE Vec<int, N> from(const P& p) {
    Vec<int, N> r; TW_UNROLL for (int i = 0; i < N; ++i) r.v[i] = (int)p.words[i]; return r;
  }
  template <class P> static TW_DEVICE void to(P& p, const Vec<int, N>& x) {
    TW_UNROLL for (int i = 0; i < N; ++i) p.words[i] = (u32)x.v[i];
  }
};
template <class H, int N> struct HalfBits {
  template <class P> static TW_DEVICE Vec<H, N> from(const P& p) {
    Vec<H, N> r;
    if constexpr (N == 1) r.w[0] = p.halves[0];
    else { TW_UNROLL for (int i = 0; i < N / 2; ++i) r.w[i] = p.words[i]; }
    return r;
  }
  template <class P> static TW_DEVICE void to(P& p, const Vec<H, N>& x) {
    if constexpr (N == 1) p.halves[0] = (u16)x.w[0];
    else { TW_UNROLL for (int i = 0; i < N / 2; ++i) p.words[i] = x.w[i]; }
  }
};
template <int N> struct Bits<f16, N> : HalfBits<f16, N> {};
template <int N> struct Bits<bf16, N> : HalfBits<bf16, N> {};

template <int N, int BYTES, bool STREAM, class T> TW_DEVICE Vec<T, N> load(const T* p) {
  constexpr int COUNT = N * (int)sizeof(T) / BYTES;
  typedef typename Unit<BYTES>::type U;
  Units<BYTES, COUNT> held;
  TW_UNROLL for (int i = 0; i < COUNT; ++i) held.units[i] = fetch<STREAM>((const U*)p + i);
  return Bits<T, N>::from(held);
}
template <int N, class T> TW_DEVICE Vec<T, N> gather(const T* p, i64 stride) {
  Units<sizeof(T), N> held;
  typedef typename Unit<sizeof(T)>::type U;
  TW_UNROLL for (int i = 0; i < N; ++i) held.units[i] = *(const U*)(p + i * stride);
  return Bits<T, N>::from(held);
}
template <int N, class T> TW_DEVICE Vec<T, N> gather_at(const T* p, const i64 (&offsets)[N]) {
  Units<sizeof(T), N> held;
  typedef typename Unit<sizeof(T)>::type U;
  TW_UNROLL for (int i = 0; i < N; ++i) held.units[i] = *(const U*)(p + offsets[i]);
  return Bits<T, N>::from(held);
}
template <class T> TW_DEVICE T load_one(const T* p) { return *p; }

// What is written and not read again soon may leave the caches first.
TW_DEVICE void put_away(Quad* p, Quad q) { asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(q.x), "r"(q.y), "r"(q.z), "r"(q.w) : "memory"); }
TW_DEVICE void put_away(Duo* p, Duo q) { asm volatile("st.global.cs.v2.u32 [%0], {%1, %2};" ::"l"(p), "r"(q.x), "r"(q.y) : "memory"); }
template <class U> TW_DEVICE void put_away(U* p, U q) { *p = q; }
template <int BYTES, bool STREAM = false, int N, class T> TW_DEVICE void store(T* p, const Vec<T, N>& x) {
  constexpr int COUNT = N * (int)sizeof(T) / BYTES;
  typedef typename Unit<BYTES>::type U;
  Units<BYTES, COUNT> held;
  Bits<T, N>::to(held, x);
  TW_UNROLL for (int i = 0; i < COUNT; ++i) {
    if (STREAM) put_away((U*)p + i, held.units[i]);
    else *((U*)p + i) = held.units[i];
  }
}
template <int N, class T> TW_DEVICE void scatter(T* p, i64 stride, const Vec<T, N>& x) {
  TW_UNROLL for (int i = 0; i < N; ++i) p[i * stride] = x[i];
}

// The same where only some elements lie in the row: those of columns 0 to width - 1.
template <int N, int BYTES, bool STREAM, class T> TW_DEVICE Vec<T, N> load_within(const T* p, int column, int width, bool whole) {
  if (whole) return load<N, BYTES, STREAM>(p);
  Units<sizeof(T), N> held;
  typedef typename Unit<sizeof(T)>::type U;
  TW_UNROLL for (int i = 0; i < N; ++i) held.units[i] = (u32)(column + i) < (u32)width ? *((const U*)p + i) : U{};
  return Bits<T, N>::from(held);
}
template <int BYTES, int N, class T> TW_DEVICE void store_within(T* p, const Vec<T, N>& x, int column, int width, bool whole) {
  if (whole) return store<BYTES>(p, x);
  TW_UNROLL for (int i = 0; i < N; ++i) if ((u32)(column + i) < (u32)width) p[i] = x[i];
}

// ---- positions: whole numbers that are computed where others are read -----------------------------

// What stands for a pointer to them.
template <class T> struct Positions {
  i64 first;
  TW_DEVICE Positions operator+(i64 step) const { return {first + step}; }
};
template <class T> TW_DEVICE T load_one(const Positions<T>& p) { return (T)p.first; }
template <int N, class T> TW_DEVICE Vec<T, N> gather(const Positions<T>& p, i64 stride) {
  Vec<T, N> r; TW_UNROLL for (int i = 0; i < N; ++i) r.v[i] = (T)(p.first + i * stride); return r;
}
template <int N, int, bool, class T> TW_DEVICE Vec<T, N> load(const Positions<T>& p) { return gather<N>(p, 1); }
template <int N, class T> TW_DEVICE Vec<T, N> gather_at(const Positions<T>& p, const i64 (&offsets)[N]) {
  Vec<T, N> r; TW_UNROLL for (int i = 0; i < N; ++i) r.v[i] = (T)(p.first + offsets[i]); return r;
}
template <int N, int BYTES, bool STREAM, class T> TW_DEVICE Vec<T, N> load_within(const Positions<T>& p, int, int, bool) {
  return gather<N>(p, 1);
}

// The place of the element that `index` names among consecutive positions; N or more where none is.
template <int N> TW_DEVICE u32 place_named(int index, Vec<int, N> positions) { return (u32)index - (u32)positions.v[0]; }
template <int N> TW_DEVICE u64 place_named(i64 index, Vec<i64, N> positions) { return (u64)index - (u64)positions.v[0]; }
// where(index == positions, a, b): most vectors have no such element, and pass by.
template <int N, class I, class A, class B> TW_DEVICE auto where_named(I index, Vec<I, N> positions, A a, B b) {
  Vec<decltype(at(a, 0)), N> r;
  TW_UNROLL for (int i = 0; i < N; ++i) r.v[i] = at(b, i);
  const auto place = place_named(index, positions);
  if (place < N) {
    TW_UNROLL for (int i = 0; i < N; ++i) if (place == i) r.v[i] = at(a, i);
  }
  return r;
}

// ---- random masks: booleans that are computed where others are read -------------------------------

// Philox4x32-10 (Salmon et al., SC 2011): which of the four words of a block are below a threshold.
TW_DEVICE u32 philox_below(u64 seed, u64 block, u32 call, u32 threshold) {
  u32 k0 = (u32)seed, k1 = (u32)(seed >> 32);
  u32 x0 = (u32)block, x1 = (u32)(block >> 32), x2 = call, x3 = 0;
  TW_UNROLL for (int round = 0; round < 10; ++round, k0 += 0x9e3779b9u, k1 += 0xbb67ae85u) {
    const u64 p = (u64)x0 * 0xd2511f53u, q = (u64)x2 * 0xcd9e8d57u;
    x0 = (u32)(q >> 32) ^ x1 ^ k0;
    x1 = (u32)q;
    x2 = (u32)(p >> 32) ^ x3 ^ k1;
    x3 = (u32)p;
  }
  return (x0 < threshold) | (x1 < threshold) << 1 | (x2 < threshold) << 2 | (x3 < threshold) << 3;
}
// What stands for a pointer to a mask's elements.
struct Mask {
  u64 seed, index;
  u32 call, threshold;
  TW_DEVICE Mask operator+(i64 step) const { return {seed, index + (u64)step, call, threshold}; }
  TW_DEVICE u32 block(u64 b) const { return philox_below(seed, b, call, threshold); }
};
TW_DEVICE bool load_one(const Mask& m) { return m.block(m.index / 4) >> m.index % 4 & 1; }
template <int N> TW_DEVICE Vec<bool, N> bits_of(u32 bits) {
  Vec<bool, N> x;
  TW_UNROLL for (int i = 0; i < N; ++i) x[i] = (bits >> i & 1) != 0;
  return x;
}
template <int N, int, bool> TW_DEVICE Vec<bool, N> load(const Mask& m) {
  const int skipped = (int)(m.index % 4);
  u32 bits = m.block(m.index / 4);
  TW_UNROLL for (int b = 1; b < (N + 6) / 4; ++b) {
    if (4 * b < skipped + N) bits |= m.block(m.index / 4 + b) << 4 * b;
  }
  return bits_of<N>(bits >> skipped);
}
template <int N> TW_DEVICE Vec<bool, N> gather(const Mask& m, i64 stride) {
  u32 bits = 0;
  for (int i = 0; i < N; ++i) bits |= (u32)load_one(m + i * stride) << i;
  return bits_of<N>(bits);
}
template <int N> TW_DEVICE Vec<bool, N> gather_at(const Mask& m, const i64 (&offsets)[N]) {
  u32 bits = 0;
  TW_UNROLL for (int i = 0; i < N; ++i) bits |= (u32)load_one(m + offsets[i]) << i;
  return bits_of<N>(bits);
}
template <int N, int BYTES, bool STREAM> TW_DEVICE Vec<bool, N> load_within(const Mask& m, int, int, bool) {
  return load<N, BYTES, STREAM>(m);
}
