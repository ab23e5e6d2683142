// y = x W^T + bias with W in panels of kPanel output columns: [panels, k, kPanel] as float32, in pairs of dimensions,
// [panels, k / 2, kPanel, 2], as bfloat16, or as `Codes`; optionally with a residual add and an RMSNorm before it and
// SwiGLU after it.
//
// Narrow storage cuts what a decode step reads, which is what limits it. A few dimensions of a panel meet all rows of
// an item before the next ones do, so they are read and widened once and are in the first-level cache then; meanwhile
// the panel that comes next is fetched. A sum runs over k in order and in float32 whatever the tile and the storage, so
// a row's result is the same bits in every batch.
#pragma once

#include "elementwise.h"
#include "kernels.h"
#include "linear_tile.h"
#include "simd.h"
#include "team.h"

constexpr int64_t kRowBlock = 128;  // rows of an item: x of that many stays in the second-level cache
constexpr int64_t kDepth = 96;      // dimensions that meet all rows before the next ones
static_assert(kDepth % kGroup == 0);

struct LinearScratch {
  alignas(64) float wide[kDepth * kPanel];         // some dimensions of a panel
  alignas(64) float lines[2][kRowBlock * kPanel];  // the columns of one or two panels of the rows of an item
};

// Panel `panel` in each form, what is to be fetched of it before it is used, and the same from column c of it on.
struct Floats {
  const float* w;
};
INLINE LinesAhead lines_of(const void* first, int64_t bytes) {
  const char* line = static_cast<const char*>(first);
  return {line, line + bytes, 0};
}

INLINE Floats panel_of(const Floats& all, int64_t panel, int64_t k) { return {all.w + panel * k * kPanel}; }
INLINE Pairs panel_of(const Pairs& all, int64_t panel, int64_t k) { return {all.words + panel * k / 2 * kPanel}; }
template <bool NIBBLES>
INLINE Coded<NIBBLES> panel_of(const Coded<NIBBLES>& all, int64_t panel, int64_t k) {
  return {panel_of(all.codes, panel, k / kGroup)};
}

INLINE LinesAhead lines_of(const Floats& panel, int64_t k) { return lines_of(panel.w, k * kPanel * 4); }
INLINE LinesAhead lines_of(const Pairs& panel, int64_t k) { return lines_of(panel.words, k * kPanel * 2); }
template <bool NIBBLES>
INLINE LinesAhead lines_of(const Coded<NIBBLES>& panel, int64_t k) {
  return lines_of(panel.codes.data, k * kPanel / (NIBBLES ? 2 : 1));
}

INLINE Floats from_column(const Floats& panel, int64_t c) { return {panel.w + c}; }
INLINE Pairs from_column(const Pairs& panel, int64_t c) { return {panel.words + c}; }
template <bool NIBBLES>
INLINE Coded<NIBBLES> from_column(const Coded<NIBBLES>& panel, int64_t c) {
  return {{panel.codes.data + c * 4, panel.codes.scale + c, NIBBLES ? panel.codes.offset + c : nullptr}};
}

// Up to so many rows weights are used as fast as they come, and the CPU's own prefetching does better.
INLINE int64_t few_rows(const Floats&) { return kFewRows; }
INLINE int64_t few_rows(const Pairs&) { return 0; }
template <typename Weights>
INLINE int64_t few_rows(const Weights&) { return 1; }

// Of codes, the scales of the dimensions from `first` to `last`.
template <typename Weights>
INLINE void fetch_scales(const Weights&, int64_t, int64_t) {}
template <bool NIBBLES>
INLINE void fetch_scales(const Coded<NIBBLES>& panel, int64_t first, int64_t last) {
  const int64_t end = last / kGroup * kPanel;
  for (int64_t i = first / kGroup * kPanel; i < end; i += 32) {
    __builtin_prefetch(panel.codes.scale + i);
    if (NIBBLES) __builtin_prefetch(panel.codes.offset + i);
  }
}

