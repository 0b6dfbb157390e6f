// `products FORM BITS ROWS INPUTS OUTPUTS`: reads words of panels and x [ROWS, INPUTS]; writes the products of the first 1
// to ROWS rows and, where blocks have scales, the weights. It needs no XLA, so an emulator can run it.

#include <cstdio>
#include <cstdlib>

#include "product.h"
#include "tiles.h"

int main(int, char** arguments) {
  const auto number = [&](int i) { return std::atoll(arguments[i]); };
  const int64_t rows = number(3);
  Part part{number(1), number(5), number(4)};
  part.Divide(false);
  std::vector<uint32_t> words(part.Panels() * part.size);
  std::vector<float> x(rows * part.inputs), y(std::max(rows, part.inputs) * part.outputs);
  if (std::fread(words.data(), 4, words.size(), stdin) != words.size()) return 1;
  if (std::fread(x.data(), 4, x.size(), stdin) != x.size()) return 1;
  part.words = words.data();
  const auto find = [&](auto blocks) -> Multiply* {
    using B = decltype(blocks);
    return number(2) == 8 ? MultiplyAny<B, 8> : MultiplyAny<B, 16>;
  };
  part.multiply = WithBlocks(part.form, find, static_cast<Multiply*>(nullptr));
  const Kernel kernel{{part}, 1, part.inputs, part.outputs, number(2), part.outputs};
  for (int64_t n = 1; n <= rows; ++n) {
    Rows in{x.data(), nullptr, n, part.inputs, kernel.bits};
    std::vector<char> integers(in.Bytes());
    in.integers = integers.data();
    for (int64_t r = 0; r < n; ++r) in.Make(r, 0, in.inputs);
    for (int64_t chunk = 0; chunk < kernel.Chunks(); ++chunk) MultiplyChunk(kernel, in, chunk, nullptr, y.data());
    std::fwrite(y.data(), 4, n * part.outputs, stdout);
  }
  if (part.form == kInt8) return 0;
  for (int64_t o = 0; o < part.outputs; ++o) {
    const uint32_t* panel = part.words + o / kWide * part.size;
    WithBlocks(part.form, [&](auto blocks) {
      OneOutput<decltype(blocks)>(panel, int(o % kWide), part.inputs, y.data() + o * part.inputs);
      return true;
    }, false);
  }
  std::fwrite(y.data(), 4, part.outputs * part.inputs, stdout);
}
