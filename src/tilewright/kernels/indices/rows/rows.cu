// Rows of `source` reduced into rows of `out`, in an order that depends on the indices alone.
//
// 1. A stable counting sort of (place, position) by place (sort.cuh).
// 2. accumulate: the sorted positions are cut into units of ROWS, each walked by LANES threads that
//    hold a piece of the row. A run of one place that lies inside a unit is finished there; what of
//    one began before the unit lies in shared memory in the end, and is added by the unit of the same
//    block in which the run begins. The units of a block are a span. A run that goes over the end of a
//    span leaves partial rows: one in each span that goes on with it, and one for its first piece,
//    which, if stored elements are as wide as sums, waits in the row of `out` itself (FIRST_IN_OUT).
//    Full batches of one place are summed as a tree.
// 3. combine: the span in which such a run begins adds up the partials of the spans that go on with
//    it; a run over many spans is shared out among a block and joined as a tree.
// 4. fill (out of place only), by further blocks of combine: rows that no index names, all of which
//    accumulate has marked; or, before all else, every row.
//
// Configuration: ROWS, LANES, UNROLLED, VEC, SUM_THREADS, BLOCKS; AHEAD reads the old row of a run when it begins
// (2: prefetches it before that; 3: reads those of a batch at once), 0 when it ends; MEAN divides by the number of terms; INCLUDE makes
// the old row a term; CARRIED: rows are elements, and what is sorted has them in place of positions; FILL_ZERO gives zeros to rows without an index, else the old row.

#define GROUPS (SUM_THREADS / LANES)
#define SPAN (GROUPS * ROWS)
#define COMBINE_GROUPS (COMBINE_THREADS / LANES)
#define SHORT_RUN 32
#define FILLED 4  // rows at a time
#define CHAINS 4
#define NOWHERE 0xffffffffu

typedef Pack<T, VEC> Stored;
typedef Pack<A, VEC> Sums;

// ---- reduce -------------------------------------------------------------------------------------

// Rows of a tensor (outer, rows, columns) with unit stride along columns.
struct Rows { i64 outer, row; };

// Of the outer axis, which two axes of a grid have: as many blocks as there are, and some that return.
#define SLICE (blockIdx.z * gridDim.y + blockIdx.y)

// The arguments of the kernels below, and how they become a Problem.
#define ARGUMENTS                                                                                 \
  const u32 *wanted, const T *source, const T *old, T *out, const Entry *sorted, A *partials,     \
      u8 *touched, u32 outer, u32 count, u32 places, u32 columns, u32 spans, i64 source_outer,    \
      i64 source_row, i64 old_outer, i64 old_row, i64 out_outer, i64 out_row, double alpha
#define PROBLEM                                                                                   \
  {source, old, out, sorted, partials, touched, SLICE, count, places, columns, spans,             \
   {source_outer, source_row}, {old_outer, old_row}, {out_outer, out_row}, alpha}

struct Problem {
  const T* source;
  const T* old;
  T* out;
  const Entry* sorted;
  A* partials;  // (outer, span, border, columns), the first border alone if FIRST_IN_OUT
  u8* touched;  // places with an index; null where nobody asks
  u32 slice, count, places, columns, spans;
  Rows in_source, in_old, in_out;
  double alpha;

  TW_DEVICE u32 place(u64 i) const { return sorted[i].place; }
  TW_DEVICE Entry entry(u64 i, u32 end) const { return i < end ? sorted[i] : Entry{NOWHERE, 0}; }
  TW_DEVICE const T* old_at(u32 place, u32 column) const {
    return old + slice * in_old.outer + place * in_old.row + column;
  }
  TW_DEVICE T* out_at(u32 place, u32 column) const {
    return out + slice * in_out.outer + place * in_out.row + column;
  }
  TW_DEVICE A* partial(u32 span, int border, u32 column) const {
    return partials + (((u64)slice * spans + span) * (FIRST_IN_OUT ? 1 : 2) + border) * columns + column;
  }
};

TW_DEVICE u32 first_not_below(const Problem& p, u64 place) {
  u32 low = 0, high = p.count;
  while (low < high) {
    const u32 middle = low + (high - low) / 2;
    if (p.place(middle) < place) low = middle + 1; else high = middle;
  }
  return low;
}

TW_DEVICE void mark(const Problem& p, u32 place, u32 column) {
  if (p.touched && column == 0 && p.slice == 0) p.touched[place] = 1;
}

// What of a run a row of `out` gets: all, or its first piece, or the rest beside the first, in `kept`.
enum RunPiece { ALL, FIRST, REST };

