// Products of fp32 and fp64 for weight_grad_sm80.cuh: plain multiply-adds, or fp32 rounded to TF32 for
// mma.sync.
//
// Sums lie as mma.sync leaves them, either way. A few pixels are summed by themselves first, so that a
// long sum has few roundings; and a tensor core, which truncates what it adds, adds nothing longer.
//
// Defined before this text: TF32, 1 where operands are rounded.

template <class T> TW_DEVICE void load_shared(T& to, u32 from);
template <> TW_DEVICE void load_shared(float& to, u32 from) {
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(to) : "r"(from) : "memory");
}
template <> TW_DEVICE void load_shared(float2& to, u32 from) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(to.x), "=f"(to.y) : "r"(from) : "memory");
}
template <> TW_DEVICE void load_shared(double& to, u32 from) {
  asm volatile("ld.shared.f64 %0, [%1];" : "=d"(to) : "r"(from) : "memory");
}
template <> TW_DEVICE void load_shared(double2& to, u32 from) {
  asm volatile("ld.shared.v2.f64 {%0, %1}, [%2];" : "=d"(to.x), "=d"(to.y) : "r"(from) : "memory");
}
// Of a step's pixel: a column of the tile, which is counted from the box at `boxes` on.
TW_DEVICE u32 item_at(u32 boxes, int pixel, int column) {
  return chunk_at(boxes + column / PANEL * BOX_BYTES, pixel, column % PANEL / WIDE) + column % WIDE * (int)sizeof(Item);
}
constexpr u32 COLUMNS_AT = ROW_BOXES * BOX_BYTES;

#if TF32

constexpr int PIXELS = 16;  // two products

TW_DEVICE u32 rounded(float value) {
  u32 found;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(found) : "f"(value));
  return found;
}
TW_DEVICE void multiply(float (&d)[4], const u32* a, const u32* b) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

TW_DEVICE void products(float (&sums)[BLOCKS][COLUMNS / 2], float (&bias)[BLOCKS][4], u32 stage, int warp) {
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int k = lane % 4; k < TILE_K; k += PIXELS) {
    u32 a[BLOCKS][8];
    TW_UNROLL for (int m = 0; m < BLOCKS; ++m) {
      float values[8];
      TW_UNROLL for (int i = 0; i < 8; ++i) {
        load_shared(values[i], item_at(stage, k + i / 2 * 4, WARP_ROW(warp) + m * STRIDE + i % 2 * 8 + lane / 4));
        a[m][i] = rounded(values[i]);
      }
      if (sums_bias(warp))  // not of TF32; lanes of a row have other pixels each
        TW_UNROLL for (int half = 0; half < 2; ++half) {
          float few = values[half] + values[half + 2] + (values[half + 4] + values[half + 6]);
          few += __shfl_xor_sync(~0u, few, 1);
          add_to_bias(bias[m] + half * 2, few + __shfl_xor_sync(~0u, few, 2));
        }
    }
    TW_UNROLL for (int n = 0; n < COLUMNS; n += 8) {
      u32 b[4];
      TW_UNROLL for (int i = 0; i < 4; ++i) {
        float value;
        load_shared(value, item_at(stage + COLUMNS_AT, k + i * 4, WARP_COLUMN(warp) + n + lane / 4));
        b[i] = rounded(value);
      }
      TW_UNROLL for (int m = 0; m < BLOCKS; ++m) {
        float few[4] = {};
        multiply(few, a[m], b);
        multiply(few, a[m] + 4, b + 2);
        TW_UNROLL for (int i = 0; i < 4; ++i) sums[m][n / 2 + i] += few[i];
      }
    }
  }
}

#else

constexpr int PIXELS = 32 / sizeof(Item);

TW_DEVICE float multiply_add(float a, float b, float c) { return fmaf(a, b, c); }
TW_DEVICE double multiply_add(double a, double b, double c) { return fma(a, b, c); }

TW_DEVICE void products(Sum (&sums)[BLOCKS][COLUMNS / 2], Sum (&bias)[BLOCKS][4], u32 stage, int warp) {
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int k = 0; k < TILE_K; k += PIXELS) {
    Item a[BLOCKS][2][PIXELS];
    TW_UNROLL for (int m = 0; m < BLOCKS; ++m)
      TW_UNROLL for (int half = 0; half < 2; ++half)
        TW_UNROLL for (int i = 0; i < PIXELS; ++i)
          load_shared(a[m][half][i], item_at(stage, k + i, WARP_ROW(warp) + m * STRIDE + half * 8 + lane / 4));
    if (sums_bias(warp))
      TW_UNROLL for (int m = 0; m < BLOCKS; ++m)
        TW_UNROLL for (int half = 0; half < 2; ++half) {
          Item few = 0;
          TW_UNROLL for (int i = 0; i < PIXELS; ++i) few += a[m][half][i];
          add_to_bias(bias[m] + half * 2, few);
        }
    TW_UNROLL for (int n = 0; n < COLUMNS; n += 8) {
      DTYPE::pair b[PIXELS];
      TW_UNROLL for (int i = 0; i < PIXELS; ++i)
        load_shared(b[i], item_at(stage + COLUMNS_AT, k + i, WARP_COLUMN(warp) + n + lane % 4 * 2));
      TW_UNROLL for (int m = 0; m < BLOCKS; ++m)
        TW_UNROLL for (int half = 0; half < 2; ++half) {
          Item x = 0, y = 0;
          TW_UNROLL for (int i = 0; i < PIXELS; ++i) {
            x = multiply_add(a[m][half][i], b[i].x, x);
            y = multiply_add(a[m][half][i], b[i].y, y);
          }
          sums[m][n / 2 + half * 2] += x;
          sums[m][n / 2 + half * 2 + 1] += y;
        }
    }
  }
}

#endif
