// Sums that met padding, and should not have.
//
// Around x lie zeros that are multiplied like pixels. An infinity of grad_output makes NaN of them, in
// sums that it is no part of; and where taps share a copy of x, grad_output is padded, too, and an infinity of
// x does. Whatever a block's products left as NaN is therefore summed again over the slice's pixels, by
// plain multiply-adds that leave the padding out: NaN stays where it belongs, and nowhere else.
// Finite operands cost a vote, and layers without padding nothing.

// The pixels of grad_output: where taps share a copy of x, `out_height` and `out_width` count its padding.
struct Image {
  int height, width;
  TW_DEVICE Image(const Problem& p) : height(p.out_height), width(p.out_width) {
    if (!TAPS_INSIDE) return;
    const int filter_height = p.panels / p.panels_per_tap / p.filter_width;
    height = p.height + 2 * p.padding_h - (filter_height - 1) * p.dilation_h;
    width = p.width + 2 * p.padding_w - (p.filter_width - 1) * p.dilation_w;
  }
};

// The sum of feature k with channel c of a tap, until it is NaN. Each row's pixels are summed by
// themselves, in order.
TW_DEVICE Sum sum_again(const DTYPE::type* x, const DTYPE::type* grad, const Problem& p, const Tile& t, int channels,
                        int tap, int k, int c) {
  const Image image(p);
  const int tap_row = p.divided(tap, FILTER_WIDTH);
  const int below = tap_row * p.dilation_h - p.padding_h;
  const int right = (tap - tap_row * p.filter_width) * p.dilation_w - p.padding_w;
  const int leftmost = right < 0 ? (p.stride_w - 1 - right) / p.stride_w : 0;
  const int width = min(image.width, (p.width - right + p.stride_w - 1) / p.stride_w);
  const int first = t.first * TILE_K, end = min(first + t.steps * TILE_K, p.pixels);
  Sum sum = 0;
  for (int line = p.divided(first, OUT_WIDTH); line * p.out_width < end && sum == sum; ++line) {
    const int n = p.divided(line, OUT_HEIGHT), row = line - n * p.out_height, h = row * p.stride_h + below;
    if (row >= image.height || h < 0 || h >= p.height) continue;
    const int begin = max(leftmost, first - line * p.out_width);
    int left = min(width, end - line * p.out_width) - begin;
    const DTYPE::type* g = grad + (((long long)n * image.height + row) * image.width + begin) * p.features + k;
    const DTYPE::type* pixel = x + (((long long)n * p.height + h) * p.width + begin * p.stride_w + right) * channels + c;
    Sum of_line = 0;
    for (; left > 0; --left, g += p.features, pixel += p.stride_w * channels)
      of_line += DTYPE::widen(*g) * DTYPE::widen(*pixel);
    sum += of_line;
  }
  return sum;
}

// By all lanes of a warp, once the slice's last product is done. `channels`: of x.
TW_DEVICE void leave_padding_out(const DTYPE::type* x, const DTYPE::type* grad, const Problem& p, const Tile& t,
                                 int channels, const Panel* panels, int warp, Sum (&d)[BLOCKS][COLUMNS / 2]) {
  if (!TAPS_INSIDE && (p.padding_h | p.padding_w) == 0) return;
  Sum any[4] = {};  // NaN if one is
  TW_UNROLL for (int m = 0; m < BLOCKS; ++m)
    TW_UNROLL for (int j = 0; j < COLUMNS / 2; j += 2) any[j / 2 % 4] += d[m][j] * d[m][j + 1];
  const Sum all = any[0] + any[1] + (any[2] + any[3]);
  if (!__any_sync(~0u, all != all)) return;
  // What an index chooses lies in local memory; nothing else is held in registers meanwhile.
  constexpr int SUMS = BLOCKS * COLUMNS / 2;
  Sum held[SUMS];
  TW_UNROLL for (int i = 0; i < SUMS; ++i) held[i] = d[i / (COLUMNS / 2)][i % (COLUMNS / 2)];
#pragma unroll 1
  for (int i = 0; i < SUMS; ++i) {
    if (held[i] == held[i]) continue;
    const Fragment f(warp, i / (COLUMNS / 2), i % (COLUMNS / 2) / 4, threadIdx.x % 32);
    const int column = f.column + i % 2, within = column % PANEL, k = t.row + f.row + i / 2 % 2 * 8;
    const Panel panel = panels[column / PANEL];
    if (k >= p.features || within >= panel.channels || !of_one_group(k - t.row, within)) continue;
    const int tap = GROUP > 0 ? panel.at / OWN : (panel.at + within) / channels;
    const int c = GROUP > 0 ? t.row + within : panel.at + within - tap * channels;
    held[i] = sum_again(x, grad, p, t, channels, tap, k, c);
  }
  TW_UNROLL for (int i = 0; i < SUMS; ++i) d[i / (COLUMNS / 2)][i % (COLUMNS / 2)] = held[i];
  __syncwarp();
}
