// Rows of `source` reduced into rows of `out` on a CPU, always in the order of positions.
//
// METHOD says how threads share the work:
//   COLUMNS  each thread has some columns of every row: no skew can unbalance it;
//   OWNERS   each thread has a range of places, cut so that their positions are as many; it looks for
//            them among all positions, unless indices rise and they are one piece;
//   PRIVATE  each thread has a range of the positions and a table of its own; tables are joined in
//            the order of threads;
//   SORTED   as OWNERS, over positions sorted by place: each row is summed in a buffer of type A
//            and written once. The only one for halves, means, and tables that are no term.
// The source that includes this defines T, A, INDEX, REDUCE, METHOD, INCLUDE, MEAN, FILL and SPARSE: as many times more
// places than positions are not counted.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <omp.h>
#include <vector>

typedef std::int64_t i64;

constexpr int DIGIT = 11;  // bits; its counts stay in the first cache

enum { SUM, PROD, AMAX, AMIN };
enum { COLUMNS, OWNERS, PRIVATE, SORTED };
enum { NO_FILL, FILL_OLD, FILL_ZERO };

struct f16 { _Float16 value; };
struct bf16 { std::uint16_t bits; };

template <class S> inline S widen(S x) { return x; }
inline float widen(f16 x) { return float(x.value); }
inline float widen(bf16 x) {
  const std::uint32_t word = std::uint32_t(x.bits) << 16;
  float f;
  std::memcpy(&f, &word, 4);
  return f;
}
template <class S> inline void narrow(S x, S& to) { to = x; }
inline void narrow(float x, f16& to) { to.value = _Float16(x); }
inline void narrow(float x, bf16& to) {
  std::uint32_t word;
  std::memcpy(&word, &x, 4);
  to.bits = x != x ? 0x7fc0 : std::uint16_t((word + 0x7fff + (word >> 16 & 1)) >> 16);
}

template <class S> inline S neutral() {
  typedef std::numeric_limits<S> limits;
  if (REDUCE == PROD) return S(1);
  if (REDUCE == AMAX) return limits::has_infinity ? -limits::infinity() : limits::lowest();
  if (REDUCE == AMIN) return limits::has_infinity ? limits::infinity() : limits::max();
  return S(0);
}
// NaN wins, as in PyTorch.
template <class S> inline S reduce(S a, S b) {
  if (REDUCE == PROD) return a * b;
  if (REDUCE == AMAX) return a != a ? a : (b != b || b > a) ? b : a;
  if (REDUCE == AMIN) return a != a ? a : (b != b || b < a) ? b : a;
  return a + b;
}
template <class S> inline S divided(S sum, S terms) {
  if (std::numeric_limits<S>::is_integer) return sum / terms - (sum % terms != 0 && sum < 0);
  return sum / terms;
}
template <> inline float divided(float sum, float terms) { return sum / terms; }
template <> inline double divided(double sum, double terms) { return sum / terms; }

struct Rows { i64 outer, row; };

struct Problem {
  const T* source;
  const T* old;
  T* out;
  const INDEX* index;
  i64 count, places, columns, outer, skipped;
  Rows in_source, in_old, in_out;
  A alpha;
  int threads;

  const T* from(i64 z, i64 position) const { return source + z * in_source.outer + position * in_source.row; }
  T* to(i64 z, i64 place) const { return out + z * in_out.outer + place * in_out.row; }
  bool left_out(i64 position) const { return i64(index[position]) == skipped; }
};

// The first index out of range, or -1, and whether indices never fall.
struct Looked { i64 fault; bool rising; };
static Looked look(const Problem& p) {
  i64 found = p.count;
  bool rising = true;
#pragma omp parallel for reduction(min : found) reduction(& : rising) num_threads(p.threads) schedule(static)
  for (i64 j = 0; j < p.count; ++j) {
    if (std::uint64_t(i64(p.index[j])) >= std::uint64_t(p.places) && !p.left_out(j)) found = std::min(found, j);
    rising &= p.index[std::max(j, i64(1)) - 1] <= p.index[j];
  }
  return {found == p.count ? -1 : found, rising};
}

static void fill(const Problem& p) {
#pragma omp parallel for collapse(2) num_threads(p.threads) schedule(static)
  for (i64 z = 0; z < p.outer; ++z)
    for (i64 k = 0; k < p.places; ++k) {
      if (FILL == FILL_OLD) std::memcpy(p.to(z, k), p.old + z * p.in_old.outer + k * p.in_old.row, p.columns * sizeof(T));
      else std::memset(p.to(z, k), 0, p.columns * sizeof(T));
    }
}

