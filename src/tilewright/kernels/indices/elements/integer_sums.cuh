// Separate elements added to places as integers (integers.cuh), by atomic operations whose order does
// not matter. Elements and places are those of elements.cuh.
//
//   clear, bound, add, finish: four launches (integer_sums.cu), or phases of one (integer_sums_at_once.cu).
//
// MARKS, INTEGERS: of each place, in device memory. PRIVATE: a block keeps them for all places in shared
// memory and adds them to the others in the end; else each element goes to device memory.
// BY_NAME: in place, and places are many; only those that are named are looked at.

extern __shared__ __align__(16) u32 shared[];

struct Given {
  u32 place[ITEMS];
  Term value[ITEMS];
};

// Elements first, first + THREADS, ... of a block's turn; NOWHERE for none.
#define NOWHERE 0xffffffffu
TW_DEVICE u32 first_of(u32 turn) { return (turn * gridDim.x + blockIdx.x) * (THREADS * ITEMS) + threadIdx.x; }

template <bool VALUES, class... Axes> TW_DEVICE void read(Given& g, u32 first, u32 count, const INDEX* index, i64 skipped, int* fault, const T* moved, u32 along, u32 stride, Axes... axes) {
  At at[ITEMS];
  INDEX i[ITEMS];
  TW_UNROLL for (int q = 0; q < ITEMS; ++q) {
    if (first + q * THREADS >= count) continue;
    at[q] = at_of(first + q * THREADS, axes...);
    i[q] = index[at[q].index];
    if (VALUES) g.value[q] = widen(moved[at[q].src]);
  }
  TW_UNROLL for (int q = 0; q < ITEMS; ++q) {
    g.place[q] = NOWHERE;
    if (first + q * THREADS >= count) continue;
    const u32 place = place_of(i[q], along, skipped, fault);
    if (place < along) g.place[q] = at[q].x + place * stride;
  }
}

TW_DEVICE u32 turns(u32 count) { return (count + gridDim.x * THREADS * ITEMS - 1) / (gridDim.x * THREADS * ITEMS); }

// ---- the four phases: `await` waits for the one before -------------------------------------------

// Places of a block's turn, for phases that go over all of them.
#define EACH_PLACE(s, places) for (u32 s = blockIdx.x * THREADS + threadIdx.x; s < places; s += gridDim.x * THREADS)

template <class... More> TW_DEVICE void clear_all(const INDEX* index, u32* marks, Integer* integers, u32 count, u32 places, i64 skipped, int* fault, More... more) {
  if (!BY_NAME) {
    EACH_PLACE(s, places) { marks[s] = UNNAMED; integers[s] = {}; }
    return;
  }
  for (u32 turn = 0; turn < turns(count); ++turn) {
    Given g;
    read<false>(g, first_of(turn), count, index, skipped, fault, more...);
    TW_UNROLL for (int q = 0; q < ITEMS; ++q)
      if (g.place[q] != NOWHERE) { marks[g.place[q]] = UNNAMED; integers[g.place[q]] = {}; }
  }
}

// `g` holds what is read in the first turn, and is left with the last.
template <class Await, class... More> TW_DEVICE void bound_all(Await await, Given& g, const INDEX* index, u32* marks, u32 count, u32 places, i64 skipped, int* fault, More... more) {
  if (PRIVATE) for (u32 s = threadIdx.x; s < places; s += THREADS) shared[s] = UNNAMED;
  await();
  if (PRIVATE) __syncthreads();
  u32* to = PRIVATE ? shared : marks;
  for (u32 turn = 0; turn < turns(count); ++turn) {
    if (turn) read<true>(g, first_of(turn), count, index, skipped, fault, more...);
    TW_UNROLL for (int q = 0; q < ITEMS; ++q) {
      u32 mark = g.place[q] == NOWHERE ? UNNAMED : mark_of(g.value[q]);
      int same;
      __match_all_sync(FULL_WARP, g.place[q], &same);
      if (same) mark = of_first_lane(__reduce_max_sync(FULL_WARP, mark));
      if (mark != UNNAMED) atomicMax(&to[g.place[q]], mark);
    }
  }
  if (!PRIVATE) return;
  __syncthreads();
  for (u32 s = threadIdx.x; s < places; s += THREADS) if (shared[s] != UNNAMED) atomicMax(&marks[s], shared[s]);
}

