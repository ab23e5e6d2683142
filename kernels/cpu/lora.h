// Low-rank adapters: y += (x A) B for the tokens of each adapter.
//
// Sums run in the order of k and of the ranks, whatever tokens share a tile, so a token's result is the same bits in
// every batch.
#pragma once

#include "kernels.h"
#include "simd.h"
#include "team.h"

constexpr int kLoraRows = 4;  // tokens held in registers
constexpr int kLoraVecs = 3;  // vectors of columns held for each of them

// Under this many products the work is shorter than waking a thread.
constexpr int64_t kParallelProducts = 1 << 17;

template <int N>
struct Count {
  static constexpr int value = N;
};

// sums[r][j] += x[r][i] * w[i][j] over i below k, for VECS vectors of columns; rows of w lie `stride` apart.
template <int ROWS, int VECS>
INLINE void lora_sums(const float* const* x, const float* w, int64_t stride, int64_t k, Vec (&sums)[ROWS][VECS]) {
  for (int64_t i = 0; i < k; ++i, w += stride) {
    Vec weight[VECS];
    for (int j = 0; j < VECS; ++j) weight[j] = load(w + j * kLanes);
    for (int r = 0; r < ROWS; ++r)
      for (int j = 0; j < VECS; ++j) sums[r][j] += weight[j] * x[r][i];
  }
}

// out[r] += x[r] W over `columns` columns.
template <int ROWS>
INLINE void lora_product(const float* const* x, const float* w, int64_t stride, int64_t k, float* const* out,
                         int64_t columns) {
  int64_t c = 0;
  const auto vectors = [&](auto vecs) {
    constexpr int VECS = decltype(vecs)::value;
    Vec sums[ROWS][VECS] = {};
    lora_sums<ROWS, VECS>(x, w + c, stride, k, sums);
    for (int r = 0; r < ROWS; ++r)
      for (int j = 0; j < VECS; ++j) {
        float* to = out[r] + c + j * kLanes;
        store(to, load(to) + sums[r][j]);
      }
    c += VECS * kLanes;
  };
  while (c + kLoraVecs * kLanes <= columns) vectors(Count<kLoraVecs>());
  while (c + 2 * kLanes <= columns) vectors(Count<2>());
  while (c + kLanes <= columns) vectors(Count<1>());
  for (; c < columns; ++c)
    for (int r = 0; r < ROWS; ++r) {
      float total = 0.0f;
      for (int64_t i = 0; i < k; ++i) total += x[r][i] * w[i * stride + c];
      out[r][c] += total;
    }
}

template <int ROWS>
static void lora_rows(const Lora& a, int64_t slot, const int32_t* tokens) {
  alignas(64) float low[ROWS][kMaxLoraWidth];
  const int64_t width = a.num_parts * a.rank;
  const float *x[ROWS], *h[ROWS];
  float *y[ROWS], *to[ROWS];
  for (int r = 0; r < ROWS; ++r) {
    for (int64_t i = 0; i < width; ++i) low[r][i] = 0.0f;
    x[r] = a.x + tokens[r] * a.x_stride;
    y[r] = a.y + tokens[r] * a.y_stride;
    to[r] = low[r];
  }
  lora_product<ROWS>(x, a.a + slot * a.k * width, width, a.k, to, width);
  const float* b = a.b + slot * a.rank * a.n;
  for (int64_t part = 0, first = 0; part < a.num_parts; first += a.parts[part++]) {
    for (int r = 0; r < ROWS; ++r) {
      h[r] = low[r] + part * a.rank;
      to[r] = y[r] + first;
    }
    lora_product<ROWS>(h, b + first, a.n, a.rank, to, a.parts[part]);
  }
}

static void add_lora(const Lora& a, int threads) {
  constexpr int64_t turns = kLoraTile / kLoraRows;
  const int64_t products = a.num_tokens * a.rank * (a.k * a.num_parts + a.n);
  team_for(products < kParallelProducts ? 1 : threads, a.num_tiles * turns, 1, [&](int64_t i) {
    const int32_t *tile = a.tiles + 3 * (i / turns), *tokens = a.tokens + tile[1] + i % turns * kLoraRows;
    const int64_t left = a.tokens + tile[2] - tokens;
    if (left >= kLoraRows) return lora_rows<kLoraRows>(a, tile[0], tokens);
    for (int64_t r = 0; r < left; ++r) lora_rows<1>(a, tile[0], tokens + r);
  });
}
