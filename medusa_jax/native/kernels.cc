// What XLA for CPU calls: products of few rows with a large kernel, attention of few tokens over a cached
// text, and the norm. All take the sums behind one output in one order, whatever the number of rows: a row's
// result is the same, bit for bit, alone and among others.

#include "attention.h"
#include "product.h"
#include "rows.h"

namespace {

// x [R, I] times panels [p, ceil(I / per_word), kPanel] of words, times scales [p * kPanel] if there are any.
ffi::Error ProductHandler(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::U32> panels,
                          ffi::Buffer<ffi::F32> scales, ffi::ResultBuffer<ffi::F32> y,
                          int64_t per_word) {
  const auto xs = x.dimensions(), ps = panels.dimensions(), ys = y->dimensions();
  if (xs.size() != 2 || ps.size() != 3 || ys.size() != 2 || ps[2] != kPanel || ys[0] != xs[0] ||
      ys[1] > ps[0] * kPanel || (xs[1] + per_word - 1) / per_word != ps[1])
    return ffi::Error::InvalidArgument("x [R, I], panels [p, I / n, kPanel], y [R, O] do not fit");
  const int64_t count = scales.element_count();
  if (count && count != ps[0] * kPanel)
    return ffi::Error::InvalidArgument("one scale for every output of the panels");
  const auto run = per_word == 1 ? Product<1> : per_word == 2 ? Product<2> : Product<4>;
  run(pool, x.typed_data(), panels.typed_data(), count ? scales.typed_data() : nullptr,
      y->typed_data(), xs[0], xs[1], ps[0], ys[1]);
  return ffi::Error::Success();
}

// The sum of x [n]: how fast memory can be read here.
ffi::Error ReadHandler(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::ResultBuffer<ffi::F32> y) {
  constexpr int64_t kBlock = 1 << 16;
  const int64_t n = x.element_count(), blocks = n / kBlock;
  const float* in = x.typed_data();
  std::vector<float> sums(blocks);
  Share(pool, blocks, [in, out = sums.data()](int64_t b) {
    const float* at = in + b * kBlock;
    Vector sum[4] = {};
    for (int64_t i = 0; i < kBlock; i += 4 * kLanes) {
      __builtin_prefetch(at + i + 1024);
      for (int j = 0; j < 4; ++j) sum[j] += Load(at + i + j * kLanes);
    }
    out[b] = Sum(sum[0] + sum[1] + sum[2] + sum[3]);
  });
  float total = 0;
  for (const float s : sums) total += s;
  for (int64_t i = blocks * kBlock; i < n; ++i) total += in[i];
  *y->typed_data() = total;
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

// Queries q [B, T, N, H] of new tokens, whose keys and values are k, v [B, G, T, H], behind the texts of
// cached_k, cached_v [B, G, S, H]: slots [0, start) count. Token t sees new token s where
// mask [T, T] says so: its ancestors and itself, which stand in their order. window 0 is none.
ffi::Error AttendHandler(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> q, ffi::Buffer<ffi::F32> k,
                         ffi::Buffer<ffi::F32> v, ffi::Buffer<ffi::F32> cached_k,
                         ffi::Buffer<ffi::F32> cached_v, ffi::Buffer<ffi::S32> start,
                         ffi::Buffer<ffi::PRED> mask, ffi::ResultBuffer<ffi::F32> out,
                         int64_t window) {
  const auto qs = q.dimensions(), cs = cached_k.dimensions();
  if (qs.size() != 4 || cs.size() != 4)
    return ffi::Error::InvalidArgument("q is [B, T, N, H] and the cache [B, G, S, H]");
  const int64_t B = qs[0], T = qs[1], N = qs[2], H = qs[3], G = cs[1], S = cs[2], R = N / G;
  const AttendFn attend = AttendFor(H);
  if (!attend || cs[3] != H || N % G || mask.element_count() != size_t(T * T))
    return ffi::Error::InvalidArgument("these heads or this mask do not fit");
  // The path to each token, itself included.
  auto paths = std::make_shared<std::vector<int32_t>>(T * T);
  auto lengths = std::make_shared<std::vector<int64_t>>(T);
  for (int64_t t = 0; t < T; ++t)
    for (int64_t s = 0; s < T; ++s)
      if (mask.typed_data()[t * T + s]) (*paths)[t * T + (*lengths)[t]++] = int32_t(s);
  const float *qd = q.typed_data(), *kd = k.typed_data(), *vd = v.typed_data();
  const float *ck = cached_k.typed_data(), *cv = cached_v.typed_data();
  const int32_t* starts = start.typed_data();
  float* y = out->typed_data();
  const float scale = 1.0f / std::sqrt(float(H));
  auto unit = [=](int64_t i) {
    const int64_t t = i % T, g = i / T % G, b = i / T / G, row = b * G + g;
    const int64_t begin = std::clamp<int64_t>(starts[b], 0, S), count = begin + (*lengths)[t];
    const int64_t first = window ? std::max<int64_t>(0, count - window) : 0;
    const int32_t* path = paths->data() + t * T;
    const Rows keys{ck + row * S * H, kd + row * T * H, path, begin, H};
    const Rows values{cv + row * S * H, vd + row * T * H, path, begin, H};
    thread_local std::vector<float> scores;
    scores.resize(count + kLanes);
    for (int64_t r = 0; r < R; ++r) {
      const int64_t head = (b * T + t) * N + g * R + r;
      attend(qd + head * H, keys, values, first, count, scale, scores.data(), y + head * H);
    }
  };
  Share(pool, B * G * T, unit);
  return ffi::Error::Success();
}

}  // namespace

extern "C" int medusa_panel_width() { return kPanel; }
extern "C" int medusa_attends(int head_dim) { return AttendFor(head_dim) != nullptr; }

XLA_FFI_DEFINE_HANDLER_SYMBOL(medusa_product, ProductHandler,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::U32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<int64_t>("per_word"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(medusa_attend, AttendHandler,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::PRED>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<int64_t>("window"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(medusa_norm, NormHandler,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<double>("eps"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(medusa_read, ReadHandler,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(medusa_rotate, RotateHandler,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
