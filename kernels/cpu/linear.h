// y = x W^T + bias with W in panels of kPanel output columns: [panels, k, kPanel] as float32, in pairs of dimensions,
// [panels, k / 2, kPanel, 2], as bfloat16, or as `Codes`.
//
// Narrow storage cuts what a decode step reads, which is what limits it; values are widened to float32 in registers.
// bfloat16 also for many rows: widening a panel once into the cache would leave memory idle during the sums and was
// slower. Codes take more work, so for more rows than a tile has a panel is decoded once.
#pragma once

#include "codes.h"
#include "kernels.h"
#include "simd.h"
#include "team.h"

constexpr int kLinearRows = kLanes == 16 ? 8 : 4;  // rows held in registers
constexpr int kLinearVecs = 3;                     // vectors of columns held for each of them
constexpr int kLinearColumns = kLinearVecs * kLanes;
constexpr int64_t kRowBlock = 128;                // rows of an item: x of that many stays in the second-level cache

typedef uint32_t WordVec __attribute__((vector_size(kLanes * 4), may_alias));
typedef uint32_t WordVecUnaligned __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));

// Two bfloat16 values of one column: dimension 2 i in the low half, 2 i + 1 in the high half. A bfloat16 is the upper
// half of the float32 of the same value, so a shift and a mask widen both.
struct Pair {
  uint32_t bits;
};

template <typename Weight>
constexpr int kDepth = 1;  // dimensions that one load covers
template <>
constexpr int kDepth<Pair> = 2;

INLINE void load_weights(const float* w, Vec (&out)[1]) { out[0] = load(w); }
INLINE void load_weights(const Pair* w, Vec (&out)[2]) {
  const WordVec words = *reinterpret_cast<const WordVecUnaligned*>(w);
  const WordVec low = words << 16, high = words & 0xffff0000u;
  out[0] = reinterpret_cast<const Vec&>(low);
  out[1] = reinterpret_cast<const Vec&>(high);
}

template <int ROWS>
INLINE void store_tile(const Vec (&acc)[ROWS][kLinearVecs], const float* bias, float* out, int64_t out_stride,
                       int64_t columns) {
  for (int r = 0; r < ROWS; ++r) {
    if (columns >= kLinearColumns) {
      for (int j = 0; j < kLinearVecs; ++j)
        store(out + r * out_stride + j * kLanes, bias ? acc[r][j] + load(bias + j * kLanes) : acc[r][j]);
    } else {  // the last panel is padded
      float line[kLinearColumns];
      for (int j = 0; j < kLinearVecs; ++j) store(line + j * kLanes, acc[r][j]);
      for (int64_t c = 0; c < columns; ++c) out[r * out_stride + c] = bias ? line[c] + bias[c] : line[c];
    }
  }
}

// ROWS rows of x against kLinearColumns columns of a panel. A sum runs over k in order and in float32 whatever the tile
// and the storage, so a row's result is the same bits in every batch.
template <int ROWS, typename Weight>
static void linear_tile(const float* x, int64_t x_stride, const Weight* w, int64_t k, const float* bias, float* out,
                        int64_t out_stride, int64_t columns) {
  Vec acc[ROWS][kLinearVecs] = {};
  constexpr int step = kDepth<Weight>;
  for (int64_t i = 0; i < k; i += step, w += kPanel) {
    Vec weight[kLinearVecs][step];
    for (int j = 0; j < kLinearVecs; ++j) load_weights(w + j * kLanes, weight[j]);
    for (int d = 0; d < step; ++d)
      for (int r = 0; r < ROWS; ++r)
        for (int j = 0; j < kLinearVecs; ++j) acc[r][j] += weight[j][d] * x[r * x_stride + i + d];
  }
  store_tile<ROWS>(acc, bias, out, out_stride, columns);
}

// As `linear_tile`, with codes from the first of these columns on.
template <int ROWS, bool NIBBLES>
static void coded_tile(const float* x, int64_t x_stride, const Codes& codes, int64_t k, const float* bias, float* out,
                       int64_t out_stride, int64_t columns) {
  Vec acc[ROWS][kLinearVecs] = {};
  const uint8_t* w = codes.data;
  const uint16_t *scale = codes.scale, *offset = codes.offset;
  for (int64_t i = 0; i < k; i += kGroup, w += kGroup * kPanel / (NIBBLES ? 2 : 1), scale += kPanel) {
    each_dimension<NIBBLES, kLinearVecs>(w, scale, offset, [&](int d, const Vec(&weight)[kLinearVecs]) {
      for (int r = 0; r < ROWS; ++r)
        for (int j = 0; j < kLinearVecs; ++j) acc[r][j] += weight[j] * x[r * x_stride + i + d];
    });
    if (NIBBLES) offset += kPanel;
  }
  store_tile<ROWS>(acc, bias, out, out_stride, columns);
}

