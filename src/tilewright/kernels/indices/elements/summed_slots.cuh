// Slots of which each has a sum modulo 2^64, in two halves.

TW_DEVICE u64 of_warp(u64 integer) { return sum_of_warp(integer); }
TW_DEVICE void put_to(u32* words, u32 slot, u64 integer) { add_shared(&words[slot], &words[SLOTS + slot], integer); }
TW_DEVICE void put_to(u64* common, u64 integer) { atomicAdd(common, integer); }
TW_DEVICE u64 whole_at(const u32* words, u32 s) { return (u64)words[SLOTS + s] << 32 | words[s]; }
TW_DEVICE void set_whole(u32* words, u32 s, u64 whole) { words[s] = (u32)whole, words[SLOTS + s] = (u32)(whole >> 32); }
