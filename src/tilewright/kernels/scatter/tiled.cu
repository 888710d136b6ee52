// Elementwise scatter with the scattered axis of a block of columns in shared memory: index and src
// are read, and out is written, in one coalesced pass.
//
// Tensors are (OUTER, LENGTH or PLACES, INNER), contiguous. A tile is WIDTH columns of INNER of one
// outer slice, or SLABS whole outer slices (then WIDTH is INNER).
//
// update: the last position of a place wins, found by an integer maximum in shared memory; the
// order in which threads come does not matter. gathered (sums and the like): each column belongs to
// one thread, which goes through the positions in their order.

#define COLUMNS (SLABS * WIDTH)
#define SLOTS (COLUMNS * PLACES)
#define TILES_ACROSS ((INNER + WIDTH - 1) / WIDTH)

extern __shared__ __align__(16) u32 shared[];

struct Tile { i64 outer; int column, slabs, width; };

TW_DEVICE Tile tile_of_block() {
  const i64 across = blockIdx.x % TILES_ACROSS, down = blockIdx.x / TILES_ACROSS;
  Tile t;
  t.outer = down * SLABS;
  t.column = (int)across * WIDTH;
  t.slabs = (int)min((i64)SLABS, (i64)OUTER - t.outer);
  t.width = min(WIDTH, (int)(INNER - t.column));
  return t;
}

// Element e of a tile with `rows` rows a slice, in the order of memory; false past its edge.
struct Element { int slab, row, column; };
TW_DEVICE bool element(const Tile& t, int e, int rows, Element& found) {
  found.column = e % WIDTH;
  found.row = e / WIDTH % rows;
  found.slab = e / WIDTH / rows;
  return found.column < t.width && found.slab < t.slabs;
}
TW_DEVICE i64 address(const Tile& t, const Element& e, int rows) {
  return ((t.outer + e.slab) * rows + e.row) * (i64)INNER + t.column + e.column;
}
TW_DEVICE int slot(const Element& e, u32 place) { return (e.slab * PLACES + (int)place) * WIDTH + e.column; }

extern "C" __global__ __launch_bounds__(THREADS, 1) void update(const T* old, const INDEX* index, const T* source, T* out, double number, int* fault) {
  int* winner = (int*)shared;
  T* value = (T*)(winner + SLOTS);
  const Tile t = tile_of_block();
  for (int s = threadIdx.x; s < SLOTS; s += THREADS) winner[s] = -1;
  __syncthreads();
  constexpr int ELEMENTS = COLUMNS * LENGTH;
  for (int first = threadIdx.x; first < ELEMENTS; first += THREADS * BATCH) {
    Element e[BATCH];
    INDEX i[BATCH];
    bool valid[BATCH];
    TW_UNROLL for (int q = 0; q < BATCH; ++q) {
      const int at = first + q * THREADS;
      valid[q] = at < ELEMENTS && element(t, at, LENGTH, e[q]);
      if (valid[q]) i[q] = index[address(t, e[q], LENGTH)];
    }
    TW_UNROLL for (int q = 0; q < BATCH; ++q) {
      if (!valid[q]) continue;
      const u32 place = place_of(i[q], PLACES, NONE_SKIPPED, fault);
      if (place < PLACES) atomicMax(&winner[slot(e[q], place)], e[q].row);
    }
  }
  __syncthreads();
#if !NUMBER
  for (int first = threadIdx.x; first < ELEMENTS; first += THREADS * BATCH) {
    Element e[BATCH];
    INDEX i[BATCH];
    T given[BATCH];
    bool valid[BATCH];
    TW_UNROLL for (int q = 0; q < BATCH; ++q) {
      const int at = first + q * THREADS;
      valid[q] = at < ELEMENTS && element(t, at, LENGTH, e[q]);
      if (valid[q]) {
        i[q] = index[address(t, e[q], LENGTH)];
        given[q] = source[address(t, e[q], LENGTH)];
      }
    }
    TW_UNROLL for (int q = 0; q < BATCH; ++q) {
      if (!valid[q] || (u64)(i64)i[q] >= PLACES) continue;
      const int s = slot(e[q], (u32)i[q]);
      if (winner[s] == e[q].row) value[s] = given[q];
    }
  }
  __syncthreads();
#endif
  for (int first = threadIdx.x; first < SLOTS; first += THREADS * BATCH) {
    T now[BATCH];
    Element e[BATCH];
    bool valid[BATCH];
    TW_UNROLL for (int q = 0; q < BATCH; ++q) {
      const int s = first + q * THREADS;
      valid[q] = s < SLOTS && element(t, s, PLACES, e[q]);
      if (!valid[q]) continue;
      const bool won = winner[s] >= 0;
      if (won) now[q] = NUMBER ? Narrow<T>::of((A)number) : value[s];
      else if (IN_PLACE) valid[q] = false;
      else now[q] = old[address(t, e[q], PLACES)];
    }
    TW_UNROLL for (int q = 0; q < BATCH; ++q) if (valid[q]) out[address(t, e[q], PLACES)] = now[q];
  }
}

// INCLUDE: the old element is a term. MEAN: divide by the number of terms.
extern "C" __global__ __launch_bounds__(THREADS, 1) void gathered(const T* old, const INDEX* index, const T* source, T* out, double number, int* fault) {
  A* sums = (A*)shared;
  int* terms = (int*)(sums + SLOTS);
  const Tile t = tile_of_block();
  for (int s = threadIdx.x; s < SLOTS; s += THREADS) {
    Element e;
    const bool valid = element(t, s, PLACES, e);
    sums[s] = INCLUDE && valid ? (A)widen(old[address(t, e, PLACES)]) : neutral<A>();
    if (COUNTS) terms[s] = 0;
  }
  __syncthreads();
  for (int column = threadIdx.x; column < COLUMNS; column += THREADS) {
    Element e = {column / WIDTH, 0, column % WIDTH};
    if (e.slab >= t.slabs || e.column >= t.width) continue;
    const i64 start = address(t, e, LENGTH);
    for (int row = 0; row < LENGTH; row += 2 * BATCH) {
      INDEX i[2 * BATCH];
      T given[2 * BATCH];
      TW_UNROLL for (int q = 0; q < 2 * BATCH; ++q) {
        if (row + q >= LENGTH) continue;
        i[q] = index[start + (i64)(row + q) * INNER];
        given[q] = source[start + (i64)(row + q) * INNER];
      }
      TW_UNROLL for (int q = 0; q < 2 * BATCH; ++q) {
        if (row + q >= LENGTH) continue;
        const u32 place = place_of(i[q], PLACES, NONE_SKIPPED, fault);
        if (place >= PLACES) continue;
        const int s = slot(e, place);
        sums[s] = reduce(sums[s], (A)widen(given[q]));
        if (COUNTS) ++terms[s];
      }
    }
  }
  __syncthreads();
  for (int s = threadIdx.x; s < SLOTS; s += THREADS) {
    Element e;
    if (!element(t, s, PLACES, e)) continue;
    const i64 at = address(t, e, PLACES);
    if (COUNTS && terms[s] == 0) {
      if (!IN_PLACE) out[at] = old[at];
      continue;
    }
    A value = sums[s];
    if (MEAN) value = divided(value, A(terms[s] + INCLUDE));
    out[at] = Narrow<T>::of(value);
  }
}
