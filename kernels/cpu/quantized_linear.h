// y = x W^T with W as codes of 8 or 4 bits (`Codes`) and x in 8 bits, with a step for each kGroup of a row.
//
// Codes are bytes without a sign in panels of kPanel columns: [panels, k / 4, kPanel, 4]. A 32-bit lane then holds four
// dimensions of one column, which a VNNI instruction multiplies by four activations and adds up; of 4-bit codes it
// holds eight, four in the low halves of its bytes and the four after them in the high halves. The sum of a group starts
// from -128 or -8 times the sum of its activations, so it comes out exact in whole numbers on every instruction set;
// groups are added in float32, in order, so a row's result is the same bits in every batch. What 4-bit codes stand for
// besides, `Codes::rest`, is a product of its own behind them, in which the sums of groups are the activations.
#pragma once

#include "codes.h"
#include "elementwise.h"
#include "kernels.h"
#include "outliers.h"
#include "quantized_tile.h"
#include "simd.h"
#include "team.h"

constexpr int64_t kLineRows = 32;            // rows of a panel's product that are held at once

INLINE void add_bias(float* line, const float* bias, int64_t columns) {
  for (int64_t c = 0; c < columns; ++c) line[c] += bias[c];
}

// `count` pieces of even length: 5 rows in 2 are 3 + 2.
template <typename Body>
INLINE void each_piece(int64_t rows, int64_t count, const Body& body) {
  for (int64_t i = 0; i < count; ++i) body(i, rows * i / count, rows * (i + 1) / count - rows * i / count);
}

INLINE int64_t tiles_in(int64_t rows) { return (rows + kTileHeight - 1) / kTileHeight; }
INLINE int64_t line_blocks_in(int64_t rows) { return (rows + kLineRows - 1) / kLineRows; }

// The outliers of the tiles of x's rows; `to`: of each tile from its first row on.
INLINE void merge_tiles(const Activations& x, int64_t rows, TileOutlier* to) {
  each_piece(rows, line_blocks_in(rows), [&](int64_t, int64_t block, int64_t height) {
    each_piece(height, tiles_in(height), [&](int64_t, int64_t first, int64_t count) {
      merge_outliers(x.from(block + first), count, to + (block + first) * x.groups);
    });
  });
}

// `rows` rows of the product with a panel, kLineRows at most; next: the panel that comes after it, or null.
template <bool NIBBLES>
INLINE void multiply_panel(const Codes& panel, const Codes* next, const Activations& x, const TileOutlier* outliers,
                           int64_t rows, float* lines) {
  constexpr int all = group_lines(NIBBLES);
  const int64_t tiles = tiles_in(rows);
  each_piece(rows, tiles, [&](int64_t i, int64_t first, int64_t height) {
    const int begin = static_cast<int>(all * i / tiles), end = static_cast<int>(all * (i + 1) / tiles);
    const Ahead ahead = next ? Ahead{*next, begin, end} : Ahead{};
    quantized_lines<NIBBLES>(x.from(first).x, height, panel, x.groups, ahead, lines + first * kPanel);
    outlier_lines<NIBBLES>(outliers + first * x.groups, height, panel, lines + first * kPanel);
  });
}

// Rows `row` to `row + rows`, kLineRows at most, of panel `panel` of the result; x: their activations; outliers: of
// their tiles; next: the panel that comes after it, or -1. All of a gate comes before the up projection, so that one panel
// at a time is in cache.
template <bool NIBBLES>
INLINE void quantized_panel(const QuantizedLinear& a, const Activations& x, const TileOutlier* outliers, int64_t panel,
                            int64_t next, int64_t row, int64_t rows) {
  const int64_t groups = x.groups, parts = 1 + a.gated;
  const int64_t column = panel * kPanel, width = a.gated ? a.n / 2 : a.n, columns = min(kPanel, width - column);
  // With so few rows that codes are used as fast as they come, the CPU's own prefetching does better.
  const bool fetch = next >= 0 && rows > (NIBBLES ? 1 : kTileHeight);
  alignas(64) float lines[2][kLineRows * kPanel];
  for (int64_t part = 0; part < parts; ++part) {
    const Codes ahead = panel_of(a.codes, max(next, 0) * parts + part, groups);
    multiply_panel<NIBBLES>(panel_of(a.codes, panel * parts + part, groups), fetch ? &ahead : nullptr, x, outliers,
                            rows, lines[part]);
  }
  for (int64_t r = 0; r < rows; ++r) {
    float *line = lines[0] + r * kPanel, *to = a.out + (row + r) * width + column;
    if (a.bias) add_bias(line, a.bias + column, columns);
    if (a.gated) {
      float* up = lines[1] + r * kPanel;
      if (a.bias) add_bias(up, a.bias + width + column, columns);
      for (int c = 0; c < kPanel; c += kLanes) {
        const Vec gate = load(line + c);
        store(line + c, gate / (exp2(gate * -kLog2e) + 1.0f) * load(up + c));
      }
    }
    int64_t c = 0;
    for (; c + kLanes <= columns; c += kLanes) store(to + c, load(line + c));
    for (; c < columns; ++c) to[c] = line[c];
  }
}

