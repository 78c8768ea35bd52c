// Ranks of a host tell each other's devices how much of what hosts exchange has come; see arrivals.h.
// Compiled at run time, for RANKS ranks, by lightning_zero/native/build.py; launched by arrivals.cpp. Without
// headers of CUDA's, as barrier.cu. `host`: memory of the host, of whose words [0] is not 0 once nobody must
// wait any more; the others are for the watchdog, see device_words.h.

#include "rows.cuh"

// This device sends its own of the parts up to `number` next.
extern "C" __global__ void tell_sending(unsigned* host, int sent, unsigned number) {
  put(host + sent, number);
}

extern "C" __global__ void __launch_bounds__(32)
    announce_parts(Rows rows, int rank, unsigned number, unsigned* host, int come) {
  __threadfence_system();
  for (int peer = threadIdx.x; peer < RANKS; peer += blockDim.x) put(rows.of[peer] + rank, number);
  if (threadIdx.x == 0)
    put(host + come, number);
}

// `first`: how many parts all exchanges before had, in memory of the device: the graph that holds this is
// replayed for other exchanges than that of its capture.
extern "C" __global__ void __launch_bounds__(32)
    wait_for_parts(Rows rows, int rank, const unsigned* first, unsigned parts, unsigned* host, int wanted,
                   int got) {
  const unsigned number = *first + parts;
  if (threadIdx.x == 0)
    put(host + wanted, number);
  wait_for_all(rows.of[rank], number, host);
  if (threadIdx.x == 0)
    put(host + got, number);
}
