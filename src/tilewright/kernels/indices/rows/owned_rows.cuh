// What blocks do that own places, whose positions they have sorted: share the rows out evenly among
// groups of LANES threads, with UNROLLED rows in flight. A run of one place that lies in a group's range
// is finished there; of one that goes on, the groups behind leave their sums in shared memory, and the
// group in which it begins adds them in their order.
//
// IN_ORDER, for floating products: a group takes the whole of each run that begins in its range, so
// that a product goes over the terms in order and no part of it overflows on its own.
//
// A run may have begun in a block before, or go on in one behind: its partials are joined by who has cut it.
//
// INCLUDE makes the old row a term; MEAN divides by the number of terms; rows without any are filled
// with zeros if FILL_ZERO, else with the old ones.

#define GROUPS (THREADS / LANES)
#define NOWHERE 0xffffffffu
#define JOINED_FIRST 8

typedef Pack<T, VEC> Stored;
typedef Pack<A, VEC> Sums;

// Rows of one outer slice.
struct Problem {
  const INDEX* index;
  const T* source;
  const T* old;
  T* out;
  u32 count, places, columns;
  i64 source_row, old_row, out_row, skipped;
  A alpha;
  int* fault;

  TW_DEVICE u32 place(u32 position) const {
    return position < count ? place_of(index[position], places, skipped, fault) : places;
  }
  TW_DEVICE Stored source_at(u32 position, u32 column) const { return load<VEC>(source + position * source_row + column); }
  TW_DEVICE Stored old_at(u32 place, u32 column) const { return load<VEC>(old + place * old_row + column); }
  TW_DEVICE void write(u32 place, u32 column, const Stored& row) const { store(out + place * out_row + column, row); }
};

TW_DEVICE Sums widened(const Stored& row, A alpha) {
  Sums s;
  TW_UNROLL for (int i = 0; i < VEC; ++i) s.v[i] = SCALED ? (A)widen(row.v[i]) * alpha : (A)widen(row.v[i]);
  return s;
}

TW_DEVICE Stored result_of(const Sums& sums, A terms) {
  Stored result;
  TW_UNROLL for (int i = 0; i < VEC; ++i) {
    A value = sums.v[i];
    if (REDUCE == SUM && !INCLUDE) value += A(0);
    if (MEAN) value = divided(value, terms);
    result.v[i] = Narrow<T>::of(value);
  }
  return result;
}

// Fill rows 0 to length - 1 of the block's where `place_at` gives a place, from a column on to another.
template <class PlaceAt> TW_DEVICE void fill(const Problem& p, u32 length, u32 begin, u32 end, PlaceAt place_at) {
  for (u32 first = threadIdx.x / LANES; first < length; first += UNROLLED * GROUPS) {
    u32 place[UNROLLED];
    TW_UNROLL for (int q = 0; q < UNROLLED; ++q) place[q] = first + q * GROUPS < length ? place_at(first + q * GROUPS) : NOWHERE;
    for (u32 column = begin + threadIdx.x % LANES * VEC; column < end; column += LANES * VEC) {
      Stored row[UNROLLED];
      TW_UNROLL for (int q = 0; q < UNROLLED; ++q) {
        if (FILL_ZERO) TW_UNROLL for (int k = 0; k < VEC; ++k) row[q].v[k] = Narrow<T>::of(A(0));
        else if (place[q] != NOWHERE) row[q] = p.old_at(place[q], column);
      }
      TW_UNROLL for (int q = 0; q < UNROLLED; ++q) if (place[q] != NOWHERE) p.write(place[q], column, row[q]);
    }
  }
}

// How many of `total` entries a group takes.
TW_DEVICE u32 range_of(u32 total) { return (total + GROUPS - 1) / GROUPS; }
// A group's sum with those that the next ones up to `upto` have left: few at a time are joined with one
// another first, as a long sum loses less by a large term than by many small ones.
TW_DEVICE Sums with_heads(Sums sums, const Sums* heads, u32 upto) {
  const auto head = [=](u32 g) { return heads[g * LANES + threadIdx.x % LANES]; };
  for (u32 g = threadIdx.x / LANES + 1; g <= upto; g += JOINED_FIRST) {
    Sums few = head(g);
#pragma unroll 4
    for (u32 q = g + 1; q < min(g + JOINED_FIRST, upto + 1); ++q) few = reduce(few, head(q));
    sums = reduce(sums, few);
  }
  return sums;
}

// Reduce the runs of a block: of what it owns, which `place_at` tells the places of, number k has the
// sorted entries from begins[k] to begins[k + 1]; the block has those from `first` to `last`. `heads` has a
// sum of each thread: of the run that began before its range. What is reduced here of a run that goes on
// behind `last` is left to `leave`.
template <class EntryAt, class PlaceAt, class Leave> TW_DEVICE void reduce_runs(const Problem& p, u32 column, const u32* begins, u32 first, u32 last, Sums* heads, EntryAt entry_at, PlaceAt place_at, Leave leave) {
  const u32 range = range_of(last - first), group = threadIdx.x / LANES;
  // The start of a group's range; IN_ORDER, the first run that begins there or later.
  const auto start = [&](u32 at) {
    if (!IN_ORDER || at >= last) return min(at, last);
    const u32 owned = entry_at(at).place;
    return begins[owned] == at ? at : begins[owned + 1];
  };
  const u32 begin = start(first + group * range), end = column < p.columns ? start(first + (group + 1) * range) : begin;
  const auto finish = [&](u32 owned, const Sums& sums) {
    p.write(place_at(owned), column, result_of(sums, A(begins[owned + 1] - begins[owned] + INCLUDE)));
  };
  Sums sums = nothing<A, VEC>();
  for (u32 at = begin; at < end; at += UNROLLED) {
    Stored row[UNROLLED], kept[UNROLLED];
    TW_UNROLL for (int q = 0; q < UNROLLED; ++q) {
      if (at + q >= end) continue;
      const Entry entry = entry_at(at + q);
      row[q] = p.source_at(entry.position, column);
      if (INCLUDE && begins[entry.place] == at + q) kept[q] = p.old_at(place_at(entry.place), column);
    }
    TW_UNROLL for (int q = 0; q < UNROLLED; ++q) {
      if (at + q >= end) continue;
      const u32 owned = entry_at(at + q).place, from = begins[owned];
      if (from == at + q) {
        sums = nothing<A, VEC>();
        if (INCLUDE) TW_UNROLL for (int i = 0; i < VEC; ++i) sums.v[i] = (A)widen(kept[q].v[i]);
      }
      sums = reduce(sums, widened(row[q], p.alpha));
      if (begins[owned + 1] != at + q + 1) continue;
      if (from < begin) heads[threadIdx.x] = sums;
      else finish(owned, sums);
    }
  }
  if (IN_ORDER) return;
  const u32 owned = begin < end ? entry_at(end - 1).place : 0;
  const bool goes_on = begin < end && begins[owned + 1] > end, begins_here = begins[owned] >= begin;
  if (goes_on && !begins_here) heads[threadIdx.x] = sums;
  __syncthreads();
  if (!goes_on || !begins_here) return;
  sums = with_heads(sums, heads, (min(begins[owned + 1], last) - 1 - first) / range);
  if (begins[owned + 1] > last) leave(sums);
  else finish(owned, sums);
}
