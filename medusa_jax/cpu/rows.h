// Operations on single rows: the norm, with its mean square in one order, rotation, an MLP's gate, the largest entry.

#pragma once

#include "vectors.h"

namespace {

// Rows that one thread takes at a time: fewer are not worth waking another one.
constexpr int64_t kFewRows = 32;

inline void NormRow(const float* x, const float* scale, int64_t size, float eps, float* y) {
  Vector squares = {};
  const int64_t whole = size / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) squares = MulAdd(Load(x + i), Load(x + i), squares);
  float sum = Sum(squares);
  for (int64_t i = whole; i < size; ++i) sum += x[i] * x[i];
  const float factor = 1.0f / std::sqrt(sum / float(size) + eps);
  for (int64_t i = 0; i < whole; i += kLanes) Store(y + i, Load(scale + i) * (Load(x + i) * factor));
  for (int64_t i = whole; i < size; ++i) y[i] = scale[i] * (x[i] * factor);
}

// Rotary position embedding of one head: plane i pairs components i and i + size / 2.
inline void RotateHead(const float* x, const float* cos, const float* sin, int64_t size, float* y) {
  const int64_t half = size / 2, whole = half / kLanes * kLanes;
  const auto turn = [&](int64_t i, auto load, auto store) {
    const auto first = load(x + i), second = load(x + i + half);
    store(y + i, first * load(cos + i) - second * load(sin + i));
    store(y + i + half, second * load(cos + i + half) + first * load(sin + i + half));
  };
  for (int64_t i = 0; i < whole; i += kLanes) turn(i, Load, Store);
  for (int64_t i = whole; i < half; ++i) turn(i, [](const float* p) { return *p; }, [](float* p, float v) { *p = v; });
}

// Activations of an MLP, as `layer.py` numbers them.
enum Activation : int64_t { kSilu, kGelu, kRelu2 };

// x / (1 + exp(-z)) with z = x (silu), or with twice the argument of tanh (the approximation of GELU); or relu(x)^2.
inline Vector Activate(Vector x, Activation kind) {
  if (kind == kRelu2) {
    const Vector positive = x > 0 ? x : Vector{};
    return positive * positive;
  }
  const Vector z = kind == kGelu ? x * (1.5957691216f + 0.07135481283f * x * x) : x;
  const Vector one = Vector{} + 1.0f, power = Exp(z < 0 ? z : -z);  // exp(-|z|) does not overflow
  return x * ((z < 0 ? power : one) / (one + power));
}

// activation(gate) * up; without the factor if up is null.
inline void GateRow(const float* gate, const float* up, int64_t size, Activation kind, float* y) {
  const auto gated = [&](Vector g, Vector u) { return up ? Activate(g, kind) * u : Activate(g, kind); };
  const int64_t whole = size / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) Store(y + i, gated(Load(gate + i), up ? Load(up + i) : Vector{}));
  if (whole == size) return;
  Vector g = {}, u = {};
  std::memcpy(&g, gate + whole, (size - whole) * 4);
  if (up) std::memcpy(&u, up + whole, (size - whole) * 4);
  const Vector last = gated(g, u);
  std::memcpy(y + whole, &last, (size - whole) * 4);
}

// The place of the largest entry, the first among equals; `size` if an entry is NaN, or all are minus infinity.
inline int32_t BestOfRow(const float* x, int64_t size) {
  constexpr int64_t kBlock = 64 * kLanes;
  const float least = -INFINITY;
  const auto larger = [](auto a, auto b) { return a > b ? a : b; };
  Ints nan = {};
  float best = least;
  int64_t begin = size;
  for (int64_t block = 0; block < size; block += kBlock) {
    const int64_t whole = std::min(kBlock, size - block) / kLanes * kLanes, end = std::min(size, block + kBlock);
    Vector largest = Spread(least);
    for (int64_t i = block; i < block + whole; i += kLanes) {
      const Vector v = Load(x + i);
      nan |= v != v;
      largest = larger(v, largest);
    }
    float found = FoldOf<kLanes>(largest, larger);
    for (int64_t i = block + whole; i < end; ++i) {
      nan[0] |= x[i] != x[i];
      found = larger(x[i], found);
    }
    if (found > best) best = found, begin = block;
  }
  if (FoldOf<kLanes>(nan, [](auto a, auto b) { return a | b; })) return int32_t(size);
  while (begin < size && x[begin] != best) ++begin;
  return int32_t(begin);
}

// x + multiplier * added, where `added` is normed in place first unless its scale is null.
inline void AddRow(const float* x, float* added, const float* scale, int64_t size, float eps, float multiplier,
                   float* y) {
  if (scale) NormRow(added, scale, size, eps, added);
  const int64_t whole = size / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) Store(y + i, Load(x + i) + multiplier * Load(added + i));
  for (int64_t i = whole; i < size; ++i) y[i] = x[i] + multiplier * added[i];
}

}  // namespace
