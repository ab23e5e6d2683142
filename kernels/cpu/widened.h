// A chunk of narrow keys and values as float32: many rows then read them as they are, and none widens them again. Each
// row gets the bits that it would get without.
#pragma once

#include "kernels.h"
#include "kv_types.h"
#include "simd.h"

// Narrow numbers that were widened; their scales are yet to come.
struct Scaled {
  float value;
};
template <>
constexpr bool kHasScales<Scaled> = true;
INLINE Vec load_stored(const Scaled* p) { return load(&p->value); }

template <typename Stored>
struct Widened {
  typedef float Type;
};
template <>
struct Widened<int8_t> {
  typedef Scaled Type;
};

// A chunk's keys and values; k, v: its pages. keys: [head_dim, kChunk], values: [tokens, head_dim].
template <typename Stored>
static void widen(const Stored* const* k, const Stored* const* v, int64_t block_size, int64_t dim, int64_t tokens,
                  float* keys, float* values) {
  for (int64_t start = 0; start < tokens; start += block_size, ++k, ++v) {
    const int64_t count = min(block_size, tokens - start);
    for (int64_t d = 0; d < dim; ++d)
      for (int64_t t = 0; t < count; t += kLanes)
        store(keys + d * kChunk + start + t, load_stored(*k + d * block_size + t));
    for (int64_t i = 0; i < count * dim; i += kLanes) store(values + start * dim + i, load_stored(*v + i));
  }
}
