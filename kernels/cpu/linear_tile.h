// A few rows of x against some dimensions of one panel of weights in float32, bfloat16 or codes.
//
// The first tile of rows widens the weights and leaves them as float32 for the others, which find them in the
// first-level cache. Widening takes other vector pipes than products, so it costs little where each dimension is
// widened just before it is used.
#pragma once

#include "codes.h"
#include "kernels.h"
#include "simd.h"

constexpr int kLinearRows = kLanes == 16 ? 8 : 4;  // rows held in registers
constexpr int kLinearVecs = 3;                     // vectors of columns held for each of them
constexpr int kLinearColumns = kLinearVecs * kLanes;
constexpr int kFewRows = kLinearRows / 2;  // a tile of no more is the only one: 9 rows are 5 + 4
constexpr int kStep = 8;  // dimensions between two looks at what is to be fetched

#define INLINE_LAMBDA __attribute__((always_inline))

// body(0) to body(COUNT - 1). A loop would be unrolled too late for g++ to keep the arrays it indexes in registers.
template <int COUNT, typename Body>
INLINE void unrolled(const Body& body) {
  if constexpr (COUNT > 1) unrolled<COUNT - 1>(body);
  body(COUNT - 1);
}

// Written as assembly because g++ 12 copies sums around its own choice of instructions.
#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__))
#if defined(__AVX512F__)
#define VECTOR "v"
#else
#define VECTOR "x"
#endif
INLINE Vec spread(const float& x) {
  Vec all;
  asm("vbroadcastss %1, %0" : "=" VECTOR(all) : "m"(x));
  return all;
}
INLINE void add_product(Vec& sum, Vec w, Vec x) {
  asm("vfmadd231ps %2, %1, %0" : "+" VECTOR(sum) : VECTOR(w), VECTOR(x));
}
#undef VECTOR
#else
INLINE float spread(const float& x) { return x; }
INLINE void add_product(Vec& sum, Vec w, float x) { sum += w * x; }
#endif

// Weights of kLinearColumns columns from dimension 0 on. `dimensions` are widened at a time, which k is a multiple of:
// `prepare` looks at what those from `at` on share, `get` gives one of them, `d`, by a vector of columns, `j`.
//
// Two bfloat16 values lie in a word, dimension 2 i in the low half, 2 i + 1 in the high half. A bfloat16 is the upper
// half of the float32 of the same value, so a shift or a mask widens it.
struct Pairs {
  static constexpr int dimensions = 2;
  const uint32_t* words;

  struct Shared {
    LaneVec pairs[kLinearVecs];
  };
  INLINE void prepare(const Pairs& from, int64_t at, Shared& shared) {
    unrolled<kLinearVecs>([&](int j) INLINE_LAMBDA {
      shared.pairs[j] = *reinterpret_cast<const LaneVecUnaligned*>(from.words + at / 2 * kPanel + j * kLanes);
    });
  }
  INLINE Vec get(const Pairs&, const Shared& shared, int64_t, int d, int j) {
    const LaneVec bits = d ? shared.pairs[j] & 0xffff0000u : shared.pairs[j] << 16;
    return reinterpret_cast<const Vec&>(bits);
  }
};

template <bool NIBBLES>
struct Coded {
  static constexpr int dimensions = NIBBLES ? 8 : 4;
  Codes codes;

  // In memory, since all registers hold sums. A code has at most 8 bits and a scale 11, so their product is exact, and
  // the value is the one that its format defines, rounded once.
  struct Shared {
    alignas(64) float scale[kLinearColumns], offset[kLinearColumns];
  };
  INLINE void prepare(const Coded& from, int64_t at, Shared& shared) {
    if (at % kGroup) return;
    const int64_t first = at / kGroup * kPanel;
    unrolled<kLinearVecs>([&](int j) INLINE_LAMBDA {
      const Vec scale = load_half(from.codes.scale + first + j * kLanes);
      store(shared.scale + j * kLanes, scale);
      store(shared.offset + j * kLanes, NIBBLES ? load_half(from.codes.offset + first + j * kLanes) : scale * -128.0f);
    });
  }
  INLINE Vec get(const Coded& from, const Shared& shared, int64_t at, int d, int j) {
    const uint8_t* w = from.codes.data + at / dimensions * kPanel * 4 + j * kLanes * 4;
    const LaneVec words = *reinterpret_cast<const LaneVecUnaligned*>(w);
    const LaneVec code = words >> (d % 4 * 8 + d / 4 * 4) & (NIBBLES ? 15u : 255u);
    return __builtin_convertvector(reinterpret_cast<const IntVec&>(code), Vec) * load(shared.scale + j * kLanes) +
           load(shared.offset + j * kLanes);
  }
};

// Cache lines that will be read soon: `count` are fetched every kStep dimensions, from `line` to `end`. A CPU drops
// prefetches that come faster than memory answers.
struct LinesAhead {
  const char *line, *end;
  int64_t count;
};

INLINE void fetch(LinesAhead& ahead) {
  for (int64_t i = 0; i < ahead.count && ahead.line < ahead.end; ++i, ahead.line += 64) __builtin_prefetch(ahead.line);
}

