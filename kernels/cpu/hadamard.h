// The Walsh-Hadamard transform of a head's dimensions. Keys have outliers in a few of them, which would take the
// precision of all that share their scale: it spreads these evenly, and leaves products of q and k as they are when
// both go through it (as in QuaRot, Ashkboos et al., 2024).
#pragma once

#include "simd.h"

// Lanes i and i ^ WIDTH become their sum and difference.
template <int WIDTH>
INLINE Vec lane_butterfly(Vec v) {
  Vec partner, sign;
  for (int i = 0; i < kLanes; ++i) {
    partner[i] = v[i ^ WIDTH];
    sign[i] = i & WIDTH ? -1.0f : 1.0f;
  }
  return v * sign + partner;
}

INLINE Vec lane_butterflies(Vec v) {
  v = lane_butterfly<1>(v);
  v = lane_butterfly<2>(v);
  if constexpr (kLanes > 4) v = lane_butterfly<4>(v);
  if constexpr (kLanes > 8) v = lane_butterfly<8>(v);
  return v;
}

// to: the transform of n numbers, a multiple of 16, times `factor`, in blocks of the largest power of two that divides
// n. It keeps lengths. x may be `to`.
INLINE void spread(const float* x, float* to, int64_t n, float factor) {
  const int64_t block = n & -n;
  const float norm = factor / __builtin_sqrtf(static_cast<float>(block));
  int64_t width = kLanes;
  if (block % (4 * kLanes) == 0) {
    width *= 4;
    for (int64_t i = 0; i < n; i += width) {
      Vec v[4];
      for (int j = 0; j < 4; ++j) v[j] = load(x + i + j * kLanes);
      const Vec a = (v[0] + v[1]) * norm, b = (v[0] - v[1]) * norm, c = (v[2] + v[3]) * norm, d = (v[2] - v[3]) * norm;
      store(to + i, lane_butterflies(a + c));
      store(to + i + kLanes, lane_butterflies(b + d));
      store(to + i + 2 * kLanes, lane_butterflies(a - c));
      store(to + i + 3 * kLanes, lane_butterflies(b - d));
    }
  } else {
    for (int64_t i = 0; i < n; i += kLanes) store(to + i, lane_butterflies(load(x + i) * norm));
  }
  for (; width < block; width *= 2)
    for (int64_t first = 0; first < n; first += 2 * width)
      for (int64_t i = first; i < first + width; i += kLanes) {
        const Vec a = load(to + i), b = load(to + i + width);
        store(to + i, a + b);
        store(to + i + width, a - b);
      }
}
