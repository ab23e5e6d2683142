// Paged causal attention with a running softmax, after FlashAttention (Dao et al., 2022).
//
// The queries of one sequence that share a KV head are rows (query token, head of the group); an item is up to
// kTileRows of them, so a decode step with grouped heads and a prompt chunk take the same path. Tokens go by in chunks:
// scores for a chunk, softmax, weighted sum of its values. K pages are transposed, so a vector holds the same
// dimension of kLanes tokens. Pages lie anywhere, where the hardware's prefetch stops at each page's end, so scores fetch
// the chunk's values ahead, and values the keys that come next. A row's result depends on its own tokens alone, bit for bit, not on the batch.
#pragma once

#include "kernels.h"
#include "simd.h"

constexpr int kMicroRows = 6;                     // rows held in registers
constexpr int kMicroVecs = kLanes == 16 ? 4 : 2;  // vectors held for each of them
constexpr int kMicroTokens = kMicroVecs * kLanes;
constexpr int kMinBlock = 16;

struct Scratch {
  alignas(64) float q[kTileRows * kMaxHeadDim];    // by micro tile: [head_dim][rows of the tile]
  alignas(64) float out[kTileRows * kMaxHeadDim];  // [rows, head_dim]
  alignas(64) float scores[kTileRows * kChunk];
  float top[kTileRows], weight[kTileRows], correction[kTileRows];
  int32_t limit[kTileRows];  // tokens that the row may see
};

// scores[r][t] = sum over d of q[d][r] * k[d][t], for ROWS rows and kMicroTokens tokens. v: these tokens' values.
template <int ROWS>
static void score_tile(const float* q, const float* const* k, const float* const* v, int64_t block_size, int64_t dim,
                       float* scores) {
  Vec acc[ROWS][kMicroVecs] = {};
  for (int64_t d = 0; d < dim; ++d) {
    Vec column[kMicroVecs];
    for (int j = 0; j < kMicroVecs; ++j) column[j] = load(k[j] + d * block_size);
    for (int j = 0; j < kMicroVecs; ++j) __builtin_prefetch(v[j] + d * kLanes);
    for (int r = 0; r < ROWS; ++r)
      for (int j = 0; j < kMicroVecs; ++j) acc[r][j] += column[j] * q[d * ROWS + r];
  }
  for (int r = 0; r < ROWS; ++r)
    for (int j = 0; j < kMicroVecs; ++j) store(scores + r * kChunk + j * kLanes, acc[r][j]);
}

// out[r][d] = out[r][d] * correction[r] + sum over tokens of weights[r][t] * v[t][d], for VECS vectors of d.
// ahead: pages to fetch, one beside each of v.
template <int ROWS, int VECS>
INLINE void value_tile(const float* weights, const float* const* v, const float* const* ahead, int64_t column,
                       int64_t block_size, int64_t dim, int64_t tokens, const float* correction, float* out) {
  Vec acc[ROWS][VECS];
  for (int r = 0; r < ROWS; ++r)
    for (int j = 0; j < VECS; ++j) acc[r][j] = load(out + r * dim + column + j * kLanes) * correction[r];
  for (int64_t start = 0; start < tokens; start += block_size) {
    const float *row = *v++ + column, *next = *ahead++ + column;
    const int64_t end = min(start + block_size, tokens);
    for (int64_t t = start; t < end; ++t, row += dim, next += dim) {
      for (int j = 0; j < VECS; ++j) __builtin_prefetch(next + j * kLanes);
      Vec value[VECS];
      for (int j = 0; j < VECS; ++j) value[j] = load(row + j * kLanes);
      for (int r = 0; r < ROWS; ++r)
        for (int j = 0; j < VECS; ++j) acc[r][j] += value[j] * weights[r * kChunk + t];
    }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int j = 0; j < VECS; ++j) store(out + r * dim + column + j * kLanes, acc[r][j]);
}

template <int ROWS>
static void value_rows(const float* weights, const float* const* v, const float* const* ahead, int64_t block_size,
                       int64_t dim, int64_t tokens, const float* correction, float* out) {
  int64_t d = 0;
  for (; d + kMicroVecs * kLanes <= dim; d += kMicroVecs * kLanes)
    value_tile<ROWS, kMicroVecs>(weights, v, ahead, d, block_size, dim, tokens, correction, out);
  for (; d < dim; d += kLanes)
    value_tile<ROWS, 1>(weights, v, ahead, d, block_size, dim, tokens, correction, out);
}

typedef void (*ScoreTile)(const float*, const float* const*, const float* const*, int64_t, int64_t, float*);
typedef void (*ValueRows)(const float*, const float* const*, const float* const*, int64_t, int64_t, int64_t,
                          const float*, float*);