template <int ROWS>
INLINE void add_dimension(const float* const (&x)[ROWS], int64_t at, const Vec (&w)[kLinearVecs],
                          Vec (&sums)[ROWS][kLinearVecs]) {
  unrolled<ROWS>([&](int r) INLINE_LAMBDA {
    const auto value = spread(x[r][at]);
    unrolled<kLinearVecs>([&](int j) INLINE_LAMBDA { add_product(sums[r][j], w[j], value); });
  });
}

// body(x, sums) adds some dimensions of ROWS rows to their sums, lines: rows of kPanel floats.
template <int ROWS, typename Body>
INLINE void add_to_lines(const float* x, int64_t x_stride, float* lines, const Body& body) {
  Vec sums[ROWS][kLinearVecs];
  const float* rows[ROWS];
  unrolled<ROWS>([&](int r) INLINE_LAMBDA {
    rows[r] = x + r * x_stride;
    asm("" : "+r"(rows[r]));  // else g++ makes a pointer of its own for each row and dimension
    unrolled<kLinearVecs>([&](int j) INLINE_LAMBDA { sums[r][j] = load(lines + r * kPanel + j * kLanes); });
  });
  body(rows, sums);
  unrolled<ROWS>([&](int r) INLINE_LAMBDA {
    unrolled<kLinearVecs>([&](int j) INLINE_LAMBDA { store(lines + r * kPanel + j * kLanes, sums[r][j]); });
  });
}

// w: rows of kPanel float32 weights from dimension `first` on.
template <int ROWS>
static void float_tile(const float* x, int64_t x_stride, const float* w, int64_t first, int64_t last, LinesAhead ahead,
                       float* lines) {
  add_to_lines<ROWS>(x, x_stride, lines, [&](const auto& rows, auto& sums) INLINE_LAMBDA {
    const auto dimension = [&](int64_t at) INLINE_LAMBDA {
      Vec weights[kLinearVecs];
      unrolled<kLinearVecs>([&](int j) INLINE_LAMBDA { weights[j] = load(w + j * kLanes); });
      add_dimension<ROWS>(rows, at, weights, sums);
      w += kPanel;
    };
    int64_t at = first;
    for (; at + kStep <= last; at += kStep) {
      fetch(ahead);
      unrolled<kStep>([&](int d) INLINE_LAMBDA { dimension(at + d); });
    }
    for (; at < last; ++at) dimension(at);
  });
}

// As `float_tile`, of weights that are to be widened; to: where float_tile will find them, to_stride floats a
// dimension.
template <int ROWS, typename Weights>
static void widening_tile(const float* x, int64_t x_stride, const Weights& weights, int64_t first, int64_t last,
                          LinesAhead ahead, float* to, int64_t to_stride, float* lines) {
  add_to_lines<ROWS>(x, x_stride, lines, [&](const auto& rows, auto& sums) INLINE_LAMBDA {
    typename Weights::Shared shared;
    for (int64_t at = first; at < last; at += Weights::dimensions) {
      if (at % kStep == 0) fetch(ahead);
      Weights::prepare(weights, at, shared);
      unrolled<Weights::dimensions>([&](int d) INLINE_LAMBDA {
        Vec values[kLinearVecs];
        unrolled<kLinearVecs>([&](int j) INLINE_LAMBDA {
          values[j] = Weights::get(weights, shared, at, d, j);
          if constexpr (ROWS > kFewRows) store(to + j * kLanes, values[j]);
        });
        add_dimension<ROWS>(rows, at + d, values, sums);
        to += to_stride;
        // Else g++ widens several dimensions at once, and sums lose their registers.
        if constexpr (ROWS > 2) asm volatile("" ::: "memory");
      });
    }
  });
}

// Without a name: the linker would make one table of those of all instruction sets.
namespace {

#if defined(__AVX512F__)
#define TILES(tile, ...) \
  {nullptr, \
   tile<1 __VA_OPT__(, ) __VA_ARGS__>, \
   tile<2 __VA_OPT__(, ) __VA_ARGS__>, \
   tile<3 __VA_OPT__(, ) __VA_ARGS__>, \
   tile<4 __VA_OPT__(, ) __VA_ARGS__>, \
   tile<5 __VA_OPT__(, ) __VA_ARGS__>, \
   tile<6 __VA_OPT__(, ) __VA_ARGS__>, \
   tile<7 __VA_OPT__(, ) __VA_ARGS__>, \
   tile<8 __VA_OPT__(, ) __VA_ARGS__>}
#else
#define TILES(tile, ...) \
  {nullptr, \
   tile<1 __VA_OPT__(, ) __VA_ARGS__>, \
   tile<2 __VA_OPT__(, ) __VA_ARGS__>, \
   tile<3 __VA_OPT__(, ) __VA_ARGS__>, \
   tile<4 __VA_OPT__(, ) __VA_ARGS__>}
#endif

typedef void (*FloatTile)(const float*, int64_t, const float*, int64_t, int64_t, LinesAhead, float*);
constexpr FloatTile kFloatTiles[] = TILES(float_tile);

template <typename Weights>
struct WideningTiles {
  typedef void (*Tile)(const float*, int64_t, const Weights&, int64_t, int64_t, LinesAhead, float*, int64_t,
                       float*);
  static constexpr Tile tiles[] = TILES(widening_tile, Weights);
};

}  // namespace

#undef TILES
