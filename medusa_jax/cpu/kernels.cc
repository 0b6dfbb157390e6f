// The functions that XLA for CPU calls: products of few rows with a large kernel, a layer over few tokens after a
// cached text, norms and rotations. Each output is summed in one order for any number of rows, so a row's result
// is the same, bit for bit, alone and among others.

#include <atomic>
#include <utility>

#include "layer.h"
#include "pack.h"

namespace {

using Floats = Array<float>;

// The products of forms, with activations of 16 and 8 bits, from libraries of their own (form.cc); `load` adds one.
std::atomic<Multiply*> multiplies[2][32];
std::atomic<void (*)(int64_t form, int64_t bits)> load;

Multiply* MultiplyOf(int64_t form, int64_t bits) {
  std::atomic<Multiply*>& of = multiplies[bits == 8][form];
  if (!of.load() && load.load()) load.load()(form, bits);
  Require(of.load(), "kernels for these weights could not be compiled: MEDUSA_JAX_PRODUCTS=plain decodes without them");
  return of.load();
}

// Memory of a call, whole cache lines, reused by the next: the system clears fresh memory page by page.
float* Scratch(size_t floats) {
  thread_local std::vector<float> memory;
  if (memory.size() < floats + 16) memory.resize(floats + 16);
  return memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) / 4;
}

// Adds a linear map of the kernel's inputs to it; its scales [panels * width] and bias [outputs] may be empty.
void AddPart(Kernel& kernel, Array<const uint32_t> words, Array<const float> scales, Array<const float> bias, int64_t form,
             int64_t outputs, int64_t activations, int64_t rows) {
  const bool floats = form == kFloat32 || form == kBfloat16;
  const int64_t bits = floats ? 0 : activations;
  Part part{form, outputs, kernel.inputs, words.data, scales.size ? scales.data : nullptr, bias.size ? bias.data : nullptr};
  part.Divide(Rows::Many(rows, bits));
  Require(outputs > 0 && part.size && (activations == 8 || activations == 16) &&
              part.Panels() * part.size == words.size &&
              (!part.scales || part.Panels() * part.Width() == scales.size) && (!part.bias || outputs == bias.size),
          "the panels, scales or bias of a linear map do not fit");
  part.multiply = MultiplyOf(form, bits);
  kernel.parts[kernel.n_parts++] = part;
  kernel.stride = kernel.outputs += outputs;
  if (!floats) kernel.bits = bits;
}

// x [R, I] times a kernel in a form: y [R, O].
void Product(const Call& call) {
  const auto x = call.Arg<float>(0), y = call.Ret<float>(0);
  Require(x.rank == 2 && y.rank == 2 && y.dims[0] == x.dims[0], "x is [R, I] and y [R, O]");
  Kernel kernel{{}, 0, x.dims[1]};
  AddPart(kernel, call.Arg<const uint32_t>(1), call.Arg<const float>(2), {}, call.Number<int64_t>("form", 0), y.dims[1],
          call.Number<int64_t>("activations", 0), x.dims[0]);
  Rows in{x.data, nullptr, x.dims[0], x.dims[1], kernel.bits};
  if (in.bits) in.integers = reinterpret_cast<char*>(Scratch((in.Bytes() + 3) / 4));
  float* out = y.data;
  const std::array<int64_t, 2> sizes = {in.bits ? in.count : 0, kernel.Chunks()};
  const auto work = [=](size_t stage, int64_t i) {
    stage ? MultiplyChunk(kernel, in, i, nullptr, out) : in.Make(i, 0, in.inputs);
  };
  ShareStages(call.Pool(), sizes, work, [=](size_t stage, int64_t i) { return stage ? kernel.Weights(i) : nullptr; });
}

