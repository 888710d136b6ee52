// What is sorted: an index's place and its position; and what blocks that sort or sum have.

#ifndef THREADS
#define THREADS 256
#endif

extern __shared__ __align__(16) u32 shared[];

struct alignas(8) Entry { u32 place, position; };

