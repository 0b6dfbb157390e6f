// Attention of few tokens over a cached text.

#pragma once

#include <type_traits>
#include <vector>

#include "vectors.h"

namespace {

// Values [size] of one text by position: the first `start` slots of its cache, then the slots of the
// nodes on a path through the tree.
struct Text {
  const float* cached;
  const int32_t* path;
  int64_t start, size;
  const float* operator[](int64_t p) const {
    return cached + (p < start ? p : start + path[p - start]) * size;
  }
};

// The path to each of T new tokens, itself included, and its length: [T, M + 1], the length last. Mask [T, M]
// is true at [t, s] if node s is on the path to t; null: the tokens are a text.
inline std::vector<int32_t> Paths(const bool* mask, int64_t T, int64_t M) {
  std::vector<int32_t> paths(T * (M + 1));
  for (int64_t t = 0; t < T; ++t) {
    int32_t *path = paths.data() + t * (M + 1), &length = path[M];
    for (int64_t s = 0; s < M; ++s)
      if (mask ? mask[t * M + s] : s <= t) path[length++] = int32_t(s);
  }
  return paths;
}

// Positions that are fetched from memory before they are read.
constexpr int kAhead = 16;
// Tokens of a long text that are attended at a time: their scores stay in the processor's cache.
constexpr int64_t kAttending = 16;
// Positions whose values are summed at a time in registers: many for many queries, few while memory is the limit.
constexpr int kBlock = 64, kFewQueries = 16;
// Queries that share one load of a value, and vectors of a value that are summed at a time.
constexpr int kShared = 4, kSummed = kRows > 6 ? 4 : 2;

// Calls `work(i, n)` for groups of n items from item i on, until all are done; n is constant in each, at most kMost.
template <int kMost, typename Work>
void InGroups(int64_t count, const Work& work) {
  int64_t i = 0;
  for (; count - i >= kMost; i += kMost) work(i, std::integral_constant<int, kMost>());
  if constexpr (kMost > 1) InGroups<kMost - 1>(count - i, [&](int64_t j, auto n) { work(i + j, n); });
}

// The sums of kLanes vectors: lane l has the sum of vector l, in the order of `Sum`.
template <int d = kLanes / 2>
inline Vector Sums(Vector* x) {
  constexpr std::make_integer_sequence<int, kLanes> lanes;
#pragma GCC unroll 8
  for (int i = 0; i < d; ++i) x[i] = Mixed<d, 0>(x[i], x[i + d], lanes) + Mixed<d, d>(x[i], x[i + d], lanes);
  if constexpr (d == 1) return x[0];
  else return Sums<d / 2>(x);
}

// Scores of a query for kLanes keys.
inline Vector Scores(const float* query, int64_t size, const float* const* keys) {
  Vector sums[kLanes];
#pragma GCC unroll 16
  for (int p = 0; p < kLanes; ++p) sums[p] = Load(query) * Load(keys[p]) + Vector{};
  for (int64_t h = kLanes; h < size; h += kLanes)
#pragma GCC unroll 16
    for (int p = 0; p < kLanes; ++p) sums[p] = MulAdd(Load(query + h), Load(keys[p] + h), sums[p]);
  return Sums(sums);
}

// Adds `count` values by their weights [kQueries, stride] to kVectors vectors of out [kQueries, size].
template <int kQueries, int kVectors>
void AddValues(const float* weights, int64_t stride, const float* const* values, int64_t count, int64_t at,
               int64_t size, float* out) {
  Vector sums[kQueries][kVectors];
  for (int q = 0; q < kQueries; ++q)
    for (int v = 0; v < kVectors; ++v) sums[q][v] = Load(out + q * size + at + v * kLanes);
  for (int64_t p = 0; p < count; ++p)
#pragma GCC unroll 4
    for (int q = 0; q < kQueries; ++q)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v)
        sums[q][v] = MulAdd(Load(values[p] + at + v * kLanes), Spread(weights[q * stride + p]), sums[q][v]);
  for (int q = 0; q < kQueries; ++q)
    for (int v = 0; v < kVectors; ++v) Store(out + q * size + at + v * kLanes, sums[q][v]);
}

// Replaces the scores at positions [first, count) by their weights, and those in [begin, first) by zeros; returns
// the weights' sum. Lane l sums positions l, l + kLanes, ...; positions that are not seen add zero.
inline float Weigh(float* scores, int64_t begin, int64_t first, int64_t count) {
  const int64_t end = (count + kLanes - 1) / kLanes * kLanes;
  std::fill(scores + begin, scores + first, -INFINITY);
  std::fill(scores + count, scores + end, -INFINITY);
  Vector most = Load(scores + begin), total = {};
  for (int64_t p = begin; p < end; p += kLanes) {
    const Vector score = Load(scores + p);
    most = score > most ? score : most;
  }
  float top = most[0];
  for (int l = 1; l < kLanes; ++l) top = std::max(top, most[l]);
  for (int64_t p = begin; p < end; p += kLanes) {
    const Vector weight = Exp(Load(scores + p) - top);
    total += weight;
    Store(scores + p, weight);
  }
  return Sum(total);
}

