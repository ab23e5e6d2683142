// The two products of attention on a few rows whose sums stay in registers: scores, and weighted sums of values.
//
// Loops over rows and vectors are unrolled by pragma: else g++ 12 keeps the sums of some of these functions in memory.
#pragma once

#include "attention_products.h"
#include "kernels.h"
#include "kv_types.h"
#include "simd.h"

constexpr int kMicroRows = 6;                     // rows held in registers
constexpr int kMicroVecs = kLanes == 16 ? 4 : 2;  // vectors held for each of them, at most

constexpr int kPiece = 16;                   // tokens whose numbers lie together, whatever a block's size
constexpr int kQueryWords = kMaxHeadDim + 16;  // from one row's q to the next: a constant, no power of two

constexpr int kLineWords = 16;
constexpr int kLineVecs = kLineWords / kLanes;

// sums[r][j] += the words at words[j] times the rows' numbers x + r * STRIDE.
template <int ROWS, int VECS, int STRIDE, typename Stored>
INLINE void add_products(typename Product<Stored>::Sum (&sums)[ROWS][VECS], const LaneVec (&words)[VECS],
                         const int32_t* x) {
  typedef Product<Stored> P;
  if constexpr (P::kParts == 1) {
    typename P::Part parts[VECS][1];
#pragma GCC unroll 8
    for (int j = 0; j < VECS; ++j) P::split(words[j], parts[j]);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
      for (int j = 0; j < VECS; ++j) P::add(sums[r][j], parts[j], x + r * STRIDE);
  } else {  // a vector at a time: the parts of all would not leave room for the sums
#pragma GCC unroll 8
    for (int j = 0; j < VECS; ++j) {
      typename P::Part parts[P::kParts];
      P::split(words[j], parts);
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; ++r) P::add(sums[r][j], parts, x + r * STRIDE);
    }
  }
}

// Makes room below the sums of the digits so far, for those of the next.
template <int ROWS, int VECS, typename Sum>
INLINE void next_digit(Sum (&sums)[ROWS][VECS]) {
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
    for (int j = 0; j < VECS; ++j) sums[r][j] <<= kDigitBits;
}

// A piece's keys: words [head_dim / kPerWord, of stride block_size]; its values: [kPiece / kPerWord, head_dim].
struct Piece {
  const uint32_t *k, *v;
  const float *k_scales, *v_scales;  // where the type has scales
};

