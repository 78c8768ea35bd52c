// A barrier of all ranks on their devices. Compiled at run time, for RANKS ranks and LANES lanes, by
// lightning_zero/native/build.py; launched by barrier.cpp. Without CUDA's headers, which need not be
// installed.
//
// Who is far behind is let through by whoever is ahead. Barriers are counted in memory of the device, so that
// a CUDA graph that holds this kernel counts one more at each replay.

#include "rows.cuh"

// A rank begins an epoch, on LANES lanes at once: it counts on from `first`, and whoever waits for less than
// that is let through.
extern "C" __global__ void __launch_bounds__(32)
    begin_epoch(Rows rows, int rank, unsigned* counts, unsigned first) {
  if (threadIdx.x < LANES)
    counts[threadIdx.x] = first;
  for (int at = threadIdx.x; at < RANKS * LANES; at += blockDim.x)
    put(rows.of[at % RANKS] + (at / RANKS) * RANKS + rank, first);
}

// `host`: memory of the host. [0]: not 0 once nobody must wait any more; [arrived], [passed]: how far this
// device is.
extern "C" __global__ void __launch_bounds__(32)
    rank_barrier(Rows rows, int rank, unsigned* count, unsigned* host, int arrived, int passed) {
  __shared__ unsigned number;
  if (threadIdx.x == 0) {
    number = *count + 1;
    *count = number;
    put(host + arrived, number);
  }
  __syncthreads();
  __threadfence_system();
  for (int peer = threadIdx.x; peer < RANKS; peer += blockDim.x) put(rows.of[peer] + rank, number);
  wait_for_all(rows.of[rank], number, host);
  if (threadIdx.x == 0)
    put(host + passed, number);
}
