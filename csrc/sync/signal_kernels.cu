// Kernels with which ranks signal each other on their devices: barriers (barrier.h), the epoch lock
// (epoch_lock.h) and the parts of host exchanges (signals.h). lightning_zero/native/build.py compiles this
// file at run time for RANKS ranks, without CUDA's headers, which need not be installed.
//
// Each rank has a signal pad, to which its peers write: number `peer` is the progress of that peer. Numbers
// only increase, so plain stores and loads suffice, which also cross links without atomics. Numbers have 32
// bits, so code compares their differences.
//
// `host` is pinned host memory, laid out as in signal_pads.h. host[0] is not 0 once all waits must end.

constexpr int CHANNELS = 2;  // device_words::BARRIERS

struct SignalPads {
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

// Write `number` to this rank's slot of every pad, after all writes before.
__device__ void signal_all(SignalPads pads, int rank, unsigned number) {
  __threadfence_system();
  for (int peer = threadIdx.x; peer < RANKS; peer += blockDim.x) put(pads.of[peer] + rank, number);
}

// Wait until all peers have reached `number`, or host[0] is not 0. All threads call this.
__device__ void wait_for_all(const unsigned* pad, unsigned number, const unsigned* host) {
  for (int peer = threadIdx.x; peer < RANKS; peer += blockDim.x) {
    // Host memory is a microsecond away, so it is read rarely.
    for (unsigned tries = 1; static_cast<int>(get(pad + peer) - number) < 0; ++tries) {
      if (tries % 512 == 0 && get(host) != 0)
        break;
    }
  }
  __syncthreads();
  __threadfence_system();
}

// ---- barriers

// Begin a training step on all CHANNELS: count barriers from `first`, and release peers that wait for less.
extern "C" __global__ void __launch_bounds__(32)
    begin_barrier_step(SignalPads pads, int rank, unsigned* counts, unsigned first) {
  if (threadIdx.x < CHANNELS)
    counts[threadIdx.x] = first;
  for (int at = threadIdx.x; at < RANKS * CHANNELS; at += blockDim.x)
    put(pads.of[at % RANKS] + (at / RANKS) * RANKS + rank, first);
}

// `count` is in device memory, so that a CUDA graph which contains this kernel counts one more per replay.
extern "C" __global__ void __launch_bounds__(32)
    rank_barrier(SignalPads pads, int rank, unsigned* count, unsigned* host, int arrived, int passed) {
  __shared__ unsigned number;
  if (threadIdx.x == 0) {
    number = *count + 1;
    *count = number;
    put(host + arrived, number);
  }
  __syncthreads();
  signal_all(pads, rank, number);
  wait_for_all(pads.of[rank], number, host);
  if (threadIdx.x == 0)
    put(host + passed, number);
}

// ---- the epoch lock

// `host` receives the epoch that this device has reached, and the last one for which it need not wait.
extern "C" __global__ void __launch_bounds__(32)
    announce_epoch(SignalPads pads, int rank, unsigned number, unsigned* host, int arrived, int passed) {
  signal_all(pads, rank, number);
  if (threadIdx.x == 0) {
    put(host + arrived, number);
    put(host + passed, number);
  }
}

extern "C" __global__ void __launch_bounds__(32)
    wait_for_epoch(SignalPads pads, int rank, unsigned number, unsigned* host, int arrived, int passed) {
  if (threadIdx.x == 0)
    put(host + passed, number - 1);
  wait_for_all(pads.of[rank], number, host);
  if (threadIdx.x == 0)
    put(host + passed, number);
}

// ---- parts of a host exchange

// Record for the watchdog that this device sends its parts up to `number` next.
extern "C" __global__ void announce_send(unsigned* host, int sent, unsigned number) {
  put(host + sent, number);
}

extern "C" __global__ void __launch_bounds__(32)
    announce_parts(SignalPads pads, int rank, unsigned number, unsigned* host, int received) {
  signal_all(pads, rank, number);
  if (threadIdx.x == 0)
    put(host + received, number);
}

// `first` is the number of parts in all earlier exchanges. It is in device memory, because a graph with this
// kernel is replayed for other exchanges than that of its capture.
extern "C" __global__ void __launch_bounds__(32)
    wait_for_parts(SignalPads pads, int rank, const unsigned* first, unsigned parts, unsigned* host, int requested,
                   int completed) {
  const unsigned number = *first + parts;
  if (threadIdx.x == 0)
    put(host + requested, number);
  wait_for_all(pads.of[rank], number, host);
  if (threadIdx.x == 0)
    put(host + completed, number);
}
