// The two products of attention on a few rows whose sums stay in registers: scores, and weighted sums of values.
#pragma once

#include "kernels.h"
#include "kv_types.h"
#include "simd.h"

constexpr int kMicroRows = 6;                     // rows held in registers
constexpr int kMicroVecs = kLanes == 16 ? 4 : 2;  // vectors held for each of them
constexpr int kMicroTokens = kMicroVecs * kLanes;

constexpr int kLineBytes = 64;

// scores[r][t] = sum over d of q[d][r] * k[d][t], for ROWS rows and kMicroTokens tokens. v: these tokens' values;
// scales: of these keys.
template <int ROWS, typename Stored>
static void score_tile(const float* q, const Stored* const* k, const Stored* const* v, const float* const* scales,
                       int64_t block_size, int64_t dim, float* scores) {
  constexpr int64_t line = max(1, kLineBytes / (kLanes * static_cast<int>(sizeof(Stored))));
  Vec acc[ROWS][kMicroVecs] = {};
  for (int64_t d = 0; d < dim; ++d) {
    Vec column[kMicroVecs];
    for (int j = 0; j < kMicroVecs; ++j) column[j] = load_stored(k[j] + d * block_size);
    if (d % line == 0)
      for (int j = 0; j < kMicroVecs; ++j) __builtin_prefetch(v[j] + d * kLanes);
    for (int r = 0; r < ROWS; ++r)
      for (int j = 0; j < kMicroVecs; ++j) acc[r][j] += column[j] * q[d * ROWS + r];
  }
  for (int r = 0; r < ROWS; ++r)
    for (int j = 0; j < kMicroVecs; ++j)
      store(scores + r * kChunk + j * kLanes, kHasScales<Stored> ? acc[r][j] * load(scales[j]) : acc[r][j]);
}

// out[r][d] = out[r][d] * correction[r] + sum over tokens of weights[r][t] * v[t][d], for VECS vectors of d.
// ahead: pages to fetch, one beside each of v.
template <int ROWS, int VECS, typename Stored>
INLINE void value_tile(const float* weights, const Stored* const* v, const Stored* const* ahead, int64_t column,
                       int64_t block_size, int64_t dim, int64_t tokens, const float* correction, float* out) {
  constexpr int line = max(1, kLineBytes / (kLanes * static_cast<int>(sizeof(Stored))));
  Vec acc[ROWS][VECS];
  for (int r = 0; r < ROWS; ++r)
    for (int j = 0; j < VECS; ++j) acc[r][j] = load(out + r * dim + column + j * kLanes) * correction[r];
  for (int64_t start = 0; start < tokens; start += block_size) {
    const Stored *row = *v++ + column, *next = *ahead++ + column;
    const int64_t end = min(start + block_size, tokens);
    for (int64_t t = start; t < end; ++t, row += dim, next += dim) {
      for (int j = 0; j < VECS; j += line) __builtin_prefetch(next + j * kLanes);
      Vec value[VECS];
      for (int j = 0; j < VECS; ++j) value[j] = load_stored(row + j * kLanes);
      for (int r = 0; r < ROWS; ++r)
        for (int j = 0; j < VECS; ++j) acc[r][j] += value[j] * weights[r * kChunk + t];
    }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int j = 0; j < VECS; ++j) store(out + r * dim + column + j * kLanes, acc[r][j]);
}

template <int ROWS, typename Stored>
static void value_rows(const float* weights, const Stored* const* v, const Stored* const* ahead, int64_t block_size,
                       int64_t dim, int64_t tokens, const float* correction, float* out) {
  int64_t d = 0;
  for (; d + kMicroVecs * kLanes <= dim; d += kMicroVecs * kLanes)
    value_tile<ROWS, kMicroVecs>(weights, v, ahead, d, block_size, dim, tokens, correction, out);
  for (; d < dim; d += kLanes)
    value_tile<ROWS, 1>(weights, v, ahead, d, block_size, dim, tokens, correction, out);
}

// Without a name: the linker would make one table of those of all instruction sets.
namespace {

template <typename Stored>
struct Tiles {
  typedef void (*Score)(const float*, const Stored* const*, const Stored* const*, const float* const*, int64_t, int64_t,
                        float*);
  typedef void (*Value)(const float*, const Stored* const*, const Stored* const*, int64_t, int64_t, int64_t,
                        const float*, float*);
  static constexpr Score score[kMicroRows + 1] = {
      nullptr,
      score_tile<1, Stored>,
      score_tile<2, Stored>,
      score_tile<3, Stored>,
      score_tile<4, Stored>,
      score_tile<5, Stored>,
      score_tile<6, Stored>,
  };
  static constexpr Value value[kMicroRows + 1] = {
      nullptr,
      value_rows<1, Stored>,
      value_rows<2, Stored>,
      value_rows<3, Stored>,
      value_rows<4, Stored>,
      value_rows<5, Stored>,
      value_rows<6, Stored>,
  };
};

}  // namespace
