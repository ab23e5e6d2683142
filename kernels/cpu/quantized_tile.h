// A few rows of activations in 8 bits against one panel of codes.
#pragma once

#include "codes.h"
#include "kernels.h"
#include "kv_types.h"
#include "simd.h"

// How four weights of each lane meet four activations. kParts: 32-bit words that four activations take; a tile holds up
// to kTileHeight rows and tile_vecs(rows) vectors of columns in registers.
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)

constexpr int kParts = 1;
constexpr int kTileHeight = kLanes == 16 ? 4 : 3;
constexpr int tile_vecs(int rows) { return kLanes == 16 ? 3 : rows == 1 ? 6 : rows == 2 ? 3 : 2; }

// Written as assembly because g++ 12 copies registers around the builtin and halves the speed.
INLINE void multiply_add(IntVec& acc, const LaneVec (&w)[1], const int32_t* x) {
#if defined(__AVX512VNNI__)
  asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(w[0]), "v"(splat(x[0])));
#else
  asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(acc) : "x"(w[0]), "x"(splat(x[0])));
#endif
}

INLINE void split_weights(LaneVec words, LaneVec (&w)[1]) { w[0] = words; }
INLINE void store_activations(IntVec x, int32_t* to) {
  *reinterpret_cast<ByteVec*>(to) = __builtin_convertvector(x, ByteVec);
}

#elif defined(__SSE2__)

// Dimensions 0 and 2 as one pair of 16-bit numbers, 1 and 3 as another: products are added up in 32 bits.
constexpr int kParts = 2;
constexpr int kTileHeight = kLanes == 16 ? 3 : 4;
constexpr int tile_vecs(int rows) { return kLanes == 16 || rows == 1 ? 3 : rows == 2 ? 2 : 1; }

INLINE IntVec multiply_pairs(LaneVec w, IntVec x) {
  IntVec sum;
#if defined(__AVX512BW__)
  asm("vpmaddwd %2, %1, %0" : "=v"(sum) : "v"(w), "v"(x));
#elif defined(__AVX2__)
  asm("vpmaddwd %2, %1, %0" : "=x"(sum) : "x"(w), "x"(x));
#else
  sum = reinterpret_cast<const IntVec&>(w);
  asm("pmaddwd %1, %0" : "+x"(sum) : "x"(x));
#endif
  return sum;
}

INLINE void multiply_add(IntVec& acc, const LaneVec (&w)[2], const int32_t* x) {
  acc += multiply_pairs(w[0], splat(x[0]));
  acc += multiply_pairs(w[1], splat(x[1]));
  acc = settled(acc);  // else g++ saves all products of a group on the stack to add them up at its end
}

INLINE void split_weights(LaneVec words, LaneVec (&w)[2]) {
  w[0] = words & 0x00ff00ffu;
  w[1] = words >> 8 & 0x00ff00ffu;
}

INLINE void store_activations(IntVec x, int32_t* to) {
  for (int i = 0; i < kLanes; i += 4) {
    *to++ = (x[i] & 0xffff) | x[i + 2] << 16;
    *to++ = (x[i + 1] & 0xffff) | x[i + 3] << 16;
  }
}

#else

constexpr int kParts = 4;
constexpr int kTileHeight = 2;
constexpr int tile_vecs(int) { return 3; }

INLINE void multiply_add(IntVec& acc, const LaneVec (&w)[4], const int32_t* x) {
  for (int i = 0; i < 4; ++i) acc += reinterpret_cast<const IntVec&>(w[i]) * x[i];
}

INLINE void split_weights(LaneVec words, LaneVec (&w)[4]) {
  for (int i = 0; i < 4; ++i) w[i] = words >> (8 * i) & 255u;
}

INLINE void store_activations(IntVec x, int32_t* to) {
  for (int i = 0; i < kLanes; ++i) to[i] = x[i];
}

#endif

constexpr int kSteps = kGroup / 4;

// kGroup values of a row: whole numbers times a step that is a power of two.
//
// So the step costs no multiplication. A sum of products begins with the bits of `origin`, a float in whose last place
// one is worth a step: in the end it is, read as a float, `origin` plus as many steps as the sum is, exactly.
struct ActivationGroup {
  int32_t start;  // the bits of `origin`, less the codes' zero times the sum of the whole numbers
  float origin;   // 1.5 * 2^23 steps, or NaN
  int32_t words[kSteps * kParts];
};

