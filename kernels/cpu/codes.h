// Weights as whole numbers of 8 or 4 bits (`Codes`).
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