template <RunPiece PIECE> TW_DEVICE Stored result_of(const Problem& p, const Sums& sums, const Stored& kept, A terms) {
  Stored result;
  TW_UNROLL for (int i = 0; i < VEC; ++i) {
    A value = SCALED ? A(sums.v[i] * (A)p.alpha) : sums.v[i];
    if (INCLUDE || PIECE == REST) value = reduce((A)widen(kept.v[i]), value);
    else if (REDUCE == SUM) value = A(value + A(0));
    if constexpr (MEAN && PIECE != FIRST) value = divided(value, terms);
    result.v[i] = Narrow<T>::of(value);
  }
  return result;
}
template <RunPiece PIECE> TW_DEVICE void finish(const Problem& p, u32 place, u32 column, const Sums& sums, const Stored& kept) {
  A terms = A(1);
  if constexpr (MEAN && PIECE != FIRST) terms = A(first_not_below(p, (u64)place + 1) - first_not_below(p, place) + INCLUDE);
  store(p.out_at(place, column), result_of<PIECE>(p, sums, kept, terms));
  mark(p, place, column);
}

TW_DEVICE Stored old_row_of(const Problem& p, u32 place, u32 column) {
  if (INCLUDE) return load<VEC>(p.old_at(place, column));
  return Stored();
}

template <int FIRST, int N> TW_DEVICE Sums tree(const Stored* rows) {
  if constexpr (N == 1) {
    Sums s;
    TW_UNROLL for (int i = 0; i < VEC; ++i) s.v[i] = (A)widen(rows[FIRST].v[i]);
    return s;
  } else return reduce(tree<FIRST, N / 2>(rows), tree<FIRST + N / 2, N / 2>(rows));
}

// What the units of a span leave to one another in shared memory.
struct Heads {
  Sums* sums;    // of each thread: of the run that began before its unit
  u32* through;  // of each unit: whether that run also goes on behind it
};
TW_DEVICE Heads heads_at(u32* start) { return {(Sums*)start, (u32*)((Sums*)start + SUM_THREADS)}; }

// Add to `sums`, of a run that goes on in `group`, what the units of the span from there on have of it;
// true if it ends in the span. In CHAINS sums in turn, which rounds less than one sum does.
TW_DEVICE bool follow(const Heads& heads, u32 group, Sums& sums) {
  bool ended = false;
  Sums chain[CHAINS] = {sums};
  TW_UNROLL for (int q = 1; q < CHAINS; ++q) chain[q] = nothing<A, VEC>();
  for (; group < GROUPS && !ended; group += CHAINS) {
    TW_UNROLL for (int q = 0; q < CHAINS; ++q) {
      if (ended || group + q >= GROUPS) continue;
      chain[q] = reduce(chain[q], heads.sums[(group + q) * LANES + threadIdx.x % LANES]);
      ended = !heads.through[group + q];
    }
  }
  sums = reduce(reduce(chain[0], chain[1]), reduce(chain[2], chain[3]));
  return ended;
}

