// Weights as whole numbers of 8 or 4 bits (`Codes`), and as the float32 values that they stand for.
#pragma once

#include "kernels.h"
#include "simd.h"

typedef uint32_t LaneVec __attribute__((vector_size(kLanes * 4), may_alias));
typedef uint32_t LaneVecUnaligned __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));

constexpr int64_t fours_in(int64_t groups) { return (groups + 3) / 4; }

INLINE Codes panel_of(const Codes& codes, int64_t panel, int64_t groups) {
  const int64_t first = panel * groups * kPanel;
  if (!codes.offset) return {codes.data + first * kGroup, codes.scale + first};
  const uint8_t* rest = codes.rest ? codes.rest + panel * fours_in(groups) * kPanel * 4 : nullptr;
  return {codes.data + first * kGroup / 2, codes.scale + first, codes.offset + first, rest,
          codes.rest_scale + (rest ? panel * kPanel : 0)};
}

// body(dimension, values) for the kGroup dimensions of one group in order, the values of VECS vectors of columns each.
// w, scale, offset: the group's, from the first of these columns on. A code has at most 8 bits and a scale 11, so their
// product is exact, and the value is the one that its format defines, rounded once.
template <bool NIBBLES, int VECS, typename Body>
INLINE void each_dimension(const uint8_t* w, const uint16_t* scale, const uint16_t* offset, const Body& body) {
  constexpr int dimensions = NIBBLES ? 8 : 4;  // of a word
  Vec scales[VECS], offsets[VECS];
  for (int j = 0; j < VECS; ++j) {
    scales[j] = load_half(scale + j * kLanes);
    offsets[j] = NIBBLES ? load_half(offset + j * kLanes) : scales[j] * -128.0f;
  }
  for (int first = 0; first < kGroup; first += dimensions, w += kPanel * 4) {
    LaneVec words[VECS];
    for (int j = 0; j < VECS; ++j) words[j] = *reinterpret_cast<const LaneVecUnaligned*>(w + j * kLanes * 4);
#pragma GCC unroll 8
    for (int d = 0; d < dimensions; ++d) {
      Vec values[VECS];
      for (int j = 0; j < VECS; ++j) {
        const LaneVec code = words[j] >> (d % 4 * 8 + d / 4 * 4) & (NIBBLES ? 15u : 255u);
        values[j] = __builtin_convertvector(reinterpret_cast<const IntVec&>(code), Vec) * scales[j] + offsets[j];
      }
      body(first + d, values);
    }
  }
}

// to: [k, kPanel], the values of a panel.
template <bool NIBBLES>
static void decode_panel(const Codes& panel, int64_t groups, float* to) {
  constexpr int vecs = 3;
  for (int64_t g = 0; g < groups; ++g, to += kGroup * kPanel)
    for (int c = 0; c < kPanel; c += vecs * kLanes)
      each_dimension<NIBBLES, vecs>(panel.data + g * kGroup * kPanel / (NIBBLES ? 2 : 1) + c * 4,
                                    panel.scale + g * kPanel + c, panel.offset + (NIBBLES ? g * kPanel + c : 0),
                                    [&](int d, const Vec(&values)[vecs]) {
                                      for (int j = 0; j < vecs; ++j) store(to + d * kPanel + c + j * kLanes, values[j]);
                                    });
}
