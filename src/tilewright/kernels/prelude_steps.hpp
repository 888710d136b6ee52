// What generated C++ kernels compute with, behind prelude.hpp: casts, choices, sweeps over a row and
// reductions; prelude_functions.hpp has functions.

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

template <class X> TW_INLINE X sign_of(X x) {
  X zero = {};
  return where(x > 0, zero + 1, where(x < 0, zero - 1, zero));  // NaN: 0, as in torch
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