// The first tile of an item leaves the weights for the others, if there are any, in `wide`.
INLINE void multiply_tile(int64_t height, bool, bool, const float* x, int64_t x_stride, const Floats& w, int64_t first,
                          int64_t last, const LinesAhead& ahead, float*, float* lines) {
  kFloatTiles[height](x, x_stride, w.w + first * kPanel, first, last, ahead, lines);
}
template <typename Weights>
INLINE void multiply_tile(int64_t height, bool is_first, bool is_only, const float* x, int64_t x_stride,
                          const Weights& w, int64_t first, int64_t last, const LinesAhead& ahead, float* wide,
                          float* lines) {
  if (is_first)
    WideningTiles<Weights>::tiles[height](x, x_stride, w, first, last, ahead, wide, is_only ? 0 : kPanel, lines);
  else
    kFloatTiles[height](x, x_stride, wide, first, last, ahead, lines);
}

// Where panel `panel` of the weight lies in the result: its first column, and how many there are of it. The panels of a
// gate and an up projection alternate; unless that is activated, the gate's columns come first.
struct Place {
  int64_t column, columns;
};
INLINE Place place_of(const Linear& a, int64_t panel) {
  const int64_t parts = 1 + a.gated, part = panel % parts, column = panel / parts * kPanel, width = a.n / parts;
  return {(a.activated ? 0 : part * width) + column, min(kPanel, width - column)};
}

// lines: `rows` rows from `row` on against panel `panel`. next: the panel that comes after it, or -1; out: unless null,
// where the first of these rows will be written, `width` apart: its memory is fetched meanwhile.
template <typename Weights>
INLINE void multiply_panel(const Linear& a, const Weights& weights, int64_t panel, int64_t columns, int64_t next,
                           int64_t row, int64_t rows, float* wide, float* lines, const float* out, int64_t width) {
  const Weights then = panel_of(weights, max(next, 0), a.k);
  const int64_t tiles = (rows + kLinearRows - 1) / kLinearRows;
  const int64_t height = rows / tiles, higher = rows % tiles;  // of even height: 9 rows are 5 + 4
  const int64_t depth = tiles > 1 ? kDepth : a.k, steps = (a.k + kStep - 1) / kStep * tiles;
  LinesAhead ahead = lines_of(then, a.k);
  ahead.count = next < 0 || rows <= few_rows(weights) ? 0 : ((ahead.end - ahead.line) / 64 + steps) / steps;
  for (int64_t i = 0; i < rows * kPanel; i += kLanes) store(lines + i, Vec{});
  for (int64_t c = 0; c < columns; c += kLinearColumns) {
    const Weights w = from_column(panel_of(weights, panel, a.k), c);
    for (int64_t first = 0; first < a.k; first += depth) {
      const int64_t last = min(first + depth, a.k);
      if (ahead.count) fetch_scales(then, first, last);
      for (int64_t i = 0, r = 0; i < tiles; ++i) {
        const int64_t count = height + (i < higher);
        const float* x = a.x + (row + r) * a.x_stride;
        if (out && last == a.k && columns == kPanel)
          for (int64_t j = r; j < r + count; ++j)
            for (int64_t f = 0; f < kLinearColumns; f += 16) __builtin_prefetch(out + j * width + c + f, 1);
        multiply_tile(count, i == 0, tiles == 1, x, a.x_stride, w, first, last, ahead, wide + c,
                      lines + r * kPanel + c);
        ahead.line += (last - first + kStep - 1) / kStep * ahead.count * 64;
        r += count;
      }
    }
    ahead.count = 0;
  }
}

// Rows `row` to `row + rows` of unit `unit` of the result: of a panel, or of those of a gate and an up projection.
template <typename Weights>
INLINE void linear_unit(const Linear& a, const Weights& weights, int64_t unit, int64_t next, int64_t row, int64_t rows,
                        LinearScratch& s) {
  const int64_t parts = 1 + a.activated, width = a.n / parts;
  const Place place = place_of(a, unit * parts);
  alignas(64) float biases[2][kPanel] = {};
  float* out = a.out + row * width + place.column;
  for (int64_t part = 0; part < parts; ++part) {
    const bool is_last = part + 1 == parts;
    const int64_t panel = unit * parts + part, then = !is_last ? panel + 1 : next < 0 ? -1 : next * parts;
    multiply_panel(a, weights, panel, place.columns, then, row, rows, s.wide, s.lines[part], is_last ? out : nullptr,
                   width);
    if (a.bias)
      for (int64_t c = 0; c < place.columns; ++c) biases[part][c] = a.bias[part * width + place.column + c];
  }
  for (int64_t r = 0; r < rows; ++r) {
    float *line = s.lines[0] + r * kPanel, *to = out + r * width;
    Vec y[kPanelVecs];
    for (int j = 0; j < kPanelVecs; ++j) y[j] = load(line + j * kLanes);
    if (a.bias)
      for (int j = 0; j < kPanelVecs; ++j) y[j] += load(biases[0] + j * kLanes);
    if (a.activated)
      for (int j = 0; j < kPanelVecs; ++j) {
        const Vec up = load(s.lines[1] + r * kPanel + j * kLanes);
        y[j] = silu(y[j]) * (a.bias ? up + load(biases[1] + j * kLanes) : up);
      }
    if (place.columns == kPanel) {
      for (int j = 0; j < kPanelVecs; ++j) store(to + j * kLanes, y[j]);
    } else {
      for (int j = 0; j < kPanelVecs; ++j) store(line + j * kLanes, y[j]);
      for (int64_t c = 0; c < place.columns; ++c) to[c] = line[c];
    }
  }
}