extern "C" __global__ __launch_bounds__(SUM_THREADS, SUM_BLOCKS) void accumulate(ARGUMENTS) {
  if (!follow_wanted(wanted) || SLICE >= outer) return;
  const Problem p = PROBLEM;
  const Heads heads = heads_at(shared);
  const u32 lane = threadIdx.x % LANES, group = threadIdx.x / LANES;
  // Neighbouring blocks have the pieces of the same rows, so that memory is read in long stretches.
  const u32 pieces = (p.columns + LANES * VEC - 1) / (LANES * VEC), span = blockIdx.x / pieces;
  const u32 unit = span * GROUPS + group, column = (blockIdx.x % pieces * LANES + lane) * VEC;
  const bool inside = column < p.columns;
  const u32 begin = min((u64)unit * ROWS, (u64)p.count), end = min((u64)begin + ROWS, (u64)p.count);
  const T* rows = p.source + p.slice * p.in_source.outer + column;
  u32 current = NOWHERE, before = NOWHERE, after = NOWHERE;
  if (begin < end) {
    if (begin > 0) before = p.place(begin - 1);
    if (end < p.count) after = p.place(end);
  }
  Sums sums = nothing<A, VEC>();
  Stored kept;
  Entry coming = p.entry(begin + lane, end);
  for (u32 at = begin; __any_sync(FULL_WARP, at < end); at += LANES) {
    const Entry my = coming;
    coming = p.entry((u64)at + LANES + lane, end);
    TW_UNROLL for (int u = 0; u < LANES; u += UNROLLED) {
      u32 place[UNROLLED];
      Stored row[UNROLLED];
      bool one_run = true;
      TW_UNROLL for (int q = 0; q < UNROLLED; ++q) {
        place[q] = __shfl_sync(FULL_WARP, my.place, u + q, LANES);
        const u32 position = __shfl_sync(FULL_WARP, my.position, u + q, LANES);
        const bool begins = place[q] != (q ? place[q - 1] : current);
        one_run = one_run && !begins;
        if (!inside || place[q] >= p.places) continue;
        if constexpr (CARRIED) row[q].v[0] = of_bits<T>(position);
        else row[q] = load<VEC>(rows + position * p.in_source.row);
      }
      Stored old_row[AHEAD == 3 ? UNROLLED : 1];
      if (INCLUDE && AHEAD >= 2 && !one_run) {
        TW_UNROLL for (int q = 0; q < UNROLLED; ++q) {
          if (!inside || place[q] >= p.places || place[q] == before || place[q] == (q ? place[q - 1] : current)) continue;
          if constexpr (AHEAD == 3) old_row[q] = load<VEC>(p.old_at(place[q], column));
          else asm volatile("prefetch.global.L2 [%0];" ::"l"(p.old_at(place[q], column)));
        }
      }
      if (one_run) {
        if (inside && current < p.places) sums = reduce(sums, tree<0, UNROLLED>(row));
        continue;
      }
      TW_UNROLL for (int q = 0; q < UNROLLED; ++q) {
        if (place[q] == NOWHERE) continue;
        if (place[q] != current) {
          if (inside && current < p.places) {
            if (current == before) heads.sums[threadIdx.x] = sums;
            else finish<ALL>(p, current, column, sums, AHEAD ? kept : old_row_of(p, current, column));
          }
          current = place[q];
          sums = nothing<A, VEC>();
          if (INCLUDE && AHEAD && inside && current < p.places && current != before) {
            if constexpr (AHEAD == 3) kept = old_row[q];
            else kept = load<VEC>(p.old_at(current, column));
          }
        }
        if (inside && place[q] < p.places) sums = reduce(sums, tree<0, 1>(row + q));
      }
    }
  }
  const bool ends_as_it_began = current < p.places && current == before;
  if (ends_as_it_began) heads.sums[threadIdx.x] = sums;
  if (lane == 0) heads.through[group] = ends_as_it_began && current == after;
  __syncthreads();
  if (!inside) return;
  if (group == 0 && before < p.places && p.place(begin) == before) {
    Sums head = nothing<A, VEC>();
    follow(heads, 0, head);
    store(p.partial(span, 0, column), head);
  }
  if (current >= p.places || ends_as_it_began) return;
  const bool ends = current != after || follow(heads, group + 1, sums);
  if (!ends && !FIRST_IN_OUT) {
    mark(p, current, column);
    return store(p.partial(span, 1, column), sums);
  }
  if (!AHEAD) kept = old_row_of(p, current, column);
  if (ends) finish<ALL>(p, current, column, sums, kept);
  else finish<FIRST>(p, current, column, sums, kept);
}

// The first piece of a run that goes on after `span`, apart from what waits in its row of `out`; then
// the end of such a run.
TW_DEVICE Sums first_piece(const Problem& p, u32 span, u32 column) {
  if constexpr (FIRST_IN_OUT) return nothing<A, VEC>();
  else return load<VEC>(p.partial(span, 1, column));
}
TW_DEVICE Stored waiting(const Problem& p, u32 place, u32 column) {
  if constexpr (FIRST_IN_OUT) return load<VEC>(p.out_at(place, column));
  else return old_row_of(p, place, column);
}
TW_DEVICE void complete(const Problem& p, u32 place, u32 column, const Sums& sums, const Stored& kept) {
  finish<FIRST_IN_OUT ? REST : ALL>(p, place, column, sums, kept);
}

// Reduce into `sums` the partials of COUNT spans from `first` on, `step` apart, that belong to
// `place`; false once one does not. All are fetched at once, needed or not.
template <int COUNT> TW_DEVICE bool take(const Problem& p, u64 first, u32 step, u32 place, u32 column, bool inside, Sums& sums) {
  bool goes_on[COUNT];
  Sums more[COUNT];
  TW_UNROLL for (int q = 0; q < COUNT; ++q) {
    const u64 span = first + (u64)q * step;
    goes_on[q] = false;
    if (span >= p.spans) continue;
    goes_on[q] = p.place(span * SPAN) == place;
    if (inside) more[q] = load<VEC>(p.partial((u32)span, 0, column));
  }
  TW_UNROLL for (int q = 0; q < COUNT; ++q) if (goes_on[q] && inside) sums = reduce(sums, more[q]);
  return goes_on[COUNT - 1];
}

