// How the KV cache stores numbers: float32, bfloat16, or int8 with a scale for each token of a KV head.
#pragma once

#include "kernels.h"
#include "simd.h"

struct Bfloat16 {
  uint16_t bits;
};

template <typename Stored>
constexpr bool kHasScales = false;
template <>
constexpr bool kHasScales<int8_t> = true;

typedef int8_t ByteVec __attribute__((vector_size(kLanes), aligned(1), may_alias));

INLINE Vec load_stored(const float* p) { return load(p); }
INLINE Vec load_stored(const Bfloat16* p) {
  typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));
  const Words words = __builtin_convertvector(*reinterpret_cast<const ShortVec*>(p), Words) << 16;
  return reinterpret_cast<const Vec&>(words);
}
INLINE Vec load_stored(const int8_t* p) {
  const ByteVec& bytes = *reinterpret_cast<const ByteVec*>(p);
#if defined(__AVX2__)
  IntVec whole;  // g++ 12 takes the general conversion apart into a dozen instructions
  asm("vpmovsxbd %1, %0" : "=v"(whole) : "m"(bytes));
  return __builtin_convertvector(whole, Vec);
#else
  return __builtin_convertvector(__builtin_convertvector(bytes, IntVec), Vec);
#endif
}

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

INLINE float to_stored(const float* x, int8_t* to, int64_t n) {
  const float top = largest_magnitude(x, n), inverse = top > kTiny ? 127.0f / top : 0.0f;
  for (int64_t i = 0; i < n; i += kLanes)
    *reinterpret_cast<ByteVec*>(to + i) = __builtin_convertvector(round_to_int(load(x + i) * inverse), ByteVec);
  return top / 127.0f;
}
