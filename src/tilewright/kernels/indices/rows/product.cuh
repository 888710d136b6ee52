// Products of floating values of which no partial one leaves the range where the whole does not.

TW_DEVICE float fraction_of(float x, int* exponent) { return frexpf(x, exponent); }
TW_DEVICE double fraction_of(double x, int* exponent) { return frexp(x, exponent); }
TW_DEVICE float scaled(float x, int exponent) { return ldexpf(x, exponent); }
TW_DEVICE double scaled(double x, int exponent) { return ldexp(x, exponent); }

// fraction * 2^exponent. Exponents stop at FAR, from where none comes back.
#define FAR (1 << 29)
template <class S> struct Product {
  S fraction;
  int exponent;

  Product() = default;
  TW_DEVICE explicit Product(S value) {
    exponent = 0;
    fraction = value;
    if (value == value && value - value == 0) fraction = fraction_of(value, &exponent);
  }
  TW_DEVICE operator S() const { return scaled(fraction, exponent); }
};
template <class S> TW_DEVICE Product<S> reduce(Product<S> a, const Product<S>& b) {
  Product<S> whole(a.fraction * b.fraction);
  whole.exponent = max(-FAR, min(FAR, whole.exponent + a.exponent + b.exponent));
  return whole;
}
