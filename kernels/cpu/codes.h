// Weights as whole numbers of 8 or 4 bits (`Codes`).
#pragma once

#include "kernels.h"
#include "simd.h"

constexpr int kPanelVecs = kPanel / kLanes;

typedef uint32_t LaneVec __attribute__((vector_size(kLanes * 4), may_alias));
typedef uint32_t LaneVecUnaligned __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));

INLINE const uint16_t* rest_scale(const Codes& panel, int64_t groups) {
  return reinterpret_cast<const uint16_t*>(panel.rest + fours_in(groups) * 4 * kPanel);
}

INLINE Codes panel_of(const Codes& codes, int64_t panel, int64_t groups) {
  const int64_t first = panel * groups * kPanel;
  const bool nibbles = codes.offset || codes.rest;
  return {codes.data + first * kGroup / (nibbles ? 2 : 1), codes.scale + first,
          codes.offset ? codes.offset + first : nullptr,
          codes.rest ? codes.rest + panel * rest_bytes(groups) : nullptr};
}