template <class S> static inline void add(S* to, const T* from, A alpha, i64 columns) {
#pragma omp simd
  for (i64 c = 0; c < columns; ++c) to[c] = reduce(A(to[c]), A(widen(from[c]) * alpha));
}

#if METHOD == 0
static void run(const Problem& p, bool rising) {
#pragma omp parallel num_threads(p.threads)
  {
    // Whole cache lines, so that no two threads write to one.
    const i64 line = 64 / sizeof(T), lines = (p.columns + line - 1) / line;
    const int t = omp_get_thread_num(), threads = omp_get_num_threads();
    const i64 first = lines * t / threads * line;
    const i64 last = std::min(lines * (t + 1) / threads * line, p.columns);
    if (first < last)
      for (i64 z = 0; z < p.outer; ++z)
        for (i64 j = 0; j < p.count; ++j)
          if (!p.left_out(j)) add(p.to(z, p.index[j]) + first, p.from(z, j) + first, p.alpha, last - first);
  }
}
#endif

// Whether places are so many more than positions that a look at each of them takes longest.
static bool sparse(const Problem& p) { return p.places > SPARSE * p.count; }

static std::vector<i64> counted(const Problem& p) {
  std::vector<i64> starts(p.places + 1, 0);
  for (i64 j = 0; j < p.count; ++j)
    if (!p.left_out(j)) ++starts[p.index[j] + 1];
  for (i64 k = 0; k < p.places; ++k) starts[k + 1] += starts[k];
  return starts;
}

#if METHOD == 1
// Of rising indices each thread has a piece that begins with a new place.
static void run_rising(const Problem& p) {
#pragma omp parallel for num_threads(p.threads) schedule(static, 1)
  for (int t = 0; t < p.threads; ++t) {
    const auto border = [&](i64 j) {
      return j < p.count ? std::lower_bound(p.index, p.index + p.count, p.index[j]) - p.index : p.count;
    };
    const i64 first = border(p.count * t / p.threads), last = border(p.count * (t + 1) / p.threads);
    for (i64 z = 0; z < p.outer; ++z)
      for (i64 j = first; j < last; ++j)
        if (!p.left_out(j)) add(p.to(z, p.index[j]), p.from(z, j), p.alpha, p.columns);
  }
}
// Places at which threads begin, so that each has about as many positions.
static std::vector<i64> ranges(const Problem& p) {
  std::vector<i64> cuts(p.threads + 1, p.places);
  cuts[0] = 0;
  if (sparse(p)) {
    std::vector<i64> places;
    for (i64 j = 0; j < p.count; ++j)
      if (!p.left_out(j)) places.push_back(p.index[j]);
    std::sort(places.begin(), places.end());
    const i64 total = places.size();
    for (int t = 1; t < p.threads && total; ++t) cuts[t] = places[total * t / p.threads];
    return cuts;
  }
  const std::vector<i64> starts = counted(p);
  for (int t = 1; t < p.threads; ++t)
    cuts[t] = std::lower_bound(starts.begin(), starts.begin() + p.places, starts[p.places] * t / p.threads) - starts.begin();
  return cuts;
}
static void run(const Problem& p, bool rising) {
  if (rising) return run_rising(p);
  const std::vector<i64> cuts = ranges(p);
#pragma omp parallel for num_threads(p.threads) schedule(static, 1)
  for (int t = 0; t < p.threads; ++t)
    for (i64 z = 0; z < p.outer; ++z)
      for (i64 j = 0; j < p.count; ++j) {
        const i64 place = p.index[j];
        if (place >= cuts[t] && place < cuts[t + 1] && !p.left_out(j)) add(p.to(z, place), p.from(z, j), p.alpha, p.columns);
      }
}
#endif

#if METHOD == 2
static void run(const Problem& p, bool rising) {
  const i64 size = p.places * p.columns;
  std::vector<A> tables(size * p.threads);
#pragma omp parallel num_threads(p.threads)
  {
    const int t = omp_get_thread_num(), threads = omp_get_num_threads();
    for (i64 z = 0; z < p.outer; ++z) {
      A* table = tables.data() + size * t;
      std::fill(table, table + size, REDUCE == SUM ? A(-0.0) : neutral<A>());  // keeps minus zero
      for (i64 j = p.count * t / threads; j < p.count * (t + 1) / threads; ++j)
        if (!p.left_out(j)) add(table + p.index[j] * p.columns, p.from(z, j), p.alpha, p.columns);
#pragma omp barrier
#pragma omp for schedule(static)
      for (i64 k = 0; k < p.places; ++k)
        for (int other = 0; other < threads; ++other) {
          const A* from = tables.data() + size * other + k * p.columns;
          T* to = p.to(z, k);
#pragma omp simd
          for (i64 c = 0; c < p.columns; ++c) to[c] = reduce(A(to[c]), from[c]);
        }
    }
  }
}
#endif

