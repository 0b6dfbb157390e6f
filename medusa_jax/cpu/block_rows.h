// Products of few rows with panels in blocks. Each type's are many functions: they are compiled in two files of
// their own, at the same time as the rest.

#pragma once

#include <utility>

#include "blocks.h"

// Rows of x [rows, inputs] times panels of `size` words: out [rows, panels * kPanel].
using BlockFn = void (*)(const uint32_t* words, int64_t size, const float* x, int64_t inputs, float* out);

// The function for `rows` up to kFew and one panel, or up to kPaired and two neighbouring ones; of types with
// one level of scales, and with two.
BlockFn PlainBlocks(int64_t form, int64_t rows, int64_t panels);
BlockFn LevelBlocks(int64_t form, int64_t rows, int64_t panels);

namespace {

// Rows whose sums fit the registers; and those that leave room for a second panel, which shares the loads of x.
constexpr int kFew = kLanes == 8 ? 4 : 8, kPaired = kRows == 12 ? 4 : 2;

// R rows of x [R, inputs] times neighbouring panels: out [R, panels * kPanel], every sum in the order of the
// inputs.
template <class B, int R, int panels>
void BlockRows(const uint32_t* words, int64_t size, const float* x, int64_t inputs, float* out) {
  Vector sum[R][2 * panels] = {};
  Unpack<B, panels>(words, size, inputs, [&](int64_t i, int v, Vector w) __attribute__((always_inline)) {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) sum[r][v] = MulAdd(w, Spread(x[r * inputs + i]), sum[r][v]);
  });
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < 2 * panels; ++v) Store(out + (r * 2 * panels + v) * kLanes, sum[r][v]);
}

template <class B, int panels, size_t... R>
BlockFn BlocksForRows(int64_t rows, std::index_sequence<R...>) {
  static constexpr BlockFn table[] = {BlockRows<B, int(R) + 1, panels>...};
  return table[rows - 1];
}

template <bool levels>
BlockFn BlocksFor(int64_t form, int64_t rows, int64_t panels) {
  const auto found = [&](auto blocks) -> BlockFn {
    using B = decltype(blocks);
    if constexpr (B::kLevels == levels) {
      if (panels == 2) return BlocksForRows<B, 2>(rows, std::make_index_sequence<kPaired>());
      return BlocksForRows<B, 1>(rows, std::make_index_sequence<kFew>());
    } else {
      return nullptr;
    }
  };
  return WithBlocks(form, found, BlockFn(nullptr));
}

}  // namespace
