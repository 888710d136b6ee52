// Elements of an index by buckets of neighbouring places, so that every access to memory is near its
// neighbours' however random the indices are.
//
// Tensors are (OUTER, LENGTH or PLACES, INNER), x and src in boxes (boxes.cuh); in one dimension LENGTH may
// be more than there are, and a call tells how many elements it has of a tile. A tile is WIDTH columns of
// INNER of one outer slice; its elements and slots count in the order (row, column). A bucket is 2^SHIFT
// rows of slots, a chunk is what one block of `split` reads.
//
// 1. split: a chunk's elements are put in the order of their buckets in shared memory and written as
//    entries in one piece, with where the run of each bucket begins and how long it is.
// 2. settle: a block gathers the runs of its bucket from all chunks, makes of each slot what its
//    entries say in shared memory, whatever the order they come in (buckets.cu, bucket_sums.cu), and
//    writes slots in the order of memory. A bucket of more than SHARE entries, by a sample of the
//    chunks, is settled by several blocks, which join what they have in global memory; the last of them
//    writes.
//
// ASCENDING: kernels of ascending.cuh came before, and where they wrote the result nothing is left to do.
//
// CARRIED: entries hold the elements' values. JOINED_ZEROS: of a slot, where blocks join; so they begin.
// `note_of` is the settler's: 16 bits that an entry has of its value or its position in the chunk.

#define TILES_ACROSS ((INNER + WIDTH - 1) / WIDTH)
#define ELEMENTS ((u64)LENGTH * WIDTH)
#define CHUNK (SPLIT_THREADS * ITEMS)
#define CHUNKS ((u32)((ELEMENTS + CHUNK - 1) / CHUNK))
#define BUCKETS ((u32)(((u64)PLACES + (1 << SHIFT) - 1) >> SHIFT))
#define SLOTS (WIDTH << SHIFT)
// Buckets of more than SHARE entries at most, and blocks beside the first of each.
#define HEAVY ((u32)((u64)CHUNKS * CHUNK / SHARE))
#define SAMPLED (CHUNKS < 16 ? CHUNKS : 16)
#define RUNS ((int)((CHUNKS + SETTLE_THREADS - 1) / SETTLE_THREADS))
#define NOWHERE 0xffffffffu
#define BATCH 4
#define IN_FLIGHT (ITEMS < 8 ? ITEMS : 8)
#define VALUES_AHEAD (CARRIED && ITEMS <= (sizeof(T) > 4 ? 4 : 8))

extern __shared__ __align__(16) u32 shared[];

#if !ASCENDING
TW_DEVICE bool rising(const u32*) { return false; }
#endif

// Slot in the bucket and note, from the upper bits down; above them a value of up to four bytes. A wide
// value is apart: so are those of a chunk, before all else of it.
struct Wide { u32 where, value[2]; };
template <int BYTES> struct Carrying { typedef u64 Entry; };
template <> struct Carrying<0> { typedef u32 Entry; };
template <> struct Carrying<8> { typedef Wide Entry; };
typedef Carrying<CARRIED ? (sizeof(T) > 4 ? 8 : 4) : 0>::Entry Entry;
// Of a slot, where blocks join what they have of a bucket.
typedef Carrying<CARRIED ? 4 : 0>::Entry Key;

template <class E> struct Entries {
  typedef u32 Carried;
  static TW_DEVICE u32 carried(T value) { return bits_of(value); }
  static TW_DEVICE E of(u32 bits, u32 where) { return (E)((u64)bits << 32 | where); }
  static TW_DEVICE u32 where(E e) { return (u32)e; }
  static TW_DEVICE T value(E e) { return of_bits<T>((u32)((u64)e >> 32)); }
  static TW_DEVICE E at(const E* chunk, u32 i) { return chunk[i]; }
  static TW_DEVICE void put(E* chunk, u32 i, E e) { chunk[i] = e; }
};
template <> struct Entries<Wide> {
  typedef T Carried;
  union Bits { T value; u32 words[2]; };
  static TW_DEVICE T carried(T value) { return value; }
  static TW_DEVICE Wide of(T value, u32 where) {
    const Bits b = {value};
    return {where, {b.words[0], b.words[1]}};
  }
  static TW_DEVICE u32 where(const Wide& e) { return e.where; }
  static TW_DEVICE T value(const Wide& e) {
    Bits b;
    b.words[0] = e.value[0], b.words[1] = e.value[1];
    return b.value;
  }
  static TW_DEVICE Wide at(const Wide* chunk, u32 i) { return of(((const T*)chunk)[i], ((const u32*)((const T*)chunk + CHUNK))[i]); }
  static TW_DEVICE void put(Wide* chunk, u32 i, const Wide& e) {
    ((T*)chunk)[i] = value(e);
    ((u32*)((T*)chunk + CHUNK))[i] = e.where;
  }
};
typedef Entries<Entry>::Carried Carried;
TW_DEVICE u32 note_of(Carried value, u32 position);
TW_DEVICE T value_of(const Entry& e) { return Entries<Entry>::value(e); }
TW_DEVICE u32 slot_of(const Entry& e) { return Entries<Entry>::where(e) >> 16; }
TW_DEVICE u32 note_of(const Entry& e) { return Entries<Entry>::where(e) & 0xffff; }

