// The kernels as plain functions on pointers: the boundary between files compiled for one instruction set and the
// bindings, which know torch and choose the instruction set when the process starts.
//
// Tensors are float32 unless they say otherwise; strides are in elements; the innermost dimension is contiguous.
// Arguments have been checked.
#pragma once

#include <stdint.h>

// Rows of x: outer * inner of them, n values each.
struct Rows {
  const float* data;
  int64_t outer, inner, n;
  int64_t outer_stride, inner_stride;
};

// Heads of this step's tokens: [tokens, heads, head_dim].
struct Heads {
  const float* data;
  int64_t heads;
  int64_t token_stride;
};

struct Rotary {
  const float* cos;  // [max_positions, half]
  const float* sin;
  int64_t half;  // pairs of dimensions that turn: head_dim / 2, or fewer
  const int64_t* positions;  // [tokens]
};

enum class KvType { kFloat, kBfloat16, kInt8 };

// One layer's pages, of words that hold `per` = 1, 2 or 4 numbers of float32, bfloat16 or int8. K: [num_blocks,
// kv_heads, head_dim / per, block_size, per], V: [num_blocks, kv_heads, block_size / per, head_dim, per]. An int8 page
// holds its numbers plus 128, and ends with block_size float32 numbers, the scale of each token.
struct Cache {
  void* k;
  void* v;
  KvType type;
  int64_t kv_heads, head_dim, block_size;
};

// Part of one sequence and KV head: `rows` (query token, head of the group) pairs from `row` on, against the tokens
// from `first` to `last`. `group` >= 0: an unfinished result, number `part` of that group of parts.
struct Item {
  int32_t sequence, kv_head;
  int32_t row, rows;
  int32_t first, last;
  int32_t group, part;
};

// The parts of one (sequence, KV head), merged by whichever thread finishes the last of them.
struct Group {
  int32_t parts, remaining;
  int64_t offset;  // of its first part in `partial`, in floats
};

struct Attention {
  const float* q;  // [tokens, heads, head_dim], rows of q_stride
  int64_t q_stride;
  Rotary rotary;  // turns q first, unless its cos is null
  float* out;  // [tokens, heads, head_dim]
  Cache cache;
  int64_t heads;
  const int32_t* query_start;
  const int32_t* seq_lens;
  const int32_t* rows;
  const int32_t* block_tables;
  int64_t max_blocks;
  float scale;
  int64_t window;  // tokens that a row sees at most, its own included; 0: all
  float soft_cap;  // scores are bounded by it; 0: they are not
  const Item* items;
  int64_t num_items;
  Group* groups;
  float* partial;  // a part: rows * (head_dim + 2) floats, the sums, then each row's maximum and weight
};

constexpr int kTileRows = 48;   // rows of an item at most
constexpr int kMaxHeadDim = 256;
constexpr int kChunk = 128;       // tokens whose scores are held at once, at most
constexpr int kPartChunks = 4;    // a longer context is cut, so that one sequence can keep all threads busy

// Chunks hold whole blocks, or blocks hold whole chunks: block sizes are multiples of 16 up to 128, and of 128 above.
static inline int64_t chunk_tokens(int64_t block_size) {
  return block_size >= kChunk ? kChunk : kChunk / block_size * block_size;
}

constexpr int kPanel = 48;  // output columns of a panel: the usual widths of a model are even multiples of it

constexpr int kGroup = 32;  // codes along k, or activations, that share a scale

// Weights as whole numbers: a weight is scale * code + offset, or scale * (code - 128) where `offset` is null. Columns
// are padded to whole panels, k to whole groups.
struct Codes {
  const uint8_t* data;     // [panels, k / 4, kPanel, 4]; with an offset 4 bits each, [panels, k / 8, kPanel, 4]
  const uint16_t* scale;   // float16 [panels, k / kGroup, kPanel]
  const uint16_t* offset;  // as scale
  // For `quantized_linear` in place of an offset: offset + 8 * scale as a scale times (code - 128), so that a weight is
  // about scale * (code - 8) + that. A panel's codes are [k / kGroup / 4 rounded up, kPanel, 4], then come its scales:
  // float16 [kPanel].
  const uint8_t* rest;
};

static inline constexpr int64_t fours_in(int64_t groups) { return (groups + 3) / 4; }
static inline constexpr int64_t rest_bytes(int64_t groups) { return (fours_in(groups) * 4 + 2) * kPanel; }  // a panel's

// Quantised groups of a row: those of its values, and with 4-bit weights those of the sums of these.
static inline constexpr int64_t row_groups(int64_t groups, bool nibbles) {
  return groups + (nibbles ? (groups + kGroup - 1) / kGroup : 0);
}

// out: [rows, n] = x: [rows, k] times the packed weight, which is one of w_float, w_bfloat16 and codes; the others are
// null. bias may be null. `gated`: the weight's rows are a gate and an up projection, in alternating panels;
// `activated`, for such a weight: out: [rows, n / 2] = SiLU(gate) * up. `norm`, unless null: the weight of an RMSNorm
// that x + residual goes through first; the sum is kept in `total`.
struct Linear {
  const float* x;
  int64_t x_stride, rows, n, k;
  const float* w_float;
  const uint16_t* w_bfloat16;
  Codes codes;
  const float* bias;  // [n]
  bool gated, activated;
  float* out;
  const float* residual;  // [rows, k]
  const float* norm;      // [k]
  float eps;
  float* total;   // [rows, k]
  float* normed;  // scratch: [rows, k], or [kLoneRows, k] for each thread
};

