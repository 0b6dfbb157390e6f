// Weights in blocks, as panels of integers: d * (q - offset), or d * q + m, with q of a few bits.
//
// A panel holds kWide outputs on every machine, as rows of 32-bit words, a row for all of them. For every `kUnit`
// inputs:
//
//   d                float16 [kWide]; int8 has a scale per output instead, outside the panel
//   m                float16 [kWide], if the type has minima
//   and for every 32 of these inputs:
//     scales of d    bytes [32 / kGroup, kWide], if the type has two levels
//     scales of m    bytes [kWide], if it has both
//     codes          words [kBits, kWide], see `Codes`
//
// `Codes` s = 0 ... 7 are four bytes for an output: inputs 4 s, 4 s + 2, 4 s + 1 and 4 s + 3. Two codes that are
// 16 bits apart are neighbouring inputs, so a mask and a shift prepare a product of pairs. Their low four bits
// share a word with those of the next s; further bits follow in words of their own.
//
// Codes carry no sign: types without minima store q + offset, and a sum starts at -offset * sum(x).

#pragma once

#include <tuple>

#include "vectors.h"

namespace {

constexpr int kWide = 32;

template <int bits, bool minima, bool levels, bool scaled = true>
struct Blocks {
  static constexpr int kBits = bits;
  static constexpr bool kMinima = minima, kLevels = levels, kScaled = scaled;
  static constexpr int kUnit = levels ? 256 : 32;
  static constexpr int kGroup = bits == 6 ? 16 : 32;  // inputs that share a scale
  static constexpr int kOffset = minima ? 0 : 1 << (bits - 1);
  // Words of the parts.
  static constexpr int kHead = (scaled + minima) * kWide / 2;
  static constexpr int kScales = levels ? (32 / kGroup + minima) * kWide / 4 : 0;
  static constexpr int kBlock = kScales + bits * kWide;
  static constexpr int kWords = kHead + kUnit / 32 * kBlock;
};

// A form of panels; see `FORMS` in compiler.py. From kInt8 on they are in blocks.
enum Form : int64_t {
  kFloat32 = 1, kBfloat16 = 2,  // as many in a word
  kInt8 = 4,
  kQ4_0 = 16, kQ4_1, kQ5_0, kQ5_1, kQ8_0, kQ4_K, kQ5_K, kQ6_K
};

template <int64_t form>
using BlocksOf = std::tuple_element_t<
    form < kQ4_0 ? 8 : form - kQ4_0,
    std::tuple<Blocks<4, false, false>, Blocks<4, true, false>, Blocks<5, false, false>, Blocks<5, true, false>,
               Blocks<8, false, false>, Blocks<4, true, true>, Blocks<5, true, true>, Blocks<6, false, true>,
               Blocks<8, false, false, false>>>;

// The result of `use` for the form's `Blocks`; `other` if the form has no blocks.
template <typename Use, typename Other>
inline auto WithBlocks(int64_t form, const Use& use, const Other& other) {
  switch (form) {
    case kInt8: return use(BlocksOf<kInt8>());
    case kQ4_0: return use(BlocksOf<kQ4_0>());
    case kQ4_1: return use(BlocksOf<kQ4_1>());
    case kQ5_0: return use(BlocksOf<kQ5_0>());
    case kQ5_1: return use(BlocksOf<kQ5_1>());
    case kQ8_0: return use(BlocksOf<kQ8_0>());
    case kQ4_K: return use(BlocksOf<kQ4_K>());
    case kQ5_K: return use(BlocksOf<kQ5_K>());
    case kQ6_K: return use(BlocksOf<kQ6_K>());
    default: return other;
  }
}

// The byte of `Codes` k / 4 that is input k of a block.
constexpr int ByteOf(int k) { return k % 4 == 1 ? 2 : k % 4 == 2 ? 1 : k % 4; }

// Codes s of kLanes outputs: one in each byte.
template <class B>
__attribute__((always_inline)) inline Words Codes(const uint32_t* codes, int s) {
  if constexpr (B::kBits == 8) {
    return LoadWords(codes + s * kWide);
  } else {
    constexpr int n = B::kBits - 4;  // further bits
    const Words low = LoadWords(codes + s / 2 * kWide) >> (s % 2 * 4) & 0x0f0f0f0fu;
    if constexpr (n == 0) return low;
    const Words high = LoadWords(codes + (4 + s * n / 8) * kWide);
    const int at = s * n % 8;
    return low | ((at < 4 ? high << (4 - at) : high >> (at - 4)) & ((1u << n) - 1) * 0x10101010u);
  }
}

// The first of the two neighbouring inputs that `Pair` i, 0 ... 15, has codes of.
template <class B>
constexpr int InputOf(int i) {
  constexpr int kPlaces[] = {2, 4, 0, 6};
  return B::kBits == 4 ? i % 4 * 8 + kPlaces[i / 4] : 2 * i;
}

// Two codes of kLanes outputs, 16 bits each. `placed`: codes of four bits stay where they are in their word, so the first
// four pairs are times 256 and the next four times 16.
template <class B, bool placed>
__attribute__((always_inline)) inline Words Pair(const uint32_t* codes, int i) {
  const auto upper = [](Words words, int from) { return Words(Sixteens(words) >> from); };
  if constexpr (B::kBits == 4) {
    const Words word = LoadWords(codes + i % 4 * kWide);
    if (i >= 12) return upper(word, 12);
    const int at = i < 4 ? 8 : i < 8 ? 4 : 0;
    return placed ? word & (0x000f000fu << at) : word >> at & 0x000f000fu;
  }
  const Words both = Codes<B>(codes, i / 2);
  return i % 2 ? upper(both, 8) : both & 0x00ff00ffu;
}

// Words of a panel of `inputs`; 0 if the form has no blocks, or whole blocks do not fill the inputs.
inline int64_t PanelWords(int64_t form, int64_t inputs) {
  return WithBlocks(
      form,
      [&](auto blocks) -> int64_t {
        using B = decltype(blocks);
        if (B::kScaled && inputs % B::kUnit) return 0;
        return (inputs + B::kUnit - 1) / B::kUnit * B::kWords;
      },
      int64_t(0));
}

// The weights [inputs] of output o of a panel, rounded once.
template <class B>
void OneOutput(const uint32_t* words, int o, int64_t inputs, float* out) {
  const int first = o / kLanes * kLanes, lane = o % kLanes;
  for (int64_t i = 0; i < inputs; i += B::kUnit) {
    const uint16_t* head = reinterpret_cast<const uint16_t*>(words) + first;
    const Vector d = Halves(head), m = Halves(head + (B::kMinima ? kWide : 0));
    words += B::kHead;
    for (int j = 0; j < B::kUnit; j += 32, words += B::kBlock) {
      const uint8_t* bytes = reinterpret_cast<const uint8_t*>(words) + first;
      for (int k = 0; k < 32; ++k) {
        const Words codes = Codes<B>(words + B::kScales + first, k / 4);
        const float q = float(int(codes[lane] >> 8 * ByteOf(k) & 255) - B::kOffset);
        Vector scale = d, low = m;
        if (B::kLevels) scale *= Bytes<!B::kMinima>(bytes + k / B::kGroup * kWide);
        if (B::kLevels && B::kMinima) low *= Bytes<false>(bytes + kWide);
        out[i + j + k] = B::kMinima ? q * scale[lane] + low[lane] : q * scale[lane];
      }
    }
  }
}

}  // namespace
