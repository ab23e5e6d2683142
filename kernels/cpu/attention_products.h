// How words of the KV cache meet the numbers of a row: q's, against keys, and softmax weights, against values.
//
// float32 and bfloat16: multiply-adds in float32; where the CPU multiplies pairs of bfloat16, the row's numbers are
// rounded to it, as the cache's have been. Codes: a row's numbers become whole numbers of 14 bits and a sign under one
// scale, so that sums are exact, and the same with any instructions; those that take 8 bits see them as two digits.
#pragma once

#include "kernels.h"
#include "kv_types.h"
#include "quantized_tile.h"
#include "simd.h"

// What is to be known of a row whose numbers are whole ones.
struct RowCode {
  float scale;
  int32_t start;  // a sum begins with it: codes are 128 too large
};

// Without a name: the linker would make one of those of all instruction sets.
namespace {

// For each type: Sum; Part, as a word is taken apart for `add`, and kParts of them, each with 32 bits of a row's
// numbers. encode: n numbers, a multiple of kLanes, as such words; each of kDigits starts `digit` words after the one
// before. top: the largest magnitude, where kNeedsTop.
template <typename Stored>
struct Product;

// A row's numbers stay as they are.
struct PlainRows {
  typedef Vec Sum;
  typedef Vec Part;
  static constexpr int kDigits = 1;
  static constexpr bool kEncodes = false, kNeedsTop = false;
  INLINE RowCode encode(const float* x, int64_t n, int32_t* to, int64_t, float) {
    for (int64_t i = 0; i < n; i += kLanes) store(reinterpret_cast<float*>(to) + i, load(x + i));
    return {};
  }
  INLINE Vec number(const int32_t* x) { return splat(__builtin_bit_cast(float, *x)); }
};

template <>
struct Product<float> : PlainRows {
  static constexpr int kParts = 1;
  INLINE void split(LaneVec words, Vec (&parts)[1]) { parts[0] = reinterpret_cast<const Vec&>(words); }
  INLINE void add(Vec& sum, const Vec (&parts)[1], const int32_t* x) { sum += parts[0] * number(x); }
};

#if defined(__AVX512BF16__)

template <>
struct Product<Bfloat16> {
  typedef Vec Sum;
  typedef LaneVec Part;
  static constexpr int kParts = 1, kDigits = 1;
  static constexpr bool kEncodes = true, kNeedsTop = false;
  INLINE RowCode encode(const float* x, int64_t n, int32_t* to, int64_t, float) {
    for (int64_t i = 0; i < n; i += kLanes) {
      ShortVec pairs;
      asm("vcvtneps2bf16 %1, %0" : "=v"(pairs) : "v"(load(x + i)));
      *reinterpret_cast<ShortVec*>(to + i / 2) = pairs;
    }
    return {};
  }
  INLINE void split(LaneVec words, LaneVec (&parts)[1]) { parts[0] = words; }
  INLINE void add(Vec& sum, const LaneVec (&parts)[1], const int32_t* x) {
    asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(parts[0]), "v"(splat(*x)));
  }
};

#else

template <>
struct Product<Bfloat16> : PlainRows {
  static constexpr int kParts = 2;
  INLINE void split(LaneVec words, Vec (&parts)[2]) {
    const LaneVec even = words << 16, odd = words & 0xffff0000u;
    parts[0] = reinterpret_cast<const Vec&>(even);
    parts[1] = reinterpret_cast<const Vec&>(odd);
  }
  INLINE void add(Vec& sum, const Vec (&parts)[2], const int32_t* x) {
    sum += parts[0] * number(x);
    sum += parts[1] * number(x + 1);
  }
};

#endif

constexpr int kDigitBits = 7;
constexpr float kRowTop = 127 * 128;  // the largest whole number of a row

template <>
struct Product<KvCode> {
  typedef IntVec Sum;
  typedef LaneVec Part;
  static constexpr int kParts = ::kParts, kDigits = kParts == 1 ? 2 : 1;
  static constexpr bool kEncodes = true, kNeedsTop = true;
  // NaN and infinity make the scale NaN or infinite, so they are not lost.
  INLINE RowCode encode(const float* x, int64_t n, int32_t* to, int64_t digit, float top) {
    const float inverse = top > kTiny ? kRowTop / top : 0.0f;
    IntVec sums = {};
    for (int64_t i = 0; i < n; i += kLanes, to += kLanes / 4 * kParts) {
      const IntVec whole = round_to_int(load(x + i) * inverse);
      sums += whole;
      if constexpr (kDigits == 1) {
        store_activations(whole, to);
      } else {
        const IntVec high = (whole + (1 << (kDigitBits - 1))) >> kDigitBits;
        store_activations(high, to);
        store_activations(whole - (high << kDigitBits), to + digit);
      }
    }
    const int32_t sum = reduce(sums, [](IntQuad a, IntQuad b) { return a + b; });
    return {top / kRowTop, kDigits == 1 ? -128 * sum : -sum};  // the first digit's sums are moved up by 7 bits
  }
  INLINE void split(LaneVec words, LaneVec (&parts)[kParts]) { split_weights(words, parts); }
  INLINE void add(IntVec& sum, const LaneVec (&parts)[kParts], const int32_t* x) {
    multiply_add(sum, parts, x);
  }
};

}  // namespace

// Up to kTileRows rows of n numbers, of strides X and TO words; step by step for all, as a row's steps wait for each
// other.
template <typename Stored, int X, int TO>
INLINE void encode_rows(const float* x, int rows, int64_t n, int32_t* to, int64_t digit, RowCode* codes) {
  typedef Product<Stored> P;
  float tops[kTileRows];
  if constexpr (P::kNeedsTop)
    for (int r = 0; r < rows; ++r) tops[r] = largest_magnitude(x + r * X, n);
  for (int r = 0; r < rows; ++r)
    codes[r] = P::encode(x + r * X, n, to + r * TO, digit, P::kNeedsTop ? tops[r] : 0.0f);
}