// Attention of some new tokens of a text: `heads` neighbouring query heads of each, over one head of keys and
// values; queries and out are [rows, stride]. Every sum follows the token's own positions; it sees the last
// `window` of them (0: all). Scores are multiplied by `multiplier` / sqrt(size). Positions that all tokens see, and the keys of the tree, are loaded once for all.
// `paths`: from `Paths`, for M nodes.
inline void Attend(const float* queries, int64_t rows, int64_t stride, int64_t heads, int64_t size,
                   const float* keys, const float* values, int64_t start, const int32_t* paths, int64_t M,
                   int64_t window, float multiplier, float* out) {
  const int64_t n = rows * heads, room = (start + M + kLanes) / kLanes * kLanes;
  const auto count = [&](int64_t r) { return start + paths[r * (M + 1) + M]; };
  const auto first = [&](int64_t r) { return window ? std::max<int64_t>(0, count(r) - window) : 0; };
  int64_t begin = first(0);  // vectors of positions are whole from `begin` to `end`
  for (int64_t r = 1; r < rows; ++r) begin = std::min(begin, first(r));
  begin = begin / kLanes * kLanes;
  // Positions [0, common) are the same for all tokens, and none sees slots from `last` on.
  int64_t common = INT64_MAX, last = 0;
  const auto is_text = [&](int64_t r) {
    const int32_t *path = paths + r * (M + 1), length = path[M];
    return !length || path[length - 1] == length - 1;
  };
  for (int64_t r = 0; r < rows; ++r) {
    const int32_t *path = paths + r * (M + 1), length = path[M];
    common = std::min(common, is_text(r) ? start + length : start);
    last = std::max(last, start + (length ? path[length - 1] + 1 : 0));
  }
  common = std::max(begin, common);
  // The weights of other layers have evicted keys and values from the processor's cache.
  const auto fetch = [&](const float* cached, int64_t p, int64_t count) {
    for (int64_t i = 0; i < count * size; i += 16) __builtin_prefetch(cached + p * size + i);
  };
  fetch(keys, begin, kAhead);
  thread_local std::vector<float> memory;
  memory.resize(kLanes + n * (room + 2 * size + 1));
  // All arrays but the totals are aligned, so that no vector crosses two cache lines.
  const uintptr_t line = kLanes * 4, from = reinterpret_cast<uintptr_t>(memory.data());
  float* scores = memory.data() + (line - from % line) / 4;
  float *scaled = scores + n * room, *sums = scaled + n * size, *totals = sums + n * size;
  const float scale = multiplier / std::sqrt(float(size));
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t h = 0; h < heads * size; h += kLanes)
      Store(scaled + r * heads * size + h, Load(queries + r * stride + h) * scale);
  const float* at[kBlock];
  for (int64_t p = begin; p < last; p += kLanes) {
    fetch(keys, p + kAhead, kLanes);
    for (int l = 0; l < kLanes; ++l) at[l] = keys + std::min(p + l, last - 1) * size;
    for (int64_t q = 0; q < n; ++q) Store(scores + q * room + p, Scores(scaled + q * size, size, at));
  }
  fetch(values, begin, kAhead);
  for (int64_t q = 0; q < n; ++q) {
    const int64_t r = q / heads;
    const int32_t* path = paths + r * (M + 1);
    float* of_new = scores + q * room + start;
    for (int32_t i = 0; !is_text(r) && i < path[M]; ++i) of_new[i] = of_new[path[i]];  // i <= path[i]
    totals[q] = Weigh(scores + q * room, begin, first(r), count(r));
  }
  std::fill(sums, sums + n * size, 0.0f);
  // Adds the values at positions [p, end), at most kBlock, for `count` queries from q on.
  const auto add = [&](int64_t q, int64_t count, const Text& text, int64_t p, int64_t end) {
    for (int64_t l = p; l < end; ++l) at[l - p] = text[l];
    InGroups<kShared>(count, [&](int64_t i, auto some) {
      InGroups<kSummed>(size / kLanes, [&](int64_t v, auto vectors) {
        const int64_t query = q + i;
        AddValues<some, vectors>(scores + query * room + p, room, at, end - p, v * kLanes, size, sums + query * size);
      });
    });
  };
  const int64_t block = n > kFewQueries ? kBlock : kLanes;
  for (int64_t p = begin; p < common; p += block) {
    fetch(values, p + kAhead, block);
    add(0, n, {values, nullptr, common, size}, p, std::min(p + block, common));
  }
  for (int64_t r = 0; r < rows; ++r) {
    const Text text{values, paths + r * (M + 1), start, size};
    for (int64_t p = common; p < count(r); p += kBlock)
      add(r * heads, heads, text, p, std::min(p + kBlock, count(r)));
  }
  for (int64_t q = 0; q < n; ++q)
    for (int64_t h = 0; h < size; h += kLanes)
      Store(out + q / heads * stride + q % heads * size + h, Load(sums + q * size + h) / totals[q]);
}

}  // namespace
