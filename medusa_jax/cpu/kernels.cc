// The functions that XLA for CPU calls: products of few rows with a large kernel, a layer over few tokens after a
// cached text, norms and rotations. Each output is summed in one order for any number of rows, so a row's result
// is the same, bit for bit, alone and among others.

#include <utility>

#include "layer.h"

namespace {

using Numbers = ffi::Span<const int64_t>;
using Floats = ffi::Buffer<ffi::F32>;

// Memory of a call, whole cache lines, reused by the next: the system clears fresh memory page by page.
float* Scratch(size_t floats) {
  thread_local std::vector<float> memory;
  if (memory.size() < floats + 16) memory.resize(floats + 16);
  return memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) / 4;
}

// Adds a linear map of the kernel's inputs to it; its scales [panels * width] and bias [outputs] may be empty. Returns
// false if the sizes do not fit.
bool AddPart(Kernel& kernel, ffi::Buffer<ffi::U32> words, Floats scales, const float* bias, size_t n_bias, int64_t form,
             int64_t outputs, int64_t activations, int64_t rows) {
  const Part part{form, outputs, kernel.inputs, words.typed_data(),
                  scales.element_count() ? scales.typed_data() : nullptr, n_bias ? bias : nullptr,
                  Rows::Many(rows, activations)};
  const bool floats = form == kFloat32 || form == kBfloat16;
  if (outputs < 1 || !(floats || PanelWords(form, kernel.inputs)) || (activations != 8 && activations != 16) ||
      part.Panels() * part.Size() != int64_t(words.element_count()) ||
      (part.scales && part.Panels() * part.Width() != int64_t(scales.element_count())) ||
      (part.bias && outputs != int64_t(n_bias)))
    return false;
  kernel.parts[kernel.n_parts++] = part;
  kernel.outputs += outputs;
  if (!floats) kernel.bits = activations;
  return true;
}

