// y = x W^T with W as codes of 8 or 4 bits (`Codes`) and x in 8 bits, with a step for each kGroup of a row.
//
// Codes are bytes without a sign in panels of kPanel columns: [panels, k / 4, kPanel, 4]. A 32-bit lane then holds four
// dimensions of one column, which a VNNI instruction multiplies by four activations and adds up; of 4-bit codes it
// holds eight, four in the low halves of its bytes and the four after them in the high halves. The sum of a group
// starts from -128 or -8 times the sum of its activations, so it comes out exact in whole numbers on every instruction
// set; groups are added in float32, in order, so a row's result is the same bits in every batch. What 4-bit codes stand
// for besides, `Codes::rest`, is a product of its own behind them, in which the sums of groups are the activations.
#pragma once

#include "codes.h"
#include "elementwise.h"
#include "kernels.h"
#include "outliers.h"
#include "quantized_tile.h"
#include "simd.h"
#include "team.h"

constexpr int64_t kLineRows = 32;            // rows of a panel's product that are held at once

// `count` pieces of even length: 5 rows in 2 are 3 + 2.
template <typename Body>
INLINE void each_piece(int64_t rows, int64_t count, const Body& body) {
  for (int64_t i = 0; i < count; ++i) body(i, rows * i / count, rows * (i + 1) / count - rows * i / count);
}

INLINE int64_t tiles_in(int64_t rows) { return (rows + kTileHeight - 1) / kTileHeight; }
INLINE int64_t line_blocks_in(int64_t rows) { return (rows + kLineRows - 1) / kLineRows; }

// `rows` rows of the product with a panel, kLineRows at most, without outliers. next: the panel that comes after it, or
// null; out: unless null, where the first of these rows will be written, `width` apart: its memory is fetched
// meanwhile, since a line that is not in cache when it is written takes longer than the sums that go there.
template <bool NIBBLES>
INLINE void multiply_panel(const Codes& panel, const Codes* next, const Activations& x, int64_t rows, float* lines,
                           const float* out, int64_t width) {
  constexpr int all = group_lines(NIBBLES);
  const int64_t tiles = tiles_in(rows);
  each_piece(rows, tiles, [&](int64_t i, int64_t first, int64_t height) {
    const int begin = static_cast<int>(all * i / tiles), end = static_cast<int>(all * (i + 1) / tiles);
    const Ahead ahead = next ? Ahead{*next, begin, end} : Ahead{};
    for (int64_t r = first; out && r < first + height; ++r)
      for (int c = 0; c < kPanel; c += 16) __builtin_prefetch(out + r * width + c, 1);
    quantized_lines<NIBBLES>(x.from(first).x, height, panel, x.groups, ahead, lines + first * kPanel);
  });
}

// One row of a panel's product with all that comes after the tiles. line: the sums of the tiles; row: in its block.
template <bool NIBBLES>
INLINE void finish_line(const float* line, const BlockOutliers& outliers, const Codes& panel, int64_t groups,
                        int64_t part, int64_t row, const float* bias, Vec (&sums)[kPanelVecs]) {
  for (int j = 0; j < kPanelVecs; ++j) sums[j] = load(line + j * kLanes);
  add_outliers<NIBBLES>(outliers, panel, groups, part, row, sums);
  if (!bias) return;
  for (int j = 0; j < kPanelVecs; ++j) sums[j] += load(bias + j * kLanes);
}