// Outputs `rows` [n] of a kernel of one part in blocks, each with all of its weights: y [n, I].
void UnpackRows(const Call& call) {
  const auto rows = call.Arg<int32_t>(0);
  const auto panels = call.Arg<const uint32_t>(1);
  const auto y = call.Ret<float>(0);
  const int64_t form = call.Number<int64_t>("form", 0), outputs = call.Number<int64_t>("outputs", 0);
  const int64_t n = rows.size, inputs = y.rank == 2 ? y.dims[1] : 0;
  Part part{form, outputs, inputs, panels.data};
  part.Divide(false);
  Require(part.Blocks() && part.size && y.dims[0] == n && outputs > 0 && part.Panels() * part.size == panels.size,
          "rows [n], these panels and y [n, I] do not fit");
  const int32_t* which = rows.data;
  float* out = y.data;
  Share(call.Pool(), n, [=](int64_t i) {
    const int64_t o = std::clamp<int64_t>(which[i], 0, outputs - 1);
    const auto unpack = [&](auto blocks) {
      OneOutput<decltype(blocks)>(part.words + o / kWide * part.size, int(o % kWide), inputs, out + i * inputs);
      return true;
    };
    WithBlocks(part.form, unpack, false);
  });
}

// y = x / sqrt(mean(x^2) + eps) * scale for the rows of x [..., D].
void Norm(const Call& call) {
  const auto x = call.Arg<float>(0), scale = call.Arg<float>(1), y = call.Ret<float>(0);
  const float eps = float(call.Number("eps", 0.0));
  const int64_t size = scale.size;
  Require(size && x.size % size == 0 && y.size == x.size, "x and y are [..., D], scale is [D]");
  const float *in = x.data, *by = scale.data;
  float* out = y.data;
  const int64_t rows = x.size / size;
  Share(call.Pool(), (rows + kFewRows - 1) / kFewRows, [=](int64_t i) {
    for (int64_t r = i * kFewRows; r < std::min(rows, (i + 1) * kFewRows); ++r)
      NormRow(in + r * size, by, size, eps, out + r * size);
  });
}

// Rotates heads x [..., N, H] by angles with cosines and sines [..., H].
void Rotate(const Call& call) {
  const auto x = call.Arg<float>(0), cos = call.Arg<float>(1), sin = call.Arg<float>(2), y = call.Ret<float>(0);
  Require(x.rank > 1 && x.size && y.size == x.size, "x and y are [..., N, H]");
  const int64_t N = x.dims[x.rank - 2], H = x.dims[x.rank - 1], rows = x.size / (N * H);
  Require(H % 2 == 0 && cos.size == rows * H && sin.size == cos.size, "cos and sin are [..., H]");
  const float *in = x.data, *c = cos.data, *s = sin.data;
  float* out = y.data;
  Share(call.Pool(), (rows + kFewRows - 1) / kFewRows, [=](int64_t i) {
    for (int64_t r = i * kFewRows; r < std::min(rows, (i + 1) * kFewRows); ++r)
      for (int64_t n = r * N; n < (r + 1) * N; ++n)
        RotateHead(in + n * H, c + r * H, s + r * H, H, out + n * H);
  });
}

// The places of the largest entries (`BestOfRow`) of the rows of x [..., V].
void Best(const Call& call) {
  const auto x = call.Arg<float>(0);
  const auto y = call.Ret<int32_t>(0);
  Require(y.size && x.size % y.size == 0, "x is [..., V] and y [...]");
  const int64_t size = x.size / y.size;
  const float* in = x.data;
  int32_t* out = y.data;
  Share(call.Pool(), y.size, [=](int64_t r) { out[r] = BestOfRow(in + r * size, size); });
}

