// What XLA for CPU calls: products of few rows with a large kernel, a layer over few tokens after a cached
// text, the norm and rotation. All sum each output in one order, whatever the number of rows: a row's result
// is the same, bit for bit, alone and among others.

#include <numeric>
#include <utility>

#include "layer.h"

namespace {

using Numbers = ffi::Span<const int64_t>;

// Memory of a call, kept for the next: fresh memory is cleared by the system first, page by page.
float* Scratch(size_t floats) {
  thread_local std::vector<float> memory;
  if (memory.size() < floats) memory.resize(floats);
  return memory.data();
}

// A kernel of parts in `forms`, with `widths` outputs each, whose words follow one another; with scales of
// all panels' outputs and a bias [outputs], or none of either; for activations of 8 or 16 bits. No parts: it does
// not fit.
Kernel KernelOf(ffi::Buffer<ffi::U32> words, ffi::Buffer<ffi::F32> scales, ffi::Buffer<ffi::F32> bias,
                const int64_t* forms, const int64_t* widths, size_t n_parts, int64_t inputs,
                int64_t outputs, int64_t activations) {
  Kernel kernel{{}, n_parts, nullptr, nullptr, inputs, outputs, 0};
  if (scales.element_count()) kernel.scales = scales.typed_data();
  if (bias.element_count()) kernel.bias = bias.typed_data();
  if (n_parts < 1 || n_parts > kernel.parts.size() || (activations != 8 && activations != 16)) return {};
  int64_t at = 0, columns = 0, width = 0;
  for (size_t i = 0; i < n_parts; ++i) {
    Part& part = kernel.parts[i];
    part = {forms[i], widths[i], inputs, words.typed_data() + at};
    const bool floats = part.form == kFloat32 || part.form == kBfloat16;
    if (part.outputs < 1 || !(floats || PanelWords(part.form, inputs))) return {};
    if (!floats) kernel.bits = activations;
    at += part.Panels() * part.Size(), columns += part.Panels() * part.Width(), width += part.outputs;
  }
  if (at != int64_t(words.element_count()) || width != outputs ||
      (kernel.scales && (n_parts > 1 || int64_t(scales.element_count()) != columns)) ||
      (kernel.bias && int64_t(bias.element_count()) != outputs))
    return {};
  return kernel;
}

// x [R, I] times a kernel: `KernelOf`.
ffi::Error ProductHandler(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::U32> panels,
                          ffi::Buffer<ffi::F32> scales, ffi::Buffer<ffi::F32> bias,
                          ffi::ResultBuffer<ffi::F32> y, Numbers forms, Numbers widths, int64_t activations) {
  const auto xs = x.dimensions(), ys = y->dimensions();
  Kernel kernel{};
  if (xs.size() == 2 && ys.size() == 2 && ys[0] == xs[0] && forms.size() == widths.size())
    kernel = KernelOf(panels, scales, bias, forms.begin(), widths.begin(), forms.size(), xs[1], ys[1], activations);
  if (!kernel.n_parts) return ffi::Error::InvalidArgument("x [R, I], these panels and y [R, O] do not fit");
  Rows in{const_cast<float*>(x.typed_data()), nullptr, xs[0], xs[1], kernel.bits};
  if (in.bits) in.integers = reinterpret_cast<char*>(Scratch((in.Bytes() + 3) / 4));
  float* out = y->typed_data();
  const std::array<int64_t, 2> sizes = {in.bits ? in.count : 0, kernel.Chunks()};
  ShareStages(pool, sizes, [=](size_t stage, int64_t i) {
    stage ? MultiplyChunk(kernel, in, i, nullptr, out) : in.Make(i, 0, in.inputs);
  });
  return ffi::Error::Success();
}

// Outputs `rows` [n] of a kernel of one part in blocks, each with all of its weights: y [n, I].
ffi::Error RowsHandler(ffi::ThreadPool pool, ffi::Buffer<ffi::S32> rows, ffi::Buffer<ffi::U32> panels,
                       ffi::ResultBuffer<ffi::F32> y, int64_t form, int64_t outputs) {
  const auto ys = y->dimensions();
  const int64_t n = rows.element_count(), inputs = ys.size() == 2 ? ys[1] : 0;
  const Part part{form, outputs, inputs, panels.typed_data()};
  if (!PanelWords(form, inputs) || ys[0] != n || outputs < 1 ||
      part.Panels() * part.Size() != int64_t(panels.element_count()))
    return ffi::Error::InvalidArgument("rows [n], these panels and y [n, I] do not fit");
  const int32_t* which = rows.typed_data();
  float* out = y->typed_data();
  Share(pool, n, [=](int64_t i) {
    const int64_t o = std::clamp<int64_t>(which[i], 0, outputs - 1);
    const auto unpack = [&](auto blocks) {
      OneOutput<decltype(blocks)>(part.words + o / kWide * part.Size(), int(o % kWide), inputs, out + i * inputs);
      return true;
    };
    WithBlocks(part.form, unpack, false);
  });
  return ffi::Error::Success();
}

// y = x / sqrt(mean(x^2) + eps) * scale for the rows of x [..., D].
ffi::Error NormHandler(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> scale,
                       ffi::ResultBuffer<ffi::F32> y, double eps) {
  const int64_t size = scale.element_count();
  if (!size || x.element_count() % size || y->element_count() != x.element_count())
    return ffi::Error::InvalidArgument("x and y are [..., D], scale is [D]");
  const float *in = x.typed_data(), *by = scale.typed_data();
  float* out = y->typed_data();
  const int64_t rows = x.element_count() / size;
  Share(pool, (rows + kFewRows - 1) / kFewRows, [=](int64_t i) {
    for (int64_t r = i * kFewRows; r < std::min(rows, (i + 1) * kFewRows); ++r)
      NormRow(in + r * size, by, size, float(eps), out + r * size);
  });
  return ffi::Error::Success();
}

// Heads x [rows, N, H] turned by angles whose cosines and sines are [rows, H].
ffi::Error RotateHandler(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> cos,
                         ffi::Buffer<ffi::F32> sin, ffi::ResultBuffer<ffi::F32> y) {
  const auto xs = x.dimensions();
  if (xs.size() != 3 || xs[2] % 2 || int64_t(cos.element_count()) != xs[0] * xs[2] ||
      sin.element_count() != cos.element_count())
    return ffi::Error::InvalidArgument("x is [rows, N, H], cos and sin are [rows, H]");
  const int64_t rows = xs[0], N = xs[1], H = xs[2];
  const float *in = x.typed_data(), *c = cos.typed_data(), *s = sin.typed_data();
  float* out = y->typed_data();
  Share(pool, (rows + kFewRows - 1) / kFewRows, [=](int64_t i) {
    for (int64_t r = i * kFewRows; r < std::min(rows, (i + 1) * kFewRows); ++r)
      for (int64_t n = r * N; n < (r + 1) * N; ++n)
        RotateHead(in + n * H, c + r * H, s + r * H, H, out + n * H);
  });
  return ffi::Error::Success();
}

// A layer (`Layer`) over rows x [B, T, D] turned by angles whose cosines and sines are [B, T, H], after
// texts that fill slots [0, start) of keys and values [B, G, S, H], which new_keys and new_values are too.
// Token t sees new token s where mask [T, T] says so: its ancestors and itself, which stand in their order.
// The kernels come last, each as panels, scales and bias: queries, keys and values; attention's output; gate
// and up; down.
ffi::Error LayerHandler(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> cos,
                        ffi::Buffer<ffi::F32> sin, ffi::Buffer<ffi::S32> start,
                        ffi::Buffer<ffi::PRED> mask, ffi::Buffer<ffi::F32> keys,
                        ffi::Buffer<ffi::F32> values, ffi::Buffer<ffi::F32> attn_norm,
                        ffi::Buffer<ffi::F32> mlp_norm, ffi::Buffer<ffi::F32> q_norm,
                        ffi::Buffer<ffi::F32> k_norm, ffi::RemainingArgs kernels,
                        ffi::ResultBuffer<ffi::F32> y, ffi::ResultBuffer<ffi::F32> new_keys,
                        ffi::ResultBuffer<ffi::F32> new_values, int64_t n_heads, int64_t d_ff,
                        int64_t window, int64_t activations, Numbers forms, Numbers widths, Numbers counts,
                        double eps) {
  const auto xs = x.dimensions(), cs = keys.dimensions();
  if (xs.size() != 3 || cs.size() != 4)
    return ffi::Error::InvalidArgument("x is [B, T, D] and the cache [B, G, S, H]");
  Layer l{};
  l.B = xs[0], l.T = xs[1], l.D = xs[2], l.G = cs[1], l.S = cs[2], l.H = cs[3];
  l.N = n_heads, l.F = d_ff, l.window = window, l.eps = float(eps);
  const int64_t R = l.B * l.T, heads = (l.N + 2 * l.G) * l.H, queries = l.N * l.H;
  const auto has = [](ffi::Buffer<ffi::F32> b, int64_t n) { return int64_t(b.element_count()) == n; };
  if (l.H % kLanes || cs[0] != l.B || l.T > l.S || l.N % l.G || int64_t(mask.element_count()) != l.T * l.T ||
      int64_t(start.element_count()) != l.B || !has(cos, R * l.H) || !has(sin, R * l.H) ||
      !has(values, l.B * l.G * l.S * l.H) || !has(attn_norm, l.D) || !has(mlp_norm, l.D) ||
      !has(k_norm, q_norm.element_count()) || !(has(q_norm, 0) || has(q_norm, l.H)))
    return ffi::Error::InvalidArgument("these heads, norms, angles or this mask do not fit");
  if (keys.typed_data() != new_keys->typed_data() || values.typed_data() != new_values->typed_data())
    return ffi::Error::InvalidArgument("the cache is written in place");
  Kernel* const all[] = {&l.qkv, &l.out, &l.gate_up, &l.down};
  const int64_t inputs[] = {l.D, queries, l.D, l.F}, outputs[] = {heads, l.D, 2 * l.F, l.D};
  if (counts.size() != 4 || std::accumulate(counts.begin(), counts.end(), int64_t(0)) != int64_t(forms.size()) ||
      widths.size() != forms.size() || *std::min_element(counts.begin(), counts.end()) < 1)
    return ffi::Error::InvalidArgument("each of four kernels has parts");
  for (size_t i = 0, part = 0; i < 4; part += counts.begin()[i++]) {
    const auto panels = kernels.get<ffi::Buffer<ffi::U32>>(3 * i);
    const auto scales = kernels.get<ffi::Buffer<ffi::F32>>(3 * i + 1);
    const auto bias = kernels.get<ffi::Buffer<ffi::F32>>(3 * i + 2);
    if (!panels || !scales || !bias)
      return ffi::Error::InvalidArgument("each of four kernels is panels, scales and a bias");
    *all[i] = KernelOf(*panels, *scales, *bias, forms.begin() + part, widths.begin() + part, counts.begin()[i],
                       inputs[i], outputs[i], activations);
    if (!all[i]->n_parts) return ffi::Error::InvalidArgument("a kernel does not fit");
  }
  const std::vector<int32_t> paths = Paths(mask.typed_data(), l.T);
  l.x = x.typed_data(), l.cos = cos.typed_data(), l.sin = sin.typed_data();
  l.start = start.typed_data(), l.paths = paths.data();
  l.shares = std::clamp<int64_t>(2 * pool.num_threads() / (l.B * l.G) + 1, 1, l.T);
  l.attn_norm = attn_norm.typed_data(), l.mlp_norm = mlp_norm.typed_data();
  if (has(q_norm, l.H)) l.q_norm = q_norm.typed_data(), l.k_norm = k_norm.typed_data();
  l.keys = new_keys->typed_data(), l.values = new_values->typed_data(), l.y = y->typed_data();
  l.normed = {nullptr, nullptr, R, l.D, std::max(l.qkv.bits, l.gate_up.bits)};
  l.attended = {nullptr, nullptr, R, queries, l.out.bits}, l.inner = {nullptr, nullptr, R, l.F, l.down.bits};
  const auto floats_of = [](const Rows& x) { return x.count * x.inputs; };
  const auto words_of = [](const Rows& x) { return x.bits ? (x.Bytes() + 63) / 64 * 16 : 0; };
  Rows* const rows[] = {&l.normed, &l.attended, &l.inner};
  size_t needed = R * (heads + queries + 2 * l.F);
  for (const Rows* x : rows) needed += words_of(*x) + floats_of(*x);
  float* at = Scratch(needed);
  const auto take = [&](int64_t n) { return std::exchange(at, at + n); };
  for (Rows* x : rows) {
    x->floats = take(floats_of(*x));
    if (x->bits) x->integers = reinterpret_cast<char*>(take(words_of(*x)));
  }
  l.heads = take(R * heads), l.queries = take(R * queries), l.gates = take(R * 2 * l.F);
  RunLayer(pool, l);
  return ffi::Error::Success();
}

}  // namespace

