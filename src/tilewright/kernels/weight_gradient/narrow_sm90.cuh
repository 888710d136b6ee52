// The weight gradient of a convolution of few channels on sm_90: wgmma multiplies, while other warps copy
// and unfold. See weight_grad_unfold.cuh.
//
// Taps are the rows of the product and features its columns. A warp has 16 rows, two octets of taps, which
// it reads transposed from unfolded rows into registers; grad_output is brought by the copy engine, in
// swizzled rows of 128 bytes, which all warpgroups read. So a line costs each warp one ldmatrix for 16
// pixels, and no other warp reads the same taps. Nothing that a
// thread has written is read by wgmma, so that no fence is needed between the two. Unfolded rows are free for the
// next ones as soon as they are in registers; with PENDING a line's products are under way while the next one's
// taps are read.
//
// Defined before this text, besides what weight_grad_unfold.cuh needs: PRODUCERS, threads that copy and
// unfold, in GROUPS groups that take steps in turn, LEAD, steps that may be unfolded before they are read, PENDING,
// and `multiply`, a wgmma of 64 x FEATURES x 16 with taps in registers.

constexpr int WARPS = (R * OCTETS + 7) / 8 * 4;  // of whole warpgroups; those past the last octet repeat it
constexpr int FRAGMENTS = FEATURES / 8;
constexpr int CONSUMERS = WARPS * 32;
constexpr int THREADS = CONSUMERS + PRODUCERS;
// Steps whose unfolded rows are kept. A group waits for each phase of what is done, and a barrier tells only the last
// phase from the one before: none may go on by two while a group that comes late has yet to look.
constexpr int RING = (PRIME + 1 > GROUPS ? PRIME + 1 : GROUPS) + LEAD;
constexpr int GROUP_THREADS = PRODUCERS / GROUPS;
constexpr int AHEAD = STAGES * GROUPS;           // steps from the one that is unfolded to the one that is asked for
constexpr int GRADS = AHEAD + 2 + LEAD;          // lines whose piece of grad_output is kept, from its copy on
constexpr int LINE_SEGMENTS = PAIRED || CHUNK / 16 <= PENDING ? 1 : PENDING + 1;  // of a line, all but one of which may be under way
constexpr int LINE_BYTES = CHUNK * 128;
constexpr int RAWS = AHEAD + GROUPS;
constexpr int STEP_BYTES = STRIDE_H * ROW_BYTES;
constexpr int RAW_BYTES = STRIDE_H * RAW * 2;
constexpr int RING_AT = GRADS * LINE_BYTES, RAWS_AT = RING_AT + RING * STEP_BYTES, BARRIERS_AT = RAWS_AT + RAWS * RAW_BYTES;
static_assert(FEATURES == 64 && CHUNK % 16 == 0, "swizzled rows");
static_assert(WARPS == EXPECTED_WARPS && FRAGMENTS == EXPECTED_FRAGMENTS, "layout");
static_assert(BARRIERS_AT + 16 * RING + 8 * GRADS == LOOP_BYTES && SHARES == 1, "layout");

// A step's rows are unfolded; they have been read; a line's piece of grad_output is there.
TW_DEVICE u32 full(u32 memory, int step) { return memory + BARRIERS_AT + step % RING * 16; }
TW_DEVICE u32 done(u32 memory, int step) { return full(memory, step) + 8; }
TW_DEVICE u32 there(u32 memory, int line) { return memory + BARRIERS_AT + RING * 16 + line % GRADS * 8; }
TW_DEVICE u32 grad_of(u32 memory, int line) { return memory + line % GRADS * LINE_BYTES; }

// A line's pixels, with zeros behind the end of the row.
TW_DEVICE void load_line(u32 to, const TensorMap* grad, u32 barrier, const Problem& b, const Walk& w) {
  const int feature = blockIdx.y * FEATURES, pixel = w.chunk * CHUNK, line = w.n * b.out_height + w.p;
  barrier_expect(barrier, LINE_BYTES);
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];"
      ::"r"(to), "l"(grad), "r"(barrier), "r"(feature), "r"(pixel), "r"(line) : "memory");
}

// 64 features of pixels in groups of eight, 1024 bytes apart; the swizzle goes by the address.
TW_DEVICE u64 descriptor(u32 address) { return (u64)(1u << 30 | 1024 / 16) << 32 | (address & 0x3ffff) / 16; }

// By a group, which takes every GROUPS-th step from its own number on.
TW_DEVICE void produce(int group, int thread, const u16* x, const TensorMap* grad, unsigned char* memory, const Problem& b) {
  const Lines lines(b);
  const u32 shared = shared_address(memory);
  Walk ahead(b, lines.first), here(b, lines.first);
  int fetched = 0, asked = 0;  // steps, and lines, of all groups
  const auto pass = [&]() {
    asked += ahead.prime == 0;
    ahead.advance(b), ++fetched;
  };
  const auto fetch = [&]() {
    if (fetched < lines.steps) {
      if (thread == 0 && ahead.prime == 0) load_line(grad_of(shared, asked), grad, there(shared, asked), b, ahead);
      copy_rows<GROUP_THREADS>(thread, shared + RAWS_AT + fetched % RAWS * RAW_BYTES, x, b, ahead);
    }
    TW_UNROLL for (int i = 0; i < GROUPS; ++i) pass();
    commit_copies();
  };
  TW_UNROLL for (int i = 0; i < GROUPS - 1; ++i)
    if (i < group) pass(), here.advance(b);
  TW_UNROLL for (int i = 0; i < STAGES; ++i) fetch();
  for (int step = group; step < lines.steps; step += GROUPS) {
    wait_for_copies<STAGES - 1>();
    // The step's copies are there, those of the group's step before are unfolded.
    asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "n"(GROUP_THREADS) : "memory");
    // Whose place in the ring, and among pieces of grad_output, is needed; each phase of a barrier is waited for.
    TW_UNROLL for (int i = GROUPS - 1; i >= 0; --i) {
      const int before = step - 1 - LEAD - i;
      if (before >= 0) barrier_wait(done(shared, before), before / RING & 1);
    }
    fetch();
    unfold<GROUP_THREADS>(thread, memory + RING_AT + step % RING * STEP_BYTES, memory + RAWS_AT + step % RAWS * RAW_BYTES, b, here.chunk);
    __syncwarp();
    if (thread % 32 == 0) barrier_arrive(full(shared, step));
    TW_UNROLL for (int i = 0; i < GROUPS; ++i) here.advance(b);
  }
  wait_for_copies<0>();
}

