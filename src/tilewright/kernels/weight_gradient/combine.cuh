// Adding the slices of a tile, for common.cuh: in the order of slices, whoever adds them.
//
// Blocks of a cluster add theirs through shared memory first. What is left lies in the workspace, and is
// added by the tile's last block, by all of its blocks, by one block after the other, or by a second kernel, whose
// blocks have ADD_THREADS threads.

// Lighter than __threadfence, which is sequentially consistent.
TW_DEVICE void fence() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// Add sums that another block left, [place] as this one's threads hold theirs, to those of this warp.
template <int MOST>  // loads under way, of a quad each
TW_DEVICE void add_segment(const Quad* from, const Tile& t, int warp, Sum (&d)[BLOCKS][COLUMNS / 2], Sum (&bias)[BLOCKS][4]) {
  constexpr int DEEP = FRAGMENTS % MOST == 0 ? MOST : 2;
  static_assert(FRAGMENTS % DEEP == 0, "fragments in pairs");
  const Quad* own = from + warp * BLOCKS * FRAGMENTS * 32 + threadIdx.x % 32;
  TW_UNROLL for (int m = 0; m < BLOCKS; ++m)
    TW_UNROLL for (int j = 0; j < FRAGMENTS; j += DEEP) {
      Quad v[DEEP];
      TW_UNROLL for (int i = 0; i < DEEP; ++i) v[i] = load_quad(own + (m * FRAGMENTS + j + i) * 32);
      TW_UNROLL for (int i = 0; i < DEEP; ++i) {
        Sum* const sum = d[m] + (j + i) * 4;
        sum[0] += v[i].x, sum[1] += v[i].y, sum[2] += v[i].z, sum[3] += v[i].w;
      }
    }
  if (!sums_bias(warp) || t.panel > 0) return;
  TW_UNROLL for (int m = 0; m < BLOCKS; ++m) {
    const Sum* row = (const Sum*)(from + QUADS) + (Fragment(warp, m, 0, threadIdx.x % 32).row << PAIRED);
    TW_UNROLL for (int i = 0; i < 4; i += 2, row += 8 << PAIRED) {
      add_to_bias(bias[m] + i, __ldcg(row));
      if (PAIRED) bias[m][i + 1] += __ldcg(row + 1);
    }
  }
}

// Blocks of a tile one after the other (SERIAL): each waits for the one with the slice before its own, which began
// earlier since blocks begin in the order of their numbers, and adds what that left. A tile needs the memory of one slice.
TW_DEVICE Quad* running_sums(Sum* partial, const Tile& t) { return (Quad*)partial + (long long)t.tile * (QUADS + BIAS_QUADS); }
template <int ADDERS>
TW_DEVICE void take_turn(Sum* partial, const u32* counters, const Tile& t, int warp, Sum (&d)[BLOCKS][COLUMNS / 2],
                         Sum (&bias)[BLOCKS][4]) {
  if (threadIdx.x == 0) {
    while (*(const volatile u32*)(counters + t.tile) < t.group) {}
    fence();
  }
  asm volatile("bar.sync 1, %0;" ::"n"(ADDERS) : "memory");
  if (t.group > 0) add_segment<4>(running_sums(partial, t), t, warp, d, bias);
}
TW_DEVICE void give_turn(u32* counters, const Tile& t) {
  __syncthreads();
  if (threadIdx.x > 0) return;
  fence();
  *(volatile u32*)(counters + t.tile) = t.group + 1 < t.groups ? t.group + 1 : 0;
}

TW_DEVICE void add_to(Quad& sum, Quad v) { sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w; }