// A layer (`Layer`) over rows x [B, T, D] with cosines and sines [B, T, H]. Their keys and values go to the slots from
// `start` on of the caches [B, G, S, H], in place: new_keys and new_values are the same memory. The rows are the last T
// of M nodes; mask [T, M] is true for the nodes that a row sees: its ancestors, in order, and itself. Without nodes the
// rows are texts. Of a single text only the first count [1] tokens are computed, and the rows of others are zeros. Without attn_norm attention
// reads `read` [B, T, I]. The linear maps come last, each as panels, scales and bias: queries, keys, values;
// attention's output; gate (unless it has none), up; down. After them come
// the norms of the outputs of attention and MLP, if there are any. Attributes with the usual value may be absent.
void RunLayerOf(const Call& call) {
  const auto x = call.Arg<float>(0), cos = call.Arg<float>(1), sin = call.Arg<float>(2);
  const auto start = call.Arg<int32_t>(3);
  const auto mask = call.Arg<bool>(4);
  const auto keys = call.Arg<float>(5), values = call.Arg<float>(6), read = call.Arg<float>(7);
  const auto attn_norm = call.Arg<float>(8), mlp_norm = call.Arg<float>(9);
  const auto q_norm = call.Arg<float>(10), k_norm = call.Arg<float>(11);
  const auto count = call.Arg<int32_t>(12);
  const auto y = call.Ret<float>(0), new_keys = call.Ret<float>(1), new_values = call.Ret<float>(2);
  constexpr int64_t kLinears = 13;  // where the linear maps begin
  const auto integer = [&](const char* name) { return call.Number<int64_t>(name, 0); };
  const auto number = [&](const char* name) { return float(call.Number(name, 1.0)); };
  const int64_t activations = integer("activations");
  const auto forms = call.Numbers("forms");
  Require(x.rank == 3 && keys.rank == 4 && mask.rank == 2, "x is [B, T, D], the cache [B, G, S, H] and the mask [T, M]");
  Layer l{};
  l.B = x.dims[0], l.T = x.dims[1], l.D = x.dims[2], l.G = keys.dims[1], l.S = keys.dims[2], l.H = keys.dims[3];
  l.M = mask.dims[1] ? mask.dims[1] : l.T, l.N = integer("n_heads"), l.F = integer("d_ff"), l.window = integer("window");
  l.eps = number("eps");
  l.residual_multiplier = number("residual_multiplier"), l.query_multiplier = number("query_multiplier");
  l.activation = Activation(integer("activation"));
  int64_t R = l.B * l.T;
  const int64_t heads = (l.N + 2 * l.G) * l.H, queries = l.N * l.H;
  const auto has = [](Floats b, int64_t n) { return b.size == n; };
  const bool norms = has(attn_norm, l.D);
  l.I = norms ? l.D : read.size / R;
  Require(l.N > 0 && l.H % kLanes == 0 && keys.dims[0] == l.B && l.T <= l.M && l.M <= l.S && l.N % l.G == 0 &&
              mask.dims[0] == l.T && start.size == l.B && has(cos, R * l.H) && has(sin, R * l.H) &&
              (!count.size || (count.size == l.B && !mask.dims[1])) && has(values, l.B * l.G * l.S * l.H) && (norms || has(attn_norm, 0)) && (norms || has(read, R * l.I)) &&
              (has(mlp_norm, l.D) || has(mlp_norm, 0)) &&
              ((has(q_norm, 0) && has(k_norm, 0)) || (has(q_norm, l.H) && has(k_norm, l.H)) ||
               (has(q_norm, queries) && has(k_norm, l.G * l.H))),
          "these heads, norms, angles or this mask do not fit");
  Require(keys.data == new_keys.data && values.data == new_values.data, "the cache is written in place");
  if (l.B == 1 && count.size) {  // the rest is padding
    const int64_t all = std::exchange(R, std::clamp<int64_t>(count.data[0], 1, l.T));
    l.T = l.M = R;
    std::fill(y.data + R * l.D, y.data + all * l.D, 0.0f);
  }
  l.qkv.inputs = l.I, l.out.inputs = queries, l.gate_up.inputs = l.D, l.down.inputs = l.F;
  struct Map {
    Kernel* kernel;
    int64_t outputs;
  };
  std::vector<Map> maps = {{&l.qkv, queries}, {&l.qkv, l.G * l.H}, {&l.qkv, l.G * l.H}, {&l.out, l.D},
                           {&l.gate_up, l.F}, {&l.gate_up, l.F},   {&l.down, l.D}};
  if (forms.size == 6) maps.erase(maps.begin() + 4);  // an MLP without gate
  const int64_t n_maps = maps.size(), after = kLinears + 3 * n_maps;
  Require(forms.size == n_maps, "there are seven or six linear maps");
  for (int64_t i = 0, at = kLinears; i < n_maps; ++i, at += 3)
    AddPart(*maps[i].kernel, call.Arg<const uint32_t>(at), call.Arg<const float>(at + 1), call.Arg<const float>(at + 2),
            forms.data[i], maps[i].outputs, activations, R);
  l.gate_up.stride += 16;  // often a multiple of 4 KB otherwise, and all rows would compete for a few lines of the cache
  const bool out_norms = call.Args() > after;
  if (out_norms) {
    const auto first = call.Arg<float>(after), second = call.Arg<float>(after + 1);
    Require(has(first, l.D) && has(second, l.D), "norms of outputs are [D]");
    l.attn_out_norm = first.data, l.mlp_out_norm = second.data;
  }
  const std::vector<int32_t> paths = Paths(mask.dims[1] ? mask.data : nullptr, l.T, l.M);
  l.x = x.data, l.read = norms ? nullptr : read.data;
  l.cos = cos.data, l.sin = sin.data;
  l.start = start.data, l.paths = paths.data();
  l.shares = std::max<int64_t>(2 * call.Pool().num_threads() / (l.B * l.G) + 1, l.T / kAttending);
  l.shares = std::clamp<int64_t>(l.shares, 1, l.T);
  l.attn_norm = attn_norm.data, l.mlp_norm = has(mlp_norm, l.D) ? mlp_norm.data : nullptr;
  if (!has(q_norm, 0)) l.q_norm = q_norm.data, l.k_norm = k_norm.data;
  l.all_heads = !has(q_norm, l.H), l.late = integer("late_norms");
  l.keys = new_keys.data, l.values = new_values.data, l.y = y.data;
  l.entered = {nullptr, nullptr, R, l.I, l.qkv.bits}, l.attended = {nullptr, nullptr, R, queries, l.out.bits};
  l.normed = {nullptr, nullptr, R, l.D, l.gate_up.bits}, l.inner = {nullptr, nullptr, R, l.F, l.down.bits};
  const auto floats_of = [](const Rows& x) { return (x.count * x.inputs + 15) / 16 * 16; };
  const auto words_of = [](const Rows& x) { return x.bits ? (x.Bytes() + 63) / 64 * 16 : 0; };
  Rows* const rows[] = {&l.entered, &l.attended, &l.normed, &l.inner};
  const bool apart = out_norms || l.residual_multiplier != 1.0f;
  size_t needed = R * (heads + queries + l.gate_up.stride + (apart ? l.D : 0));
  for (const Rows* x : rows) needed += words_of(*x) + floats_of(*x);
  float* at = Scratch(needed);
  const auto take = [&](int64_t n) { return std::exchange(at, at + n); };
  for (Rows* x : rows) {
    x->floats = take(floats_of(*x));
    if (x->bits) x->integers = reinterpret_cast<char*>(take(words_of(*x)));
  }
  l.heads = take(R * heads), l.queries = take(R * queries), l.gates = take(R * l.gate_up.stride);
  if (apart) l.added = take(R * l.D);
  RunLayer(call.Pool(), l);
}

