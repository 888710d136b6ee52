// Barriers of the whole grid, in two steps each. All blocks run at once (a cooperative launch), and the
// counter, of all barriers of a launch, is zero before the launch and after it.

// From all threads of a block: what they wrote before is seen by whoever has waited for it.
TW_DEVICE void arrive_all(u32* counter) {
  __syncthreads();
  if (threadIdx.x > 0) return;
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
  atomicAdd(counter, 1u);
}
// Until every block has arrived at barrier `turn`, the first of which is 1, of as many as there are.
TW_DEVICE void await_all(u32* counter, u32 turn = 1, u32 turns = 1) {
  if (threadIdx.x == 0) {
    while (*(volatile u32*)counter < turn * gridDim.x) {}
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
    if (turn == turns && atomicAdd(counter, 1u) == (turns + 1) * gridDim.x - 1) *(volatile u32*)counter = 0;
  }
  __syncthreads();
}
