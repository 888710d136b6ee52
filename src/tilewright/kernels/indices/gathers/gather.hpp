// Gather of tensors with any strides on a CPU: out[position] = x[.., index[position], ..].
//
// A line is the last axis, of SIZE positions; AXES lists the others from there outwards with their
// sizes and strides. RUNS: a line has one index and lies side by side in x. The source that includes
// this defines T, INDEX, PLACES, STRIDE (of x along the gathered dim) and STEP, INDEX_STEP of a line.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <omp.h>

typedef std::int64_t i64;
typedef std::uint64_t u64;

struct Line { const T* x; const INDEX* index; };

static inline Line line_at(const T* x, const INDEX* index, i64 rest) {
#define AXIS(size, of_x, of_index) { const i64 c = rest % (size); rest /= (size); x += c * i64(of_x); index += c * i64(of_index); }
  AXES
  return {x, index};
}

// Positions first to last of a line; whether an index is out of range, in place of which 0 is read.
static inline bool read(const Line& line, T* out, i64 first, i64 last) {
  bool bad = false;
  if (RUNS) {
    const u64 place = u64(i64(*line.index));
    bad = place >= PLACES;
    const T* from = line.x + (bad ? 0 : i64(place)) * STRIDE;
    if (last - first == SIZE) std::memcpy(out, from, SIZE * sizeof(T));
    else std::memcpy(out + first, from + first, (last - first) * sizeof(T));
    return bad;
  }
#pragma omp simd reduction(| : bad)
  for (i64 j = first; j < last; ++j) {
    const u64 place = u64(i64(line.index[j * INDEX_STEP]));
    bad |= place >= PLACES;
    out[j] = line.x[j * STEP + (place < PLACES ? i64(place) : 0) * STRIDE];
  }
  return bad;
}

// Returns whether an index is out of range.
extern "C" void collect(const T* x, const INDEX* index, T* out, i64 lines, int threads, i64* fault) {
  int found = 0;
#pragma omp parallel num_threads(threads) reduction(| : found)
  {
    const i64 t = omp_get_thread_num(), team = omp_get_num_threads();
    // Whole lines where there are enough of them.
    const i64 unit = lines >= 4 * team ? SIZE : 1, units = lines * SIZE / unit;
    i64 at = units * t / team * unit;
    const i64 end = units * (t + 1) / team * unit;
    while (at < end) {
      const i64 number = at / SIZE, first = at % SIZE, last = std::min(i64(SIZE), first + end - at);
      found |= read(line_at(x, index, number), out + number * SIZE, first, last);
      at += last - first;
    }
  }
  *fault = found;
}
