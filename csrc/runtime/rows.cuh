// What kernels by which ranks wait for each other have in common: barrier.cu, turns.cu. Compiled for RANKS
// ranks.
//
// Each rank has a row of numbers that its peers write: number `peer` tells how far that peer has come.
// Numbers only grow, so plain stores and loads are enough, which also cross links that have no atomics. They
// are 32 bits wide, so differences tell who is ahead.

struct Rows {
  unsigned* of[RANKS];
};

__device__ void put(unsigned* at, unsigned value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}

__device__ unsigned get(const unsigned* at) {
  unsigned value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}

// Waits until all peers have come to `number`, or host[0] is not 0: nobody must wait any more. By all
// threads.
__device__ void wait_for_all(const unsigned* row, unsigned number, const unsigned* host) {
  for (int peer = threadIdx.x; peer < RANKS; peer += blockDim.x) {
    // The host is asked rarely: its memory is a microsecond away.
    for (unsigned tries = 1; static_cast<int>(get(row + peer) - number) < 0; ++tries) {
      if (tries % 512 == 0 && get(host) != 0)
        break;
    }
  }
  __syncthreads();
  __threadfence_system();
}