// Rows `row` to `row + rows` of a row block, kLineRows at most, of panel `panel` of the result. x: activations of the
// block, whose first row is `block`; next: the panel that comes after it, or -1. All of a gate comes before the up
// projection, so that one panel at a time is in cache, which is when the outliers' weights are decoded.
template <bool NIBBLES>
INLINE void quantized_panel(const QuantizedLinear& a, const Activations& x, const BlockOutliers& outliers,
                            int64_t panel, int64_t next, int64_t block, int64_t row, int64_t rows) {
  const int64_t groups = x.groups, parts = 1 + a.gated;
  const int64_t column = panel * kPanel, width = a.gated ? a.n / 2 : a.n, columns = min(kPanel, width - column);
  // With so few rows that codes are used as fast as they come, the CPU's own prefetching does better.
  const bool fetch = next >= 0 && rows > (NIBBLES ? 1 : kTileHeight);
  alignas(64) float lines[2][kLineRows * kPanel];
  alignas(64) float biases[2][kPanel];
  Codes codes[2];
  float* out = a.out + (block + row) * width + column;
  for (int64_t part = 0; part < parts; ++part) {
    codes[part] = panel_of(a.codes, panel * parts + part, groups);
    const Codes ahead = panel_of(a.codes, max(next, 0) * parts + part, groups);
    multiply_panel<NIBBLES>(codes[part], fetch ? &ahead : nullptr, x.from(row), rows, lines[part],
                            part + 1 == parts ? out : nullptr, width);
    if (row == 0) decode_outliers<NIBBLES>(outliers, codes[part], groups, part);
    if (a.bias)
      for (int64_t c = 0; c < kPanel; ++c) biases[part][c] = c < columns ? a.bias[part * width + column + c] : 0.0f;
  }
  for (int64_t r = 0; r < rows; ++r) {
    Vec y[kPanelVecs];
    finish_line<NIBBLES>(lines[0] + r * kPanel, outliers, codes[0], groups, 0, row + r,
                         a.bias ? biases[0] : nullptr, y);
    if (a.gated) {
      Vec up[kPanelVecs];
      finish_line<NIBBLES>(lines[1] + r * kPanel, outliers, codes[1], groups, 1, row + r,
                           a.bias ? biases[1] : nullptr, up);
      for (int j = 0; j < kPanelVecs; ++j) y[j] = silu(y[j]) * up[j];
    }
    float* to = out + r * width;
    if (columns == kPanel) {
      for (int j = 0; j < kPanelVecs; ++j) store(to + j * kLanes, a.adds ? load(to + j * kLanes) + y[j] : y[j]);
    } else {
      float* line = lines[0] + r * kPanel;
      for (int j = 0; j < kPanelVecs; ++j) store(line + j * kLanes, y[j]);
      for (int64_t c = 0; c < columns; ++c) to[c] = a.adds ? to[c] + line[c] : line[c];
    }
  }
}

// The values of a row that become whole numbers, value(i) and values(i): of kLanes from i on, as whole groups, and the
// largest magnitude of each group behind them.
template <typename Value, typename Values>
INLINE void fill_line(int64_t k, int64_t groups, float* line, const Value& value, const Values& values) {
  float* tops = line + groups * kGroup;
  for (int64_t i = k; i < groups * kGroup; ++i) line[i] = 0.0f;
  int64_t first = 0;
  for (; first < groups; first += kLanes) {
    IntVec largest[kLanes];  // magnitudes are ordered as their bits are
    const int64_t count = min(kLanes, groups - first);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t begin = (first + i) * kGroup;
      const bool part = begin + kGroup > k;
      for (int64_t d = begin; part && d < k; ++d) line[d] = value(d);
      IntVec most = {};
#pragma GCC unroll 8
      for (int64_t d = 0; d < kGroup; d += kLanes) {
        const Vec v = part ? load(line + begin + d) : values(begin + d);
        store(line + begin + d, v);
        most = larger(most, bits_of(magnitude(v)));
      }
      largest[i] = most;
    }
    for (int64_t i = count; i < kLanes; ++i) largest[i] = settled(IntVec{});
    const IntVec all = reduce_each(largest, larger);
    store(tops + first, reinterpret_cast<const Vec&>(all));
  }
  for (; first % kGroup; first += kLanes) store(tops + first, Vec{});
}

// `count` rows of the input, kRowsAtOnce at most, after the residual add and the norm that may come before the product.
// Step by step for all of them: a row's steps wait for each other. lines: line_floats for each; total: where the
// residual sums go, or null.
INLINE void quantize_rows(const QuantizedLinear& a, int64_t row, int64_t count, float* lines, float* total,
                          const Activations& to) {
  const int64_t k = a.k, whole = to.groups * kGroup, width = line_floats(to.groups);
  const float* x[kRowsAtOnce];
  float factors[kRowsAtOnce];
  for (int64_t r = 0; r < count; ++r) {
    x[r] = a.x + (row + r) * a.x_stride;
    if (a.norm && a.residual) {
      float* sums = total ? total + (row + r) * k : lines + r * width;
      factors[r] = add_inverse_rms(a.residual + (row + r) * k, x[r], sums, k, a.eps);
      x[r] = sums;
    } else if (a.norm) {
      factors[r] = inverse_rms(x[r], k, a.eps);
    }
  }
  for (int64_t r = 0; r < count; ++r) {
    const float* from = x[r];
    const float factor = factors[r];
    if (a.norm)
      fill_line(
          k, to.groups, lines + r * width, [&](int64_t i) { return a.norm[i] * (from[i] * factor); },
          [&](int64_t i) { return load(a.norm + i) * (load(from + i) * factor); });
    else
      fill_line(
          k, to.groups, lines + r * width, [&](int64_t i) { return from[i]; },
          [&](int64_t i) { return load(from + i); });
  }
  for (int64_t r = 0; r < count; ++r) take_outliers(lines + r * width, lines + r * width + whole, to.from(row + r));
  for (int64_t r = 0; r < count; ++r) quantize_values(lines + r * width, lines + r * width + whole, to.from(row + r));
}

