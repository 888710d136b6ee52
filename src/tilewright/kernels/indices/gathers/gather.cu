// Gather of tensors with any strides: out[position] = x[.., index[position], ..].
//
// AXES lists what there is in the order in which threads go, from the fastest axis outwards: sizes, and
// strides of x, of the index and of out. The fastest one counts VEC positions at a time; it may be a
// slab of the last axis, so that what blocks read of x meanwhile stays in the L2 cache. Of the last of
// AXES, OUTERMOST, no size is baked in: calls that differ in it alone share a binary. RUNS: VEC neighbours
// have one index and lie side by side in x, so that one access moves them; else each is read on its own,
// STEP apart but for its place.

#define GIVEN (RUNS ? 1 : VEC)

struct Where { OFFSET x, index; u64 out; };

TW_DEVICE Where where(POSITION rest) {
  Where at = {0, 0, 0};
  POSITION c = rest;
#define OUTERMOST(of_x, of_index, of_out)      \
  {                                            \
    at.x += (OFFSET)c * (of_x);                \
    at.index += (OFFSET)c * (of_index);        \
    if (SLABS) at.out += (u64)c * (of_out);    \
  }
#define AXIS(size, of_x, of_index, of_out)     \
  c = rest % (size);                           \
  rest /= (size);                              \
  OUTERMOST(of_x, of_index, of_out)            \
  c = rest;
  AXES
  return at;
}

// Zeros stand where an index is out of range.
TW_DEVICE Pack<T, VEC> fetch(const T* x, const Pack<INDEX, GIVEN>& index, int* fault) {
  Pack<T, VEC> found = {};
  TW_UNROLL for (int i = 0; i < GIVEN; ++i) {
    if ((u64)(i64)index.v[i] >= PLACES) *(volatile int*)fault = 1;
    else if constexpr (RUNS) found = load<VEC>(x + (OFFSET)index.v[i] * STRIDE);
    else found.v[i] = x[(OFFSET)i * STEP + (OFFSET)index.v[i] * STRIDE];
  }
  return found;
}

extern "C" __global__ __launch_bounds__(THREADS) void collect(const T* x, const INDEX* index, T* out, u64 positions, int* fault) {
  const u64 first = (u64)blockIdx.x * (THREADS * ITEMS) + threadIdx.x;
  Pack<INDEX, GIVEN> given[ITEMS];
  Pack<T, VEC> found[ITEMS];
  OFFSET from[ITEMS];
  u64 to[ITEMS];
  TW_UNROLL for (int q = 0; q < ITEMS; ++q) {
    if (first + q * THREADS >= positions) continue;
    const Where at = where((POSITION)(first + q * THREADS));
    from[q] = at.x;
    to[q] = SLABS ? at.out : (first + q * THREADS) * VEC;
    given[q] = load<GIVEN>(index + at.index);
  }
  TW_UNROLL for (int q = 0; q < ITEMS; ++q)
    if (first + q * THREADS < positions) found[q] = fetch(x + from[q], given[q], fault);
  TW_UNROLL for (int q = 0; q < ITEMS; ++q)
    if (first + q * THREADS < positions) store(out + to[q], found[q]);
}
