// y = x W for few rows, W in panels of words: [outputs / kPanel, inputs / n, kPanel], each read once, from
// end to end. A word holds the weights of n consecutive inputs: one float32, two bfloat16 or four int8.

#pragma once

#include <utility>

#include "vectors.h"

namespace {

// Outputs of a panel: two vectors, so that a row of words is whole cache lines.
constexpr int kPanel = 2 * kLanes;
// A memory stream is asked for this many bytes ahead; without it AVX2 code waits for memory.
constexpr int64_t kAhead = 8192;
// What one worker takes at a time: small enough to share out evenly, large enough to stream.
constexpr int64_t kChunkBytes = 1 << 17;

// A kernel in panels. Outputs are multiplied by scales [panels * kPanel] and added to bias [outputs], unless
// these are null.
struct Kernel {
  const uint32_t* words;
  const float *scales, *bias;
  int64_t per_word, inputs, panels, outputs;

  // Words of a panel.
  int64_t Size() const { return (inputs + per_word - 1) / per_word * kPanel; }
  // Panels that one worker takes at a time, and how many times they can be taken.
  int64_t Chunk() const { return std::clamp<int64_t>(kChunkBytes / (Size() * 4), 1, panels); }
  int64_t Chunks() const { return (panels + Chunk() - 1) / Chunk(); }
};

// The weights of input j of the n in each word.
template <int n>
inline Vector Weights(Words words, int j) {
  if (n == 4) {  // the byte to the top, then back with its sign
    const Ints bytes = reinterpret_cast<Ints>(words << (24 - 8 * j)) >> 24;
    return __builtin_convertvector(bytes, Vector);
  }
  // A bfloat16 is the upper half of a float32.
  if (n == 2) words = j ? words & 0xffff0000u : words << 16;
  return reinterpret_cast<Vector>(words);
}

// R rows of x [R, inputs] times one panel: every sum in the order of the inputs.
template <int R, int n>
void PanelRows(const uint32_t* panel, const float* x, int64_t inputs, Vector scale0, Vector scale1,
               float* out) {
  Vector sum0[R] = {}, sum1[R] = {};
  const auto add = [&](Words words0, Words words1, int64_t i, int j) {
    const Vector w0 = Weights<n>(words0, j), w1 = Weights<n>(words1, j);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      sum0[r] += w0 * x[r * inputs + i + j];
      sum1[r] += w1 * x[r * inputs + i + j];
    }
  };
  int64_t i = 0;
  for (; i + n <= inputs; i += n, panel += kPanel) {
    for (int64_t line = 0; line < kPanel * 4; line += 64)
      __builtin_prefetch(reinterpret_cast<const char*>(panel) + kAhead + line);
    const Words words0 = LoadWords(panel), words1 = LoadWords(panel + kLanes);
#pragma GCC unroll 4
    for (int j = 0; j < n; ++j) add(words0, words1, i, j);
  }
  for (int j = 0; i + j < inputs; ++j) add(LoadWords(panel), LoadWords(panel + kLanes), i, j);
  for (int r = 0; r < R; ++r) {
    Store(out + r * kPanel, sum0[r] * scale0);
    Store(out + r * kPanel + kLanes, sum1[r] * scale1);
  }
}

using PanelFn = decltype(&PanelRows<1, 1>);

// `PanelRows` for 1 to kRows rows.
template <int n, size_t... R>
PanelFn ForRows(int64_t rows, std::index_sequence<R...>) {
  constexpr PanelFn table[] = {PanelRows<int(R) + 1, n>...};
  return table[rows - 1];
}

inline PanelFn PanelFor(int64_t rows, int64_t per_word) {
  constexpr std::make_index_sequence<kRows> all;
  if (per_word == 1) return ForRows<1>(rows, all);
  return per_word == 2 ? ForRows<2>(rows, all) : ForRows<4>(rows, all);
}

// The outputs of one chunk of x [rows, inputs] times the kernel, added to those of `onto` [rows, outputs]
// unless it is null, in y [rows, outputs].
inline void MultiplyChunk(const Kernel& kernel, const float* x, int64_t rows, int64_t chunk,
                          const float* onto, float* y) {
  const int64_t size = kernel.Size(), per = kernel.Chunk(), outputs = kernel.outputs;
  // Blocks of rows of nearly one size: 8 rows are 4 and 4 where 6 fit the registers, not 6 and 2.
  const int64_t blocks = (rows + kRows - 1) / kRows;
  float out[kRows * kPanel];
  for (int64_t p = chunk * per; p < std::min(kernel.panels, (chunk + 1) * per); ++p) {
    const int64_t begin = p * kPanel, width = std::min<int64_t>(kPanel, outputs - begin);
    Vector scale0 = {}, scale1 = {};
    scale0 += 1.0f, scale1 += 1.0f;
    if (kernel.scales)
      scale0 = Load(kernel.scales + begin), scale1 = Load(kernel.scales + begin + kLanes);
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t first = rows * b / blocks, count = rows * (b + 1) / blocks - first;
      const PanelFn run = PanelFor(count, kernel.per_word);
      run(kernel.words + p * size, x + first * kernel.inputs, kernel.inputs, scale0, scale1, out);
      for (int64_t r = 0; r < count; ++r) {
        const int64_t at = (first + r) * outputs + begin;
        float* sums = out + r * kPanel;
        if (kernel.bias)
          for (int64_t i = 0; i < width; ++i) sums[i] += kernel.bias[begin + i];
        if (onto)
          for (int64_t i = 0; i < width; ++i) sums[i] += onto[at + i];
        std::memcpy(y + at, sums, width * 4);
      }
    }
  }
}

}  // namespace
