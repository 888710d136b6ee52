// Separate elements of an index: which place each names, and which element of src it sends there.
//
// The axes of the index come fastest first: their sizes, and strides of x, of the index and of src.
// That of x is 0 along the scattered axis, which has `along` places, `stride` apart. MORE_PARAMETERS
// are of a kernel that reads the index, and MORE is what it makes of them.

struct Axis { u32 size, x, index, src; };

template <class... Axes> TW_DEVICE Entry entry_of(const INDEX* index, u32 i, u32 places, i64 skipped, int* fault, u32 along, u32 stride, Axes... axes) {
  u32 in_x = 0, in_index = 0, in_src = 0;
  const auto walk = [&](const Axis& axis) {
    const u32 c = i % axis.size;
    i /= axis.size;
    in_x += c * axis.x;
    in_index += c * axis.index;
    in_src += c * axis.src;
  };
  (walk(axes), ...);
  const u32 at = place_of(index[in_index], along, skipped, fault);
  return {at == along ? places : in_x + at * stride, in_src};
}