// Copies slots start + path [B, L] of caches [B, G, S, H] to those from `start` on, in place.
void Commit(const Call& call) {
  const auto start = call.Arg<int32_t>(0), path = call.Arg<int32_t>(1);
  for (int64_t cache = 2; cache < call.Args(); ++cache) {
    const auto from = call.Arg<float>(cache), to = call.Ret<float>(cache - 2);
    Require(from.rank == 4 && from.data == to.data && path.rank == 2 && path.dims[0] == from.dims[0] &&
                start.size == path.dims[0] && path.dims[1] <= from.dims[2],
            "caches [B, G, S, H] in place, start [B] and path [B, L] do not fit");
    const int64_t B = path.dims[0], L = path.dims[1], G = from.dims[1], S = from.dims[2], H = from.dims[3];
    for (int64_t b = 0; b < B; ++b)
      for (int64_t i = 0; i < L; ++i) {
        const int64_t begin = start.data[b], node = path.data[b * L + i];
        const int64_t source = std::clamp<int64_t>(begin + node, 0, S - 1);
        const int64_t slot = std::clamp<int64_t>(begin, 0, S - L) + i;
        if (source == slot) continue;
        for (int64_t g = b * G; g < (b + 1) * G; ++g)
          std::memcpy(to.data + (g * S + slot) * H, from.data + (g * S + source) * H, H * 4);
      }
  }
}

