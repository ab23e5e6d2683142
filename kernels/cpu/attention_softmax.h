// A row's scores become softmax weights, relative to the largest score that the row has met.
#pragma once

#include "kernels.h"
#include "simd.h"

// 2^x as `exp2`, but 0 below 2^-126: what is masked weighs nothing.
INLINE Vec weight_of(Vec x) {
  const Vec power = exp2(x);
  const IntVec kept = ~(x < -126.0f) & reinterpret_cast<const IntVec&>(power);
  return reinterpret_cast<const Vec&>(kept);
}

// Bound scores by soft_cap * tanh(score / soft_cap), in powers of two. They come as 2 * log2(e) / soft_cap times what
// they are.
static void cap_scores(float* scores, int64_t from, int64_t to, float soft_cap) {
  for (int64_t t = from / kLanes * kLanes; t < to; t += kLanes) {
    const Vec tanh = 1.0f - 2.0f / (exp2(load(scores + t)) + 1.0f);
    store(scores + t, tanh * (soft_cap * kLog2e));
  }
}

INLINE IntVec lane_numbers() {
  IntVec numbers;
  for (int i = 0; i < kLanes; ++i) numbers[i] = i;
  return numbers;
}

// Scores of the vector at t that lie outside `from` to `to` become -inf.
INLINE void mask(float* scores, int64_t t, int64_t from, int64_t to) {
  const IntVec at = lane_numbers() + static_cast<int32_t>(t);
  const IntVec seen = (at >= static_cast<int32_t>(from)) & (at < static_cast<int32_t>(to));
  store(scores + t, seen ? load(scores + t) : splat(-__builtin_inff()));
}

// The tokens of a chunk that a row sees.
struct Span {
  int64_t from, to;
};

constexpr int kMostRows = 16;  // of a call below

// scores: `rows` rows of stride kChunk. In each those that the row sees become weights, and the others from `first` to
// `last`, both at whole vectors, 0. top: what weights are relative to, the largest score so far; weight: their sum so
// far; correction: what to multiply sums so far by. scale(t, weights): what the vector at t becomes once it is summed.
//
// Step by step for all rows: a row's own steps wait for each other.
template <typename Scale>
INLINE void softmax_rows(float* scores, int rows, const Span* spans, int64_t first, int64_t last, float* top,
                         float* weight, float* correction, const Scale& scale) {
  alignas(64) float before[kMostRows] = {}, now[kMostRows] = {}, factor[kMostRows];
  for (int r = 0; r < rows; ++r, scores += kChunk) {
    before[r] = now[r] = top[r];
    const auto [from, to] = spans[r];
    if (from >= to) continue;
    const int64_t begin = from / kLanes * kLanes, end = (to + kLanes - 1) / kLanes * kLanes;
    if (begin < from) mask(scores, begin, from, to);
    if (to < end) mask(scores, end - kLanes, from, to);
    Vec tops = load(scores + begin);
    for (int64_t t = begin + kLanes; t < end; t += kLanes) tops = max(tops, load(scores + t));
    const float largest_here = largest(tops);
    top[r] = now[r] = largest_here > before[r] ? largest_here : before[r];
  }
  scores -= rows * kChunk;
  for (int r = 0; r < rows; r += kLanes) store(factor + r, exp2(load(before + r) - load(now + r)));
  for (int r = 0; r < rows; ++r, scores += kChunk) {
    const auto [from, to] = spans[r];
    const int64_t begin = from < to ? from / kLanes * kLanes : last;
    const int64_t end = from < to ? (to + kLanes - 1) / kLanes * kLanes : last;
    Vec sums = {};
    for (int64_t t = first; t < begin; t += kLanes) store(scores + t, Vec{});
    for (int64_t t = begin; t < end; t += kLanes) {
      const Vec weights = weight_of(load(scores + t) - now[r]);
      sums += weights;
      store(scores + t, scale(t, weights));
    }
    for (int64_t t = end; t < last; t += kLanes) store(scores + t, Vec{});
    // A row that has seen nothing has nothing to correct, and -inf - now would say NaN where now is -inf too.
    correction[r] = before[r] == -__builtin_inff() ? 0.0f : factor[r];
    weight[r] = weight[r] * correction[r] + sum(sums);
  }
}
