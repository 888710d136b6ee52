// Products of floats as sums of integers, which have the same bits in any order: of their factors'
// logarithms to base two, in units of which 2^UNIT_BITS are one. All together are less than 2^62; bit 63
// counts the negative factors, and is the sum's own sign besides, which bit 62 tells. What has no
// logarithm, and is kept by an "or", is a kind.

#define NAMED 1u
#define HAS_ZERO 2u
#define HAS_INFINITY 4u
#define HAS_NAN 8u

TW_DEVICE u32 kinds_of(float factor) {
  const u32 size = __float_as_uint(factor) & 0x7fffffff;
  if (size == 0) return NAMED | HAS_ZERO;
  return size < 0x7f800000 ? NAMED : size > 0x7f800000 ? NAMED | HAS_NAN : NAMED | HAS_INFINITY;
}

TW_DEVICE u64 integer_of(float factor) {
  const u64 bits = (u64)__double_as_longlong((double)factor), sign = bits >> 63 << 63;
  if (kinds_of(factor) > NAMED) return sign;
  const u64 one = 1023ull << 52, below_one = (1ull << 52) - 1;
  const double fraction = __longlong_as_double((i64)((bits & below_one) | one));
  const u64 whole = (bits >> 52 & 2047) - 1023;
  return ((whole << UNIT_BITS) + (u64)__double2ll_rn(log2(fraction) * two_to(UNIT_BITS))) ^ sign;
}

// The product of the factors with that sum and those kinds; it leaves the range only as a whole.
TW_DEVICE float result_of(float old, u64 sum, u32 kinds) {
  const i64 logarithm = (i64)(sum << 1) >> 1, whole = logarithm >> UNIT_BITS;
  const double infinity = Limits<double>::most();
  double size = exp2((double)(logarithm - (whole << UNIT_BITS)) * two_to(-UNIT_BITS));
  if (kinds & HAS_ZERO) size = 0;
  if (kinds & HAS_INFINITY) size *= infinity;
  if (kinds & HAS_NAN) size = infinity - infinity;
  const bool negative = (sum >> 63 ^ sum >> 62) & 1;
  const double first = INCLUDE ? old : 1;
  return (float)ldexp(first * (negative ? -size : size), (int)whole);
}
