// A vector of floats as wide as the instruction set this file is compiled for.
//
// Compiler vector extensions rather than intrinsics: one source serves AVX-512, AVX2 and plain SSE2 or NEON. Everything
// is `static inline`, and no standard header is included: a library template instantiated here with AVX-512 flags
// could be the copy that the linker keeps for callers on a CPU without AVX-512.
#pragma once

#include <stdint.h>

#define INLINE static inline __attribute__((always_inline))

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Vec __attribute__((vector_size(kLanes * 4), may_alias));
typedef float VecUnaligned __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));
typedef int32_t IntVec __attribute__((vector_size(kLanes * 4), may_alias));

INLINE Vec load(const float* p) { return *reinterpret_cast<const VecUnaligned*>(p); }
INLINE void store(float* p, Vec v) { *reinterpret_cast<VecUnaligned*>(p) = v; }
INLINE Vec splat(float x) { return Vec{} + x; }
INLINE IntVec splat(int32_t x) { return IntVec{} + x; }

// a > b ? a : b, and with < : b where one is NaN. In assembly because g++ 12 makes a comparison and a choice of it.
INLINE Vec max(Vec a, Vec b) {
  Vec out;
#if defined(__AVX2__)
  asm("vmaxps %2, %1, %0" : "=v"(out) : "v"(a), "v"(b));
#elif defined(__SSE2__)
  out = a;
  asm("maxps %1, %0" : "+x"(out) : "x"(b));
#else
  out = a > b ? a : b;
#endif
  return out;
}

INLINE Vec min(Vec a, Vec b) {
  Vec out;
#if defined(__AVX2__)
  asm("vminps %2, %1, %0" : "=v"(out) : "v"(a), "v"(b));
#elif defined(__SSE2__)
  out = a;
  asm("minps %1, %0" : "+x"(out) : "x"(b));
#else
  out = a < b ? a : b;
#endif
  return out;
}

INLINE constexpr int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE constexpr int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }

typedef float Quad __attribute__((vector_size(16), may_alias));
typedef int32_t IntQuad __attribute__((vector_size(16), may_alias));

// Combine the lanes of v by halves: a chain over 16 lanes would cost more than the loop that filled them.
template <typename Four, typename Wide, typename Combine>
INLINE auto reduce_lanes(const Wide& v, Combine combine) {
  const Four* quads = reinterpret_cast<const Four*>(&v);
#if defined(__AVX512F__)
  const Four q = combine(combine(quads[0], quads[1]), combine(quads[2], quads[3]));
#elif defined(__AVX2__)
  const Four q = combine(quads[0], quads[1]);
#else
  const Four q = quads[0];
#endif
  const Four swapped = {q[2], q[3], q[0], q[1]};
  const Four pairs = combine(q, swapped);
  const Four crossed = {pairs[1], pairs[0], pairs[3], pairs[2]};
  return combine(pairs, crossed)[0];
}

template <typename Combine>
INLINE float reduce(Vec v, Combine combine) {
  return reduce_lanes<Quad>(v, combine);
}

template <typename Combine>
INLINE int32_t reduce(IntVec v, Combine combine) {
  return reduce_lanes<IntQuad>(v, combine);
}

// Lane i of the result is number lanes[i] of the lanes of a and then b. lanes: known when this is compiled.
INLINE IntVec pick(IntVec a, IntVec b, IntVec lanes) {
#if defined(__clang__)
  IntVec out;
  for (int i = 0; i < kLanes; ++i) out[i] = lanes[i] < kLanes ? a[lanes[i]] : b[lanes[i] - kLanes];
  return out;
#else
  return __builtin_shuffle(a, b, lanes);
#endif
}

// Lane i of the result combines all lanes of v[i], which is scratch: a tree for kLanes vectors at once, which takes a
// third of the instructions that a reduction of each takes.
template <int WIDTH = kLanes / 2, typename Combine>
INLINE IntVec reduce_each(IntVec (&v)[kLanes], const Combine& combine) {
  IntVec own = {}, other = {};
  for (int lane = 0; lane < kLanes; ++lane) {
    own[lane] = lane + (lane & WIDTH ? kLanes : 0);
    other[lane] = own[lane] ^ WIDTH;
  }
  for (int i = 0; i < WIDTH; ++i)
    v[i] = combine(pick(v[i], v[i + WIDTH], own), pick(v[i], v[i + WIDTH], other));
  if constexpr (WIDTH > 1)
    return reduce_each<WIDTH / 2>(v, combine);
  else
    return v[0];
}

INLINE float sum(Vec v) {
  return reduce(v, [](Quad a, Quad b) { return a + b; });
}

INLINE float largest(Vec v) {
  return reduce(v, [](Quad a, Quad b) { return a > b ? a : b; });
}

