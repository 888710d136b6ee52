// Rows reduced into rows where indices are few: one launch and no workspace, since every block reads
// the whole index.
//
// A block has POSITIONS positions and a piece of the row, and owns the places that are named there
// first. It sorts all positions of its places, each by the first position of its place (chunk.cuh), and
// shares them out evenly among groups of LANES threads, with UNROLLED rows in flight. A run of one
// place that lies in a group's part is finished there; of one that goes on, the groups behind leave
// their sums in shared memory, and the group in which it begins adds them in their order.
//
// IN_ORDER, for floating products: a group takes the whole of each run that begins in its part, so
// that a product goes over the terms in order and no part of it overflows on its own.
//
// Out of place, further blocks fill the rows that no index names, with zeros if FILL_ZERO, else with
// the old ones. INCLUDE makes the old row a term; MEAN divides by the number of terms.

#define GROUPS (THREADS / LANES)
#define NOWHERE 0xffffffffu

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

// Where a table has a place, or the free cell where it would be.
TW_DEVICE u32 cell_of(const u32* table, u32 place) {
  u32 at = place * 2654435761u >> (32 - DIGIT_BITS);
  while (table[at] != place && table[at] != NOWHERE) at = (at + 1) % BINS;
  return at;
}

// Sort all positions of the places that the block owns; the places of its positions are left in `named`.
TW_DEVICE void sort_owned(const Problem& p, u32 begin, const Chunk& chunk, u32* named) {
  u32* table = named + POSITIONS;
  u32* first = table + BINS;  // of each cell; POSITIONS: the block does not own the place
  u32 at[ITEMS];
  Entry entries[ITEMS];
  TW_UNROLL for (int j = 0; j < ITEMS; ++j) entries[j] = {p.place(held(j)), held(j)};
  for (int i = threadIdx.x; i < BINS; i += THREADS) {
    table[i] = NOWHERE;
    first[i] = POSITIONS;
  }
  __syncthreads();
  TW_UNROLL for (int j = 0; j < ITEMS; ++j) {
    const u32 place = entries[j].place, mine = entries[j].position - begin;
    if (mine >= POSITIONS || place >= p.places) continue;
    u32 was;
    do {
      at[j] = cell_of(table, place);
      was = atomicCAS(&table[at[j]], NOWHERE, place);
    } while (was != NOWHERE && was != place);
    atomicMin(&first[at[j]], mine);
    named[mine] = place;
  }
  __syncthreads();
  TW_UNROLL for (int j = 0; j < ITEMS; ++j) {
    at[j] = cell_of(table, entries[j].place);
    if (entries[j].position < begin) first[at[j]] = POSITIONS;  // an earlier block owns the place
  }
  __syncthreads();
  TW_UNROLL for (int j = 0; j < ITEMS; ++j) entries[j].place = first[at[j]];
  sort_chunk(entries, [](u32 owned) { return owned; }, CHUNK, chunk);
}

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

// The rows that no index names among `length` places from `begin` on.
TW_DEVICE void fill_rows(const Problem& p, u32 begin, u32 length) {
  u8* named = (u8*)shared;
  for (u32 i = threadIdx.x; i < length; i += THREADS) named[i] = begin + i >= p.places;
  __syncthreads();
  for (u32 i = threadIdx.x; i < p.count; i += THREADS) {
    const u32 place = p.place(i);
    if (place < p.places && place - begin < length) named[place - begin] = 1;
  }
  __syncthreads();
  for (u32 first = threadIdx.x / LANES; first < length; first += UNROLLED * GROUPS) {
    for (u32 column = threadIdx.x % LANES * VEC; column < p.columns; column += LANES * VEC) {
      Stored row[UNROLLED];
      TW_UNROLL for (int q = 0; q < UNROLLED; ++q) {
        const u32 i = first + q * GROUPS;
        if (FILL_ZERO) TW_UNROLL for (int k = 0; k < VEC; ++k) row[q].v[k] = Narrow<T>::of(A(0));
        else if (i < length && !named[i]) row[q] = p.old_at(begin + i, column);
      }
      TW_UNROLL for (int q = 0; q < UNROLLED; ++q) {
        const u32 i = first + q * GROUPS;
        if (i < length && !named[i]) p.write(begin + i, column, row[q]);
      }
    }
  }
}

// Of `owners` blocks for each piece of a row, and behind them those that fill `filled` rows each.
extern "C" __global__ __launch_bounds__(THREADS, 2) void reduce_rows(const INDEX* index, const T* source, const T* old, T* out, u32 count, u32 places, u32 columns, u32 owners, u32 filled, i64 source_outer, i64 source_row, i64 old_outer, i64 old_row, i64 out_outer, i64 out_row, i64 skipped, double alpha, int* fault) {
  const Problem p = {index, source + blockIdx.z * source_outer, old + blockIdx.z * old_outer, out + blockIdx.z * out_outer,
                     count, places, columns, source_row, old_row, out_row, skipped, (A)alpha, fault};
  if (blockIdx.x >= owners) {
    const u32 block = blockIdx.y * (gridDim.x - owners) + blockIdx.x - owners;
    return fill_rows(p, block * filled, filled);
  }
  const Chunk chunk = chunk_at(shared);
  Sums* heads = (Sums*)(chunk.seen + WARPS * BINS);  // of each thread: of the run that began before its part
  u32* named = (u32*)(heads + THREADS);
  sort_owned(p, blockIdx.x * POSITIONS, chunk, named);
  const u32 *begins = chunk.begins, total = begins[POSITIONS], part = (total + GROUPS - 1) / GROUPS;
  const u32 lane = threadIdx.x % LANES, group = threadIdx.x / LANES, column = (blockIdx.y * LANES + lane) * VEC;
  // The start of a group's part; IN_ORDER, the first run that begins there or later.
  const auto start = [&](u32 at) {
    if (!IN_ORDER || at >= total) return min(at, total);
    const u32 owned = chunk.entries[at].place;
    return begins[owned] == at ? at : begins[owned + 1];
  };
  const u32 begin = start(group * part), end = column < columns ? start((group + 1) * part) : begin;
  const auto finish = [&](u32 owned, const Sums& sums) {
    p.write(named[owned], column, result_of(sums, A(begins[owned + 1] - begins[owned] + INCLUDE)));
  };
  Sums sums = nothing<A, VEC>();
  for (u32 at = begin; at < end; at += UNROLLED) {
    Stored row[UNROLLED], kept[UNROLLED];
    TW_UNROLL for (int q = 0; q < UNROLLED; ++q) {
      if (at + q >= end) continue;
      const Entry entry = chunk.entries[at + q];
      row[q] = p.source_at(entry.position, column);
      if (INCLUDE && begins[entry.place] == at + q) kept[q] = p.old_at(named[entry.place], column);
    }
    TW_UNROLL for (int q = 0; q < UNROLLED; ++q) {
      if (at + q >= end) continue;
      const u32 owned = chunk.entries[at + q].place, from = begins[owned];
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
  const u32 last = begin < end ? chunk.entries[end - 1].place : 0;
  const bool goes_on = begin < end && begins[last + 1] > end, begins_here = begins[last] >= begin;
  if (goes_on && !begins_here) heads[threadIdx.x] = sums;
  __syncthreads();
  if (!goes_on || !begins_here) return;
  const u32 upto = (begins[last + 1] - 1) / part;
#pragma unroll 4
  for (u32 g = group + 1; g <= upto; ++g) sums = reduce(sums, heads[g * LANES + lane]);
  finish(last, sums);
}
