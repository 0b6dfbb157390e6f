// What products read: linear maps in panels, and rows of x. For panels in blocks x becomes integers: 32 neighbours share
// a scale, x = scale * q, q of 16 or 8 bits.

#pragma once

#include <array>
#include <type_traits>
#include <utility>
#include <vector>

#include "blocks.h"

namespace {

// Outputs of a panel of floats: two vectors, so that a row of words is whole cache lines.
constexpr int kPanel = 2 * kLanes;
// Bytes that one worker takes at a time: few enough to divide the work evenly, many enough to stream.
constexpr int64_t kChunkBytes = 1 << 17;
// The same for blocks, slower per byte; most panels of a chunk for many rows.
constexpr int64_t kChunkOfBlocks = 1 << 15, kPanelsOfMany = 8;
// Rows from which unpacking weights apart (`tiles.h`) takes less time, and rows that share what is unpacked.
constexpr int64_t kMany = 32, kSharing = 128;

// If the rows do not fit the registers, groups of them take turns at this part of a panel, which stays in the first
// cache while the next part arrives from memory. With whole panels, memory would be idle from the second turn on.
constexpr int64_t kTileBytes = 1 << 13;
// Rows that take turns at one part.
constexpr int64_t kBand = 4 * kRows;
// Bytes to fetch ahead if rows take no turns; otherwise the next tile is fetched.
constexpr int64_t kFetched = 6144;

struct Part;
struct Rows;
// Rows [from, end) of x (for blocks: groups of rows) times panels, of which `panel` is the first: sums
// [panels, rows, width]. Only many rows take several panels.
using Multiply = void(const Part& part, const uint32_t* panel, int64_t panels, const Rows& x, int64_t from, int64_t end,
                      float* sums);

// A linear map: panels of `size` words in one form. Outputs are multiplied by scales [panels * width] and added to
// bias [outputs], unless these are null.
struct Part {
  int64_t form, outputs, inputs;
  const uint32_t* words;
  const float *scales, *bias;
  Multiply* multiply;
  // By `Divide`: words of a panel, panels that one worker takes at a time, and the number of such chunks.
  int64_t size, per_chunk, chunks;

  bool Blocks() const { return form >= kInt8; }
  int64_t Width() const { return Blocks() ? kWide : kPanel; }
  int64_t Panels() const { return (outputs + Width() - 1) / Width(); }
  // Divides once for all chunks: older processors take up to 90 cycles for each division. `many`: rows (`Rows::Many`).
  void Divide(bool many) {
    size = Blocks() ? PanelWords(form, inputs) : (inputs + form - 1) / form * kPanel;
    if (!size || outputs < 1) return;
    per_chunk = many && Blocks() ? Panels() / 4 : (Blocks() ? kChunkOfBlocks : kChunkBytes) / (size * 4);
    per_chunk = std::clamp<int64_t>(per_chunk, 1, many && Blocks() ? kPanelsOfMany : Panels());
    chunks = (Panels() + per_chunk - 1) / per_chunk;
  }
};

// Linear maps of the same x, whose outputs follow one another. x becomes integers of `bits` where some are in blocks.
struct Kernel {
  std::array<Part, 3> parts;  // those of a layer are at most queries, keys and values
  size_t n_parts;
  int64_t inputs, outputs, bits, stride;  // stride: from one row of outputs to the next

