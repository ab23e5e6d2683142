// Where the largest number of each row stands.
#pragma once

#include "elementwise.h"
#include "kernels.h"
#include "simd.h"

INLINE int64_t first_nan(const float* x, int64_t n) {
  int64_t i = 0;
  while (i < n && x[i] == x[i]) ++i;
  return i;
}

// Each lane keeps its own largest number and the vector that first had it.
INLINE int64_t argmax_row(const float* x, int64_t n) {
  Vec top = splat(-__builtin_inff());
  IntVec where = {}, bad = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const Vec v = load(x + i);
    const IntVec more = v > top;
    bad |= v != v;
    top = more ? v : top;
    where = more ? splat(static_cast<int32_t>(i)) : where;
  }
  if (reduce(bad, [](IntQuad a, IntQuad b) { return a | b; })) return first_nan(x, n);
  const float most = largest(top);
  int64_t best = n;
  for (int lane = 0; lane < kLanes; ++lane)
    if (top[lane] == most) best = min(best, where[lane] + lane);
  if (most == -__builtin_inff()) best = 0;
  float found = most;
  for (; i < n; ++i) {
    if (x[i] != x[i]) return i;
    if (x[i] > found) {
      found = x[i];
      best = i;
    }
  }
  return best;
}

static void argmax(const float* x, int64_t stride, int64_t rows, int64_t n, int64_t* out, int threads) {
  for_rows(rows, rows * n, threads, [&](int64_t row) { out[row] = argmax_row(x + row * stride, n); });
}
