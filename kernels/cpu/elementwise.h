// Normalisation, activation, rotary embedding and the KV store.
#pragma once

#include "kernels.h"
#include "kv_types.h"
#include "simd.h"
#include "team.h"

// Under this many values the work is shorter than waking a thread.
constexpr int64_t kParallelValues = 16384;

// body(row) for each row, by as many threads as `values` values in all are worth.
template <typename Body>
INLINE void for_rows(int64_t rows, int64_t values, int threads, const Body& body) {
  team_for(values < kParallelValues ? 1 : threads, rows, max(1, rows / (8 * threads)), body);
}

INLINE float inverse_rms(const float* x, int64_t n, float eps) {
  Vec squares = {}, squares2 = {};
  int64_t i = 0;
  for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
    const Vec a = load(x + i), b = load(x + i + kLanes);
    squares += a * a;
    squares2 += b * b;
  }
  float total = sum(squares + squares2);
  for (; i < n; ++i) total += x[i] * x[i];
  return 1.0f / __builtin_sqrtf(total / static_cast<float>(n) + eps);
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

template <typename Stored>
static void write_as(Heads k, Heads v, Rotary rotary, Cache cache, const int64_t* slots, int64_t tokens, int threads) {
  const int64_t size = cache.block_size, dim = cache.head_dim;
  for_rows(tokens, tokens * k.heads * dim * 2, threads, [&](int64_t t) {
    if (slots[t] < 0) return;
    const int64_t block = slots[t] / size, offset = slots[t] % size;
    for (int64_t h = 0; h < k.heads; ++h) {
      const float* from = k.data + t * k.token_stride + h * dim;
      alignas(64) float turned[kMaxHeadDim];
      if (rotary.cos) {
        const int64_t row = rotary.positions[t] * rotary.half;
        turn(from, rotary.cos + row, rotary.sin + row, turned, rotary.half, dim);
        from = turned;
      }
      const int64_t page = (block * cache.kv_heads + h) * page_bytes<Stored>(cache);
      char *k_page = static_cast<char*>(cache.k) + page, *v_page = static_cast<char*>(cache.v) + page;
      alignas(64) Stored stored[kMaxHeadDim];
      const float k_scale = to_stored(from, stored, dim);
      Stored* k_to = reinterpret_cast<Stored*>(k_page) + offset;
      for (int64_t d = 0; d < dim; ++d) k_to[d * size] = stored[d];
      const float v_scale =
          to_stored(v.data + t * v.token_stride + h * dim, reinterpret_cast<Stored*>(v_page) + offset * dim, dim);
      if (kHasScales<Stored>) {
        scales_of(k_page, cache)[offset] = k_scale;
        scales_of(v_page, cache)[offset] = v_scale;
      }
    }
  });
}

static void write(Heads k, Heads v, Rotary rotary, Cache cache, const int64_t* slots, int64_t tokens, int threads) {
  switch (cache.type) {
    case KvType::kFloat:
      return write_as<float>(k, v, rotary, cache, slots, tokens, threads);
    case KvType::kBfloat16:
      return write_as<Bfloat16>(k, v, rotary, cache, slots, tokens, threads);
    case KvType::kInt8:
      return write_as<int8_t>(k, v, rotary, cache, slots, tokens, threads);
  }
}
