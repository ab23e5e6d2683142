// Normalisation, activation and rotary embedding.
#pragma once

#include "kernels.h"
#include "simd.h"
#include "team.h"

// Under this many values the work is shorter than waking a thread.
constexpr int64_t kParallelValues = 16384;

// body(row) for each row, by as many threads as `values` values in all are worth.
template <typename Body>
INLINE void for_rows(int64_t rows, int64_t values, int threads, const Body& body) {
  team_for(values < kParallelValues ? 1 : threads, rows, max(1, rows / (8 * threads)), body);
}

// 1 / RMS of n values, value(i) and values(i): of kLanes from i on.
template <typename Value, typename Values>
INLINE float inverse_rms_of(int64_t n, float eps, const Value& value, const Values& values) {
  Vec squares = {}, squares2 = {};
  int64_t i = 0;
  for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
    const Vec a = values(i), b = values(i + kLanes);
    squares += a * a;
    squares2 += b * b;
  }
  float total = sum(squares + squares2);
  for (; i < n; ++i) {
    const float a = value(i);
    total += a * a;
  }
  return 1.0f / __builtin_sqrtf(total / static_cast<float>(n) + eps);
}

INLINE float inverse_rms(const float* x, int64_t n, float eps) {
  return inverse_rms_of(n, eps, [&](int64_t i) { return x[i]; }, [&](int64_t i) { return load(x + i); });
}

// The same of a + b, which goes to `sums`.
INLINE float add_inverse_rms(const float* a, const float* b, float* sums, int64_t n, float eps) {
  return inverse_rms_of(
      n, eps, [&](int64_t i) { return sums[i] = a[i] + b[i]; },
      [&](int64_t i) {
        const Vec added = load(a + i) + load(b + i);
        store(sums + i, added);
        return added;
      });
}

INLINE void normalise(const float* x, const float* weight, float factor, float* out, int64_t n) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(out + i, load(weight + i) * (load(x + i) * factor));
  for (; i < n; ++i) out[i] = weight[i] * (x[i] * factor);
}

INLINE void add(const float* a, const float* b, float* out, int64_t n) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(out + i, load(a + i) + load(b + i));
  for (; i < n; ++i) out[i] = a[i] + b[i];
}

static void rms_norm(Rows x, const float* weight, float eps, float* out, int threads) {
  const int64_t rows = x.outer * x.inner, n = x.n;
  for_rows(rows, rows * n, threads, [&](int64_t row) {
    const float* from = x.data + (row / x.inner) * x.outer_stride + (row % x.inner) * x.inner_stride;
    normalise(from, weight, inverse_rms(from, n, eps), out + row * n, n);
  });
}

static void add_rms_norm(const float* x, const float* residual, const float* weight, float eps, float* out,
                         float* total, int64_t rows, int64_t n, int threads) {
  for_rows(rows, rows * n, threads, [&](int64_t row) {
    float* added = total + row * n;
    add(residual + row * n, x + row * n, added, n);
    normalise(added, weight, inverse_rms(added, n, eps), out + row * n, n);
  });
}

INLINE Vec silu(Vec x) { return x / (exp2(x * -kLog2e) + 1.0f); }

static void silu_and_mul(const float* x, int64_t stride, float* out, int64_t rows, int64_t n, int threads) {
  for_rows(rows, rows * n, threads, [&](int64_t row) {
    const float *gate = x + row * stride, *up = gate + n;
    float* to = out + row * n;
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) store(to + i, silu(load(gate + i)) * load(up + i));
    for (; i < n; ++i) to[i] = silu(splat(gate[i]))[0] * up[i];
  });
}

// Turn the first 2 * half of n values; the rest stay as they are.
INLINE void turn(const float* x, const float* cos, const float* sin, float* out, int64_t half, int64_t n) {
  int64_t i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    const Vec first = load(x + i), second = load(x + half + i), c = load(cos + i), s = load(sin + i);
    store(out + i, first * c - second * s);
    store(out + half + i, second * c + first * s);
  }
  for (; i < half; ++i) {
    const float first = x[i], second = x[half + i];
    out[i] = first * cos[i] - second * sin[i];
    out[half + i] = second * cos[i] + first * sin[i];
  }
  for (i = 2 * half; i < n; ++i) out[i] = x[i];
}

static void apply_rotary(Heads x, float* out, Rotary rotary, int64_t tokens, int64_t head_dim, int threads) {
  const int64_t half = rotary.half;
  for_rows(tokens, tokens * x.heads * head_dim, threads, [&](int64_t t) {
    const float *cos = rotary.cos + rotary.positions[t] * half, *sin = rotary.sin + rotary.positions[t] * half;
    for (int64_t h = 0; h < x.heads; ++h)
      turn(x.data + t * x.token_stride + h * head_dim, cos, sin, out + (t * x.heads + h) * head_dim, half,
           head_dim);
  });
}
