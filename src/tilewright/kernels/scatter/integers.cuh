// Sums of floats as sums of integers, which have the same bits in any order.
//
// The terms of a place are looked at twice. The first look keeps the largest `mark` of all, which tells
// a power of two that no term reaches. In the second, each term is a number of units, 2^unit_bits of
// which are that power: as many as leave room for the sum of all terms in 64 bits.

#define UNNAMED 0u
#define MINUS_ZEROS 1u
#define ZEROS 2u
#define NOT_FINITE 257u

#define POSITIVE_INFINITY 1u
#define NEGATIVE_INFINITY 2u
#define NOT_A_NUMBER 4u

// What a term makes of its place: UNNAMED < MINUS_ZEROS < ZEROS < its exponent and two < NOT_FINITE.
TW_DEVICE u32 mark_of(float term) {
  const u32 bits = __float_as_uint(term), exponent = bits >> 23 & 255;
  if (bits << 1 == 0) return bits ? MINUS_ZEROS : ZEROS;
  return ZEROS + max(exponent, 1u);
}

// Of a place with that mark: terms are below 2^(mark - 128), which is 2^unit_bits units.
TW_DEVICE double units_of_one(u32 mark, u32 unit_bits) { return __longlong_as_double((i64)(1023 + 128 + unit_bits - mark) << 52); }
TW_DEVICE double one_unit(u32 mark, u32 unit_bits) { return __longlong_as_double((i64)(1023 - 128 - unit_bits + mark) << 52); }

TW_DEVICE u64 integer_of(float term, u32 mark, u32 unit_bits) { return (u64)__double2ll_rn((double)term * units_of_one(mark, unit_bits)); }

// Of a place that is NOT_FINITE, whose integer is made of these by "or".
TW_DEVICE u32 kind_of(float term) {
  const u32 bits = __float_as_uint(term);
  if ((bits >> 23 & 255) < 255) return 0;
  return bits << 9 ? NOT_A_NUMBER : bits >> 31 ? NEGATIVE_INFINITY : POSITIVE_INFINITY;
}

// The sum of a place; minus zero, which changes nothing, where no term came.
TW_DEVICE double sum_of(u64 integer, u32 mark, u32 unit_bits) {
  if (mark == NOT_FINITE) {
    const double infinity = Limits<double>::most();
    if (integer == POSITIVE_INFINITY) return infinity;
    return integer == NEGATIVE_INFINITY ? -infinity : infinity - infinity;
  }
  if (mark < ZEROS) return -0.0;
  return mark == ZEROS ? 0.0 : (double)(i64)integer * one_unit(mark, unit_bits);
}

// Whether terms of a place with that mark are counted.
TW_DEVICE bool adds(u32 mark) { return mark > ZEROS && mark < NOT_FINITE; }

// Where a warp's terms are all of one place, to which they would queue up: of all its lanes, in the first.
TW_DEVICE u32 of_first_lane(u32 mark) { return threadIdx.x % 32 == 0 ? mark : UNNAMED; }
TW_DEVICE u64 sum_of_warp(u64 integer) {
  TW_UNROLL for (int step = 16; step > 0; step /= 2) integer += __shfl_xor_sync(FULL_WARP, integer, step);
  return threadIdx.x % 32 == 0 ? integer : 0;
}

// In shared memory, which adds 32 bits at once: each half is added modulo 2^32, and whoever wraps the
// lower one carries. Together a sum modulo 2^64.
TW_DEVICE void add_shared(u32* low, u32* high, u64 integer) {
  const u32 mine = (u32)integer, was = atomicAdd(low, mine);
  const u32 rest = (u32)(integer >> 32) + (was + mine < was);
  if (rest) atomicAdd(high, rest);
}