static_assert(sizeof(ActivationGroup) <= kActivationGroupBytes);

// The code that counts as zero. Where it stands for something else, that is in `Codes::rest`.
constexpr int32_t zero_code(bool nibbles) { return nibbles ? 8 : 128; }

constexpr float kOriginSteps = 12582912.0f;  // 1.5 * 2^23

// The `origin` of groups whose largest magnitudes are `tops`: the step is the smallest power of two of which that is at
// most 127. NaN, infinity and what is near it make NaN, so they are not lost.
INLINE Vec origins_of(Vec tops) {
  const Vec least = tops / 127.0f;
  const IntVec bits = (reinterpret_cast<const IntVec&>(least) + 0x7fffff) & 0x7f800000;
  const Vec steps = tops > kTiny ? reinterpret_cast<const Vec&>(bits) : splat(1.0f);
  return tops < kHuge ? steps * kOriginSteps : splat(__builtin_nanf(""));
}

INLINE Vec steps_of(Vec origins) {
  const IntVec bits = (reinterpret_cast<const IntVec&>(origins) & 0x7f800000) - (23 << 23);
  return reinterpret_cast<const Vec&>(bits);
}

// Quantise kGroup values to steps of `origin`, ties to even: so does adding it. Returns the whole numbers' sum by
// lanes.
INLINE IntVec quantize_group(const float* x, float origin, ActivationGroup& to) {
  const IntVec none = splat(__builtin_bit_cast(int32_t, origin));
  IntVec sums = {};
  for (int i = 0; i < kGroup; i += kLanes) {
    const Vec shifted = load(x + i) + origin;
    const IntVec q = reinterpret_cast<const IntVec&>(shifted) - none;
    sums += q;
    store_activations(q, to.words + i / 4 * kParts);
  }
  return sums;
}

// Quantise `count` groups, kLanes at most, to steps of their `origins`. Returns the sums of their whole numbers.
INLINE IntVec quantize_groups(const float* x, Vec origins, int64_t count, int32_t zero, ActivationGroup* to) {
  const auto plus = [](auto a, auto b) { return a + b; };
  IntVec sums[kLanes], total = {};
  alignas(64) float origin[kLanes];
  alignas(64) int32_t start[kLanes];
  store(origin, origins);
  for (int64_t i = 0; i < count; ++i) sums[i] = quantize_group(x + i * kGroup, origin[i], to[i]);
  if (count <= 2) {
    for (int64_t i = 0; i < count; ++i) total[i] = reduce(sums[i], plus);
  } else {
    for (int64_t i = count; i < kLanes; ++i) sums[i] = settled(IntVec{});  // g++ calls for many zeros at once: slow
    total = reduce_each(sums, plus);
  }
  *reinterpret_cast<IntVec*>(start) = reinterpret_cast<const IntVec&>(origins) - zero * total;
  for (int64_t i = 0; i < count; ++i) {
    to[i].start = start[i];
    to[i].origin = origin[i];
  }
  return total;
}

// Four dimensions of kLanes columns, step `i` of a group; w: the group's codes from the first of these columns on.
template <bool NIBBLES>
INLINE LaneVec load_codes(const uint8_t* w, int i) {
  if (!NIBBLES) return *reinterpret_cast<const LaneVecUnaligned*>(w + i * kPanel * 4);
  const LaneVec words = *reinterpret_cast<const LaneVecUnaligned*>(w + i / 2 * kPanel * 4);
  return (i % 2 ? words >> 4 : words) & 0x0f0f0f0fu;
}

constexpr int group_bytes(bool nibbles) { return kGroup * kPanel / (nibbles ? 2 : 1); }
constexpr int group_lines(bool nibbles) { return group_bytes(nibbles) / 64; }

// A panel that will be read soon, and which of the cache lines of each of its groups to fetch meanwhile. A tile fetches
// a few lines in each group: a CPU drops prefetches that come faster than memory answers.
struct Ahead {
  Codes panel;
  int first, last;
};

