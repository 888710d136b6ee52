// Matrices transposed, up to three batches of them in one launch: NCHW memory for kernels that read
// NHWC, and gradients from [K, R, S, C] to [K, C, R, S].
//
// A batch of matrices [rows][columns] becomes one of [columns][rows]. A block moves one tile through
// shared memory, which holds it transposed: all loads of a thread are under way before it stores the
// first. Accesses are as wide as sizes and addresses allow, 16 bytes at best. Few rows (three channels
// of an image, nine taps) come whole, so that a tile becomes one piece of memory; of more rows a tile
// has 128 bytes.
//
// Defined before this text: ITEM, an unsigned integer of an element's size; and for each batch READS and
// WRITES, elements of an access, and WHOLE, the number of rows where they are few, else 0.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define TW_DEVICE __device__ __forceinline__
#define TW_UNROLL _Pragma("unroll")

template <int BYTES> struct Words;
template <> struct Words<2> { typedef u16 type; };
template <> struct Words<4> { typedef u32 type; };
template <> struct Words<8> { typedef u64 type; };
template <> struct Words<16> { typedef uint4 type; };

constexpr int THREADS = 256, TILE_BYTES = 8192, ITEM_BYTES = sizeof(ITEM);
constexpr int READ_WIDTHS[] = READS, WRITE_WIDTHS[] = WRITES, WHOLE_ROWS[] = WHOLE;
constexpr int TRANSPOSES = sizeof(WHOLE_ROWS) / sizeof(int);

struct alignas(64) Problem {  // 128 bytes, passed by value
  struct Transpose {
    int rows, columns, row_tiles, column_tiles;
    int blocks;  // of this one and those before it
  } transposes[3];
};

// Where an element of the tile lies in shared memory, in bytes. Among many rows the 16-byte chunks of a
// column are swizzled, so that neither way do eight neighbours share banks.
template <int ROWS> TW_DEVICE int place(int row, int column) {
  if constexpr (ROWS > 0) return (column * ROWS + row) * ITEM_BYTES;
  const int at = row * ITEM_BYTES, swizzle = (column ^ column / 8) & 7;
  return column * 128 + ((at / 16 ^ swizzle) * 16 + at % 16);
}

template <int READ, int WRITE, int ROWS>
TW_DEVICE void transpose(const ITEM* from, ITEM* to, const Problem::Transpose& p, int block) {
  extern __shared__ __align__(128) unsigned char memory[];
  typedef typename Words<READ * ITEM_BYTES>::type In;
  typedef typename Words<WRITE * ITEM_BYTES>::type Out;
  constexpr int TILE_ROWS = ROWS > 0 ? ROWS : 128 / ITEM_BYTES;
  constexpr int TILE_COLUMNS = ROWS > 0 ? TILE_BYTES / ITEM_BYTES / TILE_ROWS / 8 * 8 : 64;
  constexpr int ACROSS = TILE_COLUMNS / READ, LOADS = (TILE_ROWS * ACROSS + THREADS - 1) / THREADS;
  const int of_row = block / p.column_tiles, column0 = (block - of_row * p.column_tiles) * TILE_COLUMNS;
  const int matrix = of_row / p.row_tiles, row0 = (of_row - matrix * p.row_tiles) * TILE_ROWS;
  const int rows = min(p.rows - row0, TILE_ROWS), columns = min(p.columns - column0, TILE_COLUMNS);
  const long long first = (long long)matrix * p.rows * p.columns;
  from += first + (long long)row0 * p.columns + column0;
  to += first + (long long)column0 * p.rows + row0;

  In words[LOADS];
  const ITEM* next = from + (long long)(threadIdx.x / ACROSS) * p.columns;  // where a thread keeps to its columns
  TW_UNROLL for (int i = 0; i < LOADS; ++i) {
    const int at = threadIdx.x + i * THREADS, row = at / ACROSS, column = at % ACROSS * READ;
    if constexpr (THREADS % ACROSS != 0) next = from + (long long)row * p.columns;
    if (row < rows && column < columns) words[i] = __ldg((const In*)(next + column));
    if constexpr (THREADS % ACROSS == 0) next += (long long)(THREADS / ACROSS) * p.columns;
  }
  TW_UNROLL for (int i = 0; i < LOADS; ++i) {
    const int at = threadIdx.x + i * THREADS, row = at / ACROSS, column = at % ACROSS * READ;
    if (row < rows && column < columns)
      TW_UNROLL for (int e = 0; e < READ; ++e)
        *(ITEM*)(memory + place<ROWS>(row, column + e)) = ((const ITEM*)&words[i])[e];
  }
  __syncthreads();
  if constexpr (ROWS > 0) {
    for (int at = threadIdx.x * WRITE; at < columns * ROWS; at += THREADS * WRITE)
      *(Out*)(to + at) = *(const Out*)(memory + at * ITEM_BYTES);
  } else {
    constexpr int DOWN = TILE_ROWS / WRITE;
    TW_UNROLL for (int at = threadIdx.x; at < TILE_COLUMNS * DOWN; at += THREADS) {
      const int row = at % DOWN * WRITE, column = at / DOWN;
      if (row < rows && column < columns)
        *(Out*)(to + (long long)column * p.rows + row) = *(const Out*)(memory + place<0>(row, column));
    }
  }
}

template <int NUMBER>
TW_DEVICE void transpose_from(const ITEM* const (&from)[3], ITEM* const (&to)[3], const Problem& p, int before) {
  if constexpr (NUMBER < TRANSPOSES) {
    if ((int)blockIdx.x >= p.transposes[NUMBER].blocks) return transpose_from<NUMBER + 1>(from, to, p, p.transposes[NUMBER].blocks);
    transpose<READ_WIDTHS[NUMBER], WRITE_WIDTHS[NUMBER], WHOLE_ROWS[NUMBER]>(from[NUMBER], to[NUMBER], p.transposes[NUMBER], (int)blockIdx.x - before);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 4)
transpose_all(const ITEM* from0, ITEM* to0, const ITEM* from1, ITEM* to1, const ITEM* from2, ITEM* to2,
              const __grid_constant__ Problem p) {
  const ITEM* const from[3] = {from0, from1, from2};
  ITEM* const to[3] = {to0, to1, to2};
  transpose_from<0>(from, to, p, 0);
}