extern "C" int64_t medusa_panel_width() { return kPanel; }
// Words of the panels of a kernel in blocks; 0 where these do not fill the inputs.
extern "C" int64_t medusa_packed_words(int64_t form, int64_t outputs, int64_t inputs) {
  return (outputs + kWide - 1) / kWide * PanelWords(form, inputs);
}
// Rows of blocks [outputs, row_bytes] as panels, which are zero before; 0: a scale is no number.
extern "C" int64_t medusa_pack(int64_t form, const uint8_t* rows, int64_t row_bytes, int64_t outputs,
                           int64_t inputs, uint32_t* words) {
  const int64_t size = PanelWords(form, inputs);
  for (int64_t o = 0; o < outputs; ++o) {
    const auto pack = [&](auto blocks) {
      uint32_t* panel = words + o / kWide * size;
      return PackRow<decltype(blocks)>(form, rows + o * row_bytes, inputs, int(o % kWide), panel);
    };
    if (!WithBlocks(form, pack, false)) return 0;
  }
  return 1;
}
extern "C" int64_t medusa_attends(int64_t head_dim) { return head_dim % kLanes == 0; }

XLA_FFI_DEFINE_HANDLER_SYMBOL(medusa_product, ProductHandler,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::U32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<Numbers>("forms")
                                  .Attr<Numbers>("widths")
                                  .Attr<int64_t>("activations"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(medusa_rows, RowsHandler,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::U32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<int64_t>("form")
                                  .Attr<int64_t>("outputs"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(medusa_layer, LayerHandler,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::PRED>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .RemainingArgs()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<int64_t>("n_heads")
                                  .Attr<int64_t>("d_ff")
                                  .Attr<int64_t>("window")
                                  .Attr<int64_t>("activations")
                                  .Attr<Numbers>("forms")
                                  .Attr<Numbers>("widths")
                                  .Attr<Numbers>("counts")
                                  .Attr<double>("eps"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(medusa_norm, NormHandler,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<double>("eps"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(medusa_rotate, RotateHandler,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
