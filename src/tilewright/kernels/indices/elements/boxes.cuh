// An index of a box of x or of src: what it covers of each is a box, whose elements (slice, row, column)
// are numbered as those of the index: OUTER slices, LENGTH or PLACES rows, INNER columns.
//
// X_AT and SOURCE_AT say where each lies. X_DENSE, SOURCE_DENSE: where it would if nothing else were there.

template <class S> TW_DEVICE u64 in_x(S slice, u32 row, u32 column) { return X_AT(slice, row, column); }
template <class S> TW_DEVICE u64 in_source(S slice, u32 row, u32 column) { return SOURCE_AT(slice, row, column); }
