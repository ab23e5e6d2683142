// Paged causal attention with a running softmax, after FlashAttention (Dao et al., 2022).
//
// The queries of one sequence that share a KV head are rows (query token, head of the group); an item is up to
// kTileRows of them, so a decode step with grouped heads and a prompt chunk take the same path. Tokens go by in chunks:
// scores for a chunk, softmax, weighted sum of its values. K pages are transposed, so a vector holds the same
// dimension of kLanes tokens. Pages lie anywhere, where the hardware's prefetch stops at each page's end, so scores
// fetch the chunk's values ahead, and values the keys that come next. Stored numbers are widened in registers; the
// scales of int8 multiply scores and softmax weights. Under a window, pages that no row sees any more are passed over.
// A row's result depends on its own tokens alone, bit for bit, not on the batch.
#pragma once

#include "attention_tiles.h"
#include "kernels.h"
#include "kv_types.h"
#include "simd.h"
#include "team.h"
#include "widened.h"

constexpr int kMinBlock = 16;

struct Scratch {
  alignas(64) float q[kTileRows * kMaxHeadDim];    // by micro tile: [head_dim][rows of the tile]
  alignas(64) float out[kTileRows * kMaxHeadDim];  // [rows, head_dim]
  alignas(64) float scores[kTileRows * kChunk];
  float top[kTileRows], weight[kTileRows], correction[kTileRows];
  int32_t limit[kTileRows], start[kTileRows];  // the row may see the tokens from start to limit
  alignas(64) float keys[kChunk * kMaxHeadDim], values[kChunk * kMaxHeadDim];  // a chunk's, widened
};

// Bound a row's scores by soft_cap * tanh(score / soft_cap), in powers of two. They come as 2 * log2(e) / soft_cap times
// what they are.
static void cap_row(float* scores, int64_t from, int64_t to, float soft_cap) {
  for (int64_t t = from / kLanes * kLanes; t < to; t += kLanes) {
    const Vec tanh = 1.0f - 2.0f / (exp2(load(scores + t)) + 1.0f);
    store(scores + t, tanh * (soft_cap * kLog2e));
  }
}

