// y = x W^T with both in 8 bits: a scale for each kGroup values along k of a column of W, and for each kActivationGroup
// of a row of x.
//
// Weights are bytes without a sign, 128 added, in panels of kPanel columns: [panels, k / 4, kPanel, 4]. A 32-bit lane
// then holds four dimensions of one column, which a VNNI instruction multiplies by four activations and adds up. A
// group's sum starts from -128 times the sum of its activations, so it comes out exact in whole numbers on every
// instruction set; groups are added in float32, in order, so a row's result is the same bits in every batch.
#pragma once

#include <omp.h>
#include <sched.h>

#include "elementwise.h"
#include "kernels.h"
#include "kv_types.h"
#include "simd.h"

typedef uint32_t LaneVec __attribute__((vector_size(kLanes * 4), may_alias));
typedef uint32_t LaneVecUnaligned __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));

// How four weights of each lane meet four activations. kParts: 32-bit words that four activations take; a tile holds up
// to kTileHeight rows and tile_vecs(rows) vectors of columns in registers.
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)

constexpr int kParts = 1;
constexpr int kTileHeight = kLanes == 16 ? 4 : 3;
constexpr int tile_vecs(int rows) { return kLanes == 16 ? 3 : rows == 1 ? 6 : rows == 2 ? 3 : 2; }

// Written as assembly because g++ 12 copies registers around the builtin and halves the speed.
INLINE void multiply_add(IntVec& acc, const LaneVec (&w)[1], const int32_t* x) {
#if defined(__AVX512VNNI__)
  asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(w[0]), "v"(splat(x[0])));
#else
  asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(acc) : "x"(w[0]), "x"(splat(x[0])));
#endif
}

INLINE void split_weights(LaneVec words, LaneVec (&w)[1]) { w[0] = words; }
INLINE void store_activations(IntVec x, int32_t* to) {
  *reinterpret_cast<ByteVec*>(to) = __builtin_convertvector(x, ByteVec);
}

#elif defined(__SSE2__)

// Dimensions 0 and 2 as one pair of 16-bit numbers, 1 and 3 as another: products are added up in 32 bits.
constexpr int kParts = 2;
constexpr int kTileHeight = kLanes == 16 ? 3 : 4;
constexpr int tile_vecs(int rows) { return kLanes == 16 || rows == 1 ? 3 : rows == 2 ? 2 : 1; }

INLINE IntVec multiply_pairs(LaneVec w, IntVec x) {
  IntVec sum;
#if defined(__AVX512BW__)
  asm("vpmaddwd %2, %1, %0" : "=v"(sum) : "v"(w), "v"(x));
#elif defined(__AVX2__)
  asm("vpmaddwd %2, %1, %0" : "=x"(sum) : "x"(w), "x"(x));
#else
  sum = reinterpret_cast<const IntVec&>(w);
  asm("pmaddwd %1, %0" : "+x"(sum) : "x"(x));
#endif
  return sum;
}

INLINE void multiply_add(IntVec& acc, const LaneVec (&w)[2], const int32_t* x) {
  acc += multiply_pairs(w[0], splat(x[0]));
  acc += multiply_pairs(w[1], splat(x[1]));
  acc = settled(acc);  // else g++ saves all products of a group on the stack to add them up at its end
}

INLINE void split_weights(LaneVec words, LaneVec (&w)[2]) {
  w[0] = words & 0x00ff00ffu;
  w[1] = words >> 8 & 0x00ff00ffu;
}

INLINE void store_activations(IntVec x, int32_t* to) {
  for (int i = 0; i < kLanes; i += 4) {
    *to++ = (x[i] & 0xffff) | x[i + 2] << 16;
    *to++ = (x[i + 1] & 0xffff) | x[i + 3] << 16;
  }
}

#else

constexpr int kParts = 4;
constexpr int kTileHeight = 2;
constexpr int tile_vecs(int) { return 3; }

INLINE void multiply_add(IntVec& acc, const LaneVec (&w)[4], const int32_t* x) {
  for (int i = 0; i < 4; ++i) acc += reinterpret_cast<const IntVec&>(w[i]) * x[i];
}

INLINE void split_weights(LaneVec words, LaneVec (&w)[4]) {
  for (int i = 0; i < 4; ++i) w[i] = words >> (8 * i) & 255u;
}

INLINE void store_activations(IntVec x, int32_t* to) {
  for (int i = 0; i < kLanes; ++i) to[i] = x[i];
}

