// Paged causal attention with a running softmax, after FlashAttention (Dao et al., 2022).
//
// The queries of one sequence that share a KV head are rows (query token, head of the group); an item is up to
// kTileRows of them, so a decode step with grouped heads and a prompt chunk take the same path. Tokens go by in chunks,
// and for each chunk a few rows at a time: their scores, softmax, weighted sum of the chunk's values. K pages are
// transposed, so a vector holds the same dimensions of kLanes tokens. Pages lie anywhere, where the hardware's prefetch
// stops at each page's end, so scores fetch the chunk's values ahead, and values the keys that come next. The scales of
// codes multiply scores and softmax weights. Under a window, what no row sees any more is passed over.
// A row's result depends on its own tokens alone, bit for bit, not on the batch.
#pragma once

#include "attention_softmax.h"
#include "attention_tiles.h"
#include "elementwise.h"
#include "hadamard.h"
#include "kernels.h"
#include "kv_types.h"
#include "simd.h"
#include "team.h"

struct Scratch {
  alignas(64) int32_t q[kTileRows * kQueryWords];  // encoded
  RowCode q_codes[kTileRows];
  alignas(64) float out[kTileRows * kMaxHeadDim];  // [rows, head_dim]
  alignas(64) float scores[kMicroRows * kChunk];
  alignas(64) int32_t weights[kMicroRows * kChunk];  // encoded
  RowCode weight_codes[kMicroRows];
  float top[kTileRows], weight[kTileRows];
  int32_t token[kTileRows], head[kTileRows];
  int32_t limit[kTileRows], start[kTileRows];  // the row may see the tokens from start to limit
};

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

constexpr int kPieces = kChunk / kPiece;

struct Pieces {
  Piece at[kPieces];
  int64_t count;
};

// The pieces of `item`'s tokens from `chunk` on. Scales are fetched: they are not beside the words.
template <typename Stored>
INLINE void find_pieces(const Attention& a, const Item& item, int64_t chunk, Pieces& pieces) {
  const int64_t size = a.cache.block_size, dim = a.cache.head_dim, bytes = page_bytes<Stored>(a.cache);
  const int32_t* table = a.block_tables + a.rows[item.sequence] * a.max_blocks + chunk / size;
  const int64_t end = min(chunk + chunk_tokens(size), item.last);
  pieces.count = 0;
  for (int64_t t = chunk, first = chunk % size; t < end; ++table, first = 0) {
    const int64_t page = (*table * a.cache.kv_heads + item.kv_head) * bytes;
    const char *k = static_cast<const char*>(a.cache.k) + page, *v = static_cast<const char*>(a.cache.v) + page;
    for (int64_t offset = first; offset < size && t < end; offset += kPiece, t += kPiece) {
      Piece& piece = pieces.at[pieces.count++];
      piece.k = reinterpret_cast<const uint32_t*>(k) + offset;
      piece.v = reinterpret_cast<const uint32_t*>(v) + offset / kPerWord<Stored> * dim;
      if constexpr (kHasScales<Stored>) {
        piece.k_scales = scales_of(k, a.cache) + offset;
        piece.v_scales = scales_of(v, a.cache) + offset;
        __builtin_prefetch(piece.k_scales);
        __builtin_prefetch(piece.v_scales);
      }
    }
  }
}

// Which query token of the batch and which head each row of the item is, and what it sees.
INLINE void find_rows(const Attention& a, const Item& item, Scratch& s) {
  const int32_t heads = static_cast<int32_t>(a.heads / a.cache.kv_heads), first = a.query_start[item.sequence];
  const int32_t before = a.seq_lens[item.sequence] - (a.query_start[item.sequence + 1] - first);
  int32_t token = item.row / heads, head = item.row % heads;
  for (int r = 0; r < item.rows; ++r) {
    s.token[r] = first + token;
    s.head[r] = item.kv_head * heads + head;
    s.limit[r] = before + token + 1;
    s.start[r] = a.window > 0 ? static_cast<int32_t>(max(s.limit[r] - a.window, 0)) : 0;
    s.top[r] = -__builtin_inff();
    s.weight[r] = 0.0f;
    if (++head == heads) head = 0, ++token;
  }
}

// Rows from `row` on, `height` of them: q, turned if it is to be.
template <typename Stored>
static void begin_rows(const Attention& a, int row, int height, Scratch& s) {
  typedef Product<Stored> P;
  const int64_t dim = a.cache.head_dim, half = a.rotary.half;
  // The softmax works in powers of two, and the soft cap on twice the score.
  const float scale = a.scale * kLog2e * (a.soft_cap > 0.0f ? 2.0f / a.soft_cap : 1.0f);
  alignas(64) float q[kMicroRows][kMaxHeadDim];
  for (int r = 0; r < height; ++r) {
    const int64_t token = s.token[row + r];
    const float* from = a.q + token * a.q_stride + s.head[row + r] * dim;
    if (a.rotary.cos) {
      const int64_t table = a.rotary.positions[token] * half;
      turn(from, a.rotary.cos + table, a.rotary.sin + table, q[r], half, dim);
      from = q[r];
    }
    if constexpr (kSpreads<Stored>) {
      spread(from, q[r], dim, scale);
    } else {
      for (int64_t d = 0; d < dim; d += kLanes) store(q[r] + d, load(from + d) * scale);
    }
  }
  encode_rows<Stored, kMaxHeadDim, kQueryWords>(q[0], height, dim, s.q + row * kQueryWords,
                                                dim / kPerWord<Stored> * P::kParts, s.q_codes + row);
  for (int64_t i = 0; i < height * dim; i += kLanes) store(s.out + row * dim + i, Vec{});
}

