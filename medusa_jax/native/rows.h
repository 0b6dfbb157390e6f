// What is done to each row by itself: the norm, its mean square in one order, and rotation.

#pragma once

#include "vectors.h"

namespace {

// Rows that are not worth waking another thread for.
constexpr int64_t kFewRows = 32;

inline void NormRow(const float* x, const float* scale, int64_t size, float eps, float* y) {
  Vector squares = {};
  const int64_t whole = size / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) squares += Load(x + i) * Load(x + i);
  float sum = Sum(squares);
  for (int64_t i = whole; i < size; ++i) sum += x[i] * x[i];
  const float factor = 1.0f / std::sqrt(sum / float(size) + eps);
  for (int64_t i = 0; i < size; ++i) y[i] = scale[i] * (x[i] * factor);
}

// Rotary position embedding of one head: plane i pairs components i and i + size / 2.
inline void RotateHead(const float* x, const float* cos, const float* sin, int64_t size, float* y) {
  const int64_t half = size / 2;
  for (int64_t i = 0; i < half; ++i) {
    y[i] = x[i] * cos[i] - x[i + half] * sin[i];
    y[i + half] = x[i + half] * cos[i + half] + x[i] * sin[i + half];
  }
}

}  // namespace
