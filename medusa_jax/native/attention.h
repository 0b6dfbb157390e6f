// Attention of few tokens over a cached text, each in the order of its own positions.

#pragma once

#include <vector>

#include "vectors.h"

namespace {

// Keys or values of one text by position, those of the new tokens along a path through the tree: the first
// `start` slots of its cache, then the slots of that path after them.
struct Text {
  const float* cached;
  const int32_t* path;
  int64_t start, size;
  const float* operator[](int64_t p) const {
    return cached + (p < start ? p : start + path[p - start]) * size;
  }
};

// The path to each of T new tokens, itself included, and how long it is: [T, T + 1], the length last, from
// mask [T, T], where [t, s] says whether s is on the path to t.
inline std::vector<int32_t> Paths(const bool* mask, int64_t T) {
  std::vector<int32_t> paths(T * (T + 1));
  for (int64_t t = 0; t < T; ++t) {
    int32_t *path = paths.data() + t * (T + 1), &length = path[T];
    for (int64_t s = 0; s < T; ++s)
      if (mask[t * T + s]) path[length++] = int32_t(s);
  }
  return paths;
}

// Attention of one query over positions [first, count), in their order. `scores` has room for `count`
// rounded up to whole vectors.
template <int kVectors>
void AttendOne(const float* query, Text keys, Text values, int64_t first, int64_t count, float scale,
               float* scores, float* out) {
  Vector q[kVectors];
  for (int v = 0; v < kVectors; ++v) q[v] = Load(query + v * kLanes) * scale;
  float top = -INFINITY;
  for (int64_t p = first; p < count; ++p) {
    const float* key = keys[p];
    Vector sum = {};
    for (int v = 0; v < kVectors; ++v) sum += q[v] * Load(key + v * kLanes);
    scores[p] = Sum(sum);
    top = std::max(top, scores[p]);
  }
  // Lane l adds up positions l, l + kLanes, ...: what is not seen adds zero, wherever the text ends.
  const int64_t begin = first / kLanes * kLanes, end = (count + kLanes - 1) / kLanes * kLanes;
  std::fill(scores + begin, scores + first, -INFINITY);
  std::fill(scores + count, scores + end, -INFINITY);
  Vector total = {};
  for (int64_t p = begin; p < end; p += kLanes) {
    const Vector weight = Exp(Load(scores + p) - top);
    total += weight;
    Store(scores + p, weight);
  }
  Vector sum[kVectors] = {};
  for (int64_t p = first; p < count; ++p) {
    const float* value = values[p];
    for (int v = 0; v < kVectors; ++v) sum[v] += Load(value + v * kLanes) * scores[p];
  }
  const float whole = Sum(total);
  for (int v = 0; v < kVectors; ++v) Store(out + v * kLanes, sum[v] / whole);
}

using AttendFn = decltype(&AttendOne<1>);

// The instance for heads of this size, or null: whole vectors, as many as the usual sizes need.
AttendFn AttendFor(int64_t size) {
  if (size % kLanes) return nullptr;
  switch (size / kLanes) {
    case 1: return AttendOne<1>;
    case 2: return AttendOne<2>;
    case 4: return AttendOne<4>;
    case 5: return AttendOne<5>;
    case 6: return AttendOne<6>;
    case 8: return AttendOne<8>;
    case 10: return AttendOne<10>;
    case 12: return AttendOne<12>;
    case 16: return AttendOne<16>;
    case 32: return AttendOne<32>;
    default: return nullptr;
  }
}

}  // namespace
