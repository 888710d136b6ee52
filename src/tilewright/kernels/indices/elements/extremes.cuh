// The greatest of all terms, or the least, as integers in the same order, above whose greatest is NaN's. A
// slot whose integer is zero has no term, or, of integers, the one that is no more than any old element.

#define NAMED 1u
#define IS_WIDE (sizeof(T) > 4)

TW_DEVICE u32 kinds_of(decltype(widen(T()))) { return NAMED; }

// In order, each type in as many bits as it has.
TW_DEVICE u32 ascending(int x) { return (u32)x ^ 1u << 31; }
TW_DEVICE u64 ascending(i64 x) { return (u64)x ^ 1ull << 63; }
TW_DEVICE u32 ascending(float x) { return __float_as_uint(x) ^ (__float_as_int(x) < 0 ? ~0u : 1u << 31); }
TW_DEVICE u64 ascending(double x) { return (u64)__double_as_longlong(x) ^ (__double_as_longlong(x) < 0 ? ~0ull : 1ull << 63); }
TW_DEVICE void descend(u32 order, int& x) { x = (int)(order ^ 1u << 31); }
TW_DEVICE void descend(u64 order, i64& x) { x = (i64)(order ^ 1ull << 63); }
TW_DEVICE void descend(u32 order, float& x) { x = __uint_as_float(order ^ (order >> 31 ? 1u << 31 : ~0u)); }
TW_DEVICE void descend(u64 order, double& x) { x = __longlong_as_double((i64)(order ^ (order >> 63 ? 1ull << 63 : ~0ull))); }

template <class Term> TW_DEVICE u64 integer_of(Term term) {
  auto order = ascending(term);
  if (REDUCE == AMIN) order = ~order;
  if (term != term) order = ~(order ^ order);
  return order;
}

template <class Term> TW_DEVICE Term result_of(Term old, u64 whole, u32) {
  if (INCLUDE && integer_of(old) >= whole) return old;
  const auto order = (decltype(ascending(old)))whole;
  Term result;
  descend(REDUCE == AMIN ? ~order : order, result);
  return result;
}

TW_DEVICE u64 of_warp(u64 integer) {
  if (!IS_WIDE) return of_first_lane(__reduce_max_sync(FULL_WARP, (u32)integer));
  TW_UNROLL for (int step = 16; step > 0; step /= 2) integer = max(integer, (u64)__shfl_xor_sync(FULL_WARP, integer, step));
  return threadIdx.x % 32 == 0 ? integer : 0;
}
// In shared memory, which has a maximum of 32 bits alone.
TW_DEVICE void put_to(u32* words, u32 slot, u64 integer) {
  if (!IS_WIDE) return (void)atomicMax(&words[slot], (u32)integer);
  for (u64 seen = 0; seen < integer;) {
    const u64 was = atomicCAS((u64*)words + slot, seen, integer);
    if (was == seen) return;
    seen = was;
  }
}
TW_DEVICE void put_to(u64* common, u64 integer) { atomicMax(common, integer); }
TW_DEVICE u64 whole_at(const u32* words, u32 s) { return IS_WIDE ? ((const u64*)words)[s] : words[s]; }
TW_DEVICE void set_whole(u32* words, u32 s, u64 whole) {
  if (IS_WIDE) ((u64*)words)[s] = whole;
  else words[s] = (u32)whole;
}
