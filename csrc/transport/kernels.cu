// Kernels of the transports: means over the rows of a matrix, read once at the speed of memory (row_means.h),
// and an emulated network between hosts. lightning_zero/native/build.py compiles this file at run time, for
// ROWS rows, without CUDA's headers, which need not be installed.

#ifndef ROWS
#define ROWS 1  // only the kernels of the emulated link are needed
#endif

struct alignas(16) Pack {
  unsigned word[4];
};

struct Half {
  unsigned short bits;
  static __device__ float widen(unsigned short bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
  }
};

struct BFloat16 {
  unsigned short bits;
  static __device__ float widen(unsigned short bits) { return __uint_as_float(unsigned{bits} << 16); }
  // Round to nearest, ties to even, as torch does.
  static __device__ unsigned short narrow(float value) {
    const unsigned bits = __float_as_uint(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u)
      return 0x7fc0;
    return static_cast<unsigned short>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
  }
};

// Layout of values in a 32-bit word.
template <typename T>
struct Wire {
  static constexpr int PER_WORD = 2;
  static __device__ float read(unsigned word, int part) {
    return T::widen(static_cast<unsigned short>(word >> (16 * part)));
  }
};

template <>
struct Wire<float> {
  static constexpr int PER_WORD = 1;
  static __device__ float read(unsigned word, int) { return __uint_as_float(word); }
};

template <typename T>
__device__ float read_one(const T* at) {
  if constexpr (Wire<T>::PER_WORD == 1)
    return *at;
  else
    return T::widen(at->bits);
}

// Output types: float, or bfloat16, for rows of the same number of bytes.
struct ToFloat {
  using Element = float;
  static constexpr int PER_PACK = 4;
  static __device__ float read(const Pack& pack, int i) { return __uint_as_float(pack.word[i]); }
  static __device__ void write(Pack& pack, int i, float value) { pack.word[i] = __float_as_uint(value); }
  static __device__ float read_one(const float* at) { return *at; }
  static __device__ void write_one(float* at, float value) { *at = value; }
};

struct ToBFloat16 {
  using Element = BFloat16;
  static constexpr int PER_PACK = 8;
  static __device__ float read(const Pack& pack, int i) {
    return Wire<BFloat16>::read(pack.word[i / 2], i % 2);
  }
  static __device__ void write(Pack& pack, int i, float value) {
    const unsigned bits = BFloat16::narrow(value);
    pack.word[i / 2] = i % 2 ? (pack.word[i / 2] & 0xffffu) | (bits << 16) : bits;
  }
  static __device__ float read_one(const BFloat16* at) { return BFloat16::widen(at->bits); }
  static __device__ void write_one(BFloat16* at, float value) { at->bits = BFloat16::narrow(value); }
};

// Write the mean over r of from[r * stride + i] to to[i], or add it, for i < n. The first `packs` * 16 bytes of
// each row are read 16 bytes at a time, so all rows and `to` must be aligned to 16 bytes.
template <typename T, typename To>
__device__ void mean(typename To::Element* to, const T* from, long long stride, long long n, long long packs,
                     int add) {
  constexpr int PER_WORD = Wire<T>::PER_WORD, PER_PACK = 4 * PER_WORD;
  const float factor = 1.0f / ROWS;
  const long long step = static_cast<long long>(gridDim.x) * blockDim.x;
  const long long first = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (long long pack = first; pack < packs; pack += step) {
    const long long begin = pack * PER_PACK;
    Pack rows[ROWS];
#pragma unroll
    for (int row = 0; row < ROWS; ++row)
      rows[row] = *reinterpret_cast<const Pack*>(from + row * stride + begin);
    float sum[PER_PACK];
#pragma unroll
    for (int i = 0; i < PER_PACK; ++i) {
      sum[i] = 0.0f;
#pragma unroll
      for (int row = 0; row < ROWS; ++row)
        sum[i] += Wire<T>::read(rows[row].word[i / PER_WORD], i % PER_WORD);
      sum[i] *= factor;
    }
#pragma unroll
    for (int part = 0; part < PER_PACK / To::PER_PACK; ++part) {
      auto* out = reinterpret_cast<Pack*>(to + begin + To::PER_PACK * part);
      Pack old = {};
      if (add)
        old = *out;
      Pack result = {};
#pragma unroll
      for (int i = 0; i < To::PER_PACK; ++i)
        To::write(result, i, sum[To::PER_PACK * part + i] + To::read(old, i));
      *out = result;
    }
  }
  for (long long i = packs * PER_PACK + first; i < n; i += step) {
    float sum = 0.0f;
    for (int row = 0; row < ROWS; ++row) sum += read_one(from + row * stride + i);
    To::write_one(to + i, sum * factor + (add ? To::read_one(to + i) : 0.0f));
  }
}

#define MEAN(name, T, To)                                                                             \
  extern "C" __global__ void __launch_bounds__(256)                                                   \
      name(To::Element* to, const T* from, long long stride, long long n, long long packs, int add) { \
    mean<T, To>(to, from, stride, n, packs, add);                                                     \
  }

MEAN(mean_of_float, float, ToFloat)
MEAN(mean_of_half, Half, ToFloat)
MEAN(mean_of_bfloat16, BFloat16, ToFloat)
MEAN(mean_of_bfloat16_in_bfloat16, BFloat16, ToBFloat16)

// ---- emulated network between hosts, see EmulatedLink in communicator.h

__device__ unsigned long long nanoseconds() {
  unsigned long long now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

// Reserve the link for `duration` from when it is free. `end` receives the time when it is free again.
extern "C" __global__ void reserve_link(unsigned long long* free_at, unsigned long long duration,
                                        unsigned long long* end) {
  unsigned long long seen = *free_at;
  for (;;) {
    const unsigned long long now = nanoseconds();
    *end = (seen > now ? seen : now) + duration;
    const unsigned long long before = atomicCAS(free_at, seen, *end);
    if (before == seen)
      return;
    seen = before;
  }
}

extern "C" __global__ void hold_stream(const unsigned long long* end) {
  while (nanoseconds() < *end) __nanosleep(500);
}