constexpr float kTiny = 1e-30f;  // a group of activations under this is zero, and one above kHuge becomes NaN: the
constexpr float kHuge = 1e30f;   // powers of two that go with them are far from the ends of float32's range
constexpr int64_t kRowsAtOnce = 4;  // rows that a thread norms or quantises together
constexpr int64_t kLoneRows = 4;    // up to so many (kRowsAtOnce at most) each thread quantises for itself, not to wait
constexpr int kActivationGroupBytes = 20 + 4 * kGroup;  // a quantised group and an outlier at most
constexpr int64_t kQuantizedRowBlock = 128;  // rows of an item: their activations stay in the second-level cache
constexpr int64_t kDecodedOutliers = 512;    // columns of weights that are decoded once for all outliers of a row block
constexpr float kOutlier = 2.0f;  // of the mean of a row's groups' largest: activations above it stay in float32

// Rows of a block that threads have begun to quantise, and those that are done.
struct BlockProgress {
  int64_t taken, done;
};

static_assert(sizeof(BlockProgress) == 16);

static inline int64_t row_blocks_in(int64_t rows) { return (rows + kQuantizedRowBlock - 1) / kQuantizedRowBlock; }

// out: [rows, n] = x: [rows, k] times the quantised weight, plus the bias unless null. `gated`: the weight's rows are a
// gate and an up projection, in alternating panels, and out: [rows, n / 2] = SiLU(gate) * up. `adds`: to what is in
// `out`. `norm`, unless null: the weight of an RMSNorm that x goes through first. `residual`, unless null: is added
// before that, and the sum kept in `total`.
struct QuantizedLinear {
  const float* x;
  int64_t x_stride, rows, n, k;
  const float* residual;  // [rows, k]
  const float* norm;      // [k]
  float eps;
  float* total;            // [rows, k]
  Codes codes;
  const float* bias;       // [n]
  bool gated, adds;
  float* out;
  float* lines;       // scratch for each thread: kRowsAtOnce times line_floats
  void* activations;  // scratch: kActivationGroupBytes for each of the `row_groups` of `rows` rows, or of kLoneRows for
                      // each thread
  void* outliers;     // scratch for each thread: outlier_bytes
  BlockProgress* progress;  // scratch for each row block
};

// A row of whole groups, and a number of each of them in whole groups.
static inline int64_t line_floats(int64_t groups) { return (groups + (groups + kGroup - 1) / kGroup) * kGroup; }

// Scratch for the outliers of a row block of a product of `rows` rows and `groups` groups, a multiple of 64.
static inline int64_t outlier_bytes(int64_t rows, int64_t groups) {
  const int64_t block = rows < kQuantizedRowBlock ? rows : kQuantizedRowBlock;
  return (kDecodedOutliers * (kPanel + 1) * 4 + (block + 1) * 4 + block * groups * 8 + 63) / 64 * 64;
}

constexpr int kLoraTile = 16;         // tokens of a tile at most
constexpr int kMaxLoraWidth = 2048;   // ranks of all parts of a layer

// y += (x A) B for the tokens that have adapters. Part p of the columns of B is for part p of those of A.
struct Lora {
  const float* x;
  int64_t x_stride, k;
  float* y;
  int64_t y_stride, n;
  const float* a;          // [slots, k, num_parts * rank]
  const float* b;          // [slots, rank, n]
  int64_t rank;            // a multiple of kLanes
  const int64_t* parts;    // [num_parts], columns of y
  int64_t num_parts;
  const int32_t* tokens;   // [num_tokens], rows of x and y
  int64_t num_tokens;
  const int32_t* tiles;    // [num_tiles, 3]: slot, first and last + 1 among `tokens`
  int64_t num_tiles;
};

struct Kernels {
  void (*rms_norm)(Rows x, const float* weight, float eps, float* out, int threads);
  void (*add_rms_norm)(const float* x, const float* residual, const float* weight, float eps, float* out, float* total,
                       int64_t rows, int64_t n, int threads);
  void (*silu_and_mul)(const float* x, int64_t stride, float* out, int64_t rows, int64_t n, int threads);
  void (*apply_rotary)(Heads x, float* out, Rotary rotary, int64_t tokens, int64_t head_dim, int threads);
  // Stores k and v, turning k first unless rotary.cos is null.
  void (*write)(Heads k, Heads v, Rotary rotary, Cache cache, const int64_t* slots, int64_t tokens, int threads);
  void (*attend)(const Attention& a, int threads);
  void (*linear)(const Linear& a, int threads);
  void (*quantized_linear)(const QuantizedLinear& a, int threads);
  void (*add_lora)(const Lora& a, int threads);
  // out: [rows], where the largest of each row's n numbers stands first; a NaN counts as larger than all.
  void (*argmax)(const float* x, int64_t stride, int64_t rows, int64_t n, int64_t* out, int threads);
};

const Kernels& portable_kernels();
#if defined(__x86_64__)
const Kernels& avx2_kernels();
const Kernels& avx2_vnni_kernels();
const Kernels& avx512_kernels();
const Kernels& avx512_vnni_kernels();
const Kernels& avx512_bf16_kernels();
#endif
