// Sums of floats as sums of integers, which have the same bits in any order.
//
// The terms of a place are looked at twice. The first look keeps the largest `mark` of all, which tells
// a power of two that no term reaches. In the second, each term is a number of units, 2^unit_bits of
// which are that power: as many as leave room for the sum of all terms in 64 bits. Of a double, what is
// less than a unit is a number of finer ones, 2^unit_bits of which are a unit, with a sum of their own.

typedef decltype(widen(T())) Term;
#define LIMBS ((int)sizeof(Term) / 4)
#define EACH_LIMB(p) TW_UNROLL for (int p = 0; p < LIMBS; ++p)
struct alignas(8 * LIMBS) Integer { u64 limb[LIMBS]; };

template <class E> struct Format;
template <> struct Format<float> {
  typedef u32 Bits;
  enum : u32 { FRACTION = 23, EXPONENTS = 255 };
  static TW_DEVICE Bits bits(float x) { return __float_as_uint(x); }
};
template <> struct Format<double> {
  typedef u64 Bits;
  enum : u32 { FRACTION = 52, EXPONENTS = 2047 };
  static TW_DEVICE Bits bits(double x) { return (u64)__double_as_longlong(x); }
};
typedef Format<Term> F;

#define UNNAMED 0u
#define MINUS_ZEROS 1u
#define ZEROS 2u
#define NOT_FINITE (ZEROS + F::EXPONENTS)

#define POSITIVE_INFINITY 1u
#define NEGATIVE_INFINITY 2u
#define NOT_A_NUMBER 4u

TW_DEVICE u32 exponent_of(Term term) { return (u32)(F::bits(term) >> F::FRACTION) & F::EXPONENTS; }

// What a term makes of its place: UNNAMED < MINUS_ZEROS < ZEROS < its exponent and two < NOT_FINITE.
TW_DEVICE u32 mark_of(Term term) {
  const F::Bits bits = F::bits(term);
  const u32 exponent = exponent_of(term);
  if (bits << 1 == 0) return bits ? MINUS_ZEROS : ZEROS;
  return ZEROS + max(exponent, 1u);
}

// Of a place with that mark: terms are below two to this power.
TW_DEVICE int power_above(u32 mark) { return (int)mark - (int)(F::EXPONENTS + 1) / 2; }

TW_DEVICE double two_to(int power) { return __longlong_as_double((i64)(u32)(1023 + power) << 52); }
TW_DEVICE double scaled_by(double x, int power) { return LIMBS > 1 ? ldexp(x, power) : x * two_to(power); }

TW_DEVICE Integer integer_of(Term term, u32 mark, u32 unit_bits) {
  double units = scaled_by((double)term, (int)unit_bits - power_above(mark));
  Integer r;
  EACH_LIMB(p) {
    r.limb[p] = (u64)__double2ll_rn(units);
    units = (units - (double)(i64)r.limb[p]) * two_to(unit_bits);
  }
  return r;
}

// Of a place that is NOT_FINITE, whose integer's first limb is made of these by "or".
TW_DEVICE u32 kind_of(Term term) {
  const F::Bits bits = F::bits(term);
  if (exponent_of(term) < F::EXPONENTS) return 0;
  return bits << (8 * sizeof(bits) - F::FRACTION) ? NOT_A_NUMBER : bits >> (8 * sizeof(bits) - 1) ? NEGATIVE_INFINITY : POSITIVE_INFINITY;
}

// The sum of a place; minus zero, which changes nothing, where no term came.
TW_DEVICE double sum_of(Integer integer, u32 mark, u32 unit_bits) {
  if (mark == NOT_FINITE) {
    const double infinity = Limits<double>::most();
    if (integer.limb[0] == POSITIVE_INFINITY) return infinity;
    return integer.limb[0] == NEGATIVE_INFINITY ? -infinity : infinity - infinity;
  }
  if (mark < ZEROS) return -0.0;
  if (mark == ZEROS) return 0.0;
  double units = (double)(i64)integer.limb[0];
  if (LIMBS > 1) units += (double)((i64)integer.limb[0] - (i64)units) + (double)(i64)integer.limb[LIMBS - 1] * two_to(-(int)unit_bits);
  return scaled_by(units, power_above(mark) - (int)unit_bits);
}

// Whether terms of a place with that mark are counted.
TW_DEVICE bool adds(u32 mark) { return mark > ZEROS && mark < NOT_FINITE; }
