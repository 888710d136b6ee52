// Products of halves for weight_grad_sm80.cuh: ldmatrix transposes, mma.sync multiplies.
//
// Defined before this text: OPERAND, the operands' type as mma.sync names it.

TW_DEVICE void load_transposed(u32 (&r)[4], u32 from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(from) : "memory");
}
TW_DEVICE void multiply(float* d, const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." OPERAND "." OPERAND ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// A tensor core truncates what it adds. A result that keeps fp32 has products added by rounding sums.
TW_DEVICE void accumulate(float* d, const u32 (&a)[4], u32 b0, u32 b1) {
  if constexpr (sizeof(Out) < 4) return multiply(d, a, b0, b1);
  float of_step[4] = {};
  multiply(of_step, a, b0, b1);
  TW_UNROLL for (int i = 0; i < 4; ++i) d[i] += of_step[i];
}

TW_DEVICE void products(float (&sums)[BLOCKS][COLUMNS / 2], float (&bias)[BLOCKS][4], u32 stage, int warp) {
  const int lane = threadIdx.x % 32, in = lane & 7, second = lane >> 3 & 1, third = lane >> 4;
#pragma unroll sizeof(Out) < 4 ? TILE_K / 16 : 1
  for (int k = 0; k < TILE_K; k += 16) {
    u32 a[BLOCKS][4];
    TW_UNROLL for (int m = 0; m < BLOCKS; ++m) {
      const int row = WARP_ROW(warp) + m * STRIDE + second * 8;
      load_transposed(a[m], chunk_at(stage + row / 64 * BOX_BYTES, k + in + third * 8, row % 64 / 8));
    }
    if (sums_bias(warp))
      TW_UNROLL for (int m = 0; m < BLOCKS; ++m) {
        if constexpr (!PAIRED) {
          multiply(bias[m], a[m], DTYPE::ONES, DTYPE::ONES);
        } else {
          float of_step[4] = {};
          multiply(of_step, a[m], DTYPE::ONES, DTYPE::ONES);
          TW_UNROLL for (int i = 0; i < 4; i += 2) add_to_bias(bias[m] + i, of_step[i]);
        }
      }
    TW_UNROLL for (int n = 0; n < COLUMNS; n += 16) {
      const int column = WARP_COLUMN(warp) + n + third * 8;
      u32 b[4];
      load_transposed(b, chunk_at(stage + (ROW_BOXES + column / 64) * BOX_BYTES, k + in + second * 8, column % 64 / 8));
      TW_UNROLL for (int m = 0; m < BLOCKS; ++m) {
        accumulate(sums[m] + n / 2, a[m], b[0], b[1]);
        accumulate(sums[m] + n / 2 + 4, a[m], b[2], b[3]);
      }
    }
  }
}
