// The operators of attention: rotary embedding, the KV store, and the plan of a paged attention call.
#pragma once

#include <memory>
#include <vector>

#include "checks.h"

namespace {

// [tokens, heads, head_dim] with any distance between tokens: q, k and v are slices of one projection.
Tensor packed_heads(const Tensor& x, const char* name) {
  check_float(x, name);
  TORCH_CHECK_VALUE(x.dim() == 3, name, " must be [tokens, heads, head_dim], got ", x.sizes());
  return x.stride(2) == 1 && x.stride(1) == x.size(2) ? x : x.contiguous();
}

Heads heads_of(const Tensor& x) { return {x.const_data_ptr<float>(), x.size(1), x.stride(0)}; }

constexpr Rotary kUnturned = {nullptr, nullptr, 0, nullptr};

Rotary rotary_of(const Tensor& cos, const Tensor& sin, const Tensor& positions, int64_t tokens, int64_t head_dim) {
  check_float(cos, "cos");
  check_float(sin, "sin");
  TORCH_CHECK_VALUE(cos.dim() == 2 && cos.size(1) * 2 <= head_dim && cos.sizes() == sin.sizes() &&
                        cos.is_contiguous() && sin.is_contiguous(),
                    "cos and sin must be contiguous [max_positions, at most ", head_dim / 2, "], got ",
                    cos.sizes(), " and ", sin.sizes());
  check_index(positions, "positions", at::kLong, 1);
  TORCH_CHECK_VALUE(positions.size(0) == tokens, "positions must be [", tokens, "], got ", positions.sizes());
  const int64_t* data = positions.const_data_ptr<int64_t>();
  for (int64_t t = 0; t < tokens; ++t)
    TORCH_CHECK_INDEX(data[t] >= 0 && data[t] < cos.size(0), "position ", data[t], " is outside the rotary table of ",
                      cos.size(0));
  return {cos.const_data_ptr<float>(), sin.const_data_ptr<float>(), cos.size(1), data};
}

std::tuple<Tensor, Tensor> apply_rotary(const Tensor& q_in, const Tensor& k_in, const Tensor& cos, const Tensor& sin,
                                        const Tensor& positions) {
  const Tensor q = packed_heads(q_in, "q"), k = packed_heads(k_in, "k");
  const int64_t tokens = q.size(0), dim = q.size(2);
  TORCH_CHECK_VALUE(k.size(0) == tokens && k.size(2) == dim, "q and k must agree in tokens and head_dim, got ",
                    q.sizes(), " and ", k.sizes());
  const Rotary rotary = rotary_of(cos, sin, positions, tokens, dim);
  Tensor q_out = at::empty(q.sizes(), q.options()), k_out = at::empty(k.sizes(), k.options());
  active->apply_rotary(heads_of(q), q_out.data_ptr<float>(), rotary, tokens, dim, threads());
  active->apply_rotary(heads_of(k), k_out.data_ptr<float>(), rotary, tokens, dim, threads());
  return {q_out, k_out};
}

// const_data_ptr on both: the caller writes through `Cache` only where the operator's schema says so.
Cache cache_of(const Tensor& k_cache, const Tensor& v_cache) {
  const at::ScalarType type = k_cache.scalar_type();
  TORCH_CHECK_TYPE(k_cache.device().is_cpu() && v_cache.device().is_cpu() && v_cache.scalar_type() == type &&
                       (type == at::kFloat || type == at::kBFloat16 || type == at::kChar),
                   "k_cache and v_cache must be CPU tensors of one type, float32, bfloat16 or int8, got ", type,
                   " and ", v_cache.scalar_type());
  TORCH_CHECK_VALUE(k_cache.dim() == 4 && v_cache.dim() == 4 && k_cache.is_contiguous() && v_cache.is_contiguous(),
                    "k_cache and v_cache must be contiguous with 4 dimensions");
  const int64_t blocks = v_cache.size(0), heads = v_cache.size(1), size = v_cache.size(2), width = v_cache.size(3);
  const int64_t dim = width - (type == at::kChar ? 4 : 0);
  TORCH_CHECK_VALUE(
      k_cache.size(0) == blocks && k_cache.size(1) == heads && k_cache.size(2) == width && k_cache.size(3) == size,
      "k_cache must be [num_blocks, kv_heads, head_dim, block_size] and v_cache [num_blocks, kv_heads, block_size, "
      "head_dim], with 4 more than head_dim in int8, got ",
      k_cache.sizes(), " and ", v_cache.sizes());
  TORCH_CHECK_VALUE(dim % 16 == 0 && dim >= 16 && dim <= kMaxHeadDim, "head_dim must be a multiple of 16 up to ",
                    kMaxHeadDim, ", got ", dim);
  TORCH_CHECK_VALUE(size >= 16 && size % (size <= kChunk ? 16 : kChunk) == 0,
                    "block_size must be a multiple of 16 up to 128, or a multiple of 128, got ", size);
  return {const_cast<void*>(k_cache.const_data_ptr()), const_cast<void*>(v_cache.const_data_ptr()),
          type == at::kFloat ? KvType::kFloat : type == at::kBFloat16 ? KvType::kBfloat16 : KvType::kInt8,
          heads, dim, size};
}

void store_kv(const Tensor& k_in, const Tensor& v_in, const Rotary& rotary, const Tensor& k_cache,
              const Tensor& v_cache, const Tensor& slots) {
  const Tensor k = packed_heads(k_in, "k"), v = packed_heads(v_in, "v");
  const Cache cache = cache_of(k_cache, v_cache);
  const int64_t tokens = k.size(0), capacity = v_cache.size(0) * cache.block_size;
  TORCH_CHECK_VALUE(k.size(1) == cache.kv_heads && k.size(2) == cache.head_dim && k.sizes() == v.sizes(),
                    "k and v must be [tokens, ", cache.kv_heads, ", ", cache.head_dim, "], got ", k.sizes(), " and ",
                    v.sizes());
  check_index(slots, "slots", at::kLong, 1);
  TORCH_CHECK_VALUE(slots.size(0) == tokens, "slots must be [", tokens, "], got ", slots.sizes());
  const int64_t* slot = slots.const_data_ptr<int64_t>();
  for (int64_t t = 0; t < tokens; ++t)
    TORCH_CHECK_INDEX(slot[t] < capacity, "slot ", slot[t], " is outside the cache of ", capacity, " slots");
  active->write(heads_of(k), heads_of(v), rotary, cache, slot, tokens, threads());
}

void kv_write(const Tensor& k, const Tensor& v, const Tensor& k_cache, const Tensor& v_cache, const Tensor& slots) {
  store_kv(k, v, kUnturned, k_cache, v_cache, slots);
}

Tensor rotary_write(const Tensor& q_in, const Tensor& k, const Tensor& v, const Tensor& cos, const Tensor& sin,
                    const Tensor& positions, const Tensor& k_cache, const Tensor& v_cache, const Tensor& slots) {
  const Tensor q = packed_heads(q_in, "q");
  TORCH_CHECK_VALUE(k.dim() == 3 && k.size(0) == q.size(0) && k.size(2) == q.size(2),
                    "q and k must agree in tokens and head_dim, got ", q.sizes(), " and ", k.sizes());
  const Rotary rotary = rotary_of(cos, sin, positions, q.size(0), q.size(2));
  store_kv(k, v, rotary, k_cache, v_cache, slots);
  Tensor out = at::empty(q.sizes(), q.options());
  active->apply_rotary(heads_of(q), out.data_ptr<float>(), rotary, q.size(0), q.size(2), threads());
  return out;
}

Tensor turned_attention(const Tensor& q_in, const Rotary& rotary, const Tensor& k_cache, const Tensor& v_cache,
                        const Tensor& query_start, const Tensor& seq_lens, const Tensor& block_tables,
                        const Tensor& rows, double scale, int64_t window, double soft_cap) {
  const Tensor q = packed_heads(q_in, "q");
  const Cache cache = cache_of(k_cache, v_cache);
  const int64_t tokens = q.size(0), heads = q.size(1), dim = q.size(2);
  TORCH_CHECK_VALUE(dim == cache.head_dim && heads % cache.kv_heads == 0,
                    "q must be [tokens, a multiple of ", cache.kv_heads, ", ", cache.head_dim, "], got ", q.sizes());
  check_index(query_start, "query_start", at::kInt, 1);
  check_index(seq_lens, "seq_lens", at::kInt, 1);
  check_index(rows, "rows", at::kInt, 1);
  check_index(block_tables, "block_tables", at::kInt, 2);
  const int64_t sequences = seq_lens.size(0), max_blocks = block_tables.size(1), group_heads = heads / cache.kv_heads;
  TORCH_CHECK_VALUE(query_start.size(0) == sequences + 1 && rows.size(0) == sequences, "for ", sequences,
                    " sequences query_start must be [", sequences + 1, "] and rows [", sequences, "], got ",
                    query_start.sizes(), " and ", rows.sizes());
  const int32_t* start = query_start.const_data_ptr<int32_t>();
  const int32_t* length = seq_lens.const_data_ptr<int32_t>();
  const int32_t* row = rows.const_data_ptr<int32_t>();
  const int32_t* tables = block_tables.const_data_ptr<int32_t>();
  TORCH_CHECK_VALUE(start[0] == 0 && start[sequences] <= tokens, "query_start must go from 0 to at most ", tokens,
                    " tokens, got ", start[0], " to ", start[sequences]);

  TORCH_CHECK_VALUE(window >= 0 && soft_cap >= 0.0, "window and soft_cap must be 0 or more, got ", window, " and ",
                    soft_cap);

  std::vector<Item> items;
  std::vector<Group> groups;
  int64_t partial_size = 0;
  const int64_t chunk = chunk_tokens(cache.block_size), part_tokens = chunk * kPartChunks;
  // Chunks begin at whole multiples, so that the order of a row's sums is its own.
  const auto first_seen = [&](int64_t position) {
    return window ? std::max<int64_t>(position + 1 - window, 0) / chunk * chunk : 0;
  };
  for (int64_t s = 0; s < sequences; ++s) {
    const int64_t queries = start[s + 1] - start[s], blocks = (length[s] + cache.block_size - 1) / cache.block_size;
    if (queries == 0) continue;
    TORCH_CHECK_VALUE(queries > 0 && length[s] >= queries && blocks <= max_blocks, "sequence ", s, " has ", queries,
                      " queries and ", length[s], " tokens; queries may be 0 to its tokens, and its tokens at most ",
                      max_blocks * cache.block_size);
    TORCH_CHECK_INDEX(row[s] >= 0 && row[s] < block_tables.size(0), "row ", row[s], " is outside block_tables of ",
                      block_tables.size(0), " rows");
    for (int64_t b = 0; b < blocks; ++b) {
      const int32_t block = tables[row[s] * max_blocks + b];
      TORCH_CHECK_INDEX(block >= 0 && block < v_cache.size(0), "block ", block, " of sequence ", s,
                        " is outside the cache of ", v_cache.size(0), " blocks");
    }
    const int64_t total_rows = queries * group_heads;
    for (int64_t h = 0; h < cache.kv_heads; ++h) {
      // The last rows see the most tokens: begin with them, so that short items fill up the end.
      for (int64_t row_of = (total_rows - 1) / kTileRows * kTileRows; row_of >= 0; row_of -= kTileRows) {
        const int64_t count = std::min<int64_t>(kTileRows, total_rows - row_of);
        const int64_t begin = first_seen(length[s] - queries + row_of / group_heads);
        const int64_t end = length[s] - queries + (row_of + count - 1) / group_heads + 1;
        // Cut at whole multiples, whatever else is computed beside a row: its sums have one order.
        const int64_t first_part = begin / part_tokens, parts = (end - 1) / part_tokens + 1 - first_part;
        for (int64_t part = 0; part < parts; ++part)
          items.push_back({static_cast<int32_t>(s), static_cast<int32_t>(h), static_cast<int32_t>(row_of),
                           static_cast<int32_t>(count),
                           static_cast<int32_t>(std::max(begin, (first_part + part) * part_tokens)),
                           static_cast<int32_t>(std::min(end, (first_part + part + 1) * part_tokens)),
                           parts > 1 ? static_cast<int32_t>(groups.size()) : -1, static_cast<int32_t>(part)});
        if (parts == 1) continue;
        groups.push_back({static_cast<int32_t>(parts), static_cast<int32_t>(parts), partial_size});
        partial_size += parts * count * (dim + 2);
      }
    }
  }

  Tensor out = at::empty(q.sizes(), q.options());
  const int64_t used = start[sequences] * heads * dim;
  std::fill(out.data_ptr<float>() + used, out.data_ptr<float>() + out.numel(), 0.0f);
  if (items.empty()) return out;
  const std::unique_ptr<float[]> partial(new float[partial_size]);
  active->attend({q.const_data_ptr<float>(), q.stride(0), rotary, out.data_ptr<float>(), cache, heads, start, length,
                  row, tables, max_blocks, static_cast<float>(scale), window, static_cast<float>(soft_cap),
                  items.data(), static_cast<int64_t>(items.size()), groups.data(), partial.get()},
                 threads());
  return out;
}

Tensor paged_attention(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& query_start,
                       const Tensor& seq_lens, const Tensor& block_tables, const Tensor& rows, double scale,
                       int64_t window, double soft_cap) {
  return turned_attention(q, kUnturned, k_cache, v_cache, query_start, seq_lens, block_tables, rows, scale, window,
                          soft_cap);
}

// qkv: [tokens, (heads + 2 * kv_heads) * head_dim]. Stores its keys, turned, and its values; then the attention of its
// turned queries, [tokens, heads * head_dim].
Tensor rotary_attention(const Tensor& qkv_in, const Tensor& cos, const Tensor& sin, const Tensor& positions,
                        const Tensor& k_cache, const Tensor& v_cache, const Tensor& slots, const Tensor& query_start,
                        const Tensor& seq_lens, const Tensor& block_tables, const Tensor& rows, double scale,
                        int64_t window, double soft_cap) {
  const Cache cache = cache_of(k_cache, v_cache);
  check_float(qkv_in, "qkv");
  const int64_t dim = cache.head_dim, kv_heads = cache.kv_heads;
  TORCH_CHECK_VALUE(qkv_in.dim() == 2 && qkv_in.size(1) % dim == 0 && qkv_in.size(1) / dim > 2 * kv_heads,
                    "qkv must be [tokens, (heads + ", 2 * kv_heads, ") * ", dim, "], got ", qkv_in.sizes());
  const Tensor qkv = qkv_in.contiguous();
  const int64_t tokens = qkv.size(0), heads = qkv.size(1) / dim - 2 * kv_heads, stride = qkv.size(1);
  const auto part = [&](int64_t count, int64_t first) {
    return qkv.as_strided({tokens, count, dim}, {stride, dim, 1}, qkv.storage_offset() + first * dim);
  };
  const Rotary rotary = rotary_of(cos, sin, positions, tokens, dim);
  store_kv(part(kv_heads, heads), part(kv_heads, heads + kv_heads), rotary, k_cache, v_cache, slots);
  return turned_attention(part(heads, 0), rotary, k_cache, v_cache, query_start, seq_lens, block_tables, rows, scale,
                          window, soft_cap)
      .flatten(1);
}

}  // namespace
