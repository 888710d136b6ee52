// Separate elements of an index: which place each names, and where src has what it sends there.
//
// The axes of the index come fastest first: their sizes, and strides of x, of the index and of src.
// That of x is 0 along the scattered axis, which has `along` places, `stride` apart. MORE_PARAMETERS
// are those of a kernel that walks them, MORE is what it makes of them, and AXES the last part of that.

struct Axis { u32 size, x, index, src; };

struct At { u32 position, x, index, src; };  // along the scattered axis; in each tensor

template <class... Axes> TW_DEVICE At at_of(u32 i, Axes... axes) {
  At at = {0, 0, 0, 0};
  const auto walk = [&](const Axis& axis) {
    const u32 c = i % axis.size;
    i /= axis.size;
    if (axis.x == 0) at.position = c;
    at.x += c * axis.x;
    at.index += c * axis.index;
    at.src += c * axis.src;
  };
  (walk(axes), ...);
  return at;
}

// Of all elements, COPIED at a time.
extern "C" __global__ __launch_bounds__(COPYING) void copy(const T* old, T* out, u32 elements) {
  follow_previous();
  const u64 step = (u64)gridDim.x * COPYING;
  for (u64 i = (u64)blockIdx.x * COPYING + threadIdx.x; i * COPIED < elements; i += step) {
    if ((i + 1) * COPIED <= elements) store(out + i * COPIED, load<COPIED>(old + i * COPIED));
    else for (u64 k = i * COPIED; k < elements; ++k) out[k] = old[k];
  }
}
