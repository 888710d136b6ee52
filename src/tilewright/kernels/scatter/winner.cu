// Elementwise scatter by a pass for winners: for each place the last position that names it, by an
// integer maximum in global memory, then one write of each place.
//
// Tensors are (OUTER, LENGTH or PLACES, INNER), contiguous. Blocks go through SLAB columns of INNER
// at a time, so that the winners they meet stay in the L2 cache.

#define SLABS_ACROSS (INNER / SLAB)
#define POSITIONS ((u64)OUTER * LENGTH * INNER)
#define CELLS ((u64)OUTER * PLACES * INNER)

struct Place { u64 line; u32 row, column; };

// Element e of OUTER x slabs x rows x SLAB.
TW_DEVICE Place decode(u64 e, u32 rows) {
  Place p;
  const u32 in_slab = (u32)(e % SLAB);
  u64 rest = e / SLAB;
  p.row = (u32)(rest % rows);
  rest /= rows;
  p.column = (u32)(rest % SLABS_ACROSS) * SLAB + in_slab;
  p.line = rest / SLABS_ACROSS;
  return p;
}

extern "C" __global__ __launch_bounds__(THREADS) void clear(int* winner) {
  for (u64 i = (u64)blockIdx.x * THREADS + threadIdx.x; i < CELLS; i += (u64)gridDim.x * THREADS) winner[i] = -1;
}

extern "C" __global__ __launch_bounds__(THREADS) void elect(const INDEX* index, int* winner, int* fault) {
  const u64 first = (u64)blockIdx.x * THREADS * ITEMS + threadIdx.x;
  Place p[ITEMS];
  INDEX i[ITEMS];
  TW_UNROLL for (int q = 0; q < ITEMS; ++q) {
    const u64 e = first + q * THREADS;
    if (e >= POSITIONS) continue;
    p[q] = decode(e, LENGTH);
    i[q] = __ldcs(&index[(p[q].line * LENGTH + p[q].row) * INNER + p[q].column]);  // winners stay in L2
  }
  TW_UNROLL for (int q = 0; q < ITEMS; ++q) {
    if (first + q * THREADS >= POSITIONS) continue;
    const u32 place = place_of(i[q], PLACES, NONE_SKIPPED, fault);
    if (place < PLACES) atomicMax(&winner[(p[q].line * PLACES + place) * INNER + p[q].column], (int)p[q].row);
  }
}

extern "C" __global__ __launch_bounds__(THREADS) void write(const T* old, const T* source, T* out, const int* winner, double number) {
  const u64 first = (u64)blockIdx.x * THREADS * ITEMS + threadIdx.x;
  u64 cell[ITEMS];
  int won[ITEMS];
  T now[ITEMS];
  Place p[ITEMS];
  TW_UNROLL for (int q = 0; q < ITEMS; ++q) {
    const u64 e = first + q * THREADS;
    won[q] = -2;
    if (e >= CELLS) continue;
    p[q] = decode(e, PLACES);
    cell[q] = (p[q].line * PLACES + p[q].row) * INNER + p[q].column;
    won[q] = winner[cell[q]];
  }
  TW_UNROLL for (int q = 0; q < ITEMS; ++q) {
    if (won[q] >= 0) now[q] = NUMBER ? Narrow<T>::of((A)number) : source[(p[q].line * LENGTH + won[q]) * INNER + p[q].column];
    else if (won[q] == -1 && !IN_PLACE) now[q] = old[cell[q]];
  }
  TW_UNROLL for (int q = 0; q < ITEMS; ++q) if (won[q] >= 0 || (won[q] == -1 && !IN_PLACE)) out[cell[q]] = now[q];
}