// Rows that no index names, or all of them where such are not marked; by `blocks` of WIDTH threads. A group writes whole rows, FILLED at a time: memory is written in long stretches.
template <int WIDTH> TW_DEVICE void fill_rows(const Problem& p, u32 block, u32 blocks) {
  constexpr u32 EACH = WIDTH / LANES;
  const u64 first = (u64)block * EACH + threadIdx.x / LANES, step = (u64)blocks * EACH;
  for (u64 place = first; place < p.places; place += FILLED * step) {
    bool wanted[FILLED];
    TW_UNROLL for (int q = 0; q < FILLED; ++q)
      wanted[q] = place + q * step < p.places && !(p.touched && p.touched[place + q * step]);
    for (u32 column = threadIdx.x % LANES * VEC; column < p.columns; column += LANES * VEC) {
      Stored row[FILLED];
      TW_UNROLL for (int q = 0; q < FILLED; ++q) {
        if (!FILL_ZERO && wanted[q]) row[q] = load<VEC>(p.old_at((u32)(place + q * step), column));
        if (FILL_ZERO) TW_UNROLL for (int i = 0; i < VEC; ++i) row[q].v[i] = Narrow<T>::of(A(0));
      }
      TW_UNROLL for (int q = 0; q < FILLED; ++q)
        if (wanted[q]) store(p.out_at((u32)(place + q * step), column), row[q]);
    }
  }
}

extern "C" __global__ __launch_bounds__(THREADS) void fill(ARGUMENTS) {
  if (!follow_wanted(wanted) || SLICE >= outer) return;
  const Problem p = PROBLEM;
  fill_rows<THREADS>(p, blockIdx.x, gridDim.x);
}

// Of as many blocks as spans want, if they are several, for each piece of a row, and beside these as
// many as are to fill.
extern "C" __global__ __launch_bounds__(COMBINE_THREADS, 1) void combine(ARGUMENTS) {
  if (!follow_wanted(wanted) || SLICE >= outer) return;
  const Problem p = PROBLEM;
  const u32 pieces = (columns + LANES * VEC - 1) / (LANES * VEC);
  const u32 combining = spans > 1 ? (spans + COMBINE_GROUPS - 1) / COMBINE_GROUPS * pieces : 0;
  if (blockIdx.x >= combining) return fill_rows<COMBINE_THREADS>(p, blockIdx.x - combining, gridDim.x - combining);
  Sums* joined = (Sums*)shared;
  u32* longer = (u32*)(joined + COMBINE_THREADS);
  const int lane = threadIdx.x % LANES, group = threadIdx.x / LANES;
  const u32 block = blockIdx.x / pieces, column = (blockIdx.x % pieces * LANES + lane) * VEC;
  const bool inside = column < p.columns;
  const u64 span = (u64)block * COMBINE_GROUPS + group, begin = span * SPAN, end = begin + SPAN;
  u32 place = NOWHERE;
  if (end < p.count) {
    place = p.place(end - 1);
    const bool goes_on = place < p.places && p.place(end) == place;
    const bool began_before = begin > 0 && p.place(begin - 1) == place;
    if (!goes_on || began_before) place = NOWHERE;
  }
  bool is_long = false;
  if (place != NOWHERE) {
    Sums sums;
    Stored kept;
    if (inside) {
      sums = first_piece(p, (u32)span, column);
      kept = waiting(p, place, column);
    }
    u64 next = span + 1;
    do {
      is_long = take<4>(p, next, 1, place, column, inside, sums);
      next += 4;
    } while (is_long && next <= span + SHORT_RUN);
    if (inside && !is_long) complete(p, place, column, sums, kept);
  }
  if (lane == 0) longer[group] = is_long ? place : NOWHERE;
  __syncthreads();
  for (int g = 0; g < COMBINE_GROUPS; ++g) {
    const u32 common = longer[g];
    if (common == NOWHERE) continue;
    const u64 first = (u64)block * COMBINE_GROUPS + g;
    Sums sums = nothing<A, VEC>();
    u64 next = first + 1 + group;
    while (take<4>(p, next, COMBINE_GROUPS, common, column, inside, sums)) next += 4 * COMBINE_GROUPS;
    joined[threadIdx.x] = sums;
    __syncthreads();
    for (int half = COMBINE_GROUPS / 2; half > 0; half /= 2) {
      if (group < half) joined[threadIdx.x] = reduce(joined[threadIdx.x], joined[threadIdx.x + half * LANES]);
      __syncthreads();
    }
    if (group == 0 && inside)
      complete(p, common, column, reduce(first_piece(p, (u32)first, column), joined[lane]), waiting(p, common, column));
    __syncthreads();
  }
}
