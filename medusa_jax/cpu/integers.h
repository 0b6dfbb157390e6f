// Products of few rows with panels in blocks: activations become integers, sums of integers are exact.
//
// For every block, in order, an output adds (float(sum of q * code) * (d * scale)) and, if the type has minima,
// m * (scale * sum of q), each by one multiply-add. Nothing else is rounded, so a row's result depends neither on other
// rows nor on the machine's vectors. |code| * 32639 * 32 inputs is below 2^31 for every type.

#pragma once

#include "part.h"

namespace {

// Adds R rows of `blocks` blocks of x, which alternate, times those of one panel to sums [R, kWide]. With each block
// it fetches `step` bytes from `ahead` on.
template <class B, int bits, int R>
void IntegerRows(const uint32_t* words, const void* rows, int64_t blocks, const char* ahead, int64_t step,
                 float* sums) {
  using X = Integers<bits>;
  constexpr int V = (R > kTogether / 2 ? 16 : 32) / kLanes;  // vectors that share what is spread of x
  constexpr int kBytes = B::kWords * 4 / (B::kUnit / 32);
  // Steps whose products have a sum of 16 bits (`DotShort`); 0: none are summed there.
  constexpr int kShorts = !kShortDots || bits != 8 ? 0 : B::kBits == 8 ? 1 : 32767 / (254 * ((1 << B::kBits) - 1));
  constexpr int C = kShorts || R * V >= 4 ? 1 : 4 / (R * V);  // sums of an output: one would wait for itself
  constexpr int kSteps = X::kBytes ? 8 : 16;
  constexpr bool kPlaced = !X::kBytes && B::kBits == 4 && R <= 4;  // fewer shifts of sums than of weights; see `Pair`
  constexpr bool kSigned = (kSignedBytes || kShorts) && X::kBytes && B::kBits == 8;
  constexpr int kOffset = kSigned ? 0 : B::kOffset;
  const X* x = static_cast<const X*>(rows);
  for (; blocks > 0; blocks -= B::kUnit / 32, words += B::kWords) {
    const uint32_t* block = words + B::kHead;
    for (int j = 0; j < B::kUnit / 32; ++j, block += B::kBlock, x += R, ahead += step) {
      if (step == kBytes) {
#pragma GCC unroll 32
        for (int line = 0; line < kBytes; line += 64) __builtin_prefetch(ahead + line);
      } else {
        for (int64_t line = 0; line < step; line += 64) __builtin_prefetch(ahead + line);
      }
#pragma GCC unroll 2
      for (int h = 0; h < 32 / kLanes / V; ++h) {
        asm("" : "+r"(x));  // x is spread again: GCC would keep the vectors of the first half on the stack
#pragma GCC unroll 2
        for (int g = 0; g < 32 / B::kGroup; ++g) {
          Ints sum[R][V][C] = {}, low[R][V] = {};
          Words shorts[R][V] = {};
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) {
            const int32_t minus = B::kGroup == 32 ? x[r].minus : x[r].minus_halves[g];
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v) (X::kLimbs ? low[r][v] : sum[r][v][0]) = minus * kOffset * (kPlaced ? 256 : 1) - Ints{};
          }
          const uint32_t* codes = block + B::kScales + h * V * kLanes;
#pragma GCC unroll 16
          for (int i = g * kSteps * B::kGroup / 32; i < (g + 1) * kSteps * B::kGroup / 32; ++i) {
            const int pair = kPlaced || B::kBits != 4 ? i : i % 4 * 4 + i / 4;  // word by word
            Words w[V];
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v) {
              w[v] = X::kBytes ? Codes<B>(codes + v * kLanes, i) : Pair<B, kPlaced>(codes + v * kLanes, pair);
              if (kOffset != B::kOffset) w[v] ^= 0x80808080u;
              InRegister(w[v]);
            }
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
              const Words by = x[r].Spread(X::kBytes ? 4 * i : InputOf<B>(pair));
              const Words rest = X::kLimbs ? x[r].Spread(32 + 4 * i) : by;
#pragma GCC unroll 8
              for (int v = 0; v < V; ++v) {
                Ints& to = sum[r][v][i % C];
                if constexpr (kShorts) {
                  shorts[r][v] = DotShort<kSigned>(i % kShorts ? shorts[r][v] : Words{}, w[v], by);
                  InRegister(shorts[r][v]);
                  if (i % kShorts == kShorts - 1) to = DotPairs(to, shorts[r][v], 0x10001u - Words{});
                  continue;
                }
                to = X::kBytes ? DotBytes(to, w[v], by) : DotPairs(to, w[v], by);
                if (X::kLimbs) low[r][v] = DotBytes(low[r][v], w[v], rest);
                if (kPlaced && i < 8 && i % 4 > 3 - C) to >>= 4;  // the last of this sum in this place
                InRegister(to);  // sums in another order would need more registers
              }
            }
          }
#pragma GCC unroll 8
          for (int v = 0; v < V; ++v) {
            const int at = (h * V + v) * kLanes;
            const uint16_t* head = reinterpret_cast<const uint16_t*>(words) + at;
            const uint8_t* bytes = reinterpret_cast<const uint8_t*>(block) + at;
            const bool ends = B::kMinima && g == 32 / B::kGroup - 1;
            Vector d = B::kScaled ? Halves(head) : Spread(1), m = ends ? Halves(head + kWide) : d;
            if (B::kLevels) d *= Bytes<!B::kMinima>(bytes + g * kWide);
            if (B::kLevels && ends) m *= Bytes<false>(bytes + kWide);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
              float* to = sums + r * kWide + at;
              Ints exact = sum[r][v][0];
#pragma GCC unroll 4
              for (int c = 1; c < C; ++c) exact += sum[r][v][c];
              if (X::kLimbs) exact = (exact << 8) + low[r][v];
              const Vector f = __builtin_convertvector(exact, Vector);
              Vector y = MulAdd(f, d * Spread(x[r].scale), Load(to));
              if (ends) y = MulAdd(m, Spread(x[r].sum), y);
              Store(to, y);
            }
          }
        }
      }
    }
  }
}