// Add the groups of the places from `first` to `end` of a tile and write the result. A thread has
// sixteen loads under way (eight, where sums are fp64; twelve, where it waits for them): of PLACES places and as
// many groups as that leaves.
template <int PLACES>
TW_DEVICE void add_places(const Results& out, Sum* partial, const Panel* panels, const Problem& p, const Tile& t,
                          int first, int end, int log_lanes) {
  constexpr int DEEP = (COMBINE == MARKED ? 12 : 64 / sizeof(Sum)) / PLACES;
  const int lanes = 1 << log_lanes, stride = blockDim.x >> log_lanes, turn = threadIdx.x & lanes - 1;
  const Quad* base = partial_of(partial, t, 0);
  for (int begin = first; begin < end; begin += PLACES * stride) {
    const int quad = begin + (threadIdx.x >> log_lanes);
    Quad sum[PLACES] = {};
    for (int g = turn; g < t.groups; g += DEEP * lanes) {
      Quad v[PLACES][DEEP];
      const auto from = [&](int i, int j) {
        return base + (long long)(g + j * lanes) * (QUADS + BIAS_QUADS) + quad + i * stride;
      };
      TW_UNROLL for (int j = 0; j < DEEP; ++j)
        TW_UNROLL for (int i = 0; i < PLACES; ++i)
          v[i][j] = g + j * lanes < t.groups && quad + i * stride < end ? load_quad(from(i, j)) : Quad{};
      for (bool waits = COMBINE == MARKED; waits;) {
        waits = false;
        TW_UNROLL for (int j = 0; j < DEEP; ++j)
          TW_UNROLL for (int i = 0; i < PLACES; ++i)
            if (is_marked(v[i][j])) v[i][j] = load_quad(from(i, j)), waits = true;
      }
      TW_UNROLL for (int j = 0; j < DEEP; ++j)
        TW_UNROLL for (int i = 0; i < PLACES; ++i) add_to(sum[i], v[i][j]);
    }
    for (int distance = lanes / 2; distance > 0; distance /= 2)
      TW_UNROLL for (int i = 0; i < PLACES; ++i) {
        sum[i].x += __shfl_xor_sync(~0u, sum[i].x, distance);
        sum[i].y += __shfl_xor_sync(~0u, sum[i].y, distance);
        sum[i].z += __shfl_xor_sync(~0u, sum[i].z, distance);
        sum[i].w += __shfl_xor_sync(~0u, sum[i].w, distance);
      }
    TW_UNROLL for (int i = 0; i < PLACES; ++i) {
      const int at = quad + i * stride;
      if (at >= end || turn > 0) break;
      store_quad(out, panels, p, t, at, sum[i]);
    }
  }
}

// One segment of a tile, places from `first` to `end`. Where it has fewer places than the block has threads, 2, 4 or 8 neighbouring
// lanes take turns with the groups of a place; the order of adding is fixed.
TW_DEVICE void add_groups(const Results& out, Sum* partial, const Panel* panels, const Problem& p,
                          const Tile& t, int first, int end) {
  int log_lanes = 0;
  while (log_lanes < 3 && 2 << log_lanes <= t.groups && end - first << log_lanes + 1 <= (int)blockDim.x) ++log_lanes;
  const int each = end - first << log_lanes;
  if (each <= (int)blockDim.x) add_places<1>(out, partial, panels, p, t, first, end, log_lanes);
  else if (each <= 2 * (int)blockDim.x) add_places<2>(out, partial, panels, p, t, first, end, log_lanes);
  else add_places<4>(out, partial, panels, p, t, first, end, log_lanes);
}

#if CLUSTER > 1
// With SENT each segment of a tile is sent to its block as soon as a thread holds it, into memory that is
// used for nothing else: the sums of all blocks, one behind the other, and a barrier that counts bytes.
constexpr int SEGMENT_QUADS = (QUADS + CLUSTER - 1) / CLUSTER;
static_assert(!SENT || BIAS_QUADS == 0, "sums of the bias are not sent");

TW_DEVICE int segment_begin(int rank) { return QUADS * rank / CLUSTER; }
TW_DEVICE u32 sent_barrier(const unsigned char* inbox) { return shared_address(inbox) + CLUSTER * SEGMENT_QUADS * 16; }