// x [R, I] times a kernel in a form.
ffi::Error ProductHandler(ffi::ThreadPool pool, Floats x, ffi::Buffer<ffi::U32> panels, Floats scales,
                          ffi::ResultBuffer<ffi::F32> y, int64_t form, int64_t activations) {
  const auto xs = x.dimensions(), ys = y->dimensions();
  Kernel kernel{{}, 0, xs.size() == 2 ? xs[1] : 0, 0, 0};
  if (xs.size() != 2 || ys.size() != 2 || ys[0] != xs[0] ||
      !AddPart(kernel, panels, scales, nullptr, 0, form, ys[1], activations, xs[0]))
    return ffi::Error::InvalidArgument("x [R, I], these panels and y [R, O] do not fit");
  Rows in{const_cast<float*>(x.typed_data()), nullptr, xs[0], xs[1], kernel.bits};
  if (in.bits) in.integers = reinterpret_cast<char*>(Scratch((in.Bytes() + 3) / 4));
  float* out = y->typed_data();
  const std::array<int64_t, 2> sizes = {in.bits ? in.count : 0, kernel.Chunks()};
  const auto work = [=](size_t stage, int64_t i) {
    stage ? MultiplyChunk(kernel, in, i, nullptr, out) : in.Make(i, 0, in.inputs);
  };
  ShareStages(pool, sizes, work, [=](size_t stage, int64_t i) { return stage ? kernel.Weights(i) : nullptr; });
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
ffi::Error NormHandler(ffi::ThreadPool pool, Floats x, Floats scale,
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

// Rotates heads x [rows, N, H] by angles with cosines and sines [rows, H].
ffi::Error RotateHandler(ffi::ThreadPool pool, Floats x, Floats cos,
                         Floats sin, ffi::ResultBuffer<ffi::F32> y) {
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

// A layer (`Layer`) over rows x [B, T, D] with cosines and sines [B, T, H]. Their keys and values go to the slots from
// `start` on of the caches [B, G, S, H], in place: new_keys and new_values are the same memory. The rows are the last T
// of M nodes; mask [T, M] is true for the nodes that a row sees: its ancestors, in order, and itself. Without nodes the
// rows are a text. Without attn_norm
// attention reads `read` [B, T, I]. The linear maps come last, each as panels, scales and bias: queries, keys, values;
// attention's output; gate (unless it has none), up; down. After them come
// the norms of the outputs of attention and MLP, if there are any. Attributes with the usual value may be absent.
ffi::Error LayerHandler(ffi::ThreadPool pool, Floats x, Floats cos, Floats sin, ffi::Buffer<ffi::S32> start,
                        ffi::Buffer<ffi::PRED> mask, Floats keys, Floats values, Floats read, Floats attn_norm,
                        Floats mlp_norm, Floats q_norm, Floats k_norm, ffi::RemainingArgs linears,
                        ffi::ResultBuffer<ffi::F32> y, ffi::ResultBuffer<ffi::F32> new_keys,
                        ffi::ResultBuffer<ffi::F32> new_values, ffi::Dictionary attributes) {
  const auto integer = [&](const char* name) {
    return attributes.contains(name) ? attributes.get<int64_t>(name).value() : 0;
  };
  const auto number = [&](const char* name) {
    return attributes.contains(name) ? float(attributes.get<double>(name).value()) : 1.0f;
  };
  const int64_t n_heads = integer("n_heads"), d_ff = integer("d_ff"), activations = integer("activations");
  if (n_heads < 1 || !attributes.contains("eps") || !attributes.contains("forms"))
    return ffi::Error::InvalidArgument("attributes of a layer are missing");
  const Numbers forms = attributes.get<Numbers>("forms").value();
  const auto xs = x.dimensions(), cs = keys.dimensions(), ms = mask.dimensions();
  if (xs.size() != 3 || cs.size() != 4 || ms.size() != 2)
    return ffi::Error::InvalidArgument("x is [B, T, D], the cache [B, G, S, H] and the mask [T, M]");
  Layer l{};
  l.B = xs[0], l.T = xs[1], l.D = xs[2], l.G = cs[1], l.S = cs[2], l.H = cs[3], l.M = ms[1] ? ms[1] : l.T;
  l.N = n_heads, l.F = d_ff, l.window = integer("window"), l.eps = number("eps");
  l.residual_multiplier = number("residual_multiplier"), l.query_multiplier = number("query_multiplier");
  l.activation = Activation(integer("activation"));
  const int64_t R = l.B * l.T, heads = (l.N + 2 * l.G) * l.H, queries = l.N * l.H;
  const auto has = [](Floats b, int64_t n) { return int64_t(b.element_count()) == n; };
  const bool norms = has(attn_norm, l.D);
  l.I = norms ? l.D : read.element_count() / R;
  if (l.H % kLanes || cs[0] != l.B || l.T > l.M || l.M > l.S || l.N % l.G || ms[0] != l.T ||
      int64_t(start.element_count()) != l.B || !has(cos, R * l.H) || !has(sin, R * l.H) ||
      !has(values, l.B * l.G * l.S * l.H) || !(norms || has(attn_norm, 0)) || !(norms || has(read, R * l.I)) ||
      !(has(mlp_norm, l.D) || has(mlp_norm, 0)) ||
      !((has(q_norm, 0) && has(k_norm, 0)) || (has(q_norm, l.H) && has(k_norm, l.H)) ||
        (has(q_norm, queries) && has(k_norm, l.G * l.H))))
    return ffi::Error::InvalidArgument("these heads, norms, angles or this mask do not fit");
  if (keys.typed_data() != new_keys->typed_data() || values.typed_data() != new_values->typed_data())
    return ffi::Error::InvalidArgument("the cache is written in place");
  l.qkv.inputs = l.I, l.out.inputs = queries, l.gate_up.inputs = l.D, l.down.inputs = l.F;
  struct Map {
    Kernel* kernel;
    int64_t outputs;
  };
  std::vector<Map> maps = {{&l.qkv, queries}, {&l.qkv, l.G * l.H}, {&l.qkv, l.G * l.H}, {&l.out, l.D},
                           {&l.gate_up, l.F}, {&l.gate_up, l.F},   {&l.down, l.D}};
  if (forms.size() == 6) maps.erase(maps.begin() + 4);  // an MLP without gate
  for (size_t i = 0; i < maps.size(); ++i) {
    const auto panels = linears.get<ffi::Buffer<ffi::U32>>(3 * i);
    const auto scales = linears.get<Floats>(3 * i + 1), bias = linears.get<Floats>(3 * i + 2);
    if (forms.size() != maps.size() || !panels || !scales || !bias ||
        !AddPart(*maps[i].kernel, *panels, *scales, bias->typed_data(), bias->element_count(), forms.begin()[i],
                 maps[i].outputs, activations, R))
      return ffi::Error::InvalidArgument("seven or six linear maps, each with panels, scales and a bias, do not fit");
  }
  const bool out_norms = linears.size() > 3 * maps.size();
  if (out_norms) {
    const auto first = linears.get<Floats>(3 * maps.size()), second = linears.get<Floats>(3 * maps.size() + 1);
    if (!first || !second || !has(*first, l.D) || !has(*second, l.D))
      return ffi::Error::InvalidArgument("norms of outputs are [D]");
    l.attn_out_norm = first->typed_data(), l.mlp_out_norm = second->typed_data();
  }
  const std::vector<int32_t> paths = Paths(ms[1] ? mask.typed_data() : nullptr, l.T, l.M);
  l.x = x.typed_data(), l.read = norms ? nullptr : read.typed_data();
  l.cos = cos.typed_data(), l.sin = sin.typed_data();
  l.start = start.typed_data(), l.paths = paths.data();
  l.shares = std::clamp<int64_t>(std::max(2 * pool.num_threads() / (l.B * l.G) + 1, l.T / kAttending), 1, l.T);
  l.attn_norm = attn_norm.typed_data(), l.mlp_norm = has(mlp_norm, l.D) ? mlp_norm.typed_data() : nullptr;
  if (!has(q_norm, 0)) l.q_norm = q_norm.typed_data(), l.k_norm = k_norm.typed_data();
  l.all_heads = !has(q_norm, l.H);
  l.keys = new_keys->typed_data(), l.values = new_values->typed_data(), l.y = y->typed_data();
  l.entered = {nullptr, nullptr, R, l.I, l.qkv.bits}, l.attended = {nullptr, nullptr, R, queries, l.out.bits};
  l.normed = {nullptr, nullptr, R, l.D, l.gate_up.bits}, l.inner = {nullptr, nullptr, R, l.F, l.down.bits};
  const auto floats_of = [](const Rows& x) { return (x.count * x.inputs + 15) / 16 * 16; };
  const auto words_of = [](const Rows& x) { return x.bits ? (x.Bytes() + 63) / 64 * 16 : 0; };
  Rows* const rows[] = {&l.entered, &l.attended, &l.normed, &l.inner};
  const bool apart = out_norms || l.residual_multiplier != 1.0f;
  size_t needed = R * (heads + queries + 2 * l.F + (apart ? l.D : 0));
  for (const Rows* x : rows) needed += words_of(*x) + floats_of(*x);
  float* at = Scratch(needed);
  const auto take = [&](int64_t n) { return std::exchange(at, at + n); };
  for (Rows* x : rows) {
    x->floats = take(floats_of(*x));
    if (x->bits) x->integers = reinterpret_cast<char*>(take(words_of(*x)));
  }
  l.heads = take(R * heads), l.queries = take(R * queries), l.gates = take(R * 2 * l.F);
  if (apart) l.added = take(R * l.D);
  RunLayer(pool, l);
  return ffi::Error::Success();
}

// Copies slots start + path [B, L] of caches [B, G, S, H] to those from `start` on, in place.
ffi::Error CommitHandler(ffi::Buffer<ffi::S32> start, ffi::Buffer<ffi::S32> path, ffi::RemainingArgs caches,
                         ffi::RemainingRets moved) {
  const auto ps = path.dimensions();
  for (size_t i = 0; i < caches.size(); ++i) {
    const auto from = caches.get<Floats>(i);
    auto to = moved.get<Floats>(i);
    if (!from || !to || from->dimensions().size() != 4 || from->typed_data() != (*to)->typed_data() || ps.size() != 2 ||
        ps[0] != from->dimensions()[0] || int64_t(start.element_count()) != ps[0] || ps[1] > from->dimensions()[2])
      return ffi::Error::InvalidArgument("caches [B, G, S, H] in place, start [B] and path [B, L] do not fit");
    const int64_t B = ps[0], L = ps[1], G = from->dimensions()[1], S = from->dimensions()[2], H = from->dimensions()[3];
    for (int64_t b = 0; b < B; ++b)
      for (int64_t i = 0; i < L; ++i) {
        const int64_t begin = start.typed_data()[b], node = path.typed_data()[b * L + i];
        const int64_t source = std::clamp<int64_t>(begin + node, 0, S - 1);
        const int64_t slot = std::clamp<int64_t>(begin, 0, S - L) + i;
        if (source == slot) continue;
        for (int64_t g = b * G; g < (b + 1) * G; ++g)
          std::memcpy((*to)->typed_data() + (g * S + slot) * H, from->typed_data() + (g * S + source) * H, H * 4);
      }
  }
  return ffi::Error::Success();
}

}  // namespace

extern "C" int64_t medusa_panel_width() { return kPanel; }
// Words of the panels of a kernel in blocks; 0 if whole blocks do not fill the inputs.
extern "C" int64_t medusa_packed_words(int64_t form, int64_t outputs, int64_t inputs) {
  return (outputs + kWide - 1) / kWide * PanelWords(form, inputs);
}
// Writes rows of blocks [outputs, row_bytes] to panels, which must be zero; returns 0 if a scale is not finite.
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
                                  .Arg<Floats>()
                                  .Arg<ffi::Buffer<ffi::U32>>()
                                  .Arg<Floats>()
                                  .Ret<Floats>()
                                  .Attr<int64_t>("form")
                                  .Attr<int64_t>("activations"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(medusa_rows, RowsHandler,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::U32>>()
                                  .Ret<Floats>()
                                  .Attr<int64_t>("form")
                                  .Attr<int64_t>("outputs"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(medusa_layer, LayerHandler,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::PRED>>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .RemainingArgs()
                                  .Ret<Floats>()
                                  .Ret<Floats>()
                                  .Ret<Floats>()
                                  .Attrs());

XLA_FFI_DEFINE_HANDLER_SYMBOL(medusa_commit, CommitHandler,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .RemainingArgs()
                                  .RemainingRets());

XLA_FFI_DEFINE_HANDLER_SYMBOL(medusa_norm, NormHandler,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Ret<Floats>()
                                  .Attr<double>("eps"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(medusa_rotate, RotateHandler,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Ret<Floats>());
