// Weights in the blocks of GGUF files, unpacked in registers: d * q, or d * q + m, of a few bits q.
//
// Nothing is rounded that unpacking to float32 would not round: d has 11 bits (float16), or 17 to 18 where it
// is float16 times a scale of 6 or 8 bits, and q has at most 7 and 5: their product is exact in float32, and
// adding m rounds once, fused or not. So every sum is, bit for bit, the one over the unpacked weights.
//
// A panel in blocks is a row of words for kPanel outputs after the other. For every `kUnit` inputs:
//
//   d                float16 [kPanel]
//   m                float16 [kPanel], if the type has minima
//   and for every 32 of these inputs:
//     scales of d    bytes [32 / kGroup, kPanel], if the type has two levels
//     scales of m    bytes [kPanel], if it has both
//     codes          words [kBits, kPanel]: of each output a stream of bits, the first input lowest
//                    (8 bits: bytes [32, kPanel])
//
// Codes of types without minima have a sign, in two's complement.

#pragma once

#include "vectors.h"

namespace {

// A memory stream is asked for this many bytes ahead; without it AVX2 code waits for memory.
constexpr int64_t kAhead = 8192;
// Outputs of a panel: two vectors, so that a row of words is whole cache lines.
constexpr int kPanel = 2 * kLanes;

template <int bits, bool minima, bool levels>
struct Blocks {
  static constexpr int kBits = bits;
  static constexpr bool kMinima = minima, kLevels = levels;
  static constexpr int kUnit = levels ? 256 : 32;
  static constexpr int kGroup = bits == 6 ? 16 : 32;  // inputs that share a scale
  static constexpr int kStep = bits == 5 ? 32 : bits == 6 ? 16 : 8;  // codes that fill whole words
  // Words of the parts.
  static constexpr int kHead = (minima ? 2 : 1) * kPanel / 2;
  static constexpr int kScales = levels ? (32 / kGroup + minima) * kPanel / 4 : 0;
  static constexpr int kBlock = kScales + bits * kPanel;
  static constexpr int kWords = kHead + kUnit / 32 * kBlock;
};

// A type of blocks by what it is called here; see `FORMS` in cpu/panels.py.
enum Form : int64_t {
  kFloat32 = 1, kBfloat16 = 2, kInt8 = 4,  // as many in a word
  kQ4_0 = 16, kQ4_1, kQ5_0, kQ5_1, kQ8_0, kQ4_K, kQ5_K, kQ6_K
};

// What `use` makes of the type's `Blocks`; `other` where the form is none.
template <typename Use, typename Other>
inline auto WithBlocks(int64_t form, const Use& use, const Other& other) {
  switch (form) {
    case kQ4_0: return use(Blocks<4, false, false>());
    case kQ4_1: return use(Blocks<4, true, false>());
    case kQ5_0: return use(Blocks<5, false, false>());
    case kQ5_1: return use(Blocks<5, true, false>());
    case kQ8_0: return use(Blocks<8, false, false>());
    case kQ4_K: return use(Blocks<4, true, true>());
    case kQ5_K: return use(Blocks<5, true, true>());
    case kQ6_K: return use(Blocks<6, false, true>());
    default: return other;
  }
}

// The numbers that codes of up to five bits stand for. A look-up of them takes no mask: of an index only the
// lower bits count.
#if defined(__AVX512F__) && __has_builtin(__builtin_shuffle)
#define MEDUSA_TABLES 1
#endif
template <class B>
struct Table {
  float q[32] = {};
  constexpr Table() {
    constexpr int n = 1 << B::kBits;
    for (int i = 0; i < n && i < 32; ++i) q[i] = float(B::kMinima || i < n / 2 ? i : i - n);
  }
};

// Code k from `codes` on as float32, for the outputs of vector v; k is known when this is compiled.
template <class B>
__attribute__((always_inline)) inline Vector Code(const uint32_t* codes, int k, int v) {
  constexpr int n = B::kBits;
  if constexpr (n == 8) {
    const uint8_t* bytes = reinterpret_cast<const uint8_t*>(codes) + k * kPanel + v * kLanes;
    return Bytes<true>(bytes);
  } else {
    const int word = n * k / 32, at = n * k % 32;
    codes += word * kPanel + v * kLanes;
    Words words = LoadWords(codes);
    if (at + n > 32) words = words >> at | LoadWords(codes + kPanel) << (32 - at);
    const int low = at + n > 32 ? 0 : at;  // where the code begins now
#if defined(MEDUSA_TABLES)
    if constexpr (n <= 5) {
      static constexpr Table<B> table;
      if (low) words >>= low;
      const Vector first = Load(table.q);
      if constexpr (n == 4) return __builtin_shuffle(first, words);
      return __builtin_shuffle(first, Load(table.q + 16), words);
    }
#endif
    Ints code;
    if constexpr (B::kMinima)
      code = reinterpret_cast<Ints>(words >> low & ((1u << n) - 1));
    else
      code = reinterpret_cast<Ints>(words << (32 - n - low)) >> (32 - n);
    return __builtin_convertvector(code, Vector);
  }
}

// `use(i, v, w)` for the weights w of input i and of the outputs of vector v, of all inputs of `panels`
// neighbouring panels, `size` words each, in the order of the inputs.
template <class B, int panels, typename Use>
__attribute__((always_inline)) inline void Unpack(const uint32_t* words, int64_t size, int64_t inputs,
                                                  const Use& use) {
  constexpr int V = 2 * panels;
  const auto at = [&](const uint32_t* part, int v) { return part + v / 2 * size; };
  const uint32_t *block, *const end = words + size;
  const auto fetch = [&](const uint32_t* part, int64_t n) __attribute__((always_inline)) {
    part += kAhead / 4;
    // Beyond these panels come as many others, of which each is read where its neighbour is.
    if (panels > 1 && part >= end) part += (panels - 1) * size;
#pragma GCC unroll 4
    for (int p = 0; p < panels; ++p)
#pragma GCC unroll 32
      for (int line = 0; line < n; line += 16) __builtin_prefetch(part + p * size + line);
  };
  for (int64_t i = 0; i < inputs; i += B::kUnit, words = block) {
    fetch(words, B::kHead);
    Vector d[V], m[V], scale[V], low[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      const uint16_t* head = reinterpret_cast<const uint16_t*>(at(words, v)) + v % 2 * kLanes;
      d[v] = scale[v] = Halves(head);
      if (B::kMinima) m[v] = low[v] = Halves(head + kPanel);
    }
    block = words + B::kHead;
    for (int j = 0; j < B::kUnit; j += 32, block += B::kBlock) {
      fetch(block, B::kBlock);
#pragma GCC unroll 2
      for (int g = 0; g < 32; g += B::kGroup) {
        if constexpr (B::kLevels) {
#pragma GCC unroll 4
          for (int v = 0; v < V; ++v) {
            const uint8_t* bytes = reinterpret_cast<const uint8_t*>(at(block, v)) + v % 2 * kLanes;
            // Six bits without a sign, where there are minima, or eight with one.
            scale[v] = d[v] * Bytes<!B::kMinima>(bytes + g / B::kGroup * kPanel);
            if (B::kMinima) low[v] = m[v] * Bytes<false>(bytes + kPanel);
          }
        }
        for (int s = g; s < g + B::kGroup; s += B::kStep)
#pragma GCC unroll 32
          for (int k = 0; k < B::kStep; ++k)
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) {
              const uint32_t* codes = at(block, v) + B::kScales + s * B::kBits / 32 * kPanel;
              const Vector q = Code<B>(codes, k, v % 2);
              use(i + j + s + k, v, B::kMinima ? MulAdd(q, scale[v], low[v]) : q * scale[v]);
            }
      }
    }
  }
}

// A panel in float32: [inputs, kPanel].
inline void UnpackOne(int64_t form, const uint32_t* words, int64_t inputs, float* out) {
  WithBlocks(
      form,
      [&](auto blocks) {
        Unpack<decltype(blocks), 1>(words, 0, inputs, [&](int64_t i, int v, Vector w) {
          Store(out + i * kPanel + v * kLanes, w);
        });
        return true;
      },
      false);
}

}  // namespace
