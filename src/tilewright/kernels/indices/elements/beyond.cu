// What x has outside the box that an index covers (boxes.cuh), to the same places of out, which no other
// kernel of the call writes to: BEYOND accesses, numbered in the type Access, of BEYOND_VECTOR elements each.
// BEYOND_AT says where one begins.

extern "C" __global__ __launch_bounds__(COPYING) void beyond(const T* old, T* out) {
  constexpr int ALL = COPYING * COPIES_IN_FLIGHT;
  for (Access first = (Access)blockIdx.x * ALL + threadIdx.x; first < BEYOND; first += (Access)gridDim.x * ALL) {
    Pack<T, BEYOND_VECTOR> held[COPIES_IN_FLIGHT];
    TW_UNROLL for (int q = 0; q < COPIES_IN_FLIGHT; ++q)
      if (const Access i = first + q * COPYING; i < BEYOND) held[q] = load<BEYOND_VECTOR>(old + BEYOND_AT(i));
    TW_UNROLL for (int q = 0; q < COPIES_IN_FLIGHT; ++q)
      if (const Access i = first + q * COPYING; i < BEYOND) store(out + BEYOND_AT(i), held[q]);
  }
  await_previous();  // for which the kernel behind this one does not wait
}
