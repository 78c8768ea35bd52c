// Ranks take turns on their devices to read and to write each other's shards; see turns.h. Compiled at run
// time, for RANKS ranks, by lightning_zero/native/nvrtc.py; launched by device_turns.cpp. Without headers, as
// barrier.cu.
//
// Each rank has a row of numbers that its peers write: number `peer` tells which turn that peer has come to.
// They are the lower 32 bits of numbers that only grow, so differences tell who is ahead.

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

// `host`: memory of the host. [0]: not 0 once nobody must wait any more; [arrived], [passed]: the turn that
// this device has come to, and the last one for which it need not wait any more.
extern "C" __global__ void __launch_bounds__(32)
    announce(Rows rows, int rank, unsigned number, unsigned* host, int arrived, int passed) {
  __threadfence_system();
  for (int peer = threadIdx.x; peer < RANKS; peer += blockDim.x) put(rows.of[peer] + rank, number);
  if (threadIdx.x == 0) {
    put(host + arrived, number);
    put(host + passed, number);
  }
}

extern "C" __global__ void __launch_bounds__(32)
    wait_for(Rows rows, int rank, unsigned number, unsigned* host, int arrived, int passed) {
  if (threadIdx.x == 0)
    put(host + passed, number - 1);
  for (int peer = threadIdx.x; peer < RANKS; peer += blockDim.x) {
    // The host is asked rarely: its memory is a microsecond away.
    for (unsigned tries = 1; static_cast<int>(get(rows.of[rank] + peer) - number) < 0; ++tries) {
      if (tries % 512 == 0 && get(host) != 0)
        break;
    }
  }
  __syncthreads();
  __threadfence_system();
  if (threadIdx.x == 0)
    put(host + passed, number);
}
