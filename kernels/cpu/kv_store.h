// The KV store: a step's keys, turned, and values as words of their pages.
#pragma once

#include "elementwise.h"
#include "hadamard.h"
#include "kernels.h"
#include "kv_types.h"
#include "simd.h"

typedef uint32_t Word __attribute__((may_alias));

constexpr int64_t kMostStored = 16;  // tokens that a thread takes at once, at most

// Tokens from t on, below `last`, whose values share words: all of a word's, or one.
template <typename Stored>
INLINE int64_t sharing(const int64_t* slots, int64_t t, int64_t last) {
  constexpr int64_t most = kPerWord<Stored>;
  if (slots[t] % most != 0 || t + most > last) return 1;
  for (int64_t i = 1; i < most; ++i)
    if (slots[t + i] != slots[t] + i) return 1;
  return most;
}

// Whole words of V: [dim], from a token's numbers in each of stored: [kPerWord, kMaxHeadDim].
INLINE void join(const float (*stored)[kMaxHeadDim], Word* to, int64_t dim) {
  for (int64_t d = 0; d < dim; ++d) to[d] = __builtin_bit_cast(uint32_t, stored[0][d]);
}
INLINE void join(const Bfloat16 (*stored)[kMaxHeadDim], Word* to, int64_t dim) {
  for (int64_t d = 0; d < dim; ++d) to[d] = stored[0][d].bits | static_cast<uint32_t>(stored[1][d].bits) << 16;
}
INLINE void join(const KvCode (*stored)[kMaxHeadDim], Word* to, int64_t dim) {
  for (int64_t d = 0; d < dim; ++d)
    to[d] = stored[0][d].bits | static_cast<uint32_t>(stored[1][d].bits) << 8 |
            static_cast<uint32_t>(stored[2][d].bits) << 16 | static_cast<uint32_t>(stored[3][d].bits) << 24;
}

template <typename Stored>
static void write_as(Heads k, Heads v, Rotary rotary, Cache cache, const int64_t* slots, int64_t tokens, int threads) {
  constexpr int64_t per_word = kPerWord<Stored>;
  const int64_t run = min(max(tokens / (8 * threads), 1), kMostStored);
  for_rows((tokens + run - 1) / run, tokens * k.heads * cache.head_dim * 2, threads, [=](int64_t i) {
    // Copies: what a store may change is read again after each.
    const int64_t size = cache.block_size, dim = cache.head_dim, words = dim / per_word;
    alignas(64) Stored stored[per_word][kMaxHeadDim];
    alignas(64) float turned[kMaxHeadDim];
    const int64_t last = min((i + 1) * run, tokens);
    int64_t count;
    for (int64_t t = i * run; t < last; t += count) {
      count = 1;
      if (slots[t] < 0) continue;
      count = sharing<Stored>(slots, t, last);
      const int64_t block = slots[t] / size, offset = slots[t] % size;
      for (int64_t h = 0; h < k.heads; ++h) {
        const int64_t page = (block * cache.kv_heads + h) * page_bytes<Stored>(cache);
        char *k_page = static_cast<char*>(cache.k) + page, *v_page = static_cast<char*>(cache.v) + page;
        for (int64_t j = 0; j < count; ++j) {
          const float* from = k.data + (t + j) * k.token_stride + h * dim;
          if (rotary.cos) {
            const int64_t row = rotary.positions[t + j] * rotary.half;
            turn(from, rotary.cos + row, rotary.sin + row, turned, rotary.half, dim);
            from = turned;
          }
          if constexpr (kSpreads<Stored>) {
            spread(from, turned, dim, 1.0f);
            from = turned;
          }
          const float scale = to_stored(from, stored[0], dim);
          const Word* whole = reinterpret_cast<const Word*>(stored[0]);
          Word* to = reinterpret_cast<Word*>(k_page) + offset + j;
          for (int64_t w = 0; w < words; ++w) to[w * size] = whole[w];
          if (kHasScales<Stored>) scales_of(k_page, cache)[offset + j] = scale;
        }
        for (int64_t j = 0; j < count; ++j) {
          const float scale = to_stored(v.data + (t + j) * v.token_stride + h * dim, stored[j], dim);
          if (kHasScales<Stored>) scales_of(v_page, cache)[offset + j] = scale;
        }
        Word* to = reinterpret_cast<Word*>(v_page) + offset / per_word * dim;
        if (count == per_word) {
          join(stored, to, dim);
        } else {
          Stored* parts = reinterpret_cast<Stored*>(to) + offset % per_word;
          for (int64_t d = 0; d < dim; ++d) parts[d * per_word] = stored[0][d];
        }
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
      return write_as<KvCode>(k, v, rotary, cache, slots, tokens, threads);
  }
}
