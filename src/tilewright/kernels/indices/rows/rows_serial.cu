// Rows reduced into rows where indices are few: one launch and no workspace, since every block reads
// the whole index.
//
// A block has POSITIONS positions and a piece of the row, and owns the places that are named there
// first. It sorts all positions of its places, each by the first position of its place (chunk.cuh), and
// reduces their rows (owned_rows.cuh). Out of place, further blocks fill the rows that no index names.

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
  fill(p, length, 0, p.columns, [=](u32 i) { return named[i] ? NOWHERE : begin + i; });
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
  Sums* heads = (Sums*)(chunk.seen + WARPS * BINS);
  u32* named = (u32*)(heads + THREADS);
  sort_owned(p, blockIdx.x * POSITIONS, chunk, named);
  reduce_runs(p, (blockIdx.y * LANES + threadIdx.x % LANES) * VEC, chunk.begins, 0, chunk.begins[POSITIONS], heads,
              [&](u32 at) { return chunk.entries[at]; }, [=](u32 owned) { return named[owned]; }, [](const Sums&) {});
}
