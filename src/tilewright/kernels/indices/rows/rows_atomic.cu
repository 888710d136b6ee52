// Rows added to the places that an index names, by atomic additions in whatever order they come.
//
// 1. prepare, not in place: places hold the old rows, or zeros.
// 2. accumulate: a block sorts CHUNK positions by DIGIT_BITS of a hash of their places (chunk.cuh), so
//    that rows of one place are neighbours but for a few others among them. Each group of LANES
//    threads walks a range of them, UNROLLED at a time in accesses of VEC elements, and sums a run in
//    registers; the last runs of a warp's groups are joined by shuffles. What is left are additions in
//    memory, of VEC elements each where the device has them; or with BULK of the piece of a row that
//    a warp has, by the copy engine, from one of the warp's SLOTS in shared memory. So a hot row gets
//    few, and its sum grows in as few steps, which is why it is closer to the truth than one addition
//    a position.

#define GROUPS (THREADS / LANES)
#define RANGE (CHUNK / GROUPS)
#define NOWHERE 0xffffffffu
#define PIECE (LANES * VEC)

typedef Pack<T, VEC> Stored;

extern "C" __global__ __launch_bounds__(THREADS) void prepare(const T* old, T* out, u32 places, u32 columns, i64 old_outer, i64 old_row, i64 out_outer, i64 out_row) {
  release_next();
  const u32 pieces = columns / VEC;
  const u64 all = (u64)places * pieces;
  for (u64 i = (u64)blockIdx.x * THREADS + threadIdx.x; i < all; i += (u64)gridDim.x * THREADS) {
    const u64 place = i / pieces, column = i % pieces * VEC;
    Stored row = {};
    if (KEEPS_OLD) row = load<VEC>(old + blockIdx.z * old_outer + place * old_row + column);
    store(out + blockIdx.z * out_outer + place * out_row + column, row);
  }
}

TW_DEVICE void add_to(i64* at, i64 x) { atomicAdd((u64*)at, (u64)x); }
template <class E> TW_DEVICE void add_to(E* at, E x) { atomicAdd(at, x); }
template <class E, int N> TW_DEVICE void add_to(E* at, const Pack<E, N>& x) {
  TW_UNROLL for (int i = 0; i < N; ++i) add_to(at + i, x.v[i]);
}
#if __CUDA_ARCH__ >= 900
TW_DEVICE void add_to(float* at, const Pack<float, 2>& x) {
  asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" ::"l"(at), "f"(x.v[0]), "f"(x.v[1]) : "memory");
}
TW_DEVICE void add_to(float* at, const Pack<float, 4>& x) {
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(at), "f"(x.v[0]), "f"(x.v[1]), "f"(x.v[2]), "f"(x.v[3]) : "memory");
}
#endif

#if BULK
// One thread's: at least 16 bytes, aligned so, and a multiple of them; of type ADDED.
TW_DEVICE void add_bulk(T* at, const T* slot, u32 elements) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add." ADDED " [%0], [%1], %2;" ::"l"(__cvta_generic_to_global(at)), "r"((u32)__cvta_generic_to_shared(slot)), "r"(elements * (u32)sizeof(T)) : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Until but `LATER` of what this thread had added have been read from their slots.
template <int LATER> TW_DEVICE void await_read() { asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(LATER) : "memory"); }
TW_DEVICE void await_added() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
TW_DEVICE void show_copy_engine() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
#endif

struct Run { u32 place; Stored sums; };

// Join the runs of one place that neighbouring groups of a warp hold, into the last of them.
TW_DEVICE void join(Run& run) {
  const int lane = threadIdx.x % 32;
  const u32 before = __shfl_up_sync(FULL_WARP, run.place, LANES);
  const u32 after = __shfl_down_sync(FULL_WARP, run.place, LANES);
  bool begins = lane < LANES || before != run.place;  // somewhere among the groups summed so far
  TW_UNROLL for (int step = LANES; step < 32; step *= 2) {
    const bool earlier = __shfl_up_sync(FULL_WARP, (int)begins, step);
    TW_UNROLL for (int i = 0; i < VEC; ++i) {
      const T other = __shfl_up_sync(FULL_WARP, run.sums.v[i], step);
      if (!begins) run.sums.v[i] += other;
    }
    begins = begins || earlier;
  }
  if (lane < 32 - LANES && after == run.place) run.place = NOWHERE;
}

extern "C" __global__ __launch_bounds__(THREADS, 2) void accumulate(const INDEX* index, const T* source, T* out, u32 count, u32 places, u32 columns, i64 source_outer, i64 source_row, i64 out_outer, i64 out_row, i64 skipped, double alpha, int* fault) {
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  T* const slots = (T*)shared + warp * SLOTS * PIECE;
  const Chunk chunk = chunk_at((u32*)((T*)shared + WARPS * SLOTS * PIECE));
  const u32 base = blockIdx.x * CHUNK, filled = min((u64)CHUNK, (u64)count - base);
  Entry entries[ITEMS];
  TW_UNROLL for (int j = 0; j < ITEMS; ++j) {
    const u32 position = base + held(j);
    if (held(j) < filled) entries[j] = {place_of(index[position], places, skipped, fault), position};
  }
  sort_chunk(entries, [](u32 place) { return place * 2654435761u >> (32 - DIGIT_BITS); }, filled, chunk);
  const u32 column = (blockIdx.y * LANES + threadIdx.x % LANES) * VEC;
  const u32 begin = min(threadIdx.x / LANES * RANGE, filled), end = min(begin + RANGE, filled);
  source += blockIdx.z * source_outer + column;
  out += blockIdx.z * out_outer + column;
  Run run = {NOWHERE, {}};
  u32 turn = 0;
  const auto add = [&] {
    if (run.place == NOWHERE || (!BULK && column >= columns)) return;
    if (SCALED) TW_UNROLL for (int i = 0; i < VEC; ++i) run.sums.v[i] *= (T)alpha;
#if BULK
    T* const slot = slots + turn++ % SLOTS * PIECE;
    if (lane == 0) await_read<SLOTS - 1>();
    __syncwarp();
    store(slot + lane * VEC, run.sums);
    show_copy_engine();
    __syncwarp();
    if (lane == 0) add_bulk(out + run.place * out_row, slot, min((u32)PIECE, columns - column));
#else
    add_to(out + run.place * out_row, run.sums);
#endif
  };
  await_previous();
  for (u32 at = begin; at < end; at += UNROLLED) {
    u32 place[UNROLLED];
    Stored row[UNROLLED];
    TW_UNROLL for (int q = 0; q < UNROLLED; ++q) {
      const Entry e = at + q < end ? chunk.entries[at + q] : Entry{places, 0};
      place[q] = e.place;
      row[q] = {};
      if (place[q] < places && column < columns) row[q] = load<VEC>(source + e.position * source_row);
    }
    TW_UNROLL for (int q = 0; q < UNROLLED; ++q) {
      if (place[q] >= places) continue;
      if (place[q] == run.place) { run.sums = reduce(run.sums, row[q]); continue; }
      add();
      run = {place[q], row[q]};
    }
  }
  join(run);
  add();
#if BULK
  if (lane == 0) await_added();
#endif
}