static const ScoreTile kScoreTiles[kMicroRows + 1] = {
    nullptr, score_tile<1>, score_tile<2>, score_tile<3>, score_tile<4>, score_tile<5>, score_tile<6>};
static const ValueRows kValueRows[kMicroRows + 1] = {
    nullptr, value_rows<1>, value_rows<2>, value_rows<3>, value_rows<4>, value_rows<5>, value_rows<6>};

// Turn the `valid` first scores of a row into weights relative to the row's running maximum; the rest become 0.
static void softmax_row(float* scores, int64_t valid, int64_t tokens, float* top, float* weight, float* correction) {
  *correction = 1.0f;
  const int64_t padded = (valid + kLanes - 1) / kLanes * kLanes;
  if (valid > 0) {
    for (int64_t t = valid; t < padded; ++t) scores[t] = -__builtin_inff();
    Vec tops = load(scores);
    for (int64_t t = kLanes; t < padded; t += kLanes) tops = max(tops, load(scores + t));
    const float before = *top, now = largest(tops) > before ? largest(tops) : before;
    Vec sums = {};
    for (int64_t t = 0; t < padded; t += kLanes) {
      const Vec p = exp2(load(scores + t) - now);
      store(scores + t, p);
      if (t + kLanes <= valid) sums += p;
    }
    float total = sum(sums);
    for (int64_t t = valid / kLanes * kLanes; t < valid; ++t) total += scores[t];
    // The first chunk has nothing to correct, and -inf - now would say NaN where now is -inf too.
    *correction = before == -__builtin_inff() ? 0.0f : exp2(splat(before - now))[0];
    *weight = *weight * *correction + total;
    *top = now;
  }
  for (int64_t t = valid; t < tokens; ++t) scores[t] = 0.0f;
}

// Add up the parts of a group in their order, whatever order they finished in.
static void merge_parts(const Attention& a, const Item& item, const Group& group) {
  const int64_t dim = a.cache.head_dim, heads = a.heads / a.cache.kv_heads, stride = item.rows * (dim + 2);
  for (int64_t r = 0; r < item.rows; ++r) {
    const float* part = a.partial + group.offset;
    float top = -__builtin_inff();
    for (int32_t i = 0; i < group.parts; ++i) {
      const float here = part[i * stride + item.rows * dim + r];
      top = here > top ? here : top;
    }
    const int64_t row = item.row + r, token = a.query_start[item.sequence] + row / heads;
    float* out = a.out + (token * a.heads + item.kv_head * heads + row % heads) * dim;
    for (int64_t d = 0; d < dim; ++d) out[d] = 0.0f;
    float weight = 0.0f;
    for (int32_t i = 0; i < group.parts; ++i, part += stride) {
      const float here = part[item.rows * dim + r];
      const float share = part[item.rows * (dim + 1) + r];
      if (share == 0.0f) continue;  // the row sees no token of this part
      const float factor = exp2(splat(here - top))[0];
      weight += share * factor;
      for (int64_t d = 0; d < dim; d += kLanes) store(out + d, load(out + d) + load(part + r * dim + d) * factor);
    }
    for (int64_t d = 0; d < dim; d += kLanes) store(out + d, load(out + d) / weight);
  }
}

constexpr int kPages = kChunk / kMinBlock;

struct Pages {
  const float *k[kPages], *v[kPages];
  int64_t count;
};

// The pages of `item`'s tokens from `chunk` on, at that token: a block may hold several chunks.
INLINE void find_pages(const Attention& a, const Item& item, int64_t chunk, Pages& pages) {
  const int64_t size = a.cache.block_size, page = a.cache.head_dim * size, offset = chunk % size;
  const int32_t* table = a.block_tables + a.rows[item.sequence] * a.max_blocks;
  const int64_t end = min(chunk + chunk_tokens(size), item.last);
  pages.count = 0;
  for (int64_t t = chunk; t < end; t += size) {
    const int64_t start = (table[t / size] * a.cache.kv_heads + item.kv_head) * page;
    pages.k[pages.count] = a.cache.k + start + offset;
    pages.v[pages.count++] = a.cache.v + start + offset * a.cache.head_dim;
  }
}