// Turn a row's scores from `from` to `to` into weights relative to the row's running maximum; the rest become 0.
static void softmax_row(float* scores, int64_t from, int64_t to, int64_t tokens, float* top, float* weight,
                        float* correction) {
  *correction = 1.0f;
  int64_t filled = 0;
  if (from < to) {
    const int64_t begin = from / kLanes * kLanes, padded = (to + kLanes - 1) / kLanes * kLanes;
    for (int64_t t = 0; t < begin; ++t) scores[t] = 0.0f;
    for (int64_t t = begin; t < from; ++t) scores[t] = -__builtin_inff();
    for (int64_t t = to; t < padded; ++t) scores[t] = -__builtin_inff();
    Vec tops = load(scores + begin);
    for (int64_t t = begin + kLanes; t < padded; t += kLanes) tops = max(tops, load(scores + t));
    const float before = *top, now = largest(tops) > before ? largest(tops) : before;
    Vec sums = {};
    for (int64_t t = begin; t < padded; t += kLanes) {
      const Vec p = exp2(load(scores + t) - now);
      store(scores + t, p);
      if (t + kLanes <= to) sums += p;
    }
    float total = sum(sums);
    for (int64_t t = to / kLanes * kLanes; t < to; ++t) total += scores[t];
    for (int64_t t = begin; t < from; ++t) scores[t] = 0.0f;  // was 2^-126: nothing, in a sum with the 1 of the maximum
    // The first chunk has nothing to correct, and -inf - now would say NaN where now is -inf too.
    *correction = before == -__builtin_inff() ? 0.0f : exp2(splat(before - now))[0];
    *weight = *weight * *correction + total;
    *top = now;
    filled = to;
  }
  for (int64_t t = filled; t < tokens; ++t) scores[t] = 0.0f;
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

template <typename Stored>
struct Pages {
  const Stored *k[kPages], *v[kPages];
  const float *k_scales[kPages], *v_scales[kPages];  // where the type has scales
  int64_t count;
};

// The pages of `item`'s tokens from `chunk` on, at that token: a block may hold several chunks.
template <typename Stored>
INLINE void find_pages(const Attention& a, const Item& item, int64_t chunk, Pages<Stored>& pages) {
  const int64_t size = a.cache.block_size, bytes = page_bytes<Stored>(a.cache), offset = chunk % size;
  const int32_t* table = a.block_tables + a.rows[item.sequence] * a.max_blocks;
  const int64_t end = min(chunk + chunk_tokens(size), item.last);
  pages.count = 0;
  for (int64_t t = chunk; t < end; t += size) {
    const int64_t start = (table[t / size] * a.cache.kv_heads + item.kv_head) * bytes;
    const char *k = static_cast<const char*>(a.cache.k) + start, *v = static_cast<const char*>(a.cache.v) + start;
    pages.k[pages.count] = reinterpret_cast<const Stored*>(k) + offset;
    pages.v[pages.count] = reinterpret_cast<const Stored*>(v) + offset * a.cache.head_dim;
    pages.k_scales[pages.count] = kHasScales<Stored> ? scales_of(k, a.cache) + offset : nullptr;
    pages.v_scales[pages.count++] = kHasScales<Stored> ? scales_of(v, a.cache) + offset : nullptr;
  }
}

constexpr int kWidenTiles = 3;  // from so many tiles on a chunk is widened once for all, not by each

// Give the softmax weights of `tokens` tokens the scales of their values.
INLINE void scale_weights(float* weights, const float* const* scales, int64_t block_size, int64_t tokens) {
  for (int64_t start = 0; start < tokens; start += block_size, ++scales)
    for (int64_t t = 0; t < min(block_size, tokens - start); t += kLanes)
      store(weights + start + t, load(weights + start + t) * load(*scales + t));
}

// following: the item that this thread takes next, or null.
template <typename Stored>
static void attend_item(const Attention& a, const Item& item, const Item* following, Scratch& s) {
  const int64_t dim = a.cache.head_dim, size = a.cache.block_size, heads = a.heads / a.cache.kv_heads;
  const int64_t query_start = a.query_start[item.sequence];
  const int64_t before = a.seq_lens[item.sequence] - (a.query_start[item.sequence + 1] - query_start);

  // Micro tiles of even height: 8 rows are 4 + 4, not 6 + 2.
  const int tiles = (item.rows + kMicroRows - 1) / kMicroRows;
  int tile_start[kTileRows / kMicroRows + 2];
  for (int i = 0; i <= tiles; ++i) tile_start[i] = item.rows * i / tiles;

  // The softmax works in powers of two, and the soft cap on twice the score.
  const float scale = a.scale * kLog2e * (a.soft_cap > 0.0f ? 2.0f / a.soft_cap : 1.0f);
  for (int i = 0; i < tiles; ++i) {
    const int height = tile_start[i + 1] - tile_start[i];
    for (int r = tile_start[i]; r < tile_start[i + 1]; ++r) {
      const int64_t row = item.row + r, token = query_start + row / heads;
      const float* from = a.q + token * a.q_stride + (item.kv_head * heads + row % heads) * dim;
      float* to = s.q + tile_start[i] * dim + (r - tile_start[i]);
      for (int64_t d = 0; d < dim; ++d) to[d * height] = from[d] * scale;
      s.limit[r] = static_cast<int32_t>(before + row / heads + 1);
      s.start[r] = a.window > 0 ? static_cast<int32_t>(max(s.limit[r] - a.window, 0)) : 0;
      s.top[r] = -__builtin_inff();
      s.weight[r] = 0.0f;
    }
  }
  for (int64_t i = 0; i < item.rows * dim; i += kLanes) store(s.out + i, Vec{});

  const int64_t step = chunk_tokens(size);
  const bool widens = sizeof(Stored) < sizeof(float) && tiles >= kWidenTiles;
  typedef typename Widened<Stored>::Type Wide;
  const Wide *wide_keys = reinterpret_cast<const Wide*>(s.keys), *wide_values = reinterpret_cast<const Wide*>(s.values);
  Pages<Stored> pages, next;
  find_pages(a, item, item.first, pages);
  for (int64_t chunk = item.first; chunk < item.last; chunk += step) {
    const int64_t tokens = min(step, item.last - chunk);
    if (widens) widen(pages.k, pages.v, size, dim, tokens, s.keys, s.values);
    const int64_t skipped = max(s.start[0] - chunk, 0) / kMicroTokens * kMicroTokens;  // the first row sees furthest back
    for (int64_t t = skipped; t < tokens; t += kMicroTokens) {
      const Stored *k[kMicroVecs], *v[kMicroVecs];
      const Wide *wide_k[kMicroVecs], *wide_v[kMicroVecs];
      const float* scales[kMicroVecs];
      for (int j = 0; j < kMicroVecs; ++j) {
        const int64_t at = t + j * kLanes, block = min(at / size, pages.count - 1);
        const int64_t offset = at / size == block ? at % size : 0;  // past the end: read, then masked
        k[j] = pages.k[block] + offset;
        v[j] = pages.v[block] + offset * dim;
        scales[j] = kHasScales<Stored> ? pages.k_scales[block] + offset : nullptr;
        wide_k[j] = wide_keys + min(at, kChunk - kLanes);
        wide_v[j] = wide_values;
      }
      for (int i = 0; i < tiles; ++i) {
        if (s.limit[tile_start[i + 1] - 1] <= chunk + t || s.start[tile_start[i]] >= chunk + t + kMicroTokens) continue;
        const int height = tile_start[i + 1] - tile_start[i];
        const float* q = s.q + tile_start[i] * dim;
        float* scores = s.scores + tile_start[i] * kChunk + t;
        if (widens) {
          Tiles<Wide>::score[height](q, wide_k, wide_v, scales, kChunk, dim, scores);
        } else {
          Tiles<Stored>::score[height](q, k, v, scales, size, dim, scores);
        }
      }
    }
    for (int r = 0; r < item.rows; ++r) {
      float* scores = s.scores + r * kChunk;
      const int64_t from = max(s.start[r] - chunk, 0), to = max(min(s.limit[r] - chunk, tokens), 0);
      if (a.soft_cap > 0.0f) cap_row(scores, from, to, a.soft_cap);
      softmax_row(scores, from, to, tokens, s.top + r, s.weight + r, s.correction + r);
      if (kHasScales<Stored>) scale_weights(scores, pages.v_scales, size, to);
    }
    next.count = 0;
    if (chunk + step < item.last) {
      find_pages(a, item, chunk + step, next);
    } else if (following) {
      find_pages(a, *following, following->first, next);
    }
    const Stored* ahead[kPages];
    for (int64_t b = 0; b < pages.count; ++b) ahead[b] = b < next.count ? next.k[b] : pages.v[b];
    for (int i = 0; i < tiles; ++i) {
      const int first = tile_start[i];
      const int64_t seen = min(s.limit[tile_start[i + 1] - 1] - chunk, tokens);  // no value past the last row's limit
      if (seen <= 0) continue;
      const int height = tile_start[i + 1] - first;
      const int64_t page = min(max(s.start[first] - chunk, 0) / size, pages.count);  // pages before it: out of the window
      const float *weights = s.scores + first * kChunk + page * size, *correction = s.correction + first;
      float* out = s.out + first * dim;
      if (widens) {
        const Wide* v = wide_values + page * size * dim;
        Tiles<Wide>::value[height](weights, &v, &v, kChunk, dim, seen - page * size, correction, out);
      } else {
        Tiles<Stored>::value[height](weights, pages.v + page, ahead + page, size, dim, seen - page * size, correction,
                                     out);
      }
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

template <typename Stored>
static void attend_as(const Attention& a, int threads) {
  int64_t next = 0;
  team(static_cast<int>(min(threads, a.num_items)), [&](int) {
    Scratch scratch;
    int64_t i = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED);
    while (i < a.num_items) {
      const int64_t following = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED);
      attend_item<Stored>(a, a.items[i], following < a.num_items ? &a.items[following] : nullptr, scratch);
      i = following;
    }
  });
}

static void attend(const Attention& a, int threads) {
  switch (a.cache.type) {
    case KvType::kFloat:
      return attend_as<float>(a, threads);
    case KvType::kBfloat16:
      return attend_as<Bfloat16>(a, threads);
    case KvType::kInt8:
      return attend_as<int8_t>(a, threads);
  }
}
