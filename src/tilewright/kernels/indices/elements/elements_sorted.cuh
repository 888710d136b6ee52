// What sort.cuh sorts of separate elements. What an element of the index sends travels with its place
// if it has four bytes at most (CARRIED), else where src has it does.

template <class... Axes> TW_DEVICE Entry entry_of(const INDEX* index, u32 i, u32 places, i64 skipped, int* fault, const T* moved, u32 along, u32 stride, Axes... axes) {
  const At at = at_of(i, axes...);
  const u32 place = place_of(index[at.index], along, skipped, fault);
  return {place == along ? places : at.x + place * stride, CARRIED ? bits_of(moved[at.src]) : at.src};
}