// v, computed at this point: no addition that follows is contracted with the product that made it, or reordered.
template <typename AnyVec>
INLINE AnyVec settled(AnyVec v) {
#if defined(__AVX512F__)
  asm("" : "+v"(v));
#elif defined(__SSE2__)
  asm("" : "+x"(v));
#elif defined(__aarch64__)
  asm("" : "+w"(v));
#else
  asm("" : "+m"(v));
#endif
  return v;
}

INLINE Vec magnitude(Vec v) {
  const IntVec bits = reinterpret_cast<const IntVec&>(v) & 0x7fffffff;
  return reinterpret_cast<const Vec&>(bits);
}

INLINE IntVec bits_of(Vec v) { return reinterpret_cast<const IntVec&>(v); }
INLINE IntVec larger(IntVec a, IntVec b) { return a > b ? a : b; }

// A bit for each lane of a comparison's result.
INLINE uint32_t lanes_of(IntVec truth) {
#if defined(__AVX512DQ__)
  uint16_t lanes;
  asm("vpmovd2m %1, %0" : "=k"(lanes) : "v"(truth));
  return lanes;
#elif defined(__AVX2__)
  return static_cast<uint32_t>(__builtin_ia32_movmskps256(reinterpret_cast<const Vec&>(truth)));
#elif defined(__SSE2__)
  return static_cast<uint32_t>(__builtin_ia32_movmskps(reinterpret_cast<const Vec&>(truth)));
#else
  uint32_t lanes = 0;
  for (int i = 0; i < kLanes; ++i) lanes |= (truth[i] & 1u) << i;
  return lanes;
#endif
}

// The largest of n magnitudes, n a multiple of kLanes; NaN if any is NaN.
INLINE float largest_magnitude(const float* x, int64_t n) {
  IntVec tops = {};
  for (int64_t i = 0; i < n; i += kLanes) {
    const Vec v = load(x + i);
    const IntVec bits = reinterpret_cast<const IntVec&>(v) & 0x7fffffff;  // magnitudes are ordered as their bits are
    tops = bits > tops ? bits : tops;
  }
  return __builtin_bit_cast(float, reduce(tops, [](IntQuad a, IntQuad b) { return a > b ? a : b; }));
}

// The nearest whole number of values up to 2^22, halves to even.
INLINE IntVec round_to_int(Vec x) {
  const Vec magic = splat(12582912.0f);  // 1.5 * 2^23
  const Vec shifted = settled(x) + magic;
  return reinterpret_cast<const IntVec&>(shifted) - reinterpret_cast<const IntVec&>(magic);
}

typedef uint16_t ShortVec __attribute__((vector_size(kLanes * 2), aligned(2), may_alias));

// Finite float16 numbers: their bits in the place of a float32's are the number divided by 2^112.
INLINE Vec load_half(const uint16_t* p) {
#if defined(__AVX512F__)
  Vec wide;
  asm("vcvtph2ps %1, %0" : "=v"(wide) : "m"(*reinterpret_cast<const ShortVec*>(p)));
  return wide;
#else
  const IntVec bits = __builtin_convertvector(*reinterpret_cast<const ShortVec*>(p), IntVec);
  const IntVec magnitude = (bits & 0x7fff) << 13;
  const Vec value = reinterpret_cast<const Vec&>(magnitude) * 0x1p112f;
  const IntVec whole = reinterpret_cast<const IntVec&>(value) | (bits & 0x8000) << 16;
  return reinterpret_cast<const Vec&>(whole);
#endif
}

// 2^x for x up to 127, relative error about 1e-7. Below -126 it stays at 2^-126; NaN stays NaN.
INLINE Vec exp2(Vec x) {
  x = min(splat(127.0f), max(splat(-126.0f), x));
  const Vec magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to the nearest integer
  const Vec shifted = x + magic;
  const Vec f = x - (shifted - magic);  // [-0.5, 0.5]
  Vec p = splat(1.5345808e-4f);  // of least largest relative error there: 2e-9
  p = p * f + splat(1.3399931e-3f);
  p = p * f + splat(9.6184891e-3f);
  p = p * f + splat(5.5503286e-2f);
  p = p * f + splat(2.4022646e-1f);
  p = p * f + splat(6.9314718e-1f);
  p = p * f + splat(1.0f);
  const IntVec exponent = (reinterpret_cast<const IntVec&>(shifted) - reinterpret_cast<const IntVec&>(magic)) << 23;
  const IntVec bits = reinterpret_cast<const IntVec&>(p) + exponent;
  return reinterpret_cast<const Vec&>(bits);
}

constexpr float kLog2e = 1.4426950408889634f;