struct Tile { u64 outer; u32 column; };
TW_DEVICE Tile tile_at(u64 number) { return {number / TILES_ACROSS, (u32)(number % TILES_ACROSS) * WIDTH}; }
TW_DEVICE bool inside(const Tile& t, u32 at) { return INNER % WIDTH == 0 || t.column + at % WIDTH < INNER; }
TW_DEVICE u64 address(const Tile& t, u32 at, u32 first_row, u32 rows) {
  return (t.outer * rows + first_row + at / WIDTH) * INNER + t.column + at % WIDTH;
}
TW_DEVICE u64 source_address(const Tile& t, u32 at) {
  return SOURCE_DENSE ? address(t, at, 0, LENGTH) : in_source(t.outer, at / WIDTH, t.column + at % WIDTH);
}
TW_DEVICE u64 place_address(const Tile& t, u32 at, u32 first_row) {
  return X_DENSE ? address(t, at, first_row, PLACES) : in_x(t.outer, first_row + at / WIDTH, t.column + at % WIDTH);
}

// The sum of all threads before this one; `total`, of all. `of_warp`: 32 of S.
template <int THREADS, class S> TW_DEVICE S sum_before(S mine, S* of_warp, S& total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  S upto = mine;
  TW_UNROLL for (int step = 1; step < 32; step *= 2) {
    const S other = __shfl_up_sync(FULL_WARP, upto, step);
    if (lane >= step) upto += other;
  }
  __syncthreads();
  if (lane == 31) of_warp[warp] = upto;
  __syncthreads();
  S warps = lane < THREADS / 32 ? of_warp[lane] : 0;
  TW_UNROLL for (int step = 1; step < 32; step *= 2) {
    const S other = __shfl_up_sync(FULL_WARP, warps, step);
    if (lane >= step) warps += other;
  }
  total = __shfl_sync(FULL_WARP, warps, 31);
  const S ahead = __shfl_sync(FULL_WARP, warps, max(warp - 1, 0));
  return (warp ? ahead : 0) + upto - mine;
}

// ---- split --------------------------------------------------------------------------------------

// The next place of a run, for each lane one; a whole warp takes 32 at once where it agrees, as in
// sorted indices, where additions would queue up.
TW_DEVICE u32 reserve(u32* next, u32 bucket) {
  int same;
  __match_all_sync(FULL_WARP, bucket, &same);
  if (!same) return bucket < BUCKETS ? atomicAdd(&next[bucket], 1) : 0;
  u32 first = 0;
  if (threadIdx.x % 32 == 0 && bucket < BUCKETS) first = atomicAdd(&next[bucket], 32);
  return __shfl_sync(FULL_WARP, first, 0) + threadIdx.x % 32;
}

// Turn the lengths of the runs into where they begin, and write both; the length of all comes last.
TW_DEVICE void begin_runs(u32* next, u32* of_warp, u32* runs) {
  constexpr u32 EACH = (BUCKETS + SPLIT_THREADS - 1) / SPLIT_THREADS;
  u32 sum = 0, total;
  for (u32 j = 0; j < EACH; ++j) {
    const u32 b = threadIdx.x * EACH + j;
    if (b < BUCKETS) sum += next[b];
  }
  u32 before = sum_before<SPLIT_THREADS>(sum, of_warp, total);
  for (u32 j = 0; j < EACH; ++j) {
    const u32 b = threadIdx.x * EACH + j;
    if (b >= BUCKETS) break;
    const u32 length = next[b];
    next[b] = before;
    before += length;
  }
  if (threadIdx.x == 0) next[BUCKETS] = total;
  __syncthreads();
  for (u32 b = threadIdx.x; b < BUCKETS; b += SPLIT_THREADS) runs[b] = next[b] | (next[b + 1] - next[b]) << 16;
  __syncthreads();
}