struct Ones {
  static constexpr int COUNT = FRAGMENTS * 2;
  static TW_DEVICE bool here() { return threadIdx.x / 32 == TAPS / 16 && threadIdx.x % 32 / 4 == TAPS % 8; }
  static TW_DEVICE int feature(int i) { return i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2; }
  static TW_DEVICE float& among(float (&sums)[FRAGMENTS * 4], int i) { return sums[i / 2 * 4 + TAPS / 8 % 2 * 2 + i % 2]; }
};

TW_DEVICE void consume(float (&sums)[FRAGMENTS * 4], u32 shared, const Problem& b) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int octet = min(warp * 2 + (lane >> 3 & 1), R * OCTETS - 1), back = R - 1 - octet / OCTETS;
  const u32 own = RING_AT + (STRIDE_H - 1 - back % STRIDE_H) * ROW_BYTES + octet % OCTETS * 16 + ((lane & 7) + (lane >> 4) * 8) * PIXEL_BYTES;
  const Lines lines(b);
  Walk here(b, lines.first);
  Bias<Ones>::begin();
  u32 taps[CHUNK / 16][4];
  int line = 0;
  for (int step = 0; step < lines.steps; ++step) {
    barrier_wait(full(shared, step), step / RING & 1);
    const auto give_back = [&]() {
      __syncwarp();
      if (lane == 0) barrier_arrive(done(shared, step));
    };
    if (here.prime > 0) give_back();
    if (here.prime == 0) {
      const u32 rows = shared + own + (step - back / STRIDE_H) % RING * STEP_BYTES;
      const u64 features = descriptor(grad_of(shared, line));
      TW_UNROLL for (int segment = 0; segment < LINE_SEGMENTS; ++segment) {
        const int first = segment * (CHUNK / 16) / LINE_SEGMENTS, end = (segment + 1) * (CHUNK / 16) / LINE_SEGMENTS;
        TW_UNROLL for (int k = first; k < end; ++k) load_transposed(taps[k], rows + k * 16 * PIXEL_BYTES);
        if (segment == LINE_SEGMENTS - 1) give_back();
        if (segment == 0) barrier_wait(there(shared, line), line / GRADS & 1);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        TW_UNROLL for (int k = first; k < end; ++k) multiply(sums, taps[k], features + k * 128);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LINE_SEGMENTS - 1) : "memory");
      }
      ++line;
      Bias<Ones>::take_line(sums);
    }
    here.advance(b);
  }
  if (LINE_SEGMENTS > 1) asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(0) : "memory");
  Bias<Ones>::give_back(sums);
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
weight_grad(const __grid_constant__ TensorMap lines, const u16* x, const u16* grad, float* partial, const __grid_constant__ Problem b) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const u32 shared = shared_address(memory);
  if (threadIdx.x == 0) {
    for (int i = 0; i < RING; ++i) barrier_init(full(shared, i), GROUP_THREADS / 32), barrier_init(done(shared, i), WARPS);
    for (int i = 0; i < GRADS; ++i) barrier_init(there(shared, i), 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (threadIdx.x >= CONSUMERS) {
    const int producer = threadIdx.x - CONSUMERS;
    produce(producer / GROUP_THREADS, producer % GROUP_THREADS, x, &lines, memory, b);
    return;
  }
  float sums[FRAGMENTS * 4] = {};
  consume(sums, shared, b);
  float4 quads[FRAGMENTS];
  TW_UNROLL for (int i = 0; i < FRAGMENTS; ++i) quads[i] = make_float4(sums[i * 4], sums[i * 4 + 1], sums[i * 4 + 2], sums[i * 4 + 3]);
  keep<WARPS, C>(x, grad, partial, memory, b, quads);
}

TW_DEVICE Place place(int warp, int fragment, int row, int column) {
  const int octet = warp * 2 + row / 8, r = octet / OCTETS, tap = octet % OCTETS * 8 + row % 8;
  const bool there = octet < R * OCTETS;
  const int at = there && tap < TAPS ? r * TAPS + tap : there && tap == TAPS && r == 0 ? BIAS : NOWHERE;
  return {fragment * 8 + column, at};
}

extern "C" __global__ void __launch_bounds__(256)
add_all_slices(const float* partial, const RESULT::type* into, const RESULT::type* into_bias, RESULT::type* out, RESULT::type* bias, const __grid_constant__ Problem b) {
  add_slices<WARPS, FRAGMENTS>(partial, into, into_bias, out, bias, b);
}
