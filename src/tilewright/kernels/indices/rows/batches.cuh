// An index that differs from batch to batch: position i is number i % length of batch i / length, whose
// part of the index begins `apart` after that of the batch before, and whose `along` places come after its.
// Kernels for rows then have one long table, one long source, and no batches.

#define MORE_PARAMETERS , u32 length, u32 along, u32 apart
#define MORE , length, along, apart

// The place that position i names, or `places` for one out of range.
TW_DEVICE u64 named_at(const INDEX* index, u64 i, u32 places, u32 length, u32 along, u32 apart) {
  const u32 batch = (u32)i / length;
  const u64 place = (u64)(i64)index[(u64)batch * apart + (u32)i % length];
  return place < along ? (u64)batch * along + place : places;
}
TW_DEVICE u32 place_at(const INDEX* index, u64 i, u32 places, i64, int* fault, u32 length, u32 along, u32 apart) {
  const u64 place = named_at(index, i, places, length, along, apart);
  if (place >= places) *(volatile int*)fault = 1;
  return (u32)place;
}