  int64_t Chunks() const {
    int64_t chunks = 0;
    for (size_t i = 0; i < n_parts; ++i) chunks += parts[i].chunks;
    return chunks;
  }
  // The part of a chunk, which becomes its number there.
  const Part& PartOf(int64_t& chunk) const {
    const Part* part = parts.data();
    for (; chunk >= part->chunks; ++part) chunk -= part->chunks;
    return *part;
  }
  // Where the weights of a chunk begin.
  const void* Weights(int64_t chunk) const {
    const Part& part = PartOf(chunk);
    return part.words + chunk * part.per_chunk * part.size;
  }
};

// Rows whose sums fit the registers, with two vectors of outputs each (from memory) and with four (from tiles).
constexpr int kTogether = kLanes / 2, kOfTile = kLanes == 8 ? 3 : kTogether;

// 32 activations as integers. Processors whose products of bytes are signed (`kSignedBytes`) get 16 bits as two bytes:
// q = 256 * codes[i] + codes[32 + i].
template <int bits>
struct Integers {
  static constexpr bool kLimbs = bits == 16 && kSignedBytes;
  static constexpr bool kBytes = kLimbs || (bits == 8 && (kByteDots || kShortDots));
  static constexpr float kTop = bits == 8 ? 127 : 127 * 256 + 127;
  float scale, sum;                    // sum: scale * (sum of q)
  int32_t minus, minus_halves[2];      // -(sum of q), and that of each half
  std::conditional_t<kBytes, int8_t, int16_t> codes[kLimbs ? 64 : 32];
  // Two codes of 16 bits or four of 8, for a multiplication with all outputs.
  Words Spread(int i) const {
    uint32_t word;
    std::memcpy(&word, codes + i, 4);
    return word - Words{};
  }
};

// Turns x [n] into blocks `stride` apart; the last is filled up with zeros. A value that is not finite gives a scale
// that is not a number, and with it outputs that are not. Values below 1e-30 are zeros: their scale would underflow.
template <int bits>
void Quantise(const float* x, int64_t n, Integers<bits>* out, int64_t stride) {
  using To = Integers<bits>;
  constexpr int V = 32 / kLanes;
  for (; n > 0; n -= 32, x += 32, out += stride) {
    float last[32];
    if (n < 32) {
      std::fill(last + n, last + 32, 0.0f);
      x = static_cast<const float*>(std::memcpy(last, x, n * 4));
    }
    Ints q[V], most = {}, sums[2] = {};
    for (int v = 0; v < V; ++v) {
      const Ints size = Ints(Load(x + v * kLanes)) & 0x7fffffff;  // floats in the order of their bits
      most = size > most ? size : most;
    }
    const int32_t top = FoldOf<kLanes>(most, [](auto a, auto b) { return a > b ? a : b; });
    float largest;
    std::memcpy(&largest, &top, 4);
    const bool none = largest < 1e-30f;
    const float by = none ? 0 : To::kTop / largest;
    for (int v = 0; v < V; ++v) {
      // Adding 1.5 x 2^23 rounds to an integer, which is then in the lower bits.
      q[v] = Ints(Load(x + v * kLanes) * by + 12582912.0f) - 0x4b400000;
      sums[v / (V / 2)] += q[v];
    }
    const int32_t first = SumOf<kLanes>(sums[0]), second = SumOf<kLanes>(sums[1]);
    out->scale = top >= 0x7f800000 ? NAN : none ? 0 : largest / To::kTop;
    out->sum = out->scale * float(first + second);
    out->minus = -(first + second), out->minus_halves[0] = -first, out->minus_halves[1] = -second;
    if constexpr (!To::kBytes) {
      for (int v = 0; v < V; ++v) {
        const auto narrow = __builtin_convertvector(q[v], Shorts);
        std::memcpy(out->codes + v * kLanes, &narrow, sizeof narrow);
      }
    } else {  // bytes in the order of `Codes`
      const auto store = [](Ints code, int8_t* to) {
        const auto narrow = __builtin_convertvector(code, Narrow);
        uint32_t fours[kLanes / 4];
        std::memcpy(fours, &narrow, sizeof narrow);
        for (uint32_t& w : fours) w = (w & 0xff0000ffu) | (w & 0xff00u) << 8 | (w >> 8 & 0xff00u);
        std::memcpy(to, fours, sizeof fours);
      };
      for (int v = 0; v < V; ++v) {
        store(To::kLimbs ? (q[v] + 128) >> 8 : q[v], out->codes + v * kLanes);
        if (To::kLimbs) store(q[v], out->codes + 32 + v * kLanes);
      }
    }
  }
}

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
  int64_t Groups() const {
    const int64_t most = Many() ? kOfTile : kTogether;
    return (count + most - 1) / most;
  }
  // In 32 bits, a third of the cycles of 64 on older processors.
  int64_t First(int64_t group) const { return uint32_t(count * group) / uint32_t(Groups()); }
  // Block b of the first row of a group of n.
  char* Group(int64_t first, int64_t n, int64_t b) const { return integers + (first * Blocks() + b * n) * Size(); }
  // Makes integers of n values of row r from `begin` on, a multiple of 32.
  void Make(int64_t r, int64_t begin, int64_t n) const {
    if (!integers) return;
    const int64_t group = uint32_t((r + 1) * Groups() - 1) / uint32_t(count), first = First(group), rows = First(group + 1) - first;
    char* to = Group(first, rows, begin / 32) + (r - first) * Size();
    const float* from = floats + r * inputs + begin;
    if (bits == 8) return Quantise(from, n, reinterpret_cast<Integers<8>*>(to), rows);
    Quantise(from, n, reinterpret_cast<Integers<16>*>(to), rows);
  }
};

}  // namespace
