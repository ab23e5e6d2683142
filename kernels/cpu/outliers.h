// Activations that are too large for their row: kept as they are, apart from the 8 bits of the others.
//
// The error of a group is as large as the step between two of its whole numbers, so a transformer's outlier channels
// cost their neighbours most of their bits, and make most of a row's error. Values above kOutlier times the mean of the
// groups' largest are taken out: some two of 576 (after LLM.int8(), Dettmers et al., 2022, which takes whole
// channels out by a fixed threshold). They meet the weights in float32, after the whole sum of the others and in order,
// so a row's result is the same bits in every batch.
#pragma once

#include "codes.h"
#include "kernels.h"
#include "quantized_tile.h"
#include "simd.h"

struct Outlier {
  int32_t at;  // along k
  float value;
};

// Of the rows of a tile: a value for each, 0 where a row has none there.
struct TileOutlier {
  int32_t at;
  float value[kTileHeight];
};

static_assert(sizeof(ActivationGroup) + sizeof(Outlier) <= kActivationGroupBytes);
static_assert(sizeof(TileOutlier) <= kTileOutlierBytes);

constexpr int32_t kNoMore = INT32_MAX;  // `at` of what closes a list

// Rows of `groups` quantised groups, and their outliers: `groups` at most, with the one that closes the list.
struct Activations {
  ActivationGroup* x;
  Outlier* outliers;
  int64_t groups;
  bool nibbles;  // whether the weights have 4 bits

  int64_t width() const { return row_groups(groups, nibbles); }
  Activations from(int64_t row) const { return {x + row * width(), outliers + row * groups, groups, nibbles}; }
};

// memory: for `rows` rows, kActivationGroupBytes for each of their `row_groups`.
INLINE Activations activations_in(void* memory, int64_t rows, int64_t groups, bool nibbles) {
  ActivationGroup* x = static_cast<ActivationGroup*>(memory);
  return {x, reinterpret_cast<Outlier*>(x + rows * row_groups(groups, nibbles)), groups, nibbles};
}

// One row: x, of whole groups, which is left without its outliers. tops: room for a number of each group.
INLINE void quantize_values(float* x, float* tops, const Activations& to) {
  float total = 0.0f;
  for (int64_t g = 0; g < to.groups; ++g) total += tops[g] = largest_magnitude(x + g * kGroup, kGroup);
  const float loud = total * (kOutlier / static_cast<float>(to.groups));
  Outlier *next = to.outliers, *const last = next + to.groups - 1;
  ActivationGroup* rest = to.x + to.groups;
  float sums[kGroup] = {};
  for (int64_t g = 0; g < to.groups; ++g) {
    float top = tops[g];
    if (top > loud) {
      for (int64_t i = g * kGroup; i < (g + 1) * kGroup; ++i) {
        if (!(__builtin_fabsf(x[i]) > loud) || next == last) continue;
        *next++ = {static_cast<int32_t>(i), x[i]};
        x[i] = 0.0f;
      }
      top = largest_magnitude(x + g * kGroup, kGroup);
    }
    sums[g % kGroup] = quantize_group(x + g * kGroup, top, zero_code(to.nibbles), to.x[g]);
    if (to.nibbles && ((g + 1) % kGroup == 0 || g + 1 == to.groups)) {
      quantize_group(sums, largest_magnitude(sums, kGroup), zero_code(false), *rest++);
      for (float& sum : sums) sum = 0.0f;
    }
  }
  next->at = kNoMore;
}

INLINE Vec code_values(LaneVec codes, int32_t zero, const uint16_t* scale) {
  return __builtin_convertvector(reinterpret_cast<const IntVec&>(codes) - zero, Vec) * load_half(scale);
}

// The values of VECS vectors of columns at dimension `at`; panel: from the first of these columns on.
template <bool NIBBLES, int VECS>
INLINE void weights_at(const Codes& panel, int32_t at, Vec (&w)[VECS]) {
  const int64_t group = at / kGroup * kPanel;
  const int in_group = at % kGroup, word = NIBBLES ? in_group / 8 : in_group / 4;
  const int shift = in_group % 4 * 8 + (NIBBLES ? in_group / 4 % 2 * 4 : 0);
  const uint8_t* data = panel.data + group * kGroup / (NIBBLES ? 2 : 1) + word * kPanel * 4;
  for (int j = 0; j < VECS; ++j) {
    const int64_t column = group + j * kLanes;
    const LaneVec words = *reinterpret_cast<const LaneVecUnaligned*>(data + j * kLanes * 4);
    w[j] = code_values(words >> shift & (NIBBLES ? 15u : 255u), zero_code(NIBBLES), panel.scale + column);
    if (!NIBBLES) continue;
    const int g = at / kGroup;
    const LaneVec fours = *reinterpret_cast<const LaneVecUnaligned*>(panel.rest + (g / 4 * kPanel + j * kLanes) * 4);
    w[j] += code_values(fours >> (g % 4 * 8) & 255u, zero_code(false), panel.rest_scale + j * kLanes);
  }
}

// to: `groups` for each of the rows.
INLINE void merge_outliers(const Activations& x, int64_t rows, TileOutlier* to) {
  const Outlier* next[kTileHeight];
  for (int64_t r = 0; r < rows; ++r) next[r] = x.outliers + r * x.groups;
  for (;; ++to) {
    int32_t at = kNoMore;
    for (int64_t r = 0; r < rows; ++r) at = next[r]->at < at ? next[r]->at : at;
    to->at = at;
    if (at == kNoMore) return;
    for (int64_t r = 0; r < rows; ++r) to->value[r] = next[r]->at == at ? next[r]++->value : 0.0f;
  }
}

// Add the outliers of ROWS rows to their sums against a panel, `out`: rows of kPanel floats.
template <int ROWS, bool NIBBLES>
static void outlier_tile(const TileOutlier* outliers, const Codes& panel, float* out) {
  constexpr int vecs = kLanes == 16 ? 3 : 2;
  for (int c = 0; c < kPanel; c += vecs * kLanes) {
    const Codes columns = {panel.data + c * 4, panel.scale + c, nullptr, NIBBLES ? panel.rest + c * 4 : nullptr,
                           NIBBLES ? panel.rest_scale + c : nullptr};
    Vec total[ROWS][vecs];
    for (int r = 0; r < ROWS; ++r)
      for (int j = 0; j < vecs; ++j) total[r][j] = load(out + r * kPanel + c + j * kLanes);
    for (const TileOutlier* next = outliers; next->at != kNoMore; ++next) {
      Vec w[vecs];
      weights_at<NIBBLES>(columns, next->at, w);
      for (int r = 0; r < ROWS; ++r)
        for (int j = 0; j < vecs; ++j) total[r][j] += w[j] * next->value[r];
    }
    for (int r = 0; r < ROWS; ++r)
      for (int j = 0; j < vecs; ++j) store(out + r * kPanel + c + j * kLanes, total[r][j]);
  }
}

// As `quantized_lines`, which goes before it.
template <bool NIBBLES>
INLINE void outlier_lines(const TileOutlier* outliers, int64_t height, const Codes& panel, float* out) {
  typedef void (*Tile)(const TileOutlier*, const Codes&, float*);
  static constexpr Tile tiles[] = {nullptr, outlier_tile<1, NIBBLES>, outlier_tile<2, NIBBLES>,
                                   outlier_tile<min(3, kTileHeight), NIBBLES>,
                                   outlier_tile<min(4, kTileHeight), NIBBLES>};
  if (outliers->at != kNoMore) tiles[height](outliers, panel, out);
}
