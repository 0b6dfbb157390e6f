// Products of many rows with panels in blocks: weights are unpacked once for all rows, into tiles that stay in the
// processor's cache. The integers and the order of all roundings are those of `integers.h`, and so are the bits.

#pragma once

#include "integers.h"

namespace {

// Rows from which unpacking apart takes less time, blocks of inputs in tiles at a time, rows that share these.
constexpr int64_t kMany = 32, kDeep = 8, kSharing = 128;

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
  constexpr int V = (kLanes < 16 && R > kTogether / 2 ? 16 : 32) / kLanes, C = R * V >= 4 ? 1 : 4 / (R * V);
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
          for (int v = 0; v < V; ++v) w[v] = LoadWords(tile->codes[i] + at + v * kLanes), InRegister(w[v]);
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

}  // namespace
