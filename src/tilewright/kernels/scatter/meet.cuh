// A barrier of the whole grid, in two steps. All blocks run at once (a cooperative launch), and the
// counter is zero before the launch and after it.

// From all threads of a block: what they wrote before is seen by whoever has waited for it.
TW_DEVICE void arrive_all(u32* counter) {
  __syncthreads();
  if (threadIdx.x > 0) return;
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
  atomicAdd(counter, 1u);
}
// Until every block has arrived.
TW_DEVICE void await_all(u32* counter) {
  if (threadIdx.x == 0) {
    while (*(volatile u32*)counter < gridDim.x) {}
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
    if (atomicAdd(counter, 1u) == 2 * gridDim.x - 1) *(volatile u32*)counter = 0;
  }
  __syncthreads();
}
