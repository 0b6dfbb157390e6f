// Products of many rows with panels in blocks: weights are unpacked once for kSharing rows, into tiles that stay in
// the cache. The integers and the order of all roundings are those of `integers.h`, and so are the bits.

#pragma once

#include "integers.h"

namespace {

// Blocks of inputs in tiles at a time.
constexpr int64_t kDeep = 8;

// 32 inputs of a panel: scales of each group, minima, and codes with their sign, two neighbours in a word.
struct Tile {
  float d[2][kWide], m[kWide];
  uint32_t codes[16][kWide];
};

// Unpacks the panel's blocks from `words` on.
template <class B>
void Unpack(const uint32_t* words, int64_t blocks, Tile* tile) {
  for (; blocks > 0; blocks -= B::kUnit / 32, words += B::kWords) {
    const uint32_t* block = words + B::kHead;
    for (int j = 0; j < B::kUnit / 32; ++j, block += B::kBlock, ++tile)
      for (int at = 0; at < kWide; at += kLanes) {
        const uint16_t* head = reinterpret_cast<const uint16_t*>(words) + at;
        const uint8_t* bytes = reinterpret_cast<const uint8_t*>(block) + at;
        const Vector d = B::kScaled ? Halves(head) : Spread(1);
        for (int g = 0; g < 32 / B::kGroup; ++g)
          Store(tile->d[g] + at, B::kLevels ? d * Bytes<!B::kMinima>(bytes + g * kWide) : d);
        if constexpr (B::kMinima) {
          const Vector m = Halves(head + kWide);
          Store(tile->m + at, B::kLevels ? m * Bytes<false>(bytes + kWide) : m);
        }
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) {
          const Words pair = Pair<B, false>(block + B::kScales + at, i);
          const Words codes = Words(Sixteens(pair) - uint16_t(B::kOffset));
          std::memcpy(tile->codes[InputOf<B>(i) / 2] + at, &codes, sizeof codes);
        }
      }
  }
}

// Adds R rows of blocks of x times tiles to sums [R, kWide]: `IntegerRows`.
template <int group, bool minima, int R>
void TileRows(const Tile* tile, const Integers<16>* x, int64_t blocks, float* sums) {
  constexpr int V = (kLanes < 8 && R > 1 ? 16 : 32) / kLanes, C = R * V >= 4 ? 1 : 4 / (R * V);
  for (; blocks > 0; --blocks, ++tile, x += R)
#pragma GCC unroll 2
    for (int at = 0; at < kWide; at += V * kLanes) {
      asm("" : "+r"(x));
#pragma GCC unroll 2
      for (int g = 0; g < 32 / group; ++g) {
        Ints sum[R][V][C] = {};
#pragma GCC unroll 16
        for (int i = g * group / 2; i < (g + 1) * group / 2; ++i) {
          Words w[V];
#pragma GCC unroll 8
          for (int v = 0; v < V; ++v) {
            w[v] = LoadWords(tile->codes[i] + at + v * kLanes);
            if (kLanes > 8) InRegister(w[v]);  // 16 registers are all taken: products read it from the cache
          }
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) {
            const Words by = x[r].Spread(2 * i);
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v) {
              Ints& to = sum[r][v][i % C];
              to = DotPairs(to, w[v], by);
              InRegister(to);
            }
          }
        }
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) {
          const Vector d = Load(tile->d[g] + at + v * kLanes), m = Load(tile->m + at + v * kLanes);
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) {
            float* to = sums + r * kWide + at + v * kLanes;
            Ints exact = sum[r][v][0];
#pragma GCC unroll 4
            for (int c = 1; c < C; ++c) exact += sum[r][v][c];
            Vector y = MulAdd(__builtin_convertvector(exact, Vector), d * Spread(x[r].scale), Load(to));
            if (minima) y = MulAdd(m, Spread(x[r].sum), y);
            Store(to, y);
          }
        }
      }
    }
}

template <int group, bool minima, size_t... R>
auto ForTileRows(int64_t rows, std::index_sequence<R...>) {
  static constexpr decltype(&TileRows<32, false, 1>) table[] = {TileRows<group, minima, int(R) + 1>...};
  return table[rows - 1];
}

// `Multiply` of many rows.
template <class B>
void MultiplyMany(const Part& part, const uint32_t* panel, int64_t panels, const Rows& x, int64_t from, int64_t end,
                  float* sums) {
  const int64_t size = part.size, blocks = x.Blocks(), rows = x.First(end) - x.First(from);
  alignas(64) Tile tiles[kDeep];
  std::fill(sums, sums + panels * rows * kWide, 0.0f);
  for (int64_t b = 0; b < blocks; b += kDeep)
    for (int64_t p = 0; p < panels; ++p) {
      const int64_t count = std::min(kDeep, blocks - b);
      Unpack<B>(panel + p * size + b / (B::kUnit / 32) * B::kWords, count, tiles);
      for (int64_t g = from; g < end; ++g) {
        const int64_t first = x.First(g), n = x.First(g + 1) - first;
        const auto add = ForTileRows<B::kGroup, B::kMinima>(n, std::make_index_sequence<kOfTile>());
        const auto* its = reinterpret_cast<const Integers<16>*>(x.Group(first, n, b));
        add(tiles, its, count, sums + (p * rows + first - x.First(from)) * kWide);
      }
    }
}

// `Multiply` of panels in blocks.
template <class B, int bits>
void MultiplyAny(const Part& part, const uint32_t* panel, int64_t panels, const Rows& x, int64_t from, int64_t end,
                 float* sums) {
  if constexpr (bits == 16 && !Integers<16>::kBytes)
    if (x.Many()) return MultiplyMany<B>(part, panel, panels, x, from, end, sums);
  MultiplyBlocks<B, bits>(part, panel, x, from, end, sums);
}

}  // namespace
