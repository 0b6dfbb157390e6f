// One layer of the backbone over few new tokens after a cached text (`model/layers.py: DecoderLayer`), in stages
// between which no thread goes to sleep.

#pragma once

#include <vector>

#include "attention.h"
#include "product.h"
#include "rows.h"
#include "threads.h"

namespace {

// B texts with T new tokens each, the last of M nodes after a text; R = B * T rows; S slots of cache; N query heads of
// size H, and G of keys and of values; rows of D values, F within the MLP. Attention reads I values of each row.
struct Layer {
  int64_t B, T, M, N, G, H, S, D, F, I, window;
  float eps, residual_multiplier, query_multiplier;
  Activation activation;
  const float *x, *read, *cos, *sin;      // [R, D], [R, I], [R, H]; read is null: attention reads the norm of x
  const int32_t* start;                   // [B], the slots of the first new tokens
  const int32_t* paths;                   // [T, M + 1], see `Paths`
  const float *attn_norm, *mlp_norm;      // [D]; mlp_norm is null: the MLP reads its rows as they are
  const float *q_norm, *k_norm;           // [H], or [N, H] and [G, H] (`all_heads`); null: heads have none
  bool all_heads, late;                   // late: heads are normed after their rotation
  const float *attn_out_norm, *mlp_out_norm;  // [D]; null: outputs are not normed
  Kernel qkv, out, gate_up, down;
  float *keys, *values;                   // [B, G, S, H]
  float* y;                               // [R, D]
  int64_t shares;                         // of the tokens of a text, for attention
  // Between the stages: [R, I], [R, N, H], [R, D], [R, F]; [R, N + 2 G, H], [R, N, H], [R, 2 F].
  Rows entered, attended, normed, inner;
  float *heads, *queries, *gates;
  float* added;  // [R, D]: outputs of attention and MLP that are normed or multiplied before they are added; else null

  // The end of a text, where its M nodes begin. A row that has ended may lack room for them.
  int64_t End(int64_t b) const { return std::clamp<int64_t>(start[b] - (M - T), 0, S - M); }

  // What attention reads of row r.
  void Enter(int64_t r) const {
    float* to = entered.floats + r * I;
    if (read) std::memcpy(to, read + r * I, I * 4);
    else NormRow(x + r * D, attn_norm, D, eps, to);
    entered.Make(r, 0, I);
  }

  // Rotates the query and key heads of row r; writes its keys and values to their slots.
  void Place(int64_t r) const {
    const int64_t b = r / T, slot = End(b) + M - T + r % T;
    if (q_norm && all_heads) {
      float *row = heads + r * (N + 2 * G) * H, *row_keys = row + N * H;
      NormRow(row, q_norm, N * H, eps, row);
      NormRow(row_keys, k_norm, G * H, eps, row_keys);
    }
    for (int64_t n = 0; n < N + 2 * G; ++n) {
      float* head = heads + (r * (N + 2 * G) + n) * H;
      const auto slot_of = [&](float* cache, int64_t g) { return cache + ((b * G + g) * S + slot) * H; };
      if (n >= N + G) {
        std::memcpy(slot_of(values, n - N - G), head, H * 4);
        continue;
      }
      const float* norm = all_heads ? nullptr : n < N ? q_norm : k_norm;
      if (norm && !late) NormRow(head, norm, H, eps, head);
      float* to = n < N ? queries + (r * N + n) * H : slot_of(keys, n - N);
      RotateHead(head, cos + r * H, sin + r * H, H, to);
      if (norm && late) NormRow(to, norm, H, eps, to);
    }
  }

  // Attention of some tokens of a text and one group of heads. Neighbouring units have different groups, so that
  // threads begin with different keys.
  void AttendSome(int64_t i) const {
    const int64_t g = i % G, b = i / G / shares, share = i / G % shares;
    const int64_t t = T * share / shares, rows = T * (share + 1) / shares - t;
    const int64_t heads = N / G, at = (b * G + g) * S * H, row = ((b * T + t) * N + g * heads) * H;
    Attend(queries + row, rows, N * H, heads, H, keys + at, values + at, End(b), paths + t * (M + 1), M, window,
           query_multiplier, attended.floats + row);
    if (!Aligned()) return;
    for (int64_t r = b * T + t; r < b * T + t + rows; ++r) attended.Make(r, g * heads * H, heads * H);
  }

  // Whether a group of heads is whole blocks; otherwise rows become integers once all their heads are done.
  bool Aligned() const { return N / G * H % 32 == 0; }
};

// Components of an MLP that one worker gates at a time.
constexpr int64_t kGated = 512;

// x + out(attention(norm(x))), then that + down(activation(gate) * up) of its norm.
inline void RunLayer(const ThreadPool& pool, const Layer& layer) {
  const int64_t R = layer.B * layer.T, gated = (layer.F + kGated - 1) / kGated;
  const std::array<int64_t, 11> sizes = {
      R, layer.qkv.Chunks(), R, layer.B * layer.shares * layer.G,
      layer.Aligned() || !layer.out.bits ? 0 : R, layer.out.Chunks(), R, layer.gate_up.Chunks(), R * gated, layer.down.Chunks(),
      layer.added ? R : 0};
  const std::array<const Kernel*, 11> kernels = {nullptr, &layer.qkv, nullptr, nullptr, nullptr, &layer.out,
                                                 nullptr, &layer.gate_up, nullptr, &layer.down, nullptr};
  const auto weights = [kernels](size_t s, int64_t i) { return kernels[s] ? kernels[s]->Weights(i) : nullptr; };
  const auto work = [gated, l = layer](size_t stage, int64_t i) {
    switch (stage) {
      case 0: return l.Enter(i);
      case 1: return MultiplyChunk(l.qkv, l.entered, i, nullptr, l.heads);
      case 2: return l.Place(i);
      case 3: return l.AttendSome(i);
      case 4: return l.attended.Make(i, 0, l.N * l.H);
      case 5: return MultiplyChunk(l.out, l.attended, i, l.added ? nullptr : l.x, l.added ? l.added : l.y);
      case 6: {
        float *row = l.y + i * l.D, *to = l.normed.floats + i * l.D;
        if (l.added)
          AddRow(l.x + i * l.D, l.added + i * l.D, l.attn_out_norm, l.D, l.eps, l.residual_multiplier, row);
        if (l.mlp_norm) NormRow(row, l.mlp_norm, l.D, l.eps, to);
        else std::memcpy(to, row, l.D * 4);
        return l.normed.Make(i, 0, l.D);
      }
      case 7: return MultiplyChunk(l.gate_up, l.normed, i, nullptr, l.gates);
      case 8: {
        const int64_t r = i / gated, begin = i % gated * kGated, n = std::min(kGated, l.F - begin);
        const bool has_gate = l.gate_up.outputs > l.F;
        const float* gate = l.gates + r * l.gate_up.stride + begin;
        GateRow(gate, has_gate ? gate + l.F : nullptr, n, l.activation, l.inner.floats + r * l.F + begin);
        return l.inner.Make(r, begin, n);
      }
      case 9: return MultiplyChunk(l.down, l.inner, i, l.added ? nullptr : l.y, l.added ? l.added : l.y);
      default: {
        float* row = l.y + i * l.D;
        return AddRow(row, l.added + i * l.D, l.mlp_out_norm, l.D, l.eps, l.residual_multiplier, row);
      }
    }
  };
  ShareStages(pool, sizes, work, weights);
}

}  // namespace
