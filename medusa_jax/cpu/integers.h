// Products of few rows with panels in blocks: activations become integers, sums of integers are exact.
//
// 32 neighbouring activations share a scale: x = scale * q, q of 16 or 8 bits. For every block, in order, an output
// adds (float(sum of q * code) * (d * scale)) and, if the type has minima, m * (scale * sum of q), each by one
// multiply-add. Nothing else is rounded, so a row's result depends neither on other rows nor on the machine's vectors.
// |code| * 32639 * 32 inputs is below 2^31 for every type.

#pragma once

#include <type_traits>

#include "blocks.h"

// `IntegerRows` of a form for 1 to kTogether rows. These are many functions, so each precision has its own file, which
// compiles in parallel.
using IntegerFn = void (*)(const uint32_t* words, const void* rows, int64_t blocks, const char* ahead, int64_t step,
                           float* sums);
IntegerFn IntegersOf8(int64_t form, int64_t rows);
IntegerFn IntegersOf16(int64_t form, int64_t rows);

namespace {

// Rows whose sums fit the registers.
constexpr int kTogether = kLanes / 2;

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
    float last[32] = {};
    if (n < 32) x = static_cast<const float*>(std::memcpy(last, x, n * 4));
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
      const int32_t* code = reinterpret_cast<const int32_t*>(q);
      const auto store = [&](int8_t* to, auto byte) {
        for (int i = 0; i < 32; ++i) to[i / 4 * 4 + ByteOf(i)] = byte(code[i]);
      };
      store(out->codes, [](int32_t v) { return int8_t(To::kLimbs ? (v + 128) >> 8 : v); });
      if (To::kLimbs) store(out->codes + 32, [](int32_t v) { return int8_t(v); });
    }
  }
}

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

template <class B, int bits, size_t... R>
IntegerFn ForIntegers(int64_t rows, std::index_sequence<R...>) {
  static constexpr IntegerFn table[] = {IntegerRows<B, bits, int(R) + 1>...};
  return table[rows - 1];
}

template <int bits>
IntegerFn FindIntegers(int64_t form, int64_t rows) {
  const auto find = [&](auto blocks) {
    return ForIntegers<decltype(blocks), bits>(rows, std::make_index_sequence<kTogether>());
  };
  return WithBlocks(form, find, IntegerFn(nullptr));
}

}  // namespace
