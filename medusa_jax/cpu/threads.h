// Work for XLA's threads and the calling thread.

#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>

#include "call.h"

namespace {

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

// The unit that the `taken`-th request gets, of n: workers that take turns get neighbouring units each, and so read
// memory sequentially. Of 7 units two workers get 0 4 1 5 2 6 3: one the first half, one the second.
inline int64_t Neighbour(int64_t taken, int64_t n, int64_t workers) {
  const int64_t worker = taken % workers;
  return worker * (n / workers) + std::min(worker, n % workers) + taken / workers;
}

// Bytes that a waiting worker fetches of its next unit's weights: memory would be idle.
constexpr int64_t kWaiting = 1 << 16;

// Runs `work(s, i)` for every i < sizes[s] of every stage s. A stage begins when the stages before it are done.
// `weights(s, i)`: where those of a unit begin, or null.
//
// No thread waits for another to begin: a running thread takes the next unit, and a late helper joins at the
// current unit or finds none left. Units are taken in the order of their stages, so a unit waits only for units
// that threads are already working on. This cannot deadlock, however busy the pool is, and threads stay awake
// between stages.
template <size_t kStages, typename Work, typename Weights>
void ShareStages(const ThreadPool& pool, const std::array<int64_t, kStages>& sizes, const Work& work,
                 const Weights& weights) {
  std::array<int64_t, kStages> ends;
  int64_t n = 0, widest = 0;
  for (size_t s = 0; s < kStages; ++s) {
    ends[s] = n += sizes[s];
    widest = std::max(widest, sizes[s]);
  }
  struct Counts {  // a cache line each: taking a unit must not slow down waiting threads
    alignas(64) std::atomic<int64_t> next{0};
    alignas(64) std::atomic<int64_t> done{0};
  };
  const int64_t workers = std::max<int64_t>(1, std::min(pool.num_threads(), widest));
  auto counts = std::make_shared<Counts>();
  auto take = [=] {
    size_t stage = 0;
    for (int64_t i; (i = counts->next.fetch_add(1)) < n;) {
      while (i >= ends[stage]) ++stage;
      const int64_t before = stage ? ends[stage - 1] : 0, size = ends[stage] - before;
      const int64_t unit = Neighbour(i - before, size, workers);
      const char* next = static_cast<const char*>(weights(stage, unit));
      for (int64_t tries = 0; counts->done.load(std::memory_order_acquire) < before; ++tries)
        next && tries < kWaiting / 64 ? __builtin_prefetch(next + tries * 64, 0, 2) : Wait(tries);
      work(stage, unit);
      counts->done.fetch_add(1, std::memory_order_acq_rel);
    }
  };
  for (int64_t t = 1; t < workers; ++t) pool.Schedule([take] { take(); });
  take();
  for (int64_t tries = 0; counts->done.load(std::memory_order_acquire) < n; ++tries) Wait(tries);
}

// `work(i)` for every i < n.
template <typename Work>
void Share(const ThreadPool& pool, int64_t n, const Work& work) {
  ShareStages<1>(pool, {n}, [work](size_t, int64_t i) { work(i); }, [](size_t, int64_t) { return nullptr; });
}

}  // namespace
