// y = x W for few rows, W in panels of words: [outputs / kPanel, inputs / n, kPanel], each read once, from
// end to end. A word holds the weights of n consecutive inputs: one float32, two bfloat16 or four int8; or
// the panels are in blocks (`blocks.h`).

#pragma once

#include <array>
#include <utility>
#include <vector>

#include "block_rows.h"
#include "pack.h"

namespace {

// What one worker takes at a time: small enough to share out evenly, large enough to stream.
constexpr int64_t kChunkBytes = 1 << 17;
// Blocks take more time for their bytes.
constexpr int64_t kChunkOfBlocks = 1 << 15;
// Of more rows than this a panel in blocks is unpacked once for all of them, to float32. With AVX-512 it is faster
// to unpack it again for every kFew rows, up to some number.
constexpr int kMany = kLanes == 16 ? 4 * kFew : kFew;

// Outputs of a kernel that are stored alike: panels of `size` words in a form.
struct Part {
  int64_t form, outputs, inputs;
  const uint32_t* words;

  int64_t Panels() const { return (outputs + kPanel - 1) / kPanel; }
  int64_t Size() const {
    return form > kInt8 ? PanelWords(form, inputs) : (inputs + form - 1) / form * kPanel;
  }
  // Panels that one worker takes at a time, and how many times they can be taken.
  int64_t Chunk() const {
    if (form <= kInt8) return std::clamp<int64_t>(kChunkBytes / (Size() * 4), 1, Panels());
    return std::max<int64_t>(kChunkOfBlocks / (Size() * 4) / 2 * 2, 2);  // in pairs
  }
  int64_t Chunks() const { return (Panels() + Chunk() - 1) / Chunk(); }
};

// A kernel in parts, one after the other. Outputs are multiplied by scales [panels * kPanel] and added to bias
// [outputs], unless these are null.
struct Kernel {
  std::array<Part, 3> parts;  // those of a layer are at most queries, keys and values
  size_t n_parts;
  const float *scales, *bias;
  int64_t inputs, outputs;

  int64_t Chunks() const {
    int64_t chunks = 0;
    for (size_t i = 0; i < n_parts; ++i) chunks += parts[i].Chunks();
    return chunks;
  }
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

// More rows than fit the registers take turns at this much of a panel, which stays in the first cache while the
// next arrives from memory. If each took the whole panel, memory would be idle from the second turn on.
constexpr int64_t kTileBytes = 1 << 13;
// Rows that take turns at one.
constexpr int64_t kBand = 4 * kRows;

// Bytes to fetch ahead where rows take no turns; where they do, the next tile is fetched.
constexpr int64_t kFetched = 6144;
// Multiply-adds for a word up to which memory is the limit. Weights are then fetched into the second cache, which
// waits for more lines at a time than the first; else into the first.
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

// x [rows, inputs] times one panel whose words hold the weights of n inputs: sums [rows, kPanel].
template <int n>
void MultiplyPanel(const uint32_t* panel, const float* x, int64_t rows, int64_t inputs, float* sums) {
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

inline BlockFn BlockFnFor(int64_t form, int64_t rows, int64_t panels) {
  return form < kQ4_K ? PlainBlocks(form, rows, panels) : LevelBlocks(form, rows, panels);
}

// y = sums * scales + bias + onto, of which any may be null.
inline void Finish(const float* sums, const float* scales, const float* bias, const float* onto, int64_t width,
                   float* y) {
  const auto finished = [&](int64_t i, auto load) {
    auto sum = load(sums + i);
    if (scales) sum *= load(scales + i);
    if (bias) sum += load(bias + i);
    if (onto) sum += load(onto + i);
    return sum;
  };
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) Store(y + i, finished(i, Load));
  for (; i < width; ++i) y[i] = finished(i, [](const float* at) { return *at; });
}

// The outputs of one chunk of x [rows, inputs] times the kernel, added to those of `onto` [rows, outputs]
// unless it is null, in y [rows, outputs].
inline void MultiplyChunk(const Kernel& kernel, const float* x, int64_t rows, int64_t chunk,
                          const float* onto, float* y) {
  size_t which = 0;
  int64_t before = 0;  // outputs of the parts before this one
  for (; chunk >= kernel.parts[which].Chunks(); ++which) {
    chunk -= kernel.parts[which].Chunks();
    before += kernel.parts[which].outputs;
  }
  const Part& part = kernel.parts[which];
  const int64_t size = part.Size(), per = part.Chunk(), end = std::min(part.Panels(), (chunk + 1) * per);
  const bool blocks = part.form > kInt8;
  const bool in_registers = blocks && rows <= kMany;
  const auto multiply = part.form == kBfloat16 ? MultiplyPanel<2> : part.form == kInt8 ? MultiplyPanel<4>
                                                                                        : MultiplyPanel<1>;
  const int64_t most = in_registers ? kFew : kBand;
  const int64_t groups = (rows + most - 1) / most;
  thread_local std::vector<float> unpacked;
  float out[kBand * kPanel];
  int64_t panels = 1;
  for (int64_t p = chunk * per; p < end; p += panels) {
    const uint32_t* words = part.words + p * size;
    panels = blocks && rows <= kPaired && p + 1 < end ? 2 : 1;
    if (blocks && !in_registers) {
      unpacked.resize(part.inputs * kPanel);
      UnpackOne(part.form, words, part.inputs, unpacked.data());
      words = reinterpret_cast<const uint32_t*>(unpacked.data());
    }
    const int64_t begin = p * kPanel, width = std::min(panels * kPanel, part.outputs - begin);
    const int64_t column = before + begin;
    const float* bias = kernel.bias ? kernel.bias + column : nullptr;
    const float* scales = kernel.scales ? kernel.scales + begin : nullptr;
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t first = rows * g / groups, count = rows * (g + 1) / groups - first;
      const float* in = x + first * part.inputs;
      if (in_registers)
        BlockFnFor(part.form, count, panels)(words, size, in, part.inputs, out);
      else
        multiply(words, in, count, part.inputs, out);
      for (int64_t r = 0; r < count; ++r) {
        const int64_t at = (first + r) * kernel.outputs + column;
        Finish(out + r * panels * kPanel, scales, bias, onto ? onto + at : nullptr, width, y + at);
      }
    }
  }
}

// The weights [inputs] of one output of a part in blocks.
inline void OneOutput(const Part& part, int64_t output, float* out) {
  const int64_t lane = output % kPanel;
  thread_local std::vector<float> unpacked;
  unpacked.resize(part.inputs * kPanel);
  UnpackOne(part.form, part.words + output / kPanel * part.Size(), part.inputs, unpacked.data());
  for (int64_t i = 0; i < part.inputs; ++i) out[i] = unpacked[i * kPanel + lane];
}

}  // namespace