// A row of the input, after the residual add and the norm that may come before the product.
// line: as in QuantizedLinear; total: where the residual sum goes, or null.
INLINE void quantize_row(const QuantizedLinear& a, int64_t row, float* line, float* total, const Activations& to) {
  const float* x = a.x + row * a.x_stride;
  const int64_t k = a.k;
  if (a.norm) {
    const float* values = x;
    if (a.residual) {
      const float* residual = a.residual + row * k;
      int64_t i = 0;
      for (; i + kLanes <= k; i += kLanes) store(line + i, load(residual + i) + load(x + i));
      for (; i < k; ++i) line[i] = residual[i] + x[i];
      if (total)
        for (i = 0; i < k; ++i) total[row * k + i] = line[i];
      values = line;
    }
    normalise(values, a.norm, inverse_rms(values, k, a.eps), line, k);
  } else {
    for (int64_t i = 0; i < k; ++i) line[i] = x[i];
  }
  const int64_t whole = to.groups * kGroup;
  for (int64_t i = k; i < whole; ++i) line[i] = 0.0f;
  quantize_values(line, line + whole, to);
}

static void quantized_linear(const QuantizedLinear& a, int threads) {
  const int64_t groups = (a.k + kGroup - 1) / kGroup;
  const int64_t panels = ((a.gated ? a.n / 2 : a.n) + kPanel - 1) / kPanel;
  const int64_t row_blocks = (a.rows + kQuantizedRowBlock - 1) / kQuantizedRowBlock;
  // Neighbouring panels go to one thread, so that its reads are one stream; several turns even out what each gets.
  const int64_t run = row_blocks > 1 ? 1 : max(1, panels / (threads * 4)), runs = (panels + run - 1) / run;
  const bool alone = a.rows <= kLoneRows, nibbles = a.codes.offset;
  int64_t next_row = 0, done = 0, next = 0;
  team(static_cast<int>(min(threads, row_blocks * runs)), [&](int thread) {
    float* line = a.lines + thread * groups * (kGroup + 1);
    char* memory = static_cast<char*>(a.activations);
    if (alone) memory += thread * a.rows * row_groups(groups, nibbles) * kActivationGroupBytes;
    const Activations x = activations_in(memory, a.rows, groups, nibbles);
    if (alone) {
      for (int64_t row = 0; row < a.rows; ++row)
        quantize_row(a, row, line, thread == 0 ? a.total : nullptr, x.from(row));
    } else {
      for (;;) {
        const int64_t row = __atomic_fetch_add(&next_row, 4, __ATOMIC_RELAXED);
        if (row >= a.rows) break;
        const int64_t end = min(row + 4, a.rows);
        for (int64_t r = row; r < end; ++r) quantize_row(a, r, line, a.total, x.from(r));
        __atomic_fetch_add(&done, end - row, __ATOMIC_RELEASE);
      }
      wait_for(&done, a.rows, thread);
    }
    TileOutlier* outliers = static_cast<TileOutlier*>(a.outliers) + thread * min(a.rows, kQuantizedRowBlock) * groups;
    int64_t merged = -1;  // the first row of the item whose outliers these are
    const int64_t items = row_blocks * runs;
    const auto take = [&] { return __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED); };
    for (int64_t i = take(); i < items;) {
      const int64_t row = i / runs * kQuantizedRowBlock, rows = min(kQuantizedRowBlock, a.rows - row);
      const int64_t first = i % runs * run, last = min(first + run, panels) - 1;
      if (merged != row) merge_tiles(x.from(row), rows, outliers);
      merged = row;
      const int64_t count = line_blocks_in(rows);
      for (int64_t panel = first; panel <= last; ++panel) {
        // The next item is taken while one panel is left, so that its first panel can be fetched meanwhile.
        if (panel == last) i = take();
        const int64_t then = panel < last ? panel + 1 : i < items ? i % runs * run : -1;
        each_piece(rows, count, [&](int64_t j, int64_t begin, int64_t height) {
          const int64_t next_panel = j + 1 < count ? -1 : then;
          const Activations part = x.from(row + begin);
          if (nibbles)
            quantized_panel<true>(a, part, outliers + begin * groups, panel, next_panel, row + begin, height);
          else
            quantized_panel<false>(a, part, outliers + begin * groups, panel, next_panel, row + begin, height);
        });
      }
    }
  });
}
