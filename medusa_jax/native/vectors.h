// Vectors as wide as the machine's registers, and work shared out to XLA's threads.
//
// Compiled on the machine it runs on (native/library.py), so the width is the compiler's to tell; vector
// extensions of GCC and Clang keep one source for AVX2, AVX-512 and NEON.

#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16, kRows = 12;  // 32 registers: 24 sums, 2 of weights, the rest to work with
#elif defined(__AVX__)
constexpr int kLanes = 8, kRows = 6;  // 16 registers: 12 sums
#elif defined(__aarch64__)
constexpr int kLanes = 4, kRows = 12;  // 32 registers
#else
constexpr int kLanes = 4, kRows = 6;
#endif
typedef float Vector __attribute__((vector_size(kLanes * 4)));
typedef float Unaligned __attribute__((vector_size(kLanes * 4), aligned(4)));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));
typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));
typedef uint32_t UnalignedWords __attribute__((vector_size(kLanes * 4), aligned(4)));

inline Vector Load(const float* at) { return *reinterpret_cast<const Unaligned*>(at); }
inline Words LoadWords(const uint32_t* at) { return *reinterpret_cast<const UnalignedWords*>(at); }
inline void Store(float* at, Vector x) { *reinterpret_cast<Unaligned*>(at) = x; }

// The sum of all lanes, halves first.
inline float Sum(Vector x) {
  float lanes[kLanes];
  std::memcpy(lanes, &x, sizeof lanes);
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return lanes[0];
}

inline void Wait(int64_t tries) {
  if (tries > 2000) {
    std::this_thread::yield();
    return;
  }
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// `work(i)` for every i < n, on XLA's own threads and this one; returns when all are done.
//
// Nobody waits for a thread to begin: whoever is there takes the next index, and a helper that comes
// late finds none. So it cannot lock up, whatever else the threads are busy with.
template <typename Work>
void Share(ffi::ThreadPool& pool, int64_t n, const Work& work) {
  struct Counts {
    std::atomic<int64_t> next{0}, done{0};
  };
  const int64_t helpers = std::min<int64_t>(pool.num_threads(), n) - 1;
  if (helpers <= 0) {
    for (int64_t i = 0; i < n; ++i) work(i);
    return;
  }
  auto counts = std::make_shared<Counts>();
  auto take = [counts, n, work] {
    for (int64_t i; (i = counts->next.fetch_add(1)) < n;) {
      work(i);
      counts->done.fetch_add(1, std::memory_order_release);
    }
  };
  for (int64_t t = 0; t < helpers; ++t) pool.Schedule([take] { take(); });
  take();
  for (int64_t tries = 0; counts->done.load(std::memory_order_acquire) < n; ++tries) Wait(tries);
}

}  // namespace
