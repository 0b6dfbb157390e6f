// Products of few rows with panels of floats: [outputs / kPanel, inputs / n, kPanel] words with the weights of n
// consecutive inputs, one float32 or two bfloat16.

#pragma once

#include "part.h"

namespace {

// The weights of input j of the n in each word. A bfloat16 is the upper half of a float32.
template <int n>
inline Vector Weights(Words words, int j) {
  if (n == 2) words = j ? words & 0xffff0000u : words << 16;
  return reinterpret_cast<Vector>(words);
}

// Multiply-adds per word up to which memory is the limit. Weights are then fetched into the second cache, which can
// wait for more lines at a time than the first; otherwise into the first.
constexpr int64_t kMemoryBound = 12;

// Adds R rows of x, `stride` apart, times the weights of `count` inputs of one panel to sums [R, kPanel]: every
// sum in the order of the inputs. With each row of words it fetches `step` bytes from `ahead` on.
template <int R, int n, bool second_cache>
void PanelRows(const uint32_t* words, const float* x, int64_t stride, int64_t count, const char* ahead,
               int64_t step, float* sums) {
  Vector sum0[R], sum1[R];
  for (int r = 0; r < R; ++r)
    sum0[r] = Load(sums + r * kPanel), sum1[r] = Load(sums + r * kPanel + kLanes);
  const auto add = [&](Words words0, Words words1, int64_t i, int j) {
    Vector w0 = Weights<n>(words0, j), w1 = Weights<n>(words1, j);
    InRegister(w0), InRegister(w1);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Vector by = Spread(x[r * stride + i + j]);
      sum0[r] = MulAdd(w0, by, sum0[r]);
      sum1[r] = MulAdd(w1, by, sum1[r]);
    }
  };
  constexpr int64_t kLines = std::max(kPanel * 4 / 64, 1);
  int64_t i = 0;
  for (; i + n <= count; i += n, words += kPanel, ahead += step) {
    for (int64_t line = 0; line < kLines; ++line)
      __builtin_prefetch(ahead + step * line / kLines, 0, second_cache ? 2 : 3);
    const Words words0 = LoadWords(words), words1 = LoadWords(words + kLanes);
#pragma GCC unroll 4
    for (int j = 0; j < n; ++j) add(words0, words1, i, j);
  }
  for (int j = 0; i + j < count; ++j) add(LoadWords(words), LoadWords(words + kLanes), i, j);
  for (int r = 0; r < R; ++r)
    Store(sums + r * kPanel, sum0[r]), Store(sums + r * kPanel + kLanes, sum1[r]);
}

using PanelFn = decltype(&PanelRows<1, 1, true>);

// `PanelRows` for 1 to kRows rows.
template <int n, bool second_cache, size_t... R>
PanelFn ForRows(int64_t rows, std::index_sequence<R...>) {
  static constexpr PanelFn table[] = {
      PanelRows<int(R) + 1, n, second_cache && (int(R) + 1) * n <= kMemoryBound>...};
  return table[rows - 1];
}

// `Multiply` for a panel whose words hold the weights of n inputs.
template <int n>
void MultiplyFloats(const Part& part, const uint32_t* panel, const Rows& of, int64_t from, int64_t end, float* sums) {
  const int64_t rows = end - from, inputs = part.inputs;
  const float* x = of.floats + from * inputs;
  std::fill(sums, sums + rows * kPanel, 0.0f);
  // Groups of rows of nearly one size: 8 rows are 4 and 4 where 6 fit the registers, not 6 and 2.
  const int64_t groups = (rows + kRows - 1) / kRows, size = rows / groups, larger = rows % groups;
  const bool turns = groups > 1;
  const int64_t tile = turns ? kTileBytes / (kPanel * 4) * n : inputs, step = kPanel * 4 / groups;
  constexpr std::make_index_sequence<kRows> all;
  for (int64_t i = 0; i < inputs; i += tile) {
    const int64_t count = std::min(tile, inputs - i);
    const uint32_t* words = panel + i / n * kPanel;
    const char* ahead = reinterpret_cast<const char*>(words) + (turns ? kTileBytes : kFetched);
    for (int64_t g = 0, first = 0; g < groups; ++g, ahead += count / n * step) {
      const int64_t own = size + (g < larger);
      const PanelFn add = rows * n > kMemoryBound ? ForRows<n, false>(own, all) : ForRows<n, true>(own, all);
      add(words, x + first * inputs + i, inputs, count, ahead, step, sums + first * kPanel);
      first += own;
    }
  }
}

}  // namespace
