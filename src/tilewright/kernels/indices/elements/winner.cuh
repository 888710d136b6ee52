// Elementwise scatter by a pass for winners: for each place the last position that names it, by an
// integer maximum in global memory, then one write of each place.
//
// Tensors are (OUTER, LENGTH or PLACES, INNER), x and src in boxes (boxes.cuh). Blocks go through SLAB
// columns of INNER at a time, so that the winners they meet stay in the L2 cache. A key is a winner's
// position plus one, zero for none; CARRIED: with its value below, so that it need not be fetched again.
//
//   clear, elect, write: three launches (winner.cu), or phases of one (winner_at_once.cu).
//
// Each reads what none before it writes, then waits: `await`.

#define SLABS_ACROSS (INNER / SLAB)
#define POSITIONS ((u64)OUTER * LENGTH * INNER)
#define CELLS ((u64)OUTER * PLACES * INNER)
#define NOWHERE ((Cell)-1)  // of no cell

extern __shared__ __align__(16) u32 shared[];

template <bool VALUE> struct Keys { typedef u64 Key; };
template <> struct Keys<false> { typedef u32 Key; };
typedef Keys<CARRIED>::Key Key;
typedef Keys<(CELLS >= 0xffffffffu)>::Key Cell;  // its number, or NOWHERE

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

TW_DEVICE void clear_all(Pack<u64, 2>* keys) {  // up to a multiple of 16 bytes
  const u64 pieces = (CELLS * sizeof(Key) + 15) / 16;
  for (u64 i = (u64)blockIdx.x * THREADS + threadIdx.x; i < pieces; i += (u64)gridDim.x * THREADS) keys[i] = {};
}

// Whether cells repeat among the block's positions, by a sample in four warps; for all threads alike.
TW_DEVICE bool repeats(Cell cell) {
  bool often = false;
  if (threadIdx.x < 128) {
    const u32 alike = __match_any_sync(FULL_WARP, cell);
    often = __popc(__ballot_sync(FULL_WARP, cell != NOWHERE && alike >> threadIdx.x % 32 > 1)) > 1;
  }
  return __syncthreads_or(often);
}

// Of the block's positions that name one cell, the last alone need be sent. Cells are claimed in a
// table, each entry by the first that comes; a position whose entry is another cell's is sent anyway.
struct Table { u32 *cell, *latest; };

TW_DEVICE void empty(Table t) {
  for (int s = threadIdx.x; s < SENT; s += THREADS) { t.cell[s] = NOWHERE; t.latest[s] = 0; }
}
// The entry of a cell, in which `turn` is entered; SENT for none. Lanes of a warp that name one cell
// enter once: the last does, the others lose their cell.
TW_DEVICE u32 enter(Table t, Cell& cell, u32 turn) {
  if (__match_any_sync(FULL_WARP, cell) >> threadIdx.x % 32 > 1) cell = NOWHERE;
  if (cell == NOWHERE) return SENT;
  const u32 entry = (u32)((u64)((u32)cell * 2654435761u) * SENT >> 32);
  const u32 was = atomicCAS(&t.cell[entry], NOWHERE, cell);
  if (was != NOWHERE && was != cell) return SENT;
  atomicMax(&t.latest[entry], turn);
  return entry;
}

TW_DEVICE u64 place_address(u64 cell, const Place& p) { return X_DENSE ? cell : in_x(p.line, p.row, p.column); }
TW_DEVICE u64 source_address(u64 line, u32 row, u32 column) {
  return SOURCE_DENSE ? (line * LENGTH + row) * INNER + column : in_source(line, row, column);
}

// Elements first, first + THREADS, ... of a block's turn.
TW_DEVICE u64 first_of(u64 turn) { return (turn * gridDim.x + blockIdx.x) * (THREADS * ITEMS) + threadIdx.x; }

template <class Await> TW_DEVICE void elect_turn(Await await, u64 first, const INDEX* index, const T* source, Key* keys, int* fault) {
  const Table table = {shared, shared + SENT};
  Cell cell[ITEMS];
  u32 row[ITEMS], entry[ITEMS], value[CARRIED ? ITEMS : 1];
  INDEX i[ITEMS];
  TW_UNROLL for (int q = 0; q < ITEMS; ++q) {
    const u64 e = first + q * THREADS;
    cell[q] = NOWHERE;
    if (e >= POSITIONS) continue;
    const Place p = decode(e, LENGTH);
    const u64 at = (p.line * LENGTH + p.row) * INNER + p.column;
    cell[q] = p.line * PLACES * INNER + p.column;
    row[q] = p.row;
    i[q] = __ldcs(&index[at]);  // winners stay in L2
    if (CARRIED) value[q] = NUMBER ? 0 : bits_of(source[source_address(p.line, p.row, p.column)]);
  }
  TW_UNROLL for (int q = 0; q < ITEMS; ++q) {
    if (first + q * THREADS >= POSITIONS) continue;
    const u32 place = place_of(i[q], PLACES, NONE_SKIPPED, fault);
    cell[q] = place < PLACES ? cell[q] + (Cell)place * INNER : NOWHERE;
  }
  const bool thins_out = SENT && repeats(cell[0]);
  if (thins_out) {
    empty(table);
    __syncthreads();
    TW_UNROLL for (int q = 0; q < ITEMS; ++q) entry[q] = enter(table, cell[q], q * THREADS + threadIdx.x);
    __syncthreads();
  }
  await();
  TW_UNROLL for (int q = 0; q < ITEMS; ++q) {
    if (cell[q] == NOWHERE) continue;
    if (thins_out && entry[q] < SENT && table.latest[entry[q]] != q * THREADS + threadIdx.x) continue;
    Key key = row[q] + 1;
    if constexpr (CARRIED) key = key << 32 | value[q];
    atomicMax(&keys[cell[q]], key);
  }
}

template <class Await> TW_DEVICE void write_turn(Await await, u64 first, const T* old, const T* source, T* out, const Key* keys, double number) {
  u64 cell[ITEMS];
  Key key[ITEMS];
  T now[ITEMS];
  Place p[ITEMS];
  TW_UNROLL for (int q = 0; q < ITEMS; ++q) {
    const u64 e = first + q * THREADS;
    if (e >= CELLS) continue;
    p[q] = decode(e, PLACES);
    cell[q] = (p[q].line * PLACES + p[q].row) * INNER + p[q].column;
    if (!IN_PLACE && CARRIED) now[q] = old[place_address(cell[q], p[q])];
  }
  await();
  TW_UNROLL for (int q = 0; q < ITEMS; ++q) {
    key[q] = 0;
    if (first + q * THREADS < CELLS) key[q] = __ldcg(&keys[cell[q]]);
  }
  TW_UNROLL for (int q = 0; q < ITEMS; ++q) {
    if (first + q * THREADS >= CELLS) continue;
    if (!key[q]) {
      if (!IN_PLACE && !CARRIED) now[q] = old[place_address(cell[q], p[q])];
    } else if (NUMBER) {
      now[q] = Narrow<T>::of((A)number);
    } else if (CARRIED) {
      now[q] = of_bits<T>((u32)key[q]);
    } else {
      now[q] = source[source_address(p[q].line, (u32)key[q] - 1, p[q].column)];
    }
  }
  TW_UNROLL for (int q = 0; q < ITEMS; ++q)
    if (first + q * THREADS < CELLS && (key[q] || !IN_PLACE)) out[place_address(cell[q], p[q])] = now[q];
}
