// Activations that are too large for their row: kept as they are, apart from the 8 bits of the others.
//
// The error of a group is as large as the step between two of its whole numbers, so a transformer's outlier channels
// cost their neighbours most of their bits, and make most of a row's error. Values above kOutlier times the mean of the
// groups' largest are taken out: some two of 576 (after LLM.int8(), Dettmers et al., 2022, which takes whole
// channels out by a fixed threshold). They meet the weights in float32, after the whole sum of the others and in order,
// so a row's result is the same bits in every batch.
//
// Rows have most of their outliers in the same few dimensions, so the weights of a dimension are decoded once for all
// rows of a block, and each row multiplies its own: no zeros, and no shifts and masks but the first.
#pragma once

#include "codes.h"
#include "kernels.h"
#include "quantized_tile.h"
#include "simd.h"

struct Outlier {
  int32_t at;  // along k
  float value;
};

static_assert(sizeof(ActivationGroup) + sizeof(Outlier) <= kActivationGroupBytes);

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

// Takes what is above `loud` out of a group, for zeros, as long as there is room before `last`. at: of its first value
// along k. Returns where the next outlier goes.
INLINE Outlier* take_outliers(float* group, float loud, int64_t at, Outlier* next, const Outlier* last) {
  for (int i = 0; i < kGroup; i += kLanes) {
    const Vec v = load(group + i);
    const IntVec above = magnitude(v) > splat(loud);
    store(group + i, above ? Vec{} : v);
    for (uint32_t lanes = lanes_of(above); lanes; lanes &= lanes - 1) {
      const int lane = __builtin_ctz(lanes);
      if (next == last)
        group[i + lane] = v[lane];
      else
        *next++ = {static_cast<int32_t>(at + i + lane), v[lane]};
    }
  }
  return next;
}

// The outliers of a row go from x, of whole groups, to `to`. tops: the largest magnitude of each group, and zeros up to
// whole groups of them. Which groups have outliers is found for all at once: the CPU guesses a branch in each wrong.
INLINE void take_outliers(float* x, float* tops, const Activations& to) {
  Vec totals = {};
  for (int64_t g = 0; g < to.groups; g += kLanes) totals += load(tops + g);
  const float loud = sum(totals) * (kOutlier / static_cast<float>(to.groups));
  Outlier *next = to.outliers, *const last = next + to.groups - 1;
  for (int64_t first = 0; first < to.groups; first += kLanes)
    for (uint32_t lanes = lanes_of(load(tops + first) > splat(loud)); lanes; lanes &= lanes - 1) {
      const int64_t g = first + __builtin_ctz(lanes);
      next = take_outliers(x + g * kGroup, loud, g * kGroup, next, last);
      tops[g] = largest_magnitude(x + g * kGroup, kGroup);
    }
  next->at = kNoMore;
}

// What is left of a row as whole numbers. The sums of the groups' values come in the place of `tops`.
INLINE void quantize_values(const float* x, float* tops, const Activations& to) {
  for (int64_t first = 0; first < to.groups; first += kLanes) {
    const Vec origins = origins_of(load(tops + first));
    const IntVec sums = quantize_groups(x + first * kGroup, origins, min(kLanes, to.groups - first),
                                        zero_code(to.nibbles), to.x + first);
    store(tops + first, __builtin_convertvector(sums, Vec) * steps_of(origins));
  }
  for (int64_t g = to.groups, at = 0; g < to.width(); ++g, at += kGroup)
    quantize_groups(tops + at, origins_of(splat(largest_magnitude(tops + at, kGroup))), 1, zero_code(false), to.x + g);
}

INLINE Vec code_values(LaneVec codes, int32_t zero, const uint16_t* scale) {
  return __builtin_convertvector(reinterpret_cast<const IntVec&>(codes) - zero, Vec) * load_half(scale);
}