#endif

constexpr int kSteps = kGroup / 4, kHalves = kGroup / kActivationGroup;
constexpr int64_t kQuantizedRowBlock = 128;  // rows of an item: their activations stay in the second-level cache

// kGroup values of a row, in kHalves parts with scales of their own.
struct ActivationGroup {
  int32_t start[kHalves];  // -128 times the sum of the values
  float scale[kHalves];
  int32_t words[kSteps * kParts];
};

static_assert(sizeof(ActivationGroup) <= kActivationGroupBytes);

// Quantise kGroup values: the largest of each part becomes 127, ties round to even. NaN and infinity make the scale NaN
// or infinite, so they are not lost.
INLINE void quantize_group(const float* x, ActivationGroup& to) {
  for (int h = 0; h < kHalves; ++h, x += kActivationGroup) {
    const float top = largest_magnitude(x, kActivationGroup), inverse = top > kTiny ? 127.0f / top : 0.0f;
    IntVec sums = {};
    for (int i = 0; i < kActivationGroup; i += kLanes) {
      const IntVec q = round_to_int(load(x + i) * inverse);
      sums += q;
      store_activations(q, to.words + (h * kActivationGroup + i) / 4 * kParts);
    }
    to.start[h] = -128 * reduce(sums, [](IntQuad a, IntQuad b) { return a + b; });
    to.scale[h] = top / 127.0f;
  }
}

// Positive float16 numbers: their bits in the place of a float32's are the number divided by 2^112.
INLINE Vec load_scales(const uint16_t* p) {
  typedef int32_t Words __attribute__((vector_size(kLanes * 4)));
  const Words words = __builtin_convertvector(*reinterpret_cast<const ShortVec*>(p), Words) << 13;
  return reinterpret_cast<const Vec&>(words) * 0x1p112f;
}

// ROWS rows of quantised x against a panel of weights; out: rows of kPanel floats.
template <int ROWS>
static void quantized_tile(const ActivationGroup* x, const uint8_t* panel, const uint16_t* scales, int64_t groups,
                           float* out) {
  constexpr int vecs = tile_vecs(ROWS);
  for (int c = 0; c < kPanel; c += vecs * kLanes) {
    const uint8_t* w = panel + c * 4;
    Vec total[ROWS][vecs] = {};
    for (int64_t g = 0; g < groups; ++g) {
      Vec scale[vecs];
      for (int j = 0; j < vecs; ++j) scale[j] = load_scales(scales + g * kPanel + c + j * kLanes);
      for (int h = 0; h < kHalves; ++h) {
        IntVec acc[ROWS][vecs];
        for (int r = 0; r < ROWS; ++r)
          for (int j = 0; j < vecs; ++j) acc[r][j] = splat(x[r * groups + g].start[h]);
        for (int i = h * kSteps / kHalves; i < (h + 1) * kSteps / kHalves; ++i, w += kPanel * 4) {
          LaneVec weights[vecs][kParts];
          for (int j = 0; j < vecs; ++j)
            split_weights(*reinterpret_cast<const LaneVecUnaligned*>(w + j * kLanes * 4), weights[j]);
          for (int r = 0; r < ROWS; ++r)
            for (int j = 0; j < vecs; ++j) multiply_add(acc[r][j], weights[j], x[r * groups + g].words + i * kParts);
        }
        for (int j = 0; j < vecs; ++j)
          for (int r = 0; r < ROWS; ++r)
            total[r][j] += __builtin_convertvector(acc[r][j], Vec) * (scale[j] * x[r * groups + g].scale[h]);
      }
    }
    for (int r = 0; r < ROWS; ++r)
      for (int j = 0; j < vecs; ++j) store(out + r * kPanel + c + j * kLanes, total[r][j]);
  }
}

INLINE void quantized_lines(const QuantizedLinear& a, const ActivationGroup* x, int64_t height, int64_t panel,
                            float* out) {
  typedef void (*Tile)(const ActivationGroup*, const uint8_t*, const uint16_t*, int64_t, float*);
  static constexpr Tile tiles[] = {nullptr, quantized_tile<1>, quantized_tile<2>, quantized_tile<min(3, kTileHeight)>,
                                   quantized_tile<min(4, kTileHeight)>};
  const int64_t groups = (a.k + kGroup - 1) / kGroup;
  tiles[height](x, a.w + panel * groups * kGroup * kPanel, a.w_scale + panel * groups * kPanel, groups, out);
}