// The rows of the block that begins at `row`, together with all threads that come here meanwhile.
INLINE void quantize_block(const QuantizedLinear& a, int64_t row, int64_t rows, int thread, float* lines,
                           const Activations& x) {
  BlockProgress& progress = a.progress[row / kQuantizedRowBlock];
  for (int64_t first; (first = __atomic_fetch_add(&progress.taken, kRowsAtOnce, __ATOMIC_RELAXED)) < rows;) {
    const int64_t count = min(kRowsAtOnce, rows - first);
    quantize_rows(a, row + first, count, lines, a.total, x);
    __atomic_fetch_add(&progress.done, count, __ATOMIC_RELEASE);
  }
  wait_for(&progress.done, rows, thread);
}

static void quantized_linear(const QuantizedLinear& a, int threads) {
  const int64_t groups = (a.k + kGroup - 1) / kGroup;
  const int64_t panels = ((a.gated ? a.n / 2 : a.n) + kPanel - 1) / kPanel;
  const int64_t row_blocks = row_blocks_in(a.rows);
  // Neighbouring panels go to one thread, so that its reads are one stream; several turns even out what each gets.
  const int64_t run = row_blocks > 1 ? 1 : max(1, panels / (threads * 4)), runs = (panels + run - 1) / run;
  const bool alone = a.rows <= kLoneRows, nibbles = a.codes.rest;
  // The same rows go to the same thread in each product: else half of what it reads comes from another core's cache.
  const int64_t shares = min(min(threads, kMaxShares), row_blocks);
  const auto block_of = [&](int64_t share) { return row_blocks * share / shares; };
  Shares items = shares_of(shares, [&](int64_t s) { return block_of(s) * runs; });
  for (int64_t b = 0; b < row_blocks; ++b) a.progress[b] = {};
  team(static_cast<int>(min(threads, row_blocks * runs)), [&](int thread) {
    float* lines = a.lines + thread * kRowsAtOnce * line_floats(groups);
    char* memory = static_cast<char*>(a.activations);
    if (alone) memory += thread * a.rows * row_groups(groups, nibbles) * kActivationGroupBytes;
    const Activations x = activations_in(memory, a.rows, groups, nibbles);
    if (alone) quantize_rows(a, 0, a.rows, lines, thread == 0 ? a.total : nullptr, x);
    BlockOutliers outliers = block_outliers_in(static_cast<char*>(a.outliers) + thread * outlier_bytes(a.rows, groups),
                                               min(a.rows, kQuantizedRowBlock));
    int64_t gathered = -1;  // the first row of the block whose outliers these are
    int64_t turn = 0, end;
    for (int64_t i = take(items, thread, 1, turn, end); i >= 0;) {
      const int64_t row = i / runs * kQuantizedRowBlock, rows = min(kQuantizedRowBlock, a.rows - row);
      const int64_t first = i % runs * run, last = min(first + run, panels) - 1;
      const Activations block = x.from(row);
      const int64_t count = line_blocks_in(rows);
      if (gathered != row && !alone) quantize_block(a, row, rows, thread, lines, x);
      if (gathered != row) gather_outliers(block, rows, 1 + a.gated, reinterpret_cast<int32_t*>(lines), outliers);
      gathered = row;
      for (int64_t panel = first; panel <= last; ++panel) {
        // The next item is taken while one panel is left, so that its first panel can be fetched meanwhile.
        if (panel == last) i = take(items, thread, 1, turn, end);
        const int64_t then = panel < last ? panel + 1 : i >= 0 ? i % runs * run : -1;
        each_piece(rows, count, [&](int64_t j, int64_t begin, int64_t height) {
          const int64_t next_panel = j + 1 < count ? -1 : then;
          if (nibbles)
            quantized_panel<true>(a, block, outliers, panel, next_panel, row, begin, height);
          else
            quantized_panel<false>(a, block, outliers, panel, next_panel, row, begin, height);
        });
      }
    }
  });
}
