// Sums that left out no padding, and should have.
//
// Where taps share a copy of x, its pixels also meet the zeros between rows and images of grad_output.
// An infinity of x makes NaN there, in the sums of taps that never meet it. Whatever a block's
// products left as NaN is therefore summed again over the slice's pixels, by plain multiply-adds that skip the
// padding: NaN stays where it belongs, and nowhere else. Finite operands cost a vote.

// The pixels of grad_output: the stream's rows are as long as padded ones.
struct Image {
  int height, width;
  TW_DEVICE Image(const Problem& p) {
    const int filter_height = p.panels / p.panels_per_tap / p.filter_width;
    height = p.height + 2 * p.padding_h - (filter_height - 1) * p.dilation_h;
    width = p.width + 2 * p.padding_w - (p.filter_width - 1) * p.dilation_w;
  }
};

// Sums of feature k with channels c and c + 1 under a tap, until those that are wanted are NaN. Each
// row's pixels are summed by themselves, in order.
TW_DEVICE float2 sum_again(const u16* x, const u16* grad, const Problem& p, const Tile& t, int tap, int k, int c,
                           bool want_x, bool want_y) {
  const Image image(p);
  const int below = tap / p.filter_width * p.dilation_h - p.padding_h;
  const int right = tap % p.filter_width * p.dilation_w - p.padding_w;
  const int first = t.first * TILE_K, end = min(first + t.steps * TILE_K, p.pixels);
  float2 sum = {0, 0};
  for (int line = first / p.out_width; line * p.out_width < end; ++line) {
    const int n = line / p.out_height, row = line - n * p.out_height, h = row + below;
    if (row >= image.height || h < 0 || h >= p.height) continue;
    const int begin = max(max(0, -right), first - line * p.out_width);
    int left = min(min(image.width, p.width - right), end - line * p.out_width) - begin;
    const u16* g = grad + (((long long)n * image.height + row) * image.width + begin) * p.features + k;
    const u16* pair = x + (((long long)n * p.height + h) * p.width + begin + right) * p.channels + c;
    float2 part = {0, 0};
    for (; left > 0; --left, g += p.features, pair += p.channels) {
      const float by = DTYPE::widen(*g);
      const u32 both = *(const u32*)pair;
      part.x = fmaf(by, DTYPE::widen(DTYPE::first(both)), part.x);
      part.y = fmaf(by, DTYPE::widen(DTYPE::second(both)), part.y);
    }
    sum.x += part.x, sum.y += part.y;
    if ((sum.x != sum.x || !want_x) && (sum.y != sum.y || !want_y)) break;
  }
  return sum;
}

// By all lanes of a warp, once the slice's last product is done.
TW_DEVICE void leave_padding_out(const u16* x, const u16* grad, const Problem& p, const Tile& t, int warp,
                                 Sum (&d)[BLOCKS][COLUMNS / 2]) {
  float all = 0;  // NaN if any is
  TW_UNROLL for (int m = 0; m < BLOCKS; ++m)
    TW_UNROLL for (int j = 0; j < COLUMNS / 2; j += 2) all = fmaf(d[m][j], d[m][j + 1], all);
  if (!__any_sync(~0u, all != all)) return;
  // What an index chooses lies in local memory; nothing else is held in registers meanwhile.
  constexpr int SUMS = BLOCKS * COLUMNS / 2;
  Sum held[SUMS];
  TW_UNROLL for (int i = 0; i < SUMS; ++i) held[i] = d[i / (COLUMNS / 2)][i % (COLUMNS / 2)];
  const int taps = p.panels / p.panels_per_tap;
#pragma unroll 1
  for (int i = 0; i < SUMS; i += 2) {
    const bool want_x = held[i] != held[i], want_y = held[i + 1] != held[i + 1];
    const Fragment f(warp, i / (COLUMNS / 2), i % (COLUMNS / 2) / 4, threadIdx.x % 32);
    const int panel = t.panel + f.column / PANEL, place = panel / taps;
    const int k = t.row + f.row + i / 2 % 2 * 8, c = place * PANEL + f.column % PANEL;
    if (!(want_x || want_y) || k >= p.features || c >= p.channels) continue;
    const float2 again = sum_again(x, grad, p, t, panel - place * taps, k, c, want_x, want_y);
    if (want_x) held[i] = again.x;
    if (want_y) held[i + 1] = again.y;
  }
  TW_UNROLL for (int i = 0; i < SUMS; ++i) d[i / (COLUMNS / 2)][i % (COLUMNS / 2)] = held[i];
  __syncwarp();
}