#if METHOD == 3
// Positions by their places, one digit of these after the other, the lowest first.
static std::vector<i64> by_digits(const Problem& p) {
  std::vector<i64> found;
  for (i64 j = 0; j < p.count; ++j)
    if (!p.left_out(j)) found.push_back(j);
  std::vector<i64> other(found.size());
  for (int low = 0; (p.places - 1) >> low; low += DIGIT) {
    i64 starts[(1 << DIGIT) + 1] = {};
    const auto digit = [&](i64 j) { return p.index[j] >> low & ((1 << DIGIT) - 1); };
    for (const i64 j : found) ++starts[digit(j) + 1];
    for (int d = 0; d < 1 << DIGIT; ++d) starts[d + 1] += starts[d];
    for (const i64 j : found) other[starts[digit(j)]++] = j;
    found.swap(other);
  }
  return found;
}

// Positions by their places, those of one place in their own order; and where the positions of each place that has
// some begin, with an end behind the last.
struct Sorted { std::vector<i64> positions, starts; };
static Sorted sorted(const Problem& p) {
  Sorted s;
  if (sparse(p)) {
    s.positions = by_digits(p);
  } else {
    std::vector<i64> next = counted(p);
    s.positions.resize(next[p.places]);
    for (i64 j = 0; j < p.count; ++j)
      if (!p.left_out(j)) s.positions[next[p.index[j]]++] = j;
  }
  const i64 total = s.positions.size();
  for (i64 j = 0; j < total; ++j)
    if (!j || p.index[s.positions[j]] != p.index[s.positions[j - 1]]) s.starts.push_back(j);
  s.starts.push_back(total);
  return s;
}
static void run(const Problem& p, bool rising) {
  const Sorted s = sorted(p);
  const i64 filled = s.starts.size() - 1, total = s.positions.size();
  const auto border = [&](int t) {
    return std::lower_bound(s.starts.begin(), s.starts.end() - 1, total * t / p.threads) - s.starts.begin();
  };
#pragma omp parallel for num_threads(p.threads) schedule(static, 1)
  for (int t = 0; t < p.threads; ++t) {
    std::vector<A> sums(p.columns);
    const i64 first = border(t), last = t + 1 < p.threads ? border(t + 1) : filled;
    for (i64 z = 0; z < p.outer; ++z)
      for (i64 k = first; k < last; ++k) {
        const i64 terms = s.starts[k + 1] - s.starts[k], place = p.index[s.positions[s.starts[k]]];
        T* to = p.to(z, place);
        const T* before = p.old ? p.old + z * p.in_old.outer + place * p.in_old.row : to;
        for (i64 c = 0; c < p.columns; ++c) sums[c] = INCLUDE ? A(widen(before[c])) : neutral<A>();
        for (i64 j = s.starts[k]; j < s.starts[k + 1]; ++j) add(sums.data(), p.from(z, s.positions[j]), p.alpha, p.columns);
        for (i64 c = 0; c < p.columns; ++c) narrow(MEAN ? divided(sums[c], A(terms + INCLUDE)) : sums[c], to[c]);
      }
  }
}
#endif

// Writes nothing where an index is out of range: `fault` is its position then, else -1.
extern "C" void rows(const T* source, const T* old, T* out, const INDEX* index, i64 count, i64 places, i64 columns,
                     i64 outer, i64 source_outer, i64 source_row, i64 old_outer, i64 old_row, i64 out_outer,
                     i64 out_row, i64 skipped, double alpha, int threads, i64* fault) {
  const Problem p = {source, old, out, index, count, places, columns, outer, skipped,
                     {source_outer, source_row}, {old_outer, old_row}, {out_outer, out_row}, A(alpha), threads};
  const Looked looked = look(p);
  *fault = looked.fault;
  if (looked.fault >= 0) return;
  if (FILL != NO_FILL) fill(p);
  run(p, looked.rising);
}
