// Attention of few tokens over a cached text, each in the order of its own positions.

#pragma once

#include "vectors.h"

namespace {

// exp(x) for x <= 0 to 2 units in the last place: 2^n exp(r) with x = n ln 2 + r, |r| <= ln 2 / 2, and the
// series of exp(r) to r^7 / 5040. Zero below -87, where float32 ends.
inline Vector Exp(Vector x) {
  const Vector zero = {};
  const Vector least = zero - 87.0f;
  const auto nothing = x < least;
  x = nothing ? least : x;
  // Adding 1.5 x 2^23 rounds to a whole number, which is then in the lower bits.
  const float kRound = 12582912.0f;
  const Vector shifted = x * 1.44269504088896341f + kRound;
  const Vector n = shifted - kRound;
  const Vector r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  Vector y = zero + 1.0f / 5040;
  for (const float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
    y = y * r + c;
  Ints power;
  std::memcpy(&power, &shifted, sizeof power);
  power = (power << 23) + (127 << 23);
  Vector scale;
  std::memcpy(&scale, &power, sizeof scale);
  return nothing ? zero : y * scale;
}

// Keys or values of one text by position: those before `start` in a cache, the rest (a path through the
// tree) among the new tokens.
struct Rows {
  const float* cached;
  const float* own;
  const int32_t* path;
  int64_t start, size;
  const float* operator[](int64_t p) const {
    return p < start ? cached + p * size : own + path[p - start] * size;
  }
};

// Attention of one query over positions [first, count), in their order. `scores` has room for `count`
// rounded up to whole vectors.
template <int kVectors>
void AttendOne(const float* query, Rows keys, Rows values, int64_t first, int64_t count, float scale,
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
