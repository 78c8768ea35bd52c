// Ranks take turns on their devices to read and to write each other's shards; see turns.h. Compiled at run
// time, for RANKS ranks, by lightning_zero/native/build.py; launched by device_turns.cpp. Without headers of
// CUDA's, as barrier.cu. Numbers are the lower 32 bits of a rank's turns.

#include "rows.cuh"

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
  wait_for_all(rows.of[rank], number, host);
  if (threadIdx.x == 0)
    put(host + passed, number);
}
