// A long sum that is rounded about once: two numbers, the second of which has what the first was rounded by.
template <class Sum> __device__ __forceinline__ void add_exactly(Sum& sum, Sum& rest, Sum v) {
  const Sum before = sum;
  sum += v;
  const Sum added = sum - before;
  rest += before - (sum - added) + (v - added);
}
template <class Sum> __device__ __forceinline__ Sum joined(Sum sum, Sum rest) {
  return sum - sum == 0 ? sum + rest : sum;  // of infinities the rest is NaN
}