// By one thread, before the cluster's barrier: the bytes that neighbours will send.
TW_DEVICE void expect_sums(const unsigned char* inbox, int rank) {
  const u32 barrier = sent_barrier(inbox), bytes = (CLUSTER - 1) * (segment_begin(rank + 1) - segment_begin(rank)) * 16;
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
TW_DEVICE void send_sums(unsigned char* inbox, const Tile& t, int warp, const Sum (&d)[BLOCKS][COLUMNS / 2]) {
  cluster_wait();  // until all barriers are there
  TW_UNROLL for (int m = 0; m < BLOCKS; ++m)
    TW_UNROLL for (int j = 0; j < FRAGMENTS; ++j) {
      const int at = ((warp * BLOCKS + m) * FRAGMENTS + j) * 32 + threadIdx.x % 32;
      const int owner = ((at + 1) * CLUSTER - 1) / QUADS, slot = t.rank * SEGMENT_QUADS + at - segment_begin(owner);
      if (owner == t.rank) {
        ((Quad*)inbox)[slot] = Quad{d[m][j * 4], d[m][j * 4 + 1], d[m][j * 4 + 2], d[m][j * 4 + 3]};
      } else {
        asm volatile("{\n.reg .u32 to, bar;\nmapa.shared::cluster.u32 to, %0, %2;\nmapa.shared::cluster.u32 bar, %1, %2;\n"
                     "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [to], {%3, %4, %5, %6}, [bar];\n}"
                     ::"r"(shared_address(inbox) + slot * 16), "r"(sent_barrier(inbox)), "r"(owner), "f"(d[m][j * 4]),
                     "f"(d[m][j * 4 + 1]), "f"(d[m][j * 4 + 2]), "f"(d[m][j * 4 + 3]) : "memory");
      }
    }
}
// As add_cluster, of what was sent. A block that has all of its segment may end: nobody sends it more.
TW_DEVICE void add_sent(const Results& out, Sum* partial, const unsigned char* inbox, const Panel* panels,
                        const Problem& p, const Tile& t) {
  __syncthreads();  // the block's own sums
  asm volatile(
      "{\n.reg .pred open;\nagain:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 open, [%0], 0;\n"
      "@open bra done;\nbra again;\ndone:\n}" ::"r"(sent_barrier(inbox)) : "memory");
  Quad* group = partial_of(partial, t, t.group);
  const int first = segment_begin(t.rank), count = segment_begin(t.rank + 1) - first;
  for (int i = threadIdx.x; i < count; i += THREADS) {
    const Quad* own = (const Quad*)inbox + i;
    Quad v[CLUSTER];
    TW_UNROLL for (int r = 0; r < CLUSTER; ++r) v[r] = own[(t.rank + r) % CLUSTER * SEGMENT_QUADS];
    TW_UNROLL for (int r = 1; r < CLUSTER; ++r) add_to(v[0], v[r]);
    if (t.groups == 1) store_quad(out, panels, p, t, first + i, v[0]);
    else group[first + i] = v[0];
  }
}

TW_DEVICE Quad load_peer(u32 address, int rank) {
  Quad v;
  asm volatile("{\n.reg .u32 a;\nmapa.shared::cluster.u32 a, %4, %5;\nld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [a];\n}"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(address), "r"(rank) : "memory");
  return v;
}

// Add the slices of this block's segment of the tile, which lie in the shared memory of all blocks of
// the cluster: the result if there is no other group, else this group's partial sums. Each segment
// begins with its own block's, so that blocks do not read one neighbour all at once.
TW_DEVICE void add_cluster(const Results& out, Sum* partial, const Quad* sums, const Panel* panels,
                           const Problem& p, const Tile& t) {
  constexpr int TOGETHER = CLUSTER < 8 ? 8 / CLUSTER : 1;
  __syncthreads();  // besides the cluster's barrier, which compute-sanitizer does not know
  cluster_arrive();
  cluster_wait();
  Quad* group = partial_of(partial, t, t.group);
  const u32 own = shared_address(sums);
  const int quads = quads_here(), first = quads * t.rank / CLUSTER, end = quads * (t.rank + 1) / CLUSTER;
  for (int begin = first + threadIdx.x; begin < end; begin += TOGETHER * THREADS) {
    Quad v[TOGETHER][CLUSTER];
    TW_UNROLL for (int i = 0; i < TOGETHER; ++i)
      TW_UNROLL for (int r = 0; r < CLUSTER; ++r)
        if (begin + i * THREADS < end)
          v[i][r] = load_peer(own + (begin + i * THREADS) * 16, (t.rank + r) % CLUSTER);
    TW_UNROLL for (int i = 0; i < TOGETHER; ++i) {
      const int at = begin + i * THREADS;
      if (at >= end) break;
      TW_UNROLL for (int r = 1; r < CLUSTER; ++r) add_to(v[i][0], v[i][r]);
      if (t.groups == 1) store_quad(out, panels, p, t, at, v[i][0]);
      else group[at] = v[i][0];
    }
  }
  cluster_arrive_relaxed();  // what was read has been stored: no load is under way
  cluster_wait();
}
#endif

// By the block's first thread, after all places were marked.
TW_DEVICE void tell_marked(u32* counters, const Tile& t) {
  fence();
  atomicAdd(counters + t.tile, 1);
}

// As add_groups, of the segment that falls to this block where all blocks of a tile add one.
TW_DEVICE void add_own_segment(const Results& out, Sum* partial, const Panel* panels, const Problem& p, const Tile& t) {
  const int quads = quads_here(), segment = t.rank * t.groups + t.group;
  add_groups(out, partial, panels, p, t, p.divided(quads * segment, SLICES), p.divided(quads * (segment + 1), SLICES));
}

// After every thread of the block wrote its partial sums of one segment of a tile, or of all of it. A
// counter is 0 before and after; each segment has its own.
TW_DEVICE void meet_groups(const Results& out, Sum* partial, u32* counters, const Panel* panels,
                           const Problem& p, const Tile& t) {
  if (t.groups == 1 || COMBINE == KERNEL) return;
  if (COMBINE == SERIAL) return give_turn(counters, t);
  u32* counter = counters + t.tile * CLUSTER + t.rank;
  if (COMBINE == MARKED) {  // they met long ago; one thread of those that have nothing to multiply looks
    if (threadIdx.x == THREADS - 32) {
      while (*(volatile u32*)counter < t.groups) {}
      fence();
    }
    __syncthreads();
    add_own_segment(out, partial, panels, p, t);
    if (threadIdx.x == 0 && atomicAdd(counter, 1) == 2 * t.groups - 1) *(volatile u32*)counter = 0;
    return;
  }
  bool last = false;
  __syncthreads();
  if (threadIdx.x == 0) {  // its fences order what the whole block wrote, and will read
    fence();
    if (COMBINE == LAST) {
      last = atomicInc(counter, t.groups - 1) == t.groups - 1;
    } else {
      atomicAdd(counter, 1);
      while (*(volatile u32*)counter < t.groups) {}
    }
    fence();
  }
  if (COMBINE == LAST) {
    const int quads = quads_here();
    if (__syncthreads_or(last))
      add_groups(out, partial, panels, p, t, quads * t.rank / CLUSTER, quads * (t.rank + 1) / CLUSTER);
  } else {  // all blocks run at once, so each could wait for the tile's others; now it adds a segment
    __syncthreads();
    add_own_segment(out, partial, panels, p, t);
    if (threadIdx.x == 0 && atomicAdd(counter, 1) == 2 * t.groups - 1) *(volatile u32*)counter = 0;
  }
}

// Run by all threads of a block, after those that hold sums ran `keep`.
TW_DEVICE void combine(const Results& out, Sum* partial, u32* counters, const unsigned char* staged,
                       const Panel* panels, const Problem& p, const Tile& t) {
#if CLUSTER > 1
  if constexpr (SENT) add_sent(out, partial, staged, panels, p, t);
  else add_cluster(out, partial, (const Quad*)staged, panels, p, t);
#endif
  meet_groups(out, partial, counters, panels, p, t);
}

// Sums are rounded once, after what they are added to.
TW_DEVICE void store_quads(const Results& out, const Panel* panels, const Problem& p, const Tile& t, int warp,
                           const Sum (&d)[BLOCKS][COLUMNS / 2]) {
  int lane = threadIdx.x % 32;
  TW_UNROLL for (int m = 0; m < BLOCKS; ++m)
    TW_UNROLL for (int j = 0; j < FRAGMENTS; ++j) {
      if (j % 4 == 0) asm volatile("" : "+r"(lane));  // addresses are found again, rather than kept in registers
      store_fragment(out, panels, p, t, Fragment(warp, m, j, lane),
                     Quad{d[m][j * 4], d[m][j * 4 + 1], d[m][j * 4 + 2], d[m][j * 4 + 3]});
    }
}

// What a warp does with its sums once the last product is done: the result is written, or partial
// sums, which a cluster keeps in shared memory. `staged` is the shared memory that the operands were
// in, or that to which sums are sent; the block's first ADDERS threads hold sums.
template <int ADDERS>
TW_DEVICE void keep(const Results& out, Sum* partial, const u32* counters, unsigned char* staged, const Panel* panels,
                    const Problem& p, const Tile& t, int warp, Sum (&d)[BLOCKS][COLUMNS / 2], Sum (&bias)[BLOCKS][4]) {
  if (COMBINE == SERIAL && t.groups > 1) {
    take_turn<ADDERS>(partial, counters, t, warp, d, bias);
    if (t.group + 1 < t.groups) return store_sums(running_sums(partial, t), warp, d, bias);
  } else if (CLUSTER == 1 && t.groups > 1) return store_sums(partial_of(partial, t, t.group), warp, d, bias);
#if SENT
  return send_sums(staged, t, warp, d);
#endif
  asm volatile("bar.sync 1, %0;" ::"n"(ADDERS) : "memory");  // nobody reads operands any more
  if (CLUSTER > 1) return store_sums((Quad*)staged, warp, d, bias);
  each_bias(warp, bias, [&](int row, Sum sum, Sum rest) { store_bias(out.bias, p, t.row + row, sum, rest); });
  if constexpr (ADDS || sizeof(Out) >= 4) return store_quads(out, panels, p, t, warp, d);
  gather(staged, warp, d);
  asm volatile("bar.sync 1, %0;" ::"n"(ADDERS) : "memory");
  store_gathered<ADDERS>(out.weight, staged, panels, p, t);
}

// The kernel that adds all groups where COMBINE is KERNEL: blockIdx.z is the segment of a tile. In fp64 it needs more than
// the 64 registers that ptxas gives it for sm_80 unless it is told that one block is enough.
extern "C" __global__ void __launch_bounds__(ADD_THREADS, sizeof(Sum) == 8) add_all_slices(Out* weight, Out* bias, Sum* partial, Problem p) {
  __shared__ Panel panels[TILE_PANELS];
  const Tile t(p, blockIdx.x, 0, 0);
  find_panels(panels, p, t);
  __syncthreads();
  await_previous();
  const int quads = quads_here(), segments = gridDim.z, segment = blockIdx.z;
  add_groups({weight, bias}, partial, panels, p, t, quads * segment / segments, quads * (segment + 1) / segments);
}