using IntegerFn = decltype(&IntegerRows<Blocks<4, false, false>, 16, 1>);

// `IntegerRows` for 1 to kTogether rows.
template <class B, int bits, size_t... R>
IntegerFn ForIntegers(int64_t rows, std::index_sequence<R...>) {
  static constexpr IntegerFn table[] = {IntegerRows<B, bits, int(R) + 1>...};
  return table[rows - 1];
}

// `Multiply` for blocks; counts groups of rows.
template <class B, int bits>
void MultiplyBlocks(const Part& part, const uint32_t* panel, const Rows& x, int64_t g, int64_t end, float* sums) {
  constexpr std::make_index_sequence<kTogether> all;
  constexpr int64_t unit = B::kUnit / 32, words = B::kWords, bytes = words * 4 / unit;  // of a unit, of a block
  const int64_t from = x.First(g), groups = end - g, blocks = x.Blocks();
  std::fill(sums, sums + (x.First(end) - from) * kWide, 0.0f);
  const int64_t tile = groups > 1 ? std::max<int64_t>(kTileBytes / bytes / unit, 1) * unit : blocks;
  const int64_t step = groups > 1 ? (bytes / groups + 63) / 64 * 64 : bytes;
  for (int64_t b = 0; b < blocks; b += tile) {
    const int64_t count = std::min(tile, blocks - b);
    const uint32_t* at = panel + b / unit * words;
    const char* ahead = reinterpret_cast<const char*>(at) + (groups > 1 ? tile * bytes : kFetched);
    for (int64_t i = g; i < end; ++i, ahead += count * step) {
      const int64_t first = x.First(i), n = x.First(i + 1) - first;
      const IntegerFn add = ForIntegers<B, bits>(n, all);
      add(at, x.Group(first, n, b), count, ahead, step, sums + (first - from) * kWide);
    }
  }
}

}  // namespace