// following: the item that this thread takes next, or null.
static void attend_item(const Attention& a, const Item& item, const Item* following, Scratch& s) {
  const int64_t dim = a.cache.head_dim, size = a.cache.block_size, heads = a.heads / a.cache.kv_heads;
  const int64_t query_start = a.query_start[item.sequence];
  const int64_t before = a.seq_lens[item.sequence] - (a.query_start[item.sequence + 1] - query_start);

  // Micro tiles of even height: 8 rows are 4 + 4, not 6 + 2.
  const int tiles = (item.rows + kMicroRows - 1) / kMicroRows;
  int tile_start[kTileRows / kMicroRows + 2];
  for (int i = 0; i <= tiles; ++i) tile_start[i] = item.rows * i / tiles;

  const float scale = a.scale * kLog2e;  // the softmax works in powers of two
  for (int i = 0; i < tiles; ++i) {
    const int height = tile_start[i + 1] - tile_start[i];
    for (int r = tile_start[i]; r < tile_start[i + 1]; ++r) {
      const int64_t row = item.row + r, token = query_start + row / heads;
      const float* from = a.q + token * a.q_stride + (item.kv_head * heads + row % heads) * dim;
      float* to = s.q + tile_start[i] * dim + (r - tile_start[i]);
      for (int64_t d = 0; d < dim; ++d) to[d * height] = from[d] * scale;
      s.limit[r] = static_cast<int32_t>(before + row / heads + 1);
      s.top[r] = -__builtin_inff();
      s.weight[r] = 0.0f;
    }
  }
  for (int64_t i = 0; i < item.rows * dim; i += kLanes) store(s.out + i, Vec{});

  const int64_t step = chunk_tokens(size);
  Pages pages, next;
  find_pages(a, item, item.first, pages);
  for (int64_t chunk = item.first; chunk < item.last; chunk += step) {
    const int64_t tokens = min(step, item.last - chunk);
    for (int64_t t = 0; t < tokens; t += kMicroTokens) {
      const float *k[kMicroVecs], *v[kMicroVecs];
      for (int j = 0; j < kMicroVecs; ++j) {
        const int64_t at = t + j * kLanes, block = min(at / size, pages.count - 1);
        const int64_t offset = at / size == block ? at % size : 0;  // past the end: read, then masked
        k[j] = pages.k[block] + offset;
        v[j] = pages.v[block] + offset * dim;
      }
      for (int i = 0; i < tiles; ++i) {
        if (s.limit[tile_start[i + 1] - 1] <= chunk + t) continue;
        kScoreTiles[tile_start[i + 1] - tile_start[i]](s.q + tile_start[i] * dim, k, v, size, dim,
                                                       s.scores + tile_start[i] * kChunk + t);
      }
    }
    for (int r = 0; r < item.rows; ++r)
      softmax_row(s.scores + r * kChunk, max(min(s.limit[r] - chunk, tokens), 0), tokens, s.top + r, s.weight + r,
                  s.correction + r);
    next.count = 0;
    if (chunk + step < item.last) {
      find_pages(a, item, chunk + step, next);
    } else if (following) {
      find_pages(a, *following, following->first, next);
    }
    const float* ahead[kPages];
    for (int64_t b = 0; b < pages.count; ++b) ahead[b] = b < next.count ? next.k[b] : pages.v[b];
    for (int i = 0; i < tiles; ++i) {
      const int first = tile_start[i];
      const int64_t seen = min(s.limit[tile_start[i + 1] - 1] - chunk, tokens);  // no value past the last row's limit
      if (seen <= 0) continue;
      kValueRows[tile_start[i + 1] - first](s.scores + first * kChunk, pages.v, ahead, size, dim, seen,
                                            s.correction + first, s.out + first * dim);
    }
    pages = next;
  }

  if (item.group >= 0) {
    Group& group = a.groups[item.group];
    float* part = a.partial + group.offset + item.part * item.rows * (dim + 2);
    for (int64_t i = 0; i < item.rows * dim; i += kLanes) store(part + i, load(s.out + i));
    for (int r = 0; r < item.rows; ++r) {
      part[item.rows * dim + r] = s.top[r];
      part[item.rows * (dim + 1) + r] = s.weight[r];
    }
    if (__atomic_sub_fetch(&group.remaining, 1, __ATOMIC_ACQ_REL) == 0) merge_parts(a, item, group);
    return;
  }
  for (int r = 0; r < item.rows; ++r) {
    const int64_t row = item.row + r, token = query_start + row / heads;
    float* out = a.out + (token * a.heads + item.kv_head * heads + row % heads) * dim;
    for (int64_t d = 0; d < dim; d += kLanes) store(out + d, load(s.out + r * dim + d) / s.weight[r]);
  }
}

static void attend(const Attention& a, int threads) {
  int64_t next = 0;
#pragma omp parallel num_threads(static_cast<int>(min(threads, a.num_items)))
  {
    Scratch scratch;
    int64_t i = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED);
    while (i < a.num_items) {
      const int64_t following = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED);
      attend_item(a, a.items[i], following < a.num_items ? &a.items[following] : nullptr, scratch);
      i = following;
    }
  }
}
