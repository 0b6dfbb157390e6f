// y = x W for few rows, W in panels, each read once and sequentially. Panels of floats are [outputs / kPanel,
// inputs / n, kPanel] words with the weights of n consecutive inputs, one float32 or two bfloat16; panels in blocks
// (`blocks.h`) are multiplied by activations as integers (`integers.h`).

#pragma once

#include <array>
#include <utility>
#include <vector>

#include "integers.h"
#include "pack.h"
#include "tiles.h"

namespace {

// Outputs of a panel of floats: two vectors, so that a row of words is whole cache lines.
constexpr int kPanel = 2 * kLanes;
// Bytes that one worker takes at a time: few enough to divide the work evenly, many enough to stream.
constexpr int64_t kChunkBytes = 1 << 17;
// Blocks take more time for their bytes. Panels that share many rows, at most.
constexpr int64_t kChunkOfBlocks = 1 << 15, kPanelsOfMany = 8;

// A linear map: panels of `Size()` words in one form. Outputs are multiplied by scales [panels * width] and added to
// bias [outputs], unless these are null.
struct Part {
  int64_t form, outputs, inputs;
  const uint32_t* words;
  const float *scales, *bias;
  bool many;  // rows (`Rows::Many`)

  bool Blocks() const { return form >= kInt8; }
  int64_t Width() const { return Blocks() ? kWide : kPanel; }
  int64_t Panels() const { return (outputs + Width() - 1) / Width(); }
  int64_t Size() const { return Blocks() ? PanelWords(form, inputs) : (inputs + form - 1) / form * kPanel; }
  // Panels that one worker takes at a time, and the number of such chunks.
  int64_t Chunk() const {
    if (many && Blocks()) return std::clamp<int64_t>(Panels() / 4, 1, kPanelsOfMany);
    return std::clamp<int64_t>((Blocks() ? kChunkOfBlocks : kChunkBytes) / (Size() * 4), 1, Panels());
  }
  int64_t Chunks() const { return (Panels() + Chunk() - 1) / Chunk(); }
};

// Linear maps of the same x, whose outputs follow one another. x becomes integers of `bits` where some are in blocks.
struct Kernel {
  std::array<Part, 3> parts;  // those of a layer are at most queries, keys and values
  size_t n_parts;
  int64_t inputs, outputs, bits;

  int64_t Chunks() const {
    int64_t chunks = 0;
    for (size_t i = 0; i < n_parts; ++i) chunks += parts[i].Chunks();
    return chunks;
  }
  // The part of a chunk, which becomes its number there.
  const Part& PartOf(int64_t& chunk) const {
    const Part* part = parts.data();
    for (; chunk >= part->Chunks(); ++part) chunk -= part->Chunks();
    return *part;
  }
  // Where the weights of a chunk begin.
  const void* Weights(int64_t chunk) const {
    const Part& part = PartOf(chunk);
    return part.words + chunk * part.Chunk() * part.Size();
  }
};

// Rows of x: `floats` [count, inputs], and for kernels with parts in blocks `integers`: groups of rows, and for each
// group the blocks of inputs with one `Integers<bits>` of every row.
struct Rows {
  float* floats;
  char* integers;
  int64_t count, inputs, bits;