// scores[r][t] = sum over d of q[r][d] * k[d][t] for ROWS rows and VECS vectors of tokens, of which the first is number
// `vec` of the chunk. Fetches the tokens' values.
template <int ROWS, int VECS, typename Stored>
static void score_tile(const int32_t* q, const RowCode* rows, const Piece* pieces, int64_t vec, int64_t block_size,
                       int64_t dim, float* scores) {
  typedef Product<Stored> P;
  const int64_t steps = dim / kPerWord<Stored>;
  const uint32_t *k[VECS], *v[VECS];
#pragma GCC unroll 8
  for (int j = 0; j < VECS; ++j) {
    const int64_t first = (vec + j) * kLanes;
    k[j] = pieces[first / kPiece].k + first % kPiece;
    v[j] = pieces[first / kPiece].v + first % kPiece * steps;
  }
  typename P::Sum sums[ROWS][VECS];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
    for (int j = 0; j < VECS; ++j)
      if constexpr (kHasScales<Stored>) {
        sums[r][j] = splat(rows[r].start);
      } else {
        sums[r][j] = Vec{};
      }
  for (int digit = 0; digit < P::kDigits; ++digit) {
    if constexpr (P::kDigits > 1)
      if (digit > 0) next_digit(sums);
    for (int64_t i = 0; i < steps; ++i) {
      LaneVec words[VECS];
#pragma GCC unroll 8
      for (int j = 0; j < VECS; ++j) words[j] = *reinterpret_cast<const LaneVecUnaligned*>(k[j] + i * block_size);
      if (digit == 0 && i % kLineVecs == 0)
#pragma GCC unroll 8
        for (int j = 0; j < VECS; ++j) __builtin_prefetch(v[j] + i * kLanes);
      add_products<ROWS, VECS, kQueryWords, Stored>(sums, words, q + (digit * steps + i) * P::kParts);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
    for (int j = 0; j < VECS; ++j) {
      const int64_t first = (vec + j) * kLanes;
      if constexpr (kHasScales<Stored>) {
        const Vec scales = load(pieces[first / kPiece].k_scales + first % kPiece);
        store(scores + r * kChunk + first, __builtin_convertvector(sums[r][j], Vec) * rows[r].scale * scales);
      } else {
        store(scores + r * kChunk + first, sums[r][j]);
      }
    }
}

// out[r][d] = out[r][d] * correction[r] + sum over tokens of weights[r][t] * v[t][d], for VECS vectors of d and the
// chunk's tokens from `first`, where a piece begins, to `last`. ahead: words to fetch, beside those of each piece.
template <int ROWS, int VECS, typename Stored>
INLINE void value_tile(const int32_t* weights, const RowCode* rows, const Piece* pieces, const uint32_t* const* ahead,
                       int64_t column, int64_t dim, int64_t first, int64_t last, const float* correction, float* out) {
  typedef Product<Stored> P;
  constexpr int per_word = kPerWord<Stored>;
  typename P::Sum sums[ROWS][VECS];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
    for (int j = 0; j < VECS; ++j)
      if constexpr (kHasScales<Stored>) {
        sums[r][j] = splat(rows[r].start);
      } else {
        sums[r][j] = load(out + r * dim + column + j * kLanes) * correction[r];
      }
  for (int digit = 0; digit < P::kDigits; ++digit) {
    if constexpr (P::kDigits > 1)
      if (digit > 0) next_digit(sums);
    const int32_t* x = weights + (digit * kChunk + first) / per_word * P::kParts;
    for (int64_t t = first; t < last; t += kPiece) {
      const uint32_t *from = pieces[t / kPiece].v + column, *next = ahead[t / kPiece] + column;
      const int64_t count = min(last - t, kPiece);
      for (int64_t i = 0; i < count / per_word; ++i, from += dim, next += dim, x += P::kParts) {
        if (digit == 0)
#pragma GCC unroll 8
          for (int j = 0; j < VECS; j += kLineVecs) __builtin_prefetch(next + j * kLanes);
        LaneVec words[VECS];
#pragma GCC unroll 8
        for (int j = 0; j < VECS; ++j) words[j] = *reinterpret_cast<const LaneVecUnaligned*>(from + j * kLanes);
        add_products<ROWS, VECS, kChunk, Stored>(sums, words, x);
      }
      if constexpr (per_word > 1)
        if (count % per_word) {  // what the last word holds beyond `last` may be NaN
          const uint32_t kept = (1u << (count % per_word * sizeof(Stored) * 8)) - 1;
          LaneVec words[VECS];
#pragma GCC unroll 8
          for (int j = 0; j < VECS; ++j)
            words[j] = *reinterpret_cast<const LaneVecUnaligned*>(from + j * kLanes) & kept;
          add_products<ROWS, VECS, kChunk, Stored>(sums, words, x);
        }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
    for (int j = 0; j < VECS; ++j) {
      float* to = out + r * dim + column + j * kLanes;
      if constexpr (kHasScales<Stored>) {
        store(to, load(to) * correction[r] + __builtin_convertvector(sums[r][j], Vec) * rows[r].scale);
      } else {
        store(to, sums[r][j]);
      }
    }
}

template <int ROWS, typename Stored>
static void value_rows(const int32_t* weights, const RowCode* rows, const Piece* pieces, const uint32_t* const* ahead,
                       int64_t dim, int64_t first, int64_t last, const float* correction, float* out) {
  int64_t d = 0;
  for (; d + kMicroVecs * kLanes <= dim; d += kMicroVecs * kLanes)
    value_tile<ROWS, kMicroVecs, Stored>(weights, rows, pieces, ahead, d, dim, first, last, correction, out);
  for (; d < dim; d += kLanes)
    value_tile<ROWS, 1, Stored>(weights, rows, pieces, ahead, d, dim, first, last, correction, out);
}

// Scores of the vectors of tokens from `vec` to `end`, no wider than they are.
template <int ROWS, typename Stored>
static void score_rows(const int32_t* q, const RowCode* rows, const Piece* pieces, int64_t vec, int64_t end,
                       int64_t block_size, int64_t dim, float* scores) {
  for (; vec + kMicroVecs <= end; vec += kMicroVecs)
    score_tile<ROWS, kMicroVecs, Stored>(q, rows, pieces, vec, block_size, dim, scores);
  if constexpr (kMicroVecs > 2)
    for (; vec + 2 <= end; vec += 2) score_tile<ROWS, 2, Stored>(q, rows, pieces, vec, block_size, dim, scores);
  for (; vec < end; ++vec) score_tile<ROWS, 1, Stored>(q, rows, pieces, vec, block_size, dim, scores);
}

// Without a name: the linker would make one table of those of all instruction sets.
namespace {

template <typename Stored>
struct Tiles {
  typedef void (*Score)(const int32_t*, const RowCode*, const Piece*, int64_t, int64_t, int64_t, int64_t, float*);
  typedef void (*Value)(const int32_t*, const RowCode*, const Piece*, const uint32_t* const*, int64_t, int64_t, int64_t,
                        const float*, float*);
  static constexpr Score score[kMicroRows + 1] = {
      nullptr,
      score_rows<1, Stored>,
      score_rows<2, Stored>,
      score_rows<3, Stored>,
      score_rows<4, Stored>,
      score_rows<5, Stored>,
      score_rows<6, Stored>,
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