// The same rows against the chunk of tokens that begins at `chunk`, of which there are `tokens`.
template <typename Stored>
static void attend_chunk(const Attention& a, int row, int height, int64_t chunk, int64_t tokens, const Pieces& pieces,
                         const uint32_t* const* ahead, Scratch& s) {
  typedef Product<Stored> P;
  constexpr int words = kChunk / kPerWord<Stored> * P::kParts;  // of a chunk's weights
  const int64_t dim = a.cache.head_dim;
  // The first row sees furthest back, the last one furthest on.
  const int64_t first = max(s.start[row] - chunk, 0) / kPiece * kPiece;
  const int64_t last = min(s.limit[row + height - 1] - chunk, tokens), end = (last + kLanes - 1) / kLanes * kLanes;
  if (first >= last) return;
  Tiles<Stored>::score[height](s.q + row * kQueryWords, s.q_codes + row, pieces.at, first / kLanes, end / kLanes,
                               a.cache.block_size, dim, s.scores);
  Span spans[kMicroRows];
  for (int r = 0; r < height; ++r) {
    spans[r] = {max(s.start[row + r] - chunk, 0), min(s.limit[row + r] - chunk, tokens)};
    if (a.soft_cap > 0.0f) cap_scores(s.scores + r * kChunk, spans[r].from, spans[r].to, a.soft_cap);
  }
  float correction[kMicroRows];
  const auto scale = [&](int64_t t, Vec weights) {
    if constexpr (!kHasScales<Stored>) return weights;
    const Vec scaled = weights * load(pieces.at[t / kPiece].v_scales + t % kPiece);
    return weights > 0.0f ? scaled : Vec{};  // what is masked may have any scale
  };
  softmax_rows(s.scores, height, spans, first, end, s.top + row, s.weight + row, correction, scale);
  const int32_t* weights = reinterpret_cast<const int32_t*>(s.scores);
  if constexpr (P::kEncodes) {
    encode_rows<Stored, kChunk, kChunk>(s.scores + first, height, end - first, s.weights + first * words / kChunk,
                                        words, s.weight_codes);
    weights = s.weights;
  }
  Tiles<Stored>::value[height](weights, s.weight_codes, pieces.at, ahead, dim, first, last, correction,
                               s.out + row * dim);
}

// following: the item that this thread takes next, or null.
template <typename Stored>
static void attend_item(const Attention& a, const Item& item, const Item* following, Scratch& s) {
  const int64_t dim = a.cache.head_dim;

  // Tiles of even height: 8 rows are 4 + 4, not 6 + 2.
  const int tiles = (item.rows + kMicroRows - 1) / kMicroRows;
  const auto each_tile = [&](const auto& body) {
    for (int i = 0; i < tiles; ++i) {
      const int row = item.rows * i / tiles;
      body(row, item.rows * (i + 1) / tiles - row);
    }
  };
  find_rows(a, item, s);
  each_tile([&](int row, int height) { begin_rows<Stored>(a, row, height, s); });

  const int64_t step = chunk_tokens(a.cache.block_size);
  Pieces pieces, next;
  find_pieces<Stored>(a, item, item.first, pieces);
  for (int64_t chunk = item.first; chunk < item.last; chunk += step) {
    next.count = 0;
    if (chunk + step < item.last) {
      find_pieces<Stored>(a, item, chunk + step, next);
    } else if (following) {
      find_pieces<Stored>(a, *following, following->first, next);
    }
    const uint32_t* ahead[kPieces];
    for (int64_t i = 0; i < pieces.count; ++i) ahead[i] = i < next.count ? next.at[i].k : pieces.at[i].v;
    const int64_t tokens = min(step, item.last - chunk);
    each_tile([&](int row, int height) { attend_chunk<Stored>(a, row, height, chunk, tokens, pieces, ahead, s); });
    pieces = next;
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
    float* out = a.out + (s.token[r] * a.heads + s.head[r]) * dim;
    const float share = 1.0f / s.weight[r];
    for (int64_t d = 0; d < dim; d += kLanes) store(out + d, load(s.out + r * dim + d) * share);
  }
}

template <typename Stored>
static void attend_as(const Attention& a, int threads) {
  const int team_size = static_cast<int>(min(threads, a.num_items));
  Shares items = even_shares(team_size, a.num_items);  // of sequences, whose rows other kernels share out too
  team(team_size, [&](int thread) {
    Scratch scratch;
    int64_t turn = 0, end;
    for (int64_t i = take(items, thread, 1, turn, end); i >= 0;) {
      const int64_t following = take(items, thread, 1, turn, end);
      attend_item<Stored>(a, a.items[i], following >= 0 ? &a.items[following] : nullptr, scratch);
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
      return attend_as<KvCode>(a, threads);
  }
}