  static bool Many(int64_t count, int64_t bits) { return count >= kMany && bits == 16 && !Integers<16>::kBytes; }
  bool Many() const { return Many(count, bits); }
  int64_t Size() const { return bits == 8 ? sizeof(Integers<8>) : sizeof(Integers<16>); }
  int64_t Blocks() const { return (inputs + 31) / 32; }
  int64_t Bytes() const { return count * Blocks() * Size(); }
  int64_t Groups() const { return (count + kTogether - 1) / kTogether; }
  int64_t First(int64_t group) const { return count * group / Groups(); }
  // Block b of the first row of a group of n.
  char* Group(int64_t first, int64_t n, int64_t b) const { return integers + (first * Blocks() + b * n) * Size(); }
  // Makes integers of n values of row r from `begin` on, a multiple of 32.
  void Make(int64_t r, int64_t begin, int64_t n) const {
    if (!integers) return;
    const int64_t group = ((r + 1) * Groups() - 1) / count, first = First(group), rows = First(group + 1) - first;
    char* to = Group(first, rows, begin / 32) + (r - first) * Size();
    const float* from = floats + r * inputs + begin;
    if (bits == 8) return Quantise(from, n, reinterpret_cast<Integers<8>*>(to), rows);
    Quantise(from, n, reinterpret_cast<Integers<16>*>(to), rows);
  }
};

// The weights of input j of the n in each word. A bfloat16 is the upper half of a float32.
template <int n>
inline Vector Weights(Words words, int j) {
  if (n == 2) words = j ? words & 0xffff0000u : words << 16;
  return reinterpret_cast<Vector>(words);
}

// If the rows do not fit the registers, groups of them take turns at this part of a panel, which stays in the first
// cache while the next part arrives from memory. With whole panels, memory would be idle from the second turn on.
constexpr int64_t kTileBytes = 1 << 13;
// Rows that take turns at one part.
constexpr int64_t kBand = 4 * kRows;

// Bytes to fetch ahead if rows take no turns; otherwise the next tile is fetched.
constexpr int64_t kFetched = 6144;
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

// Groups [g, end) of rows of x times one panel in blocks: sums [rows, kWide].
inline void MultiplyBlocks(const Part& part, const uint32_t* panel, const Rows& x, int64_t g, int64_t end, float* sums) {
  const int64_t from = x.First(g), groups = end - g, blocks = x.Blocks(), unit = UnitOf(part.form) / 32;
  const int64_t words = PanelWords(part.form, unit * 32), bytes = words * 4 / unit;  // of a unit, of a block
  std::fill(sums, sums + (x.First(end) - from) * kWide, 0.0f);
  const int64_t tile = groups > 1 ? std::max<int64_t>(kTileBytes / bytes / unit, 1) * unit : blocks;
  const int64_t step = groups > 1 ? (bytes / groups + 63) / 64 * 64 : bytes;
  for (int64_t b = 0; b < blocks; b += tile) {
    const int64_t count = std::min(tile, blocks - b);
    const uint32_t* at = panel + b / unit * words;
    const char* ahead = reinterpret_cast<const char*>(at) + (groups > 1 ? tile * bytes : kFetched);
    for (int64_t i = g; i < end; ++i, ahead += count * step) {
      const int64_t first = x.First(i), n = x.First(i + 1) - first;
      const IntegerFn add = x.bits == 8 ? IntegersOf8(part.form, n) : IntegersOf16(part.form, n);
      add(at, x.Group(first, n, b), count, ahead, step, sums + (first - from) * kWide);
    }
  }
}

// y = sums * scales + bias + onto; scales, bias and onto may be null.
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

// Groups [from, to) of many rows of x times `panels` panels in blocks, of which `words` is the first: sums [panels,
// rows, kWide].
inline void MultiplyMany(const Part& part, const uint32_t* words, int64_t panels, const Rows& x, int64_t from,
                         int64_t to, float* sums) {
  const int64_t size = part.Size(), blocks = x.Blocks(), unit = UnitOf(part.form) / 32;
  const int64_t rows = x.First(to) - x.First(from);
  const auto multiply = [&](auto form) {
    using B = decltype(form);
    alignas(64) Tile tiles[kDeep];
    std::fill(sums, sums + panels * rows * kWide, 0.0f);
    for (int64_t b = 0; b < blocks; b += kDeep)
      for (int64_t p = 0; p < panels; ++p) {
        const int64_t count = std::min(kDeep, blocks - b);
        Unpack<B>(words + p * size + b / unit * B::kWords, count, tiles);
        for (int64_t g = from; g < to; ++g) {
          const int64_t first = x.First(g), n = x.First(g + 1) - first;
          const auto add = ForTileRows<B::kGroup, B::kMinima>(n, std::make_index_sequence<kTogether>());
          const auto* its = reinterpret_cast<const Integers<16>*>(x.Group(first, n, b));
          add(tiles, its, count, sums + (p * rows + first - x.First(from)) * kWide);
        }
      }
    return true;
  };
  WithBlocks(part.form, multiply, false);
}

// The outputs of one chunk of x times the kernel, added to those of `onto` [rows, outputs] unless it is null, in
// y [rows, outputs].
inline void MultiplyChunk(const Kernel& kernel, const Rows& x, int64_t chunk, const float* onto, float* y) {
  const Part& part = kernel.PartOf(chunk);
  int64_t before = 0;  // outputs of the parts before this one
  for (const Part* other = kernel.parts.data(); other < &part; ++other) before += other->outputs;
  const int64_t size = part.Size(), per = part.Chunk(), end = std::min(part.Panels(), (chunk + 1) * per);
  const int64_t wide = part.Width(), all = part.Blocks() ? x.Groups() : x.count;
  const bool many = part.Blocks() && x.Many();
  const int64_t most = !part.Blocks() ? kBand : many ? std::max<int64_t>(kSharing * all / x.count, 1) : kBand / kTogether;
  const int64_t bands = (all + most - 1) / most, panels = many ? end - chunk * per : 1;  // as many at a time
  float some[kBand * std::max(kPanel, kWide)];
  thread_local std::vector<float> sums;
  for (int64_t p = chunk * per; p < end; p += panels) {
    const uint32_t* words = part.words + p * size;
    for (int64_t band = 0; band < bands; ++band) {
      const int64_t from = all * band / bands, to = all * (band + 1) / bands;
      const int64_t first = part.Blocks() ? x.First(from) : from, last = part.Blocks() ? x.First(to) : to;
      if (many) sums.resize(std::max<size_t>(sums.size(), panels * (last - first) * kWide));
      float* out = many ? sums.data() : some;
      if (many)
        MultiplyMany(part, words, panels, x, from, to, out);
      else if (part.Blocks())
        MultiplyBlocks(part, words, x, from, to, out);
      else
        (part.form == kBfloat16 ? MultiplyPanel<2> : MultiplyPanel<1>)(words, x.floats + first * x.inputs, last - first,
                                                                       x.inputs, out);
      for (int64_t i = 0; i < panels; ++i) {
        const int64_t begin = (p + i) * wide, width = std::min(wide, part.outputs - begin), column = before + begin;
        const float* bias = part.bias ? part.bias + begin : nullptr;
        const float* scales = part.scales ? part.scales + begin : nullptr;
        for (int64_t r = first; r < last; ++r) {
          const int64_t at = r * kernel.outputs + column;
          Finish(out + (i * (last - first) + r - first) * wide, scales, bias, onto ? onto + at : nullptr, width, y + at);
        }
      }
    }
  }
}

}  // namespace
