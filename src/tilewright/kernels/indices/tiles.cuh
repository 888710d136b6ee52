// Tiles of contiguous tensors (OUTER, LENGTH or PLACES, INNER): WIDTH columns of INNER of one outer
// slice, or SLABS whole outer slices (then WIDTH is INNER).

#define COLUMNS (SLABS * WIDTH)
#define SLOTS (COLUMNS * PLACES)
#define ELEMENTS (COLUMNS * LENGTH)
#define TILES_ACROSS ((INNER + WIDTH - 1) / WIDTH)

extern __shared__ __align__(16) u32 shared[];

struct Tile { i64 outer; int column, slabs, width; };

TW_DEVICE Tile tile_of_block() {
  const i64 across = blockIdx.x % TILES_ACROSS, down = blockIdx.x / TILES_ACROSS;
  Tile t;
  t.outer = down * SLABS;
  t.column = (int)across * WIDTH;
  t.slabs = (int)min((i64)SLABS, (i64)OUTER - t.outer);
  t.width = min(WIDTH, (int)(INNER - t.column));
  return t;
}

// Element `at` of a tile with `rows` rows a slice, in the order of memory.
TW_DEVICE int column_of(int at) { return at % WIDTH; }
TW_DEVICE int row_of(int at, int rows) { return at / WIDTH % rows; }
TW_DEVICE int slab_of(int at, int rows) { return at / (WIDTH * rows); }
TW_DEVICE bool inside(const Tile& t, int at, int rows) {
  if (at >= COLUMNS * rows) return false;
  if (INNER % WIDTH && column_of(at) >= t.width) return false;
  return OUTER % SLABS == 0 || slab_of(at, rows) < t.slabs;
}
TW_DEVICE i64 address(const Tile& t, int at, int rows) {
  const i64 start = t.outer * rows * (i64)INNER + t.column;
  return WIDTH == INNER ? start + at : start + row_of(at, rows) * (i64)INNER + column_of(at);
}
// Where the place named by element `at` of the index is kept.
TW_DEVICE int slot(int at, u32 place) { return (slab_of(at, LENGTH) * PLACES + (int)place) * WIDTH + column_of(at); }
