// Activations as integers, for products with panels in blocks: 32 neighbouring ones share a scale, x = scale * q, q of 16 or
// 8 bits.

#pragma once

#include <type_traits>

#include "blocks.h"

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

}  // namespace