// The values of a panel's first VECS vectors of columns at dimension `at`; groups: of all dimensions.
template <bool NIBBLES, int VECS>
INLINE void weights_at(const Codes& panel, int64_t groups, int32_t at, Vec (&w)[VECS]) {
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
    w[j] += code_values(fours >> (g % 4 * 8) & 255u, zero_code(false), rest_scale(panel, groups) + j * kLanes);
  }
}

// The outliers of a block of rows as one thread meets them.
struct BlockOutliers {
  Outlier* entries;     // of all rows in turn; `at`: a place in `dimensions`, or along k if there are none
  int32_t* first;       // [rows + 1], where the entries of each row begin
  int32_t* dimensions;  // [count]
  int32_t count;        // 0: no outliers, too many dimensions, or a single row; rows then decode their own
  float* weights;       // [parts, count, kPanel], those of the panels at hand
};

// memory: of outlier_bytes(rows, groups).
INLINE BlockOutliers block_outliers_in(void* memory, int64_t rows) {
  float* weights = static_cast<float*>(memory);
  int32_t* dimensions = reinterpret_cast<int32_t*>(weights + kDecodedOutliers * kPanel);
  int32_t* first = dimensions + kDecodedOutliers;
  return {reinterpret_cast<Outlier*>(first + rows + 1), first, dimensions, 0, weights};
}

// places: scratch for k numbers. parts: panels that one product takes, kDecodedOutliers dimensions for all of them.
INLINE void gather_outliers(const Activations& x, int64_t rows, int64_t parts, int32_t* places, BlockOutliers& to) {
  const auto copy = [&](const auto& place_of) {
    int32_t next = 0;
    for (int64_t r = 0; r < rows; ++r) {
      to.first[r] = next;
      for (const Outlier* outlier = x.outliers + r * x.groups; outlier->at != kNoMore; ++outlier)
        to.entries[next++] = {place_of(outlier->at), outlier->value};
    }
    to.first[rows] = next;
  };
  to.count = 0;
  if (rows > 1) {
    for (int64_t i = 0; i < x.groups * kGroup; ++i) places[i] = -1;
    const int32_t most = static_cast<int32_t>(kDecodedOutliers / parts);
    copy([&](int32_t at) {
      if (places[at] < 0 && to.count <= most) {
        if (to.count < most) to.dimensions[to.count] = at;
        places[at] = to.count++;
      }
      return places[at];
    });
    if (to.count > most) to.count = 0;
  }
  if (to.count == 0) copy([](int32_t at) { return at; });
}


// The weights of the block's outliers in one panel, the product's part `part`.
template <bool NIBBLES>
static void decode_outliers(const BlockOutliers& block, const Codes& panel, int64_t groups, int64_t part) {
  float* to = block.weights + part * block.count * kPanel;
  for (int32_t i = 0; i < block.count; ++i, to += kPanel) {
    Vec w[kPanelVecs];
    weights_at<NIBBLES>(panel, groups, block.dimensions[i], w);
    for (int j = 0; j < kPanelVecs; ++j) store(to + j * kLanes, w[j]);
  }
}

// Add the outliers of row `row` of a block to its sums against a panel.
template <bool NIBBLES>
INLINE void add_outliers(const BlockOutliers& block, const Codes& panel, int64_t groups, int64_t part, int64_t row,
                         Vec (&sums)[kPanelVecs]) {
  const float* weights = block.weights + part * block.count * kPanel;
  const Outlier *next = block.entries + block.first[row], *const end = block.entries + block.first[row + 1];
  for (; next != end; ++next) {
    Vec w[kPanelVecs];
    if (block.count)
      for (int j = 0; j < kPanelVecs; ++j) w[j] = load(weights + next->at * kPanel + j * kLanes);
    else
      weights_at<NIBBLES>(panel, groups, next->at, w);
    for (int j = 0; j < kPanelVecs; ++j) sums[j] += w[j] * next->value;
  }
}