template <bool NIBBLES>
INLINE void fetch(const Ahead& ahead, int64_t g) {
  for (int line = ahead.first; line < ahead.last; ++line)
    __builtin_prefetch(ahead.panel.data + g * group_bytes(NIBBLES) + line * 64);
  if (ahead.first > 0 || ahead.last == 0) return;
  for (int c = 0; c < kPanel; c += kPanel / 2) __builtin_prefetch(ahead.panel.scale + g * kPanel + c);
}

// A panel's `rest`, which is read after all of its groups, is fetched with the first of them.
INLINE void fetch_rest(const Codes& panel, int64_t g, int64_t groups) {
  const int64_t lines = (rest_bytes(groups) + 63) / 64, end = min(g * 3 + 3, lines);
  for (int64_t line = g * 3; line < end; ++line) __builtin_prefetch(panel.rest + line * 64);
}

// Add the products of one group of ROWS rows to their totals. x: the first row's group, the others' `stride` behind
// each other; w, scale: the group's, from the first of these columns on; steps: of the group that have activations.
template <bool NIBBLES, bool WHOLE, int ROWS, int VECS>
INLINE void add_group(const ActivationGroup* x, int64_t stride, const uint8_t* w, const uint16_t* scale, int64_t steps,
                      Vec (&total)[ROWS][VECS]) {
  IntVec acc[ROWS][VECS];
  for (int r = 0; r < ROWS; ++r)
    for (int j = 0; j < VECS; ++j) acc[r][j] = splat(x[r * stride].start);
#pragma GCC unroll 8
  for (int i = 0; i < kSteps; ++i) {
    if (!WHOLE && i >= steps) break;
    LaneVec weights[VECS][kParts];
    for (int j = 0; j < VECS; ++j) split_weights(load_codes<NIBBLES>(w + j * kLanes * 4, i), weights[j]);
    for (int r = 0; r < ROWS; ++r)
      for (int j = 0; j < VECS; ++j) multiply_add(acc[r][j], weights[j], x[r * stride].words + i * kParts);
  }
  for (int j = 0; j < VECS; ++j) {
    const Vec scales = load_half(scale + j * kLanes);
    for (int r = 0; r < ROWS; ++r)
      total[r][j] += (reinterpret_cast<const Vec&>(acc[r][j]) - x[r * stride].origin) * scales;
  }
}

// ROWS rows of quantised x against a panel of codes; out: rows of kPanel floats.
template <int ROWS, bool NIBBLES>
static void quantized_tile(const ActivationGroup* x, const Codes& panel, int64_t groups, Ahead ahead, float* out) {
  constexpr int vecs = tile_vecs(ROWS);
  const int64_t stride = row_groups(groups, NIBBLES);
  for (int c = 0; c < kPanel; c += vecs * kLanes) {
    Vec total[ROWS][vecs] = {};
    for (int64_t g = 0; g < groups; ++g) {
      if (c == 0) fetch<NIBBLES>(ahead, g);
      if (c == 0 && NIBBLES) fetch_rest(panel, g, groups);
      add_group<NIBBLES, true>(x + g, stride, panel.data + g * group_bytes(NIBBLES) + c * 4,
                               panel.scale + g * kPanel + c, kSteps, total);
    }
    for (int64_t g = 0; g < stride - groups; ++g)
      add_group<false, false>(x + groups + g, stride, panel.rest + g * group_bytes(false) + c * 4,
                              rest_scale(panel, groups) + c, fours_in(groups) - g * kSteps, total);
    for (int r = 0; r < ROWS; ++r)
      for (int j = 0; j < vecs; ++j) store(out + r * kPanel + c + j * kLanes, total[r][j]);
  }
}

template <bool NIBBLES>
INLINE void quantized_lines(const ActivationGroup* x, int64_t height, const Codes& panel, int64_t groups,
                            const Ahead& ahead, float* out) {
  typedef void (*Tile)(const ActivationGroup*, const Codes&, int64_t, Ahead, float*);
  static constexpr Tile tiles[] = {nullptr, quantized_tile<1, NIBBLES>, quantized_tile<2, NIBBLES>,
                                   quantized_tile<min(3, kTileHeight), NIBBLES>,
                                   quantized_tile<min(4, kTileHeight), NIBBLES>};
  tiles[height](x, panel, groups, ahead, out);
}
