// One flat index of several: out[position] is the place that the tensors' elements name together, counted
// through dims that lie behind one another, or -1 where one of them names none. Negative ones count from the end.
//
// The tensors broadcast against one another: AXES axes number the positions, innermost first, and a tensor that
// is expanded along one has a stride of 0 there. Sizes and strides are arguments, in structures as large as
// launches pass. TENSORS lists the tensors, each by number and type.

struct Axes { i64 positions, sizes[15]; };
struct Dim { i64 size, strides[15]; };  // of x, and of the tensor that points into it

template <class I> TW_DEVICE i64 element(const I* index, const Dim& dim, const POSITION (&at)[AXES]) {
  i64 from = 0;
  TW_UNROLL for (int a = 0; a < AXES; ++a) from += (i64)at[a] * dim.strides[a];
  return index[from];
}

#define TENSOR(n, type) const type *index##n, const Dim dim##n,
extern "C" __global__ __launch_bounds__(THREADS) void flatten(TENSORS const Axes axes, T* out) {
  const POSITION position = (POSITION)blockIdx.x * THREADS + threadIdx.x;
  if (position >= (POSITION)axes.positions) return;
  POSITION at[AXES], rest = position;
  TW_UNROLL for (int a = 0; a < AXES - 1; ++a) {
    at[a] = rest % (POSITION)axes.sizes[a];
    rest /= (POSITION)axes.sizes[a];
  }
  at[AXES - 1] = rest;
#undef TENSOR
#define TENSOR(n, type) element(index##n, dim##n, at),
  const i64 places[] = {TENSORS};
#undef TENSOR
#define TENSOR(n, type) dim##n.size,
  const i64 sizes[] = {TENSORS};
  u64 flat = 0;  // which may wrap where a place is out of range
  bool outside = false;
  TW_UNROLL for (int n = 0; n < sizeof sizes / sizeof *sizes; ++n) {
    outside |= places[n] < -sizes[n] || places[n] >= sizes[n];
    flat = flat * sizes[n] + (places[n] < 0 ? places[n] + sizes[n] : places[n]);
  }
  out[position] = outside ? -1 : (T)flat;
}
