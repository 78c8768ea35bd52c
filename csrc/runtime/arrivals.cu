// Ranks of a host tell each other's devices how much of what hosts exchange has come; see arrivals.h. Compiled at
// run time, for RANKS ranks, by lightning_zero/native/nvrtc.py; launched by arrivals.cpp. Without headers of CUDA's,
// as barrier.cu.

#include "rows.cuh"

extern "C" __global__ void __launch_bounds__(32) announce_parts(Rows rows, int rank, unsigned number) {
  __threadfence_system();
  for (int peer = threadIdx.x; peer < RANKS; peer += blockDim.x) put(rows.of[peer] + rank, number);
}

// `first`: how many parts all exchanges before had, in memory of the device: the graph that holds this is replayed for
// other exchanges than that of its capture. `host`: memory of the host; [0]: not 0 once nobody must wait any more.
extern "C" __global__ void __launch_bounds__(32)
    wait_for_parts(Rows rows, int rank, const unsigned* first, unsigned parts, const unsigned* host) {
  wait_for_all(rows.of[rank], *first + parts, host);
}
