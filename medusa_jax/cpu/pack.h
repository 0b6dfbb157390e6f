// Packs rows of blocks, as a GGUF file has them, into panels (`blocks.h`).

#pragma once

#include "blocks.h"

namespace {

// The content of `kUnit` inputs of one output, for any type.
struct Unit {
  uint16_t d, m;
  uint8_t scales[16], minima[8], codes[256];
};

// The low halves of n bytes, then their high halves.
template <int n>
inline void Nibbles(const uint8_t* __restrict bytes, uint8_t* __restrict codes) {
  for (int i = 0; i < n; ++i) codes[i] = bytes[i] & 15, codes[n + i] = bytes[i] >> 4;
}

// Adds bits from `from` on of 32 bytes to 32 codes, above their low four bits.
template <int n>
inline void HighBits(const uint8_t* __restrict bytes, int from, uint8_t* __restrict codes) {
  for (int i = 0; i < 32; ++i) codes[i] |= (bytes[i] >> from & ((1 << n) - 1)) << 4;
}

// Adds 16 to those of 32 codes whose bit is set, eight at a time: byte i of `own` has bit i of the next eight, or none.
inline void FifthBits(uint32_t bits, uint8_t* codes) {
  for (int i = 0; i < 32; i += 8) {
    const uint64_t own = (bits >> i & 255) * 0x0101010101010101u & 0x8040201008040201u;
    uint64_t eight;
    std::memcpy(&eight, codes + i, 8);
    eight |= ((own + 0x7f7f7f7f7f7f7f7fu) & 0x8080808080808080u) >> 3;
    std::memcpy(codes + i, &eight, 8);
  }
}

// Scales and minima of 8 groups, six bits each, in 12 bytes. Bytes 0 to 7 hold the scales and minima of the first four
// groups, and above each two bits of the last four; bytes 8 to 11 hold the other four bits of these.
inline void SixBits(const uint8_t* bytes, Unit& unit) {
  for (int g = 0; g < 4; ++g) {
    const uint8_t d = bytes[g], m = bytes[4 + g], both = bytes[8 + g];
    unit.scales[g] = d & 63, unit.scales[4 + g] = (both & 15) | (d >> 2 & 48);
    unit.minima[g] = m & 63, unit.minima[4 + g] = both >> 4 | (m >> 2 & 48);
  }
}

// The unit at `block`; returns where the next begins.
inline const uint8_t* ReadUnit(int64_t form, const uint8_t* block, Unit& unit) {
  const auto half = [&] {
    uint16_t x;
    std::memcpy(&x, block, 2), block += 2;
    return x;
  };
  const auto fifth_bits = [&] {
    uint32_t bits;
    std::memcpy(&bits, block, 4), block += 4;
    return bits;
  };
  const auto skip = [&](int n) { return (block += n) - n; };
  switch (form) {
    case kQ4_0:
    case kQ4_1:
    case kQ5_0:
    case kQ5_1: {
      const bool five = form == kQ5_0 || form == kQ5_1;
      unit.d = half();
      if (form == kQ4_1 || form == kQ5_1) unit.m = half();
      const uint32_t fifth = five ? fifth_bits() : 0;
      Nibbles<16>(skip(16), unit.codes);
      if (five) FifthBits(fifth, unit.codes);
      return block;
    }
    case kQ8_0:
      unit.d = half();
      std::memcpy(unit.codes, skip(32), 32);
      for (int i = 0; i < 32; ++i) unit.codes[i] ^= 0x80;  // adds 128
      return block;
    case kQ4_K:
    case kQ5_K: {
      unit.d = half();
      unit.m = half() ^ 0x8000;  // llama.cpp subtracts it
      SixBits(skip(12), unit);
      const uint8_t* fifth = form == kQ5_K ? skip(32) : nullptr;
      for (int g = 0; g < 8; g += 2) Nibbles<32>(skip(32), unit.codes + 32 * g);
      for (int g = 0; fifth && g < 8; ++g) HighBits<1>(fifth, g, unit.codes + 32 * g);
      return block;
    }
    default: {  // kQ6_K
      for (int h = 0; h < 2; ++h) Nibbles<64>(block + 64 * h, unit.codes + 128 * h);
      for (int g = 0; g < 8; ++g) HighBits<2>(block + 128 + g / 4 * 32, g % 4 * 2, unit.codes + 32 * g);
      std::memcpy(unit.scales, block + 192, 16);
      skip(208);
      unit.d = half();
      return block;
    }
  }
}

inline bool Finite(uint16_t half) { return (half & 0x7c00) != 0x7c00; }

// Writes output o of a panel; false if a scale is not finite.
template <class B>
bool PackRow(int64_t form, const uint8_t* blocks, int64_t inputs, int o, uint32_t* words) {
  Unit unit{};
  for (int64_t i = 0; i < inputs; i += B::kUnit) {
    blocks = ReadUnit(form, blocks, unit);
    if (!Finite(unit.d) || (B::kMinima && !Finite(unit.m))) return false;
    uint16_t* head = reinterpret_cast<uint16_t*>(words);
    head[o] = unit.d;
    if (B::kMinima) head[kWide + o] = unit.m;
    words += B::kHead;
    for (int j = 0; j < B::kUnit; j += 32, words += B::kBlock) {
      if (B::kLevels) {
        uint8_t* bytes = reinterpret_cast<uint8_t*>(words);
        for (int g = 0; g < 32 / B::kGroup; ++g)
          bytes[g * kWide + o] = unit.scales[(j + g * B::kGroup) / B::kGroup];
        if (B::kMinima) bytes[kWide + o] = unit.minima[j / 32];
      }
      uint32_t codes[B::kBits] = {};
#pragma GCC unroll 8
      for (int s = 0; s < 8; ++s) {
        uint32_t four;
        std::memcpy(&four, unit.codes + j + 4 * s, 4);
        four = (four & 0xff0000ffu) | (four >> 8 & 0xff00u) | (four & 0xff00u) << 8;  // inputs 0, 2, 1, 3
        constexpr int n = B::kBits - 4;
        const uint32_t low = four & 0x0f0f0f0fu, high = four >> 4 & 0x0f0f0f0fu;
        if (B::kBits == 8) codes[s] = four;
        else codes[s / 2] |= low << (s % 2 * 4);
        if (n && n < 4) codes[4 + s * n / 8] |= high << (s * n % 8);
      }
      for (int w = 0; w < B::kBits; ++w) words[B::kScales + w * kWide + o] = codes[w];
    }
  }
  return true;
}

}  // namespace