template <class Await, class... More> TW_DEVICE void add_all(Await await, Given& g, const INDEX* index, const u32* marks, Integer* integers, u32 count, u32 places, u32 unit_bits, i64 skipped, int* fault, More... more) {
  u32 *mark_at = shared, *halves = shared + places;  // of each limb: lower ones, then higher ones
  if (PRIVATE) for (u32 s = threadIdx.x; s < 2 * LIMBS * places; s += THREADS) halves[s] = 0;
  await();
  if (PRIVATE) {
    for (u32 s = threadIdx.x; s < places; s += THREADS) mark_at[s] = __ldcg(&marks[s]);
    __syncthreads();
  }
  for (u32 turn = 0; turn < turns(count); ++turn) {
    if (turn) read<true>(g, first_of(turn), count, index, skipped, fault, more...);
    u32 mark[ITEMS];
    TW_UNROLL for (int q = 0; q < ITEMS; ++q) {
      mark[q] = UNNAMED;
      if (g.place[q] != NOWHERE) mark[q] = PRIVATE ? mark_at[g.place[q]] : __ldcg(&marks[g.place[q]]);
    }
    TW_UNROLL for (int q = 0; q < ITEMS; ++q) {
      int same;
      __match_all_sync(FULL_WARP, g.place[q], &same);
      if (mark[q] == NOT_FINITE) {
        const u64 kind = kind_of(g.value[q]);
        if (kind && PRIVATE) atomicOr(&halves[g.place[q]], (u32)kind);
        else if (kind) atomicOr(&integers[g.place[q]].limb[0], kind);
      }
      const Integer integer = adds(mark[q]) ? integer_of(g.value[q], mark[q], unit_bits) : Integer{};
      EACH_LIMB(p) {
        const u64 limb = same ? sum_of_warp(integer.limb[p]) : integer.limb[p];
        u32* low = halves + 2 * p * places + g.place[q];
        if (limb && PRIVATE) add_shared(low, low + places, limb);
        else if (limb) atomicAdd(&integers[g.place[q]].limb[p], limb);
      }
    }
  }
  if (!PRIVATE) return;
  __syncthreads();
  for (u32 s = threadIdx.x; s < places; s += THREADS) {
    EACH_LIMB(p) {
      const u32* low = halves + 2 * p * places + s;
      const u64 limb = (u64)low[places] << 32 | low[0];
      if (mark_at[s] == NOT_FINITE && limb) atomicOr(&integers[s].limb[p], limb);
      else if (limb) atomicAdd(&integers[s].limb[p], limb);
    }
  }
}

TW_DEVICE Integer latest(const Integer* at) {
  Integer r;
  EACH_LIMB(p) r.limb[p] = __ldcg(&at->limb[p]);
  return r;
}

// INCLUDE: the old element is a term. SCALED: alpha times the sum is added.
TW_DEVICE void write(const T* old, T* out, u32 at, u32 mark, Integer integer, u32 unit_bits, double alpha) {
  if (mark == UNNAMED) {
    if (FILL_ZERO) out[at] = Narrow<T>::of(Term(0));
    else if (old != out) out[at] = old[at];
    return;
  }
  double sum = sum_of(integer, mark, unit_bits);
  if (SCALED) sum *= alpha;
  sum += INCLUDE ? (double)widen(old[at]) : 0.0;
  out[at] = Narrow<T>::of((Term)sum);
}

template <class Await, class... More> TW_DEVICE void finish_all(Await await, Given& g, const T* old, const INDEX* index, T* out, u32* marks, const Integer* integers, u32 count, u32 places, u32 unit_bits, double alpha, i64 skipped, int* fault, More... more) {
  await();
  if (!BY_NAME) {
    EACH_PLACE(s, places) write(old, out, s, __ldcg(&marks[s]), latest(&integers[s]), unit_bits, alpha);
    return;
  }
  for (u32 turn = 0; turn < turns(count); ++turn) {
    if (turn) read<false>(g, first_of(turn), count, index, skipped, fault, more...);
    TW_UNROLL for (int q = 0; q < ITEMS; ++q) {
      if (g.place[q] == NOWHERE) continue;
      const u32 mark = atomicExch(&marks[g.place[q]], UNNAMED);  // the first of a place that comes writes it
      if (mark != UNNAMED) write(old, out, g.place[q], mark, latest(&integers[g.place[q]]), unit_bits, alpha);
    }
  }
}
