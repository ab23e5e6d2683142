// How the KV cache stores numbers: float32, bfloat16, or codes of 8 bits with a scale for each token of a KV head.
//
// Pages are arrays of 32-bit words, each with kPerWord numbers that a product takes together: of one token's
// neighbouring dimensions in K, of one dimension's neighbouring tokens in V. An 8-bit code is the number plus 128.
#pragma once

#include "kernels.h"
#include "simd.h"

struct Bfloat16 {
  uint16_t bits;
};

struct KvCode {
  uint8_t bits;
};

template <typename Stored>
constexpr bool kHasScales = false;
template <>
constexpr bool kHasScales<KvCode> = true;

// Whether keys are stored as `spread` leaves them.
template <typename Stored>
constexpr bool kSpreads = kHasScales<Stored>;

template <typename Stored>
constexpr int kPerWord = 4 / static_cast<int>(sizeof(Stored));

typedef int8_t ByteVec __attribute__((vector_size(kLanes), aligned(1), may_alias));

// Bytes of one block and KV head of K or of V.
template <typename Stored>
INLINE int64_t page_bytes(const Cache& cache) {
  const int64_t size = cache.head_dim * static_cast<int64_t>(sizeof(Stored)) + (kHasScales<Stored> ? 4 : 0);
  return size * cache.block_size;
}

// The scales of a page's tokens.
INLINE float* scales_of(char* page, const Cache& cache) {
  return reinterpret_cast<float*>(page + cache.head_dim * cache.block_size);
}
INLINE const float* scales_of(const char* page, const Cache& cache) {
  return reinterpret_cast<const float*>(page + cache.head_dim * cache.block_size);
}

// Convert n values, a multiple of kLanes, to their stored form; returns the scale, where there is one.
INLINE float to_stored(const float* x, float* to, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes) store(to + i, load(x + i));
  return 1.0f;
}

INLINE float to_stored(const float* x, Bfloat16* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = __builtin_bit_cast(uint32_t, x[i]);
    to[i].bits = static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);  // halves round to even
    if (x[i] != x[i]) to[i].bits = 0x7fc0;
  }
  return 1.0f;
}

INLINE float to_stored(const float* x, KvCode* to, int64_t n) {
  const float top = largest_magnitude(x, n), inverse = top > kTiny ? 127.0f / top : 0.0f;
  for (int64_t i = 0; i < n; i += kLanes)
    *reinterpret_cast<ByteVec*>(to + i) = __builtin_convertvector(round_to_int(load(x + i) * inverse) + 128, ByteVec);
  return top / 127.0f;
}
