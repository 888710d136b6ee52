// Indices that only rise name neighbouring places one after the other: then each position whose
// successor names another place writes its own, and what lies between the two is copied. Whether they
// do rise is guessed from a sample, and found out on the way; where they do not, state says so and
// the kernels that come next write every place again. For one dimension.

#define GUESSED 1    // it looks as if they rise, and nothing has been found to the contrary
#define REFUTED 2
#define LONGEST_GAP 1024

extern "C" __global__ __launch_bounds__(SAMPLED_POSITIONS) void guess(const INDEX* index, u32* state) {
  const u64 at = (u64)threadIdx.x * (LENGTH - 1) / SAMPLED_POSITIONS;
  const u64 later = (u64)(threadIdx.x + 1) * (LENGTH - 1) / SAMPLED_POSITIONS;
  const i64 named = index[at];
  const int falls = __syncthreads_or(named > index[min(at + 1, later)] || named > index[later]);
  if (threadIdx.x == 0) *state = falls ? REFUTED : GUESSED;
}

// Whether this block may still take indices as rising; the same for all of its threads.
TW_DEVICE bool rising(const u32* state) { return !__syncthreads_or(*(volatile const u32*)state != GUESSED); }

extern "C" __global__ __launch_bounds__(DIRECT_THREADS, 4) void direct(const T* old, const INDEX* index, const T* source, T* out, u32* state, double number) {
  if (!rising(state)) return;
  const u64 first = (u64)blockIdx.x * DIRECT_THREADS * DIRECT_ITEMS + threadIdx.x;
  i64 place[DIRECT_ITEMS], next[DIRECT_ITEMS];
  T value[DIRECT_ITEMS];
  TW_UNROLL for (int q = 0; q < DIRECT_ITEMS; ++q) {
    const u64 j = first + q * DIRECT_THREADS;
    if (j >= LENGTH) continue;
    place[q] = index[j];
    next[q] = j + 1 < LENGTH ? (i64)index[j + 1] : (i64)PLACES;
    if (!NUMBER) value[q] = source[j];
  }
  bool refuted = false;
  TW_UNROLL for (int q = 0; q < DIRECT_ITEMS; ++q) {
    if (first + q * DIRECT_THREADS >= LENGTH) continue;
    const bool last = first + q * DIRECT_THREADS + 1 == LENGTH;
    refuted |= place[q] < 0 || place[q] >= PLACES || next[q] < place[q] || next[q] >= PLACES + last;
    if (!IN_PLACE) refuted |= next[q] - place[q] > LONGEST_GAP || (first + q * DIRECT_THREADS == 0 && place[q] > LONGEST_GAP);
  }
  if (__syncthreads_or(refuted)) {
    if (threadIdx.x == 0) *(volatile u32*)state = REFUTED;
    return;
  }
  TW_UNROLL for (int q = 0; q < DIRECT_ITEMS; ++q) {
    const u64 j = first + q * DIRECT_THREADS;
    if (j >= LENGTH || place[q] == next[q]) continue;
    out[place[q]] = NUMBER ? Narrow<T>::of((A)number) : value[q];
    if (IN_PLACE) continue;
    for (i64 gap = place[q] + 1; gap < next[q]; ++gap) out[gap] = old[gap];
  }
  if (!IN_PLACE && first == 0) for (i64 gap = 0; gap < place[0]; ++gap) out[gap] = old[gap];
}