#if defined(__AVX512F__)
#define TILES(tile, type) \
  {nullptr, tile<1, type>, tile<2, type>, tile<3, type>, tile<4, type>, tile<5, type>, tile<6, type>, tile<7, type>, \
   tile<8, type>}
#else
#define TILES(tile, type) {nullptr, tile<1, type>, tile<2, type>, tile<3, type>, tile<4, type>}
#endif

// Rows `row` to `row + rows` of x against one panel, whose weights are w.
template <typename Weight>
INLINE void linear_panel(const Linear& a, const Weight* w, int64_t panel, int64_t row, int64_t rows) {
  typedef void (*Tile)(const float*, int64_t, const Weight*, int64_t, const float*, float*, int64_t, int64_t);
  static constexpr Tile tiles[] = TILES(linear_tile, Weight);
  const int64_t column = panel * kPanel, count = (rows + kLinearRows - 1) / kLinearRows;
  for (int64_t i = 0; i < count; ++i) {  // of even height: 9 rows are 5 + 4
    const int64_t first = row + rows * i / count, height = row + rows * (i + 1) / count - first;
    for (int64_t c = 0; c < kPanel && column + c < a.n; c += kLinearColumns)
      tiles[height](a.x + first * a.x_stride, a.x_stride, w + c, a.k, a.bias ? a.bias + column + c : nullptr,
                    a.out + first * a.n + column + c, a.n, a.n - column - c);
  }
}

// scratch: k * kPanel.
template <bool NIBBLES>
INLINE void coded_panel(const Linear& a, int64_t panel, int64_t row, int64_t rows, float* scratch) {
  typedef void (*Tile)(const float*, int64_t, const Codes&, int64_t, const float*, float*, int64_t, int64_t);
  static constexpr Tile tiles[] = TILES(coded_tile, NIBBLES);
  const int64_t column = panel * kPanel;
  const Codes codes = panel_of(a.codes, panel, a.k / kGroup);
  if (rows > kLinearRows) {
    decode_panel<NIBBLES>(codes, a.k / kGroup, scratch);
    return linear_panel(a, scratch, panel, row, rows);
  }
  for (int64_t c = 0; c < kPanel && column + c < a.n; c += kLinearColumns)
    tiles[rows](a.x + row * a.x_stride, a.x_stride,
                {codes.data + c * 4, codes.scale + c, NIBBLES ? codes.offset + c : nullptr}, a.k,
                a.bias ? a.bias + column + c : nullptr, a.out + row * a.n + column + c, a.n, a.n - column - c);
}

static void linear(const Linear& a, int threads) {
  const int64_t panels = (a.n + kPanel - 1) / kPanel, row_blocks = (a.rows + kRowBlock - 1) / kRowBlock;
  // Neighbouring panels go to one thread, so that its reads are one stream; several turns even out what each gets.
  const int64_t run = row_blocks > 1 ? 1 : max(1, panels / (threads * 4)), runs = (panels + run - 1) / run;
  int64_t next = 0;
  team(static_cast<int>(min(threads, row_blocks * runs)), [&](int thread) {
    for (;;) {
      const int64_t i = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED);
      if (i >= row_blocks * runs) break;
      const int64_t row = i / runs * kRowBlock, rows = min(kRowBlock, a.rows - row), first = i % runs * run;
      for (int64_t panel = first; panel < min(first + run, panels); ++panel) {
        float* scratch = a.panels + thread * a.k * kPanel;
        if (a.w_float) {
          linear_panel(a, a.w_float + panel * kPanel * a.k, panel, row, rows);
        } else if (a.w_bfloat16) {
          linear_panel(a, reinterpret_cast<const Pair*>(a.w_bfloat16) + panel * kPanel * (a.k / 2), panel, row, rows);
        } else if (a.codes.offset) {
          coded_panel<true>(a, panel, row, rows, scratch);
        } else {
          coded_panel<false>(a, panel, row, rows, scratch);
        }
      }
    }
  });
}
