// What only tile kernels call.

// Further along a walk: its strides are in bytes, so that one multiply-add is all of an address.
template <class T> TW_DEVICE T* along(T* p, i64 bytes) {
  return (T*)((char*)p + bytes);
}
TW_DEVICE Mask along(const Mask& m, i64 elements) { return m + elements; }
template <class T> TW_DEVICE Positions<T> along(const Positions<T>& p, i64 elements) { return p + elements; }