INLINE void norm_row(const Linear& a, int64_t row, float* total, float* normed) {
  add(a.residual + row * a.k, a.x + row * a.x_stride, total, a.k);
  normalise(total, a.norm, inverse_rms(total, a.k, a.eps), normed, a.k);
}

template <typename Weights>
static void linear_with(const Linear& all, const Weights& weights, int threads) {
  const int64_t panels = (all.n / (1 + all.gated) + kPanel - 1) / kPanel * (1 + all.gated);
  const int64_t units = panels / (1 + all.activated), row_blocks = (all.rows + kRowBlock - 1) / kRowBlock;
  // Neighbouring panels go to one thread, so that its reads are one stream; several turns even out what each gets.
  const int64_t run = row_blocks > 1 ? 1 : max(1, units / (threads * 4)), runs = (units + run - 1) / run;
  const bool alone = all.rows <= kLoneRows;
  // The same rows go to the same thread in each product, so that it finds what it wrote in its own cache.
  const int64_t shares = min(min(threads, kMaxShares), row_blocks);
  const auto block_of = [&](int64_t share) { return row_blocks * share / shares; };
  Shares rows_left = shares_of(shares, [&](int64_t s) { return min(block_of(s) * kRowBlock, all.rows); });
  Shares items = shares_of(shares, [&](int64_t s) { return block_of(s) * runs; });
  int64_t done = 0;
  team(static_cast<int>(min(threads, row_blocks * runs)), [&](int thread) {
    LinearScratch scratch;
    Linear a = all;
    int64_t turn = 0, end;
    if (all.norm) {
      a.x = all.normed + (alone ? thread * kLoneRows * all.k : 0);
      a.x_stride = all.k;
    }
    if (all.norm && alone) {
      for (int64_t row = 0; row < all.rows; ++row) {
        float* normed = all.normed + (thread * kLoneRows + row) * all.k;
        norm_row(all, row, thread ? normed : all.total + row * all.k, normed);
      }
    } else if (all.norm) {
      for (int64_t row; (row = take(rows_left, thread, kRowsAtOnce, turn, end)) >= 0;) {
        for (int64_t r = row; r < end; ++r) norm_row(all, r, all.total + r * all.k, all.normed + r * all.k);
        __atomic_fetch_add(&done, end - row, __ATOMIC_RELEASE);
      }
      wait_for(&done, all.rows, thread);
      turn = 0;
    }
    for (int64_t i = take(items, thread, 1, turn, end); i >= 0;) {
      const int64_t row = i / runs * kRowBlock, rows = min(kRowBlock, all.rows - row);
      const int64_t first = i % runs * run, last = min(first + run, units) - 1;
      for (int64_t unit = first; unit <= last; ++unit) {
        // The next item is taken while one unit is left, so that its first panel can be fetched meanwhile.
        if (unit == last) i = take(items, thread, 1, turn, end);
        const int64_t then = unit < last ? unit + 1 : i >= 0 ? i % runs * run : -1;
        linear_unit(a, weights, unit, then, row, rows, scratch);
      }
    }
  });
}

static void linear(const Linear& a, int threads) {
  if (a.w_float) return linear_with(a, Floats{a.w_float}, threads);
  if (a.w_bfloat16) return linear_with(a, Pairs{reinterpret_cast<const uint32_t*>(a.w_bfloat16)}, threads);
  if (a.codes.offset) return linear_with(a, Coded<true>{a.codes}, threads);
  linear_with(a, Coded<false>{a.codes}, threads);
}