INLINE void add_bias(float* line, const float* bias, int64_t columns) {
  for (int64_t c = 0; c < columns; ++c) line[c] += bias[c];
}

// Rows `row` to `row + rows` against panel `panel` of the result; x: their activations.
INLINE void quantized_panel(const QuantizedLinear& a, const ActivationGroup* x, int64_t panel, int64_t row,
                            int64_t rows) {
  const int64_t groups = (a.k + kGroup - 1) / kGroup, count = (rows + kTileHeight - 1) / kTileHeight;
  const int64_t column = panel * kPanel, width = a.gated ? a.n / 2 : a.n, columns = min(kPanel, width - column);
  alignas(64) float lines[2][kTileHeight * kPanel];
  for (int64_t i = 0; i < count; ++i) {  // of even height: 5 rows are 3 + 2
    const int64_t first = rows * i / count, height = rows * (i + 1) / count - first;
    quantized_lines(a, x + first * groups, height, a.gated ? 2 * panel : panel, lines[0]);
    if (a.gated) quantized_lines(a, x + first * groups, height, 2 * panel + 1, lines[1]);
    for (int64_t r = 0; r < height; ++r) {
      float *line = lines[0] + r * kPanel, *to = a.out + (row + first + r) * width + column;
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
}

// A row of the input, after the residual add and the norm that may come before the product, in groups.
// line: k values rounded up to whole groups, for scratch; total: where the residual sum goes, or null.
INLINE void quantize_row(const QuantizedLinear& a, int64_t row, float* line, float* total, ActivationGroup* to) {
  const float* x = a.x + row * a.x_stride;
  const int64_t k = a.k, whole = k / kGroup * kGroup;
  int64_t done = 0;
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
    x = line;
  } else {
    for (; done < whole; done += kGroup) quantize_group(x + done, *to++);
    for (int64_t i = done; i < k; ++i) line[i] = x[i];
    x = line;
  }
  for (int64_t i = k; i < (k + kGroup - 1) / kGroup * kGroup; ++i) line[i] = 0.0f;
  for (; done < k; done += kGroup) quantize_group(x + done, *to++);
}

static void quantized_linear(const QuantizedLinear& a, int threads) {
  const int64_t groups = (a.k + kGroup - 1) / kGroup;
  const int64_t panels = ((a.gated ? a.n / 2 : a.n) + kPanel - 1) / kPanel;
  const int64_t row_blocks = (a.rows + kQuantizedRowBlock - 1) / kQuantizedRowBlock;
  // Neighbouring panels go to one thread, so that its reads are one stream; several turns even out what each gets.
  const int64_t run = row_blocks > 1 ? 1 : max(1, panels / (threads * 4)), runs = (panels + run - 1) / run;
  const int team = static_cast<int>(min(threads, row_blocks * runs));
  const bool alone = a.rows <= kLoneRows;
  int64_t next_row = 0, done = 0, next = 0;
#pragma omp parallel num_threads(team)
  {
    const int thread = omp_get_thread_num();
    float* line = a.lines + thread * groups * kGroup;
    ActivationGroup* x = static_cast<ActivationGroup*>(a.activations);
    if (alone) {
      x += thread * a.rows * groups;
      for (int64_t row = 0; row < a.rows; ++row)
        quantize_row(a, row, line, thread == 0 ? a.total : nullptr, x + row * groups);
    } else {
      for (;;) {
        const int64_t row = __atomic_fetch_add(&next_row, 4, __ATOMIC_RELAXED);
        if (row >= a.rows) break;
        const int64_t end = min(row + 4, a.rows);
        for (int64_t r = row; r < end; ++r) quantize_row(a, r, line, a.total, x + r * groups);
        __atomic_fetch_add(&done, end - row, __ATOMIC_RELEASE);
      }
      // Not a barrier of all threads: one that has not begun, its core being taken, keeps nobody waiting.
      for (int turn = 0; __atomic_load_n(&done, __ATOMIC_ACQUIRE) < a.rows; ++turn)
        if (turn > 1000) sched_yield();
    }
    for (;;) {
      const int64_t i = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED);
      if (i >= row_blocks * runs) break;
      const int64_t row = i / runs * kQuantizedRowBlock, first = i % runs * run;
      for (int64_t panel = first; panel < min(first + run, panels); ++panel)
        quantized_panel(a, x + row * groups, panel, row, min(kQuantizedRowBlock, a.rows - row));
    }
  }
}