extern "C" __global__ __launch_bounds__(SPLIT_THREADS, ITEMS > 16 ? 1 : 1024 / SPLIT_THREADS) void split(const INDEX* index, const T* source, Entry* entries, u32* runs, Key* common, u32* done, int* fault, const u32* state, u64 elements) {
  release_next();
  if (rising(state)) return;
  u32 *of_warp = shared, *next = shared + 32;
  Entry* staged = (Entry*)(next + (BUCKETS + 2) / 2 * 2);
  const u64 number = blockIdx.x / CHUNKS, row = blockIdx.x;
  const u32 chunk = blockIdx.x % CHUNKS;
  const Tile t = tile_at(number);
  u32 place[ITEMS], rank[ITEMS];
  Carried value[VALUES_AHEAD ? ITEMS : 1];
  TW_UNROLL for (int from = 0; from < ITEMS; from += IN_FLIGHT) {
    INDEX i[IN_FLIGHT];
    bool valid[IN_FLIGHT];
    TW_UNROLL for (int q = 0; q < IN_FLIGHT; ++q) {
      const u64 at = (u64)chunk * CHUNK + (from + q) * SPLIT_THREADS + threadIdx.x;
      valid[q] = at < elements && inside(t, (u32)at);
      if (valid[q]) i[q] = __ldcs(&index[address(t, (u32)at, 0, LENGTH)]);
      if (VALUES_AHEAD && valid[q]) value[from + q] = Entries<Entry>::carried(source[source_address(t, (u32)at)]);
    }
    if (from == 0) for (u32 b = threadIdx.x; b < BUCKETS; b += SPLIT_THREADS) next[b] = 0;
    TW_UNROLL for (int q = 0; q < IN_FLIGHT; ++q) {
      const u32 named = valid[q] ? place_of(i[q], PLACES, NONE_SKIPPED, fault) : PLACES;
      place[from + q] = named < PLACES ? named : NOWHERE;
    }
  }
  const u64 joined = (u64)OUTER * TILES_ACROSS * HEAVY, threads = (u64)gridDim.x * SPLIT_THREADS;
  for (u64 i = row * SPLIT_THREADS + threadIdx.x; i < joined * SLOTS * JOINED_ZEROS; i += threads) common[i] = 0;
  for (u64 i = row * SPLIT_THREADS + threadIdx.x; i < joined; i += threads) done[i] = 0;
  __syncthreads();
  TW_UNROLL for (int j = 0; j < ITEMS; ++j) rank[j] = reserve(next, place[j] == NOWHERE ? NOWHERE : place[j] >> SHIFT);
  __syncthreads();
  begin_runs(next, of_warp, runs + row * BUCKETS);
  const u32 filled = next[BUCKETS];
  TW_UNROLL for (int j = 0; j < ITEMS; ++j) {
    const u32 position = j * SPLIT_THREADS + threadIdx.x;
    const bool valid = place[j] != NOWHERE;
    Carried carried = VALUES_AHEAD ? value[j] : 0;
    if (CARRIED && !VALUES_AHEAD && valid) carried = Entries<Entry>::carried(source[source_address(t, chunk * CHUNK + position)]);
    const u32 slot = (place[j] & ((1u << SHIFT) - 1)) * WIDTH + position % WIDTH;  // WIDTH divides CHUNK
    const Entry e = Entries<Entry>::of(carried, slot << 16 | note_of(carried, position));
    if (valid) Entries<Entry>::put(staged, next[place[j] >> SHIFT] + rank[j], e);
  }
  __syncthreads();
  entries += row * CHUNK;
  for (u32 i = threadIdx.x; i < filled; i += SPLIT_THREADS) Entries<Entry>::put(entries, i, Entries<Entry>::at(staged, i));
}

