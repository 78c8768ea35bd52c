// The network between hosts, emulated; see slow_link.h. Compiled at run time by
// lightning_zero/native/build.py.

__device__ unsigned long long nanoseconds() {
  unsigned long long now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

// The link is taken for so long, from when it is free; `end`: until when.
extern "C" __global__ void take(unsigned long long* free_at, unsigned long long takes,
                                unsigned long long* end) {
  unsigned long long seen = *free_at;
  for (;;) {
    const unsigned long long now = nanoseconds();
    *end = (seen > now ? seen : now) + takes;
    const unsigned long long before = atomicCAS(free_at, seen, *end);
    if (before == seen)
      return;
    seen = before;
  }
}

extern "C" __global__ void hold(const unsigned long long* end) {
  while (nanoseconds() < *end) __nanosleep(500);
}
