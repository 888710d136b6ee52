// Elementwise scatter by a pass for winners: for each place the last position that names it, by an
// integer maximum in global memory, then one write of each place.
//
// Tensors are (OUTER, LENGTH or PLACES, INNER), contiguous. Blocks go through SLAB columns of INNER
// at a time, so that the winners they meet stay in the L2 cache. A key is a winner's position plus
// one, zero for none; CARRIED: with its value below, so that it need not be fetched again.
//
// Kernels overlap: each reads what no kernel before it writes, then waits.

#define SLABS_ACROSS (INNER / SLAB)
#define POSITIONS ((u64)OUTER * LENGTH * INNER)
#define CELLS ((u64)OUTER * PLACES * INNER)
#define NOWHERE 0xffffffffu

extern __shared__ __align__(16) u32 shared[];

template <bool VALUE> struct Keys { typedef u64 Key; };
template <> struct Keys<false> { typedef u32 Key; };
typedef Keys<CARRIED>::Key Key;

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

extern "C" __global__ __launch_bounds__(THREADS) void clear(Key* keys) {
  release_next();
  for (u64 i = (u64)blockIdx.x * THREADS + threadIdx.x; i < CELLS; i += (u64)gridDim.x * THREADS) keys[i] = 0;
}

// Whether the block has sent a later row for the cell of late: `sent` has cells above their rows plus
// one. Entries are overwritten as they come, in one piece; what is forgotten is sent again.
TW_DEVICE bool outdone(volatile u64* sent, u32 cell, u32 row) {
  volatile u64* at = sent + (cell * 2654435761u) / (0x100000000ull / (SENT ? SENT : 1));
  const u64 last = *at;
  if ((u32)(last >> 32) == cell && (u32)last > row) return true;
  *at = (u64)cell << 32 | (row + 1);
  return false;
}

extern "C" __global__ __launch_bounds__(THREADS) void elect(const INDEX* index, const T* source, Key* keys, int* fault) {
  volatile u64* sent = (volatile u64*)shared;
  release_next();
  const u64 first = (u64)blockIdx.x * THREADS * ITEMS + threadIdx.x;
  Place p[ITEMS];
  INDEX i[ITEMS];
  u32 value[CARRIED ? ITEMS : 1];
  TW_UNROLL for (int q = 0; q < ITEMS; ++q) {
    const u64 e = first + q * THREADS;
    if (e >= POSITIONS) continue;
    p[q] = decode(e, LENGTH);
    const u64 at = (p[q].line * LENGTH + p[q].row) * INNER + p[q].column;
    i[q] = __ldcs(&index[at]);  // winners stay in L2
    if (CARRIED) value[q] = NUMBER ? 0 : bits_of(source[at]);
  }
  if (SENT) {
    for (int s = threadIdx.x; s < SENT; s += THREADS) sent[s] = (u64)NOWHERE << 32;
    __syncthreads();
  }
  await_previous();
  TW_UNROLL for (int q = ITEMS - 1; q >= 0; --q) {  // later positions first: they outdo the others
    u32 place = PLACES;
    if (first + q * THREADS < POSITIONS) place = place_of(i[q], PLACES, NONE_SKIPPED, fault);
    if (INNER == 1 && SENT) {  // a warp of one place, as in sorted indices: its last lane wins
      int same;
      __match_all_sync(FULL_WARP, place, &same);
      if (same && threadIdx.x % 32 != 31) place = PLACES;
    }
    if (place >= PLACES) continue;
    const u64 cell = (p[q].line * PLACES + place) * INNER + p[q].column;
    if (SENT && outdone(sent, (u32)cell, p[q].row)) continue;
    Key key = p[q].row + 1;
    if constexpr (CARRIED) key = key << 32 | value[q];
    atomicMax(&keys[cell], key);
  }
}

extern "C" __global__ __launch_bounds__(THREADS) void write(const T* old, const T* source, T* out, const Key* keys, double number) {
  const u64 first = (u64)blockIdx.x * THREADS * ITEMS + threadIdx.x;
  u64 cell[ITEMS];
  Key key[ITEMS];
  T now[ITEMS];
  Place p[ITEMS];
  TW_UNROLL for (int q = 0; q < ITEMS; ++q) {
    const u64 e = first + q * THREADS;
    if (e >= CELLS) continue;
    p[q] = decode(e, PLACES);
    cell[q] = (p[q].line * PLACES + p[q].row) * INNER + p[q].column;
    if (!IN_PLACE && CARRIED) now[q] = old[cell[q]];
  }
  await_previous();
  TW_UNROLL for (int q = 0; q < ITEMS; ++q) {
    key[q] = 0;
    if (first + q * THREADS < CELLS) key[q] = keys[cell[q]];
  }
  TW_UNROLL for (int q = 0; q < ITEMS; ++q) {
    if (first + q * THREADS >= CELLS) continue;
    if (!key[q]) {
      if (!IN_PLACE && !CARRIED) now[q] = old[cell[q]];
    } else if (NUMBER) {
      now[q] = Narrow<T>::of((A)number);
    } else if (CARRIED) {
      now[q] = of_bits<T>((u32)key[q]);
    } else {
      now[q] = source[(p[q].line * LENGTH + (u32)key[q] - 1) * INNER + p[q].column];
    }
  }
  TW_UNROLL for (int q = 0; q < ITEMS; ++q)
    if (first + q * THREADS < CELLS && (key[q] || !IN_PLACE)) out[cell[q]] = now[q];
}