// ---- settle -------------------------------------------------------------------------------------

// What a block of `settle` does: the split-th of `splits` of a bucket, the heavy-th of those that have
// several. `beside` counts the blocks beside the first of each, up to the bucket's.
struct Share { u32 bucket, split, splits, heavy, beside; };

// Of a bucket with more entries than one block should take, or, beyond BUCKETS, of any such bucket;
// nowhere if there is none. All blocks of a tile come to the same conclusion, from the same sample.
TW_DEVICE Share share_of(u32 unit, const u32* runs, u32* scratch) {
  Share* found = (Share*)(scratch + 32);
  u32 heavy_before = 0, blocks_before = 0;
  __syncthreads();
  if (threadIdx.x == 0) *found = {NOWHERE, 0, 0, 0, 0};
  for (u32 first = 0; first < BUCKETS; first += SETTLE_THREADS) {
    const u32 b = first + threadIdx.x;
    u64 count = 0;
    if (b < BUCKETS) {
      TW_UNROLL for (u32 k = 0; k < SAMPLED; ++k) count += runs[(u64)CHUNKS * k / SAMPLED * BUCKETS + b] >> 16;
      count = count * CHUNKS / SAMPLED;
    }
    const u32 blocks = count > SHARE ? (u32)((count - 1) / SHARE) : 0;  // beside the bucket's own
    u32 total;
    const u32 packed = sum_before<SETTLE_THREADS>(blocks | (u32)(blocks > 0) << 16, scratch, total);
    const u32 at = blocks_before + (packed & 0xffff), heavy = heavy_before + (packed >> 16);
    if (blocks && b == unit) *found = {b, 0, blocks + 1, heavy, at};
    if (blocks && unit >= BUCKETS && unit - BUCKETS >= at && unit - BUCKETS < at + blocks)
      *found = {b, unit - BUCKETS - at + 1, blocks + 1, heavy, at};
    blocks_before += total & 0xffff;
    heavy_before += total >> 16;
  }
  __syncthreads();
  const Share mine = *found;
  __syncthreads();
  return mine;
}

// Shared memory of a block: SLOT_WORDS arrays with a word for each slot; then the runs of the bucket as
// one list of entries, of which a window is looked at at a time.
struct Settling {
  u32* words;
  u32* scratch;          // 64 words
  u32 *chunk, *shifted;  // of each run that is not empty: where it is from, and where it lies there
                         // less where it lies in the list
  u32 *heads, *ahead;    // a bit for each entry that begins a run; runs that begin before each word
};
TW_DEVICE Settling settling() {
  Settling m;
  m.words = shared;
  m.scratch = m.words + SLOT_WORDS * SLOTS;
  m.chunk = m.scratch + 64;
  m.shifted = m.chunk + RUNS * SETTLE_THREADS;
  m.heads = m.shifted + RUNS * SETTLE_THREADS;
  m.ahead = m.heads + SETTLE_THREADS;
  return m;
}

#define WINDOW (32 * SETTLE_THREADS)

// The runs of a share of a bucket, RUNS of them in each thread.
struct List {
  u32 begins[RUNS];  // in the list; NOWHERE for an empty run
  u32 total;
};
TW_DEVICE List list_runs(const Settling& m, const Share& mine, const u32* runs) {
  const u32 first = (u32)((u64)CHUNKS * mine.split / mine.splits), last = (u32)((u64)CHUNKS * (mine.split + 1) / mine.splits);
  u32 run[RUNS];
  u64 sum = 0, total;  // of entries, and in the lower 16 bits of runs that are not empty
  TW_UNROLL for (int j = 0; j < RUNS; ++j) {
    const u32 chunk = threadIdx.x * RUNS + j;
    run[j] = chunk >= first && chunk < last ? runs[(u64)chunk * BUCKETS + mine.bucket] : 0;
  }
  TW_UNROLL for (int j = 0; j < RUNS; ++j) sum += (u64)(run[j] >> 16) << 16 | (run[j] >> 16 > 0);
  u64 before = sum_before<SETTLE_THREADS>(sum, (u64*)m.scratch, total);
  List list;
  list.total = (u32)(total >> 16);
  TW_UNROLL for (int j = 0; j < RUNS; ++j) {
    const u32 length = run[j] >> 16, begin = (u32)(before >> 16), number = (u32)before & 0xffff;
    list.begins[j] = length ? begin : NOWHERE;
    if (!length) continue;
    m.chunk[number] = threadIdx.x * RUNS + j;
    m.shifted[number] = (run[j] & 0xffff) - begin;
    before += (u64)length << 16 | 1;
  }
  return list;
}

