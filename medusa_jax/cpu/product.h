// y = x W, W in panels that are read sequentially.

#pragma once

#include "part.h"

namespace {

// y = sums * scales + bias + onto; scales, bias and onto may be null.
inline void Finish(const float* sums, const float* scales, const float* bias, const float* onto, int64_t width,
                   float* y) {
  const auto finished = [&](int64_t i, auto load) {
    auto sum = load(sums + i);
    if (scales) sum *= load(scales + i);
    if (bias) sum += load(bias + i);
    if (onto) sum += load(onto + i);
    return sum;
  };
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) Store(y + i, finished(i, Load));
  for (; i < width; ++i) y[i] = finished(i, [](const float* at) { return *at; });
}

// The outputs of one chunk of x times the kernel, added to those of `onto` [rows, outputs] unless it is null, in
// y [rows, outputs]; rows are `stride` apart.
inline void MultiplyChunk(const Kernel& kernel, const Rows& x, int64_t chunk, const float* onto, float* y) {
  const Part& part = kernel.PartOf(chunk);
  int64_t before = 0;  // outputs of the parts before this one
  for (const Part* other = kernel.parts.data(); other < &part; ++other) before += other->outputs;
  const int64_t size = part.size, per = part.per_chunk, end = std::min(part.Panels(), (chunk + 1) * per);
  const int64_t wide = part.Width(), all = part.Blocks() ? x.Groups() : x.count;
  const bool many = part.Blocks() && x.Many();
  const int64_t most = !part.Blocks() ? kBand : many ? std::max<int64_t>(kSharing * all / x.count, 1) : kBand / kTogether;
  const int64_t bands = all > most ? (all + most - 1) / most : 1, share = bands > 1 ? (all + bands - 1) / bands : all;
  const int64_t panels = many ? end - chunk * per : 1;  // as many at a time
  float some[kBand * std::max(kPanel, kWide)];
  thread_local std::vector<float> sums;
  for (int64_t p = chunk * per; p < end; p += panels) {
    const uint32_t* words = part.words + p * size;
    for (int64_t from = 0; from < all; from += share) {
      const int64_t to = std::min(all, from + share);
      const int64_t first = part.Blocks() ? x.First(from) : from, last = part.Blocks() ? x.First(to) : to;
      const int64_t rows = last - first;
      if (many) sums.resize(std::max<size_t>(sums.size(), panels * rows * kWide));
      float* out = many ? sums.data() : some;
      // Where the products go, other cores have lines of the last layer's.
      for (int64_t r = first; r < last; ++r)
        for (int64_t at = p * wide, end = std::min(at + panels * wide, part.outputs); at < end; at += 16)
          __builtin_prefetch(y + r * kernel.stride + before + at, 1);
      part.multiply(part, words, panels, x, from, to, out);
      for (int64_t r = first; r < last; ++r)
        for (int64_t i = 0; i < panels; ++i) {
          const int64_t begin = (p + i) * wide, width = std::min(wide, part.outputs - begin);
          const int64_t at = r * kernel.stride + before + begin;
          const float* bias = part.bias ? part.bias + begin : nullptr;
          const float* scales = part.scales ? part.scales + begin : nullptr;
          Finish(out + (i * rows + r - first) * wide, scales, bias, onto ? onto + at : nullptr, width, y + at);
        }
    }
  }
}

}  // namespace
