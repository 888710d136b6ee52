// Separate elements copied to the places that an index names, index and source of any strides and
// smaller than x or not; where it repeats, the last position wins.
//
// A cell is a place of a column of the index: `along` of each, however many columns more x has. Its key
// is the winner's position plus one, zero for none.
//
// 1. clear: no cell has a key.
// 2. elect: for each cell the last position that names it, by an integer maximum.
// 3. write: each cell with a key is written, in order. Out of place x was copied before.
//
// NAMED: cells are many; only those that the index names are cleared, and each position that won writes
// its element. HASHED: their keys are in a table of slots, at least twice as many as positions, of a cell's
// number plus one and its key; a cell takes the first slot behind its hash that is free. ALONE: a column has one position, which wins; there are no keys, and write is all there is.
// NUMBER: one number is written, and there is no source. A thread has ITEMS elements.

#define NOWHERE 0xffffffffu

struct Sent { At at; u32 place, cell; };

TW_DEVICE u32 first_of_thread() { return blockIdx.x * (THREADS * ITEMS) + threadIdx.x; }

template <class... Axes> TW_DEVICE void read(Sent (&sent)[ITEMS], u32 count, u32 length, u32 inner, const INDEX* index, int* fault, const T*, u32 along, u32, Axes... axes) {
  INDEX named[ITEMS];
  TW_UNROLL for (int q = 0; q < ITEMS; ++q) {
    const u32 i = first_of_thread() + q * THREADS;
    if (i >= count) continue;
    sent[q].at = at_of(i, axes...);
    named[q] = index[sent[q].at.index];
  }
  TW_UNROLL for (int q = 0; q < ITEMS; ++q) {
    const u32 i = first_of_thread() + q * THREADS;
    sent[q].cell = NOWHERE;
    if (i >= count) continue;
    sent[q].place = place_of(named[q], along, NONE_SKIPPED, fault);
    if (sent[q].place < along) sent[q].cell = (i / (length * inner) * along + sent[q].place) * inner + i % inner;
  }
}

// `size`: of the keys, in cells; of the table in slots, a power of two.
TW_DEVICE u32 slot_behind(u32 slot, u32 size) { return (slot + 1) & (size - 1); }
TW_DEVICE u32 first_slot(u32 cell, u32 size) { return (u32)((u64)(cell * 2654435761u) * size >> 32); }

// Where a cell's key is, once it has a place.
TW_DEVICE u32* claimed(u32* keys, u32 cell, u32 size) {
  if (!HASHED) return keys + cell;
  u32 slot = first_slot(cell, size);
  for (u32 was; (was = atomicCAS(&keys[2 * slot], 0u, cell + 1)) && was != cell + 1;) slot = slot_behind(slot, size);
  return keys + 2 * slot + 1;
}
TW_DEVICE u32 key_of(const u32* keys, u32 cell, u32 size) {
  if (!HASHED) return keys[cell];
  u32 slot = first_slot(cell, size);
  while (keys[2 * slot] != cell + 1) slot = slot_behind(slot, size);
  return keys[2 * slot + 1];
}

extern "C" __global__ __launch_bounds__(THREADS) void clear(const INDEX* index, u32* keys, u32 count, u32 size, u32 length, u32 inner, int* fault MORE_PARAMETERS) {
  release_next();
  if (NAMED && !HASHED) {
    Sent sent[ITEMS];
    read(sent, count, length, inner, index, fault MORE);
    TW_UNROLL for (int q = 0; q < ITEMS; ++q) if (sent[q].cell != NOWHERE) keys[sent[q].cell] = 0;
  } else {  // up to a multiple of 16 bytes
    const u32 pieces = HASHED ? size / 2 : (size + 3) / 4;
    for (u32 i = blockIdx.x * THREADS + threadIdx.x; i < pieces; i += gridDim.x * THREADS) store(keys + 4 * i, Pack<u32, 4>{});
  }
  await_previous();  // the copy of x, for which the kernels behind this one do not wait
}

extern "C" __global__ __launch_bounds__(THREADS) void elect(const INDEX* index, u32* keys, u32 count, u32 size, u32 length, u32 inner, int* fault MORE_PARAMETERS) {
  release_next();
  Sent sent[ITEMS];
  read(sent, count, length, inner, index, fault MORE);
  await_previous();
  TW_UNROLL for (int q = 0; q < ITEMS; ++q) {
    const u32 alike = __match_any_sync(FULL_WARP, sent[q].cell);
    if (sent[q].cell == NOWHERE || alike >> threadIdx.x % 32 > 1) continue;  // a later lane's position is larger
    atomicMax(claimed(keys, sent[q].cell, size), sent[q].at.position + 1);
  }
}

template <class... More> TW_DEVICE void write_named(const INDEX* index, T* out, const u32* keys, T number, u32 count, u32 size, u32 length, u32 inner, int* fault, const T* moved, u32 along, u32 stride, More... axes) {
  Sent sent[ITEMS];
  T value[ITEMS];
  u32 key[ITEMS];
  read(sent, count, length, inner, index, fault, moved, along, stride, axes...);
  TW_UNROLL for (int q = 0; q < ITEMS; ++q) {
    value[q] = number;
    if (!NUMBER && sent[q].cell != NOWHERE) value[q] = moved[sent[q].at.src];
  }
  await_previous();
  TW_UNROLL for (int q = 0; q < ITEMS; ++q) key[q] = ALONE ? 1 : sent[q].cell == NOWHERE ? 0 : key_of(keys, sent[q].cell, size);
  TW_UNROLL for (int q = 0; q < ITEMS; ++q)
    if (sent[q].cell != NOWHERE && key[q] == sent[q].at.position + 1) out[sent[q].at.x + sent[q].place * stride] = value[q];
}

template <class... Axes> TW_DEVICE void write_cells(T* out, const u32* keys, T number, u32 cells, u32 length, u32 inner, const T* moved, u32 along, u32 stride, Axes... axes) {
  u32 key[ITEMS], to[ITEMS];
  T value[ITEMS];
  await_previous();
  TW_UNROLL for (int q = 0; q < ITEMS; ++q) {
    const u32 cell = first_of_thread() + q * THREADS;
    key[q] = cell < cells ? keys[cell] : 0;
  }
  TW_UNROLL for (int q = 0; q < ITEMS; ++q) {
    if (!key[q]) continue;
    const u32 cell = first_of_thread() + q * THREADS, row = cell / inner;
    const At at = at_of((row / along * length + key[q] - 1) * inner + cell % inner, axes...);
    to[q] = at.x + row % along * stride;
    value[q] = NUMBER ? number : moved[at.src];
  }
  TW_UNROLL for (int q = 0; q < ITEMS; ++q) if (key[q]) out[to[q]] = value[q];
}

extern "C" __global__ __launch_bounds__(THREADS) void write(const INDEX* index, T* out, const u32* keys, double number, u32 count, u32 size, u32 length, u32 inner, int* fault MORE_PARAMETERS) {
  const T written = Narrow<T>::of((A)number);
  if (NAMED) write_named(index, out, keys, written, count, size, length, inner, fault MORE);
  else write_cells(out, keys, written, size, length, inner MORE);
}
