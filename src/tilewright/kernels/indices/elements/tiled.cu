// Elementwise scatter with the scattered axis of a block of columns in shared memory: index and src
// are read, and out is written, in one coalesced pass.
//
// Tiles are those of tiles.cuh, of an index of which x and src have boxes (boxes.cuh).
//
// update: the last position of a place wins, found by an integer maximum in shared memory; the
// order in which threads come does not matter. gathered (sums and the like): each column belongs to
// one thread, which goes through the positions in their order.

// What one thread has in flight of a tile: all that is its own if HELD, and then indices stay in
// registers from one phase to the next; else BATCH elements.
#define EACH ((ELEMENTS + THREADS - 1) / THREADS)
#define HELD_AT_ONCE (HELD ? EACH : BATCH)

TW_DEVICE i64 source_address(const Tile& t, int at) {
  if (SOURCE_DENSE) return address(t, at, LENGTH);
  return in_source(t.outer + slab_of(at, LENGTH), row_of(at, LENGTH), t.column + column_of(at));
}
TW_DEVICE i64 place_address(const Tile& t, int at) {
  if (X_DENSE) return address(t, at, PLACES);
  return in_x(t.outer + slab_of(at, PLACES), row_of(at, PLACES), t.column + column_of(at));
}

struct Given {
  int cell[HELD_AT_ONCE];  // -1: nothing, or an index out of range
  T value[HELD_AT_ONCE];
};

// Read elements first, first + THREADS, ...; report what is out of range.
TW_DEVICE void read(const Tile& t, int first, const INDEX* index, const T* source, int* fault, Given& g) {
  INDEX i[HELD_AT_ONCE];
  TW_UNROLL for (int q = 0; q < HELD_AT_ONCE; ++q) {
    const int at = first + q * THREADS;
    if (!inside(t, at, LENGTH)) continue;
    i[q] = index[address(t, at, LENGTH)];
    if (!NUMBER && source) g.value[q] = source[source_address(t, at)];
  }
  TW_UNROLL for (int q = 0; q < HELD_AT_ONCE; ++q) {
    const int at = first + q * THREADS;
    g.cell[q] = -1;
    if (!inside(t, at, LENGTH)) continue;
    const u32 place = place_of(i[q], PLACES, NONE_SKIPPED, fault);
    if (place < PLACES) g.cell[q] = slot(at, place);
  }
}

extern "C" __global__ __launch_bounds__(THREADS, BLOCKS) void update(const T* old, const INDEX* index, const T* source, T* out, double number, int* fault) {
  int* winner = (int*)shared;
  T* value = (T*)((u8*)shared + (SLOTS * 4 + 7) / 8 * 8);
  const Tile t = tile_of_block();
  Given g;
  if (HELD) read(t, threadIdx.x, index, source, fault, g);
  for (int s = threadIdx.x; s < SLOTS; s += THREADS) winner[s] = -1;
  __syncthreads();
  for (int first = threadIdx.x; first < ELEMENTS; first += THREADS * HELD_AT_ONCE) {
    if (!HELD) read(t, first, index, nullptr, fault, g);
    TW_UNROLL for (int q = 0; q < HELD_AT_ONCE; ++q) if (g.cell[q] >= 0) atomicMax(&winner[g.cell[q]], row_of(first + q * THREADS, LENGTH));
  }
  __syncthreads();
#if !NUMBER
  for (int first = threadIdx.x; first < ELEMENTS; first += THREADS * HELD_AT_ONCE) {
    if (!HELD) read(t, first, index, source, fault, g);
    TW_UNROLL for (int q = 0; q < HELD_AT_ONCE; ++q)
      if (g.cell[q] >= 0 && winner[g.cell[q]] == row_of(first + q * THREADS, LENGTH)) value[g.cell[q]] = g.value[q];
  }
  __syncthreads();
#endif
  for (int first = threadIdx.x; first < SLOTS; first += THREADS * BATCH) {
    T now[BATCH];
    i64 to[BATCH];
    TW_UNROLL for (int q = 0; q < BATCH; ++q) {
      const int s = first + q * THREADS;
      to[q] = -1;
      if (!inside(t, s, PLACES)) continue;
      const bool won = winner[s] >= 0;
      if (!won && IN_PLACE) continue;
      to[q] = place_address(t, s);
      if (won) now[q] = NUMBER ? Narrow<T>::of((A)number) : value[s];
      else now[q] = old[to[q]];
    }
    TW_UNROLL for (int q = 0; q < BATCH; ++q) if (to[q] >= 0) out[to[q]] = now[q];
  }
}

// Positions that a thread reads ahead. Addresses in a box of several axes take registers, too.
#define AHEAD ((X_DENSE && SOURCE_DENSE ? 2 : 1) * BATCH)

// INCLUDE: the old element is a term. MEAN: divide by the number of terms.
extern "C" __global__ __launch_bounds__(THREADS, BLOCKS) void gathered(const T* old, const INDEX* index, const T* source, T* out, double number, int* fault) {
  A* sums = (A*)shared;
  int* terms = (int*)(sums + SLOTS);
  const Tile t = tile_of_block();
  for (int s = threadIdx.x; s < SLOTS; s += THREADS) {
    sums[s] = INCLUDE && inside(t, s, PLACES) ? (A)widen(old[place_address(t, s)]) : neutral<A>();
    if (COUNTS) terms[s] = 0;
  }
  __syncthreads();
  for (int column = threadIdx.x; column < COLUMNS; column += THREADS) {
    const int top = column / WIDTH * LENGTH * WIDTH + column % WIDTH;  // its first position
    if (!inside(t, top, LENGTH)) continue;
    const i64 start = address(t, top, LENGTH), from = source_address(t, top);
    INDEX i[AHEAD];
    T given[AHEAD];
    const auto ask = [&](int q, int row) {
      if (row >= LENGTH) return;
      i[q] = index[start + (i64)row * INNER];
      given[q] = source[from + row * SOURCE_ROW];
    };
    TW_UNROLL for (int q = 0; q < AHEAD; ++q) ask(q, q);
    for (int row = 0; row < LENGTH; row += AHEAD) {
      TW_UNROLL for (int q = 0; q < AHEAD; ++q) {
        if (row + q >= LENGTH) continue;
        const u32 place = place_of(i[q], PLACES, NONE_SKIPPED, fault);
        const A value = (A)widen(given[q]);
        ask(q, row + q + AHEAD);
        if (place >= PLACES) continue;
        const int s = slot(top, place);
        sums[s] = reduce(sums[s], value);
        if (COUNTS) ++terms[s];
      }
    }
  }
  __syncthreads();
  for (int s = threadIdx.x; s < SLOTS; s += THREADS) {
    if (!inside(t, s, PLACES)) continue;
    const i64 at = place_address(t, s);
    if (COUNTS && terms[s] == 0) {
      if (!IN_PLACE) out[at] = old[at];
      continue;
    }
    A value = sums[s];
    if (MEAN) value = divided(value, A(terms[s] + INCLUDE));
    out[at] = Narrow<T>::of(value);
  }
}
