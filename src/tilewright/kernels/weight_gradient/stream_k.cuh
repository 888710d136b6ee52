// Stream-K: the steps of all tiles, one tile behind the other, in equal ranges, one for each block.
//
// As many blocks as run at once walk the same number of steps, however many tiles there are; the warp that
// loads goes on to the next tile while the others write theirs. Whole tiles are written at once. A tile whose steps fall to several
// blocks is written by the one that has its first step, which comes to it last: the others' sums, each block's first,
// are waiting in the workspace by then, and are added in the order of pixels. WHOLE ranges end where tiles do.

TW_DEVICE int steps_of_tile(const Problem& p) { return (p.pixels + TILE_K - 1) / TILE_K; }
TW_DEVICE int range_begin(const Problem& p, int block) {
  return (block * p.steps + min(block, p.longer)) * (WHOLE ? steps_of_tile(p) : 1);
}

// The segment of a tile that begins at step `at` of all tiles and ends with the tile, or with this block's range.
TW_DEVICE Tile segment_at(const Problem& p, int at) {
  const int steps = steps_of_tile(p);
  Tile t(p, at / steps);
  t.first = WHOLE ? 0 : at - t.tile * steps;
  t.steps = WHOLE ? steps : min(steps - t.first, range_begin(p, blockIdx.x + 1) - at);
  return t;
}
// How many blocks the rest of the tile falls to.
TW_DEVICE int later_blocks(const Problem& p, const Tile& t) {
  const int end = (t.tile + 1) * steps_of_tile(p);
  int later = 0;
  while (range_begin(p, blockIdx.x + 1 + later) < end) ++later;
  return later;
}

// Where a block leaves the sums of a segment that is not its tile's first: only its range's first one can be that.
TW_DEVICE Quad* sums_of_block(Sum* partial, int block) { return (Quad*)partial + (long long)block * (QUADS + BIAS_QUADS); }

// Halves, past shared memory, where the next tile's operands are: neighbouring lanes give each other a pair of
// columns, so that each stores four and a row's lanes fill sectors. Channels come in eights.
template <class To>  // RESULT, of halves
TW_DEVICE void store_halves(Out* out, const Panel* panels, const Problem& p, const Tile& t, int warp, const Sum (&d)[BLOCKS][COLUMNS / 2]) {
  const int lane = threadIdx.x % 32;
  const bool odd = lane & 1;
  TW_UNROLL for (int m = 0; m < BLOCKS; ++m)
    TW_UNROLL for (int j = 0; j < FRAGMENTS; j += 2) {
      const int column = WARP_COLUMN(warp) + (j + odd) * 8 + lane / 2 % 2 * 4, c = column % PANEL;
      const Panel panel = panels[column / PANEL];
      TW_UNROLL for (int below = 0; below < 2; ++below) {
        const Sum* const sum = d[m] + j * 4 + below * 2;
        const typename To::pair first = To::pack(sum[0], sum[1]), second = To::pack(sum[4], sum[5]);
        const typename To::pair taken = __shfl_xor_sync(~0u, odd ? first : second, 1);
        const int k = t.row + Fragment(warp, m, j, lane).row + below * 8;
        if (k < p.features && c < panel.channels)
          *(uint2*)(out + row_of(p, k) + panel.at + c) = odd ? make_uint2(taken, second) : make_uint2(first, taken);
      }
    }
}

// What the block's ADDERS first threads do with the sums of a segment of their range.
template <int ADDERS>
TW_DEVICE void finish_segment(const Results& out, Sum* partial, u32* counters, const Panel* panels, const Problem& p, const Tile& t,
                           int warp, Sum (&d)[BLOCKS][COLUMNS / 2], Sum (&bias)[BLOCKS][4]) {
  if constexpr (!WHOLE) {
    u32* counter = counters + t.tile;  // 0 before and after
    if (t.first > 0) {
      store_sums(sums_of_block(partial, blockIdx.x), warp, d, bias);
      asm volatile("bar.sync 1, %0;" ::"n"(ADDERS) : "memory");
      if (threadIdx.x == 0) fence(), atomicAdd(counter, 1);
      return;
    }
    if (const int later = later_blocks(p, t)) {
      if (threadIdx.x == 0) {  // all blocks run at once
        while (*(volatile u32*)counter < later) {}
        fence();
        *(volatile u32*)counter = 0;
      }
      asm volatile("bar.sync 1, %0;" ::"n"(ADDERS) : "memory");
      for (int i = 1; i <= later; ++i) add_segment<8>(sums_of_block(partial, blockIdx.x + i), t, warp, d, bias);
    }
  }
  if (t.panel == 0) each_bias(warp, bias, [&](int row, Sum sum, Sum rest) { store_bias(out.bias, p, t.row + row, sum, rest); });
  if constexpr (ADDS || sizeof(Out) >= 4) store_quads(out, panels, p, t, warp, d);
  else store_halves<RESULT>(out.weight, panels, p, t, warp, d);
}