// Python's function, which gets addresses and sizes of n arrays, and its calls that have not returned.
std::atomic<void (*)(const int64_t* arrays, int64_t n)> host;
std::atomic<int64_t> asking;

// Calls the host with arguments and results of 32 bits. The results are zeros, where it does not write them.
void AskHost(const Call& call) {
  std::vector<int64_t> arrays;
  const auto add = [&](const auto& x) { arrays.insert(arrays.end(), {reinterpret_cast<int64_t>(x.data), x.size}); };
  for (int64_t i = 0; i < call.Args(); ++i) add(call.Arg<int32_t>(i));
  for (int64_t i = 0; i < call.Rets(); ++i) {
    const auto result = call.Ret<int32_t>(i);
    std::fill_n(result.data, result.size, 0);
    add(result);
  }
  ++asking;
  if (auto* const ask = host.load()) ask(arrays.data(), arrays.size() / 2);
  --asking;
}

}  // namespace

extern "C" int64_t medusa_panel_width() { return kPanel; }
// Words of the panels of a kernel in blocks; 0 if whole blocks do not fill the inputs.
extern "C" int64_t medusa_packed_words(int64_t form, int64_t outputs, int64_t inputs) {
  return (outputs + kWide - 1) / kWide * PanelWords(form, inputs);
}
// Writes rows of blocks [outputs, row_bytes] to panels of zeros; returns 0 if a scale is not finite.
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

extern "C" void medusa_use_loader(void (*loader)(int64_t, int64_t)) { load = loader; }
extern "C" void medusa_add_form(int64_t form, int64_t bits, Multiply* multiply) { multiplies[bits == 8][form] = multiply; }
// Waits for calls of the last function if there is no other: Python is about to end.
extern "C" void medusa_use_host(void (*function)(const int64_t*, int64_t)) {
  host = function;
  while (!function && asking.load()) std::this_thread::yield();
}

extern "C" XLA_FFI_Error* medusa_product(XLA_FFI_CallFrame* frame) { return Answer(frame, Product); }
extern "C" XLA_FFI_Error* medusa_rows(XLA_FFI_CallFrame* frame) { return Answer(frame, UnpackRows); }
extern "C" XLA_FFI_Error* medusa_layer(XLA_FFI_CallFrame* frame) { return Answer(frame, RunLayerOf); }
extern "C" XLA_FFI_Error* medusa_commit(XLA_FFI_CallFrame* frame) { return Answer(frame, Commit); }
extern "C" XLA_FFI_Error* medusa_norm(XLA_FFI_CallFrame* frame) { return Answer(frame, Norm); }
extern "C" XLA_FFI_Error* medusa_rotate(XLA_FFI_CallFrame* frame) { return Answer(frame, Rotate); }
extern "C" XLA_FFI_Error* medusa_best(XLA_FFI_CallFrame* frame) { return Answer(frame, Best); }
extern "C" XLA_FFI_Error* medusa_ask(XLA_FFI_CallFrame* frame) { return Answer(frame, AskHost); }