// Mark where runs begin in the window from `start`. `passed` counts those that began before it, and
// then those before the next window.
TW_DEVICE void mark_runs(const Settling& m, const List& list, u32 start, u32& passed) {
  __syncthreads();
  m.heads[threadIdx.x] = 0;
  __syncthreads();
  TW_UNROLL for (int j = 0; j < RUNS; ++j) {
    const u32 at = list.begins[j] - start;
    if (list.begins[j] != NOWHERE && list.begins[j] >= start && at < WINDOW) atomicOr(&m.heads[at / 32], 1u << at % 32);
  }
  __syncthreads();
  u32 total;
  m.ahead[threadIdx.x] = passed + sum_before<SETTLE_THREADS>((u32)__popc(m.heads[threadIdx.x]), m.scratch, total);
  passed += total;
  __syncthreads();
}

// Hand all listed entries on, BATCH of a thread at a time with the chunks they are from; NOWHERE for none.
template <class Take> TW_DEVICE void take_all(const Settling& m, const List& list, const Entry* entries, Take take) {
  const u32 lane = threadIdx.x % 32, upto = FULL_WARP >> (31 - lane);
  u32 passed = 0;
  for (u32 start = 0; start < list.total; start += WINDOW) {
    mark_runs(m, list, start, passed);
    const u32 end = min((u32)WINDOW, list.total - start);
    for (u32 first = 0; first < end; first += SETTLE_THREADS * BATCH) {
      Entry e[BATCH];
      u32 from[BATCH];
      TW_UNROLL for (int q = 0; q < BATCH; ++q) {
        const u32 at = first + q * SETTLE_THREADS + threadIdx.x, word = at / 32;
        from[q] = NOWHERE;
        if (at >= end) continue;
        const u32 run = m.ahead[word] + __popc(m.heads[word] & upto) - 1;
        from[q] = m.chunk[run];
        e[q] = Entries<Entry>::at(entries + (u64)from[q] * CHUNK, m.shifted[run] + start + at);
      }
      take(e, from);
    }
  }
  __syncthreads();
}

// Bring near what will stay where nothing is written, a sector for each thread at a time.
TW_DEVICE void fetch_old(const Tile& t, u32 bucket, const T* old) {
  if (IN_PLACE || ASCENDING || LENGTH > 2 * (u64)PLACES || bucket >= BUCKETS) return;
  const u32 row = bucket << SHIFT, size = min(1u << SHIFT, PLACES - row) * WIDTH;
  constexpr u32 SECTOR = WIDTH == 1 || WIDTH * sizeof(T) > 32 ? 32 / sizeof(T) : WIDTH;
  for (u32 s = threadIdx.x * SECTOR; s < size; s += SETTLE_THREADS * SECTOR)
    if (inside(t, s)) asm volatile("prefetch.global.L2 [%0];" ::"l"(&old[place_address(t, s, row)]));
}

// What the block does, and its list; nothing of a bucket where no block beside its first is needed.
TW_DEVICE Share share_and_list(const Settling& m, u32 unit, const u32* runs, List& list) {
  Share mine = {unit, 0, 1, 0, 0};
  if (HEAVY && unit >= BUCKETS) {
    mine = share_of(unit, runs, m.scratch);
    if (mine.bucket == NOWHERE) return mine;
  }
  list = list_runs(m, mine, runs);
  if (HEAVY && unit < BUCKETS && list.total > SHARE) {
    const Share heavy = share_of(unit, runs, m.scratch);
    if (heavy.bucket != NOWHERE) list = list_runs(m, mine = heavy, runs);
  }
  return mine;
}

// Of the blocks that share a bucket, whether this is the last to come; what the others wrote can be read.
TW_DEVICE bool comes_last(const Settling& m, u32* done, const Share& mine) {
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) *m.scratch = atomicAdd(done, 1) + 1 == mine.splits;
  __syncthreads();
  if (!*m.scratch) return false;
  __threadfence();
  return true;
}
