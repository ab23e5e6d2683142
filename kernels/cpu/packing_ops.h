// Weights from the rows of a checkpoint into panels, once, when a model is loaded.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <string.h>

#include <algorithm>
#include <cmath>

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

#include "linear_ops.h"

namespace {

constexpr int64_t kPackedWords = 256;  // of each of a panel's rows at a time: what they become stays in the L2 cache

// out[j * kPanel + i] = word j of row i, for `rows` rows of `words` words; rows lie `stride` bytes apart.
void transpose(const char* in, int64_t stride, int64_t rows, int64_t words, uint32_t* out) {
  int64_t i = 0;
#if defined(__SSE__)
  const int64_t fours = words / 4 * 4;
  for (; i + 4 <= rows; i += 4) {
    const char* from = in + i * stride;
    for (int64_t j = 0; j < fours; j += 4) {
      __m128 lines[4];
      for (int64_t r = 0; r < 4; ++r)
        lines[r] = _mm_loadu_ps(reinterpret_cast<const float*>(from + r * stride + j * 4));
      _MM_TRANSPOSE4_PS(lines[0], lines[1], lines[2], lines[3]);
      for (int64_t r = 0; r < 4; ++r) _mm_storeu_ps(reinterpret_cast<float*>(out + (j + r) * kPanel + i), lines[r]);
    }
    for (int64_t j = fours; j < words; ++j)
      for (int64_t r = 0; r < 4; ++r) memcpy(out + j * kPanel + i + r, from + r * stride + j * 4, 4);
  }
#endif
  for (; i < rows; ++i)
    for (int64_t j = 0; j < words; ++j) memcpy(out + j * kPanel + i, in + i * stride + j * 4, 4);
}

// Whether no number of `rows` rows of `words` words is NaN or infinite: no exponent has all of its bits. Number:
// uint32_t for float32, uint16_t for bfloat16.
template <typename Number>
bool all_finite(const char* in, int64_t stride, int64_t rows, int64_t words) {
  constexpr Number kExponent = sizeof(Number) == 4 ? 0x7f800000 : 0x7f80;
  Number found = 0;
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < words * 4 / static_cast<int64_t>(sizeof(Number)); ++j) {
      Number number;
      memcpy(&number, in + i * stride + j * sizeof(Number), sizeof(Number));
      found |= static_cast<Number>((number & kExponent) == kExponent);
    }
  return !found;
}

// body(first row of `rows`, its column, how many, the panel) for each panel that rows from column `first` on lie in.
template <typename Body>
void for_panels(int64_t first, int64_t rows, const Body& body) {
  const int64_t begin = first / kPanel, end = (first + rows + kPanel - 1) / kPanel;
  team_for(threads(), end - begin, 1, [&](int64_t i) {
    const int64_t panel = begin + i, from = std::max(first, panel * kPanel);
    body(from - first, from % kPanel, std::min(first + rows, (panel + 1) * kPanel) - from, panel);
  });
}

void check_rows(const Tensor& source, at::ScalarType type) {
  TORCH_CHECK_TYPE(source.device().is_cpu() && source.scalar_type() == type, "rows to pack must be a CPU tensor of ",
                   type, ", got ", source.scalar_type(), " on ", source.device());
  TORCH_CHECK_VALUE(source.dim() == 2 && source.stride(1) == 1, "rows to pack must be [rows, k], each contiguous, got ",
                    source.sizes());
}

// Writes source: [rows, k], float32 or bfloat16, into the columns from `first` on of panels: [panels, k, kPanel] in
// float32 or [panels, k / 2, kPanel, 2] in bfloat16, each contiguous. Either way it is a transposition of words of 32
// bits. Returns whether all numbers are finite: they are looked at while they are on their way through the cache.
bool pack_rows(const Tensor& source, const Tensor& panels, int64_t first) {
  check_rows(source, panels.scalar_type());
  const int64_t depth = panels.scalar_type() == at::kFloat ? 1 : 2;
  TORCH_CHECK_VALUE(panels.dim() == depth + 2 && panels.size(0) > 0 && panels.select(0, 0).is_contiguous() &&
                        panels.size(2) == kPanel && first >= 0 && panels.size(1) * depth == source.size(1) &&
                        first + source.size(0) <= panels.size(0) * kPanel,
                    "rows ", source.sizes(), " do not fit into panels ", panels.sizes(), " from column ", first, " on");
  const int64_t words = panels.size(1), stride = source.stride(0) * source.element_size();
  const char* in = static_cast<const char*>(source.const_data_ptr());
  uint32_t* out = static_cast<uint32_t*>(panels.data_ptr());
  const int64_t panel_words = panels.stride(0) / depth;
  const auto finite = depth == 1 ? all_finite<uint32_t> : all_finite<uint16_t>;
  int good = 1;
  for_panels(first, source.size(0), [&](int64_t row, int64_t column, int64_t count, int64_t panel) {
    for (int64_t word = 0; word < words; word += kPackedWords) {
      const char* from = in + row * stride + word * 4;
      const int64_t some = std::min(kPackedWords, words - word);
      if (!finite(from, stride, count, some)) __atomic_store_n(&good, 0, __ATOMIC_RELAXED);
      transpose(from, stride, count, some, out + panel * panel_words + word * kPanel + column);
    }
  });
  return good;
}

// A group's codes, as whole numbers in float32, and what a code stands for: scale * code + offset.
struct CodedGroup {
  float code[kGroup];
  c10::Half scale, offset;
};

// Codes of 8 bits have 128 added; of 4 bits each eight lie in four bytes, the first four in the low halves.
void store(const CodedGroup& group, bool four_bits, uint8_t* to) {
  int32_t code[kGroup];
  for (int64_t j = 0; j < kGroup; ++j) code[j] = static_cast<int32_t>(group.code[j]) + (four_bits ? 0 : 128);
  for (int64_t j = 0; j < kGroup; j += four_bits ? 8 : 4, to += kPanel * 4) {
    uint8_t word[4];
    for (int64_t i = 0; i < 4; ++i)
      word[i] = static_cast<uint8_t>(four_bits ? code[j + i] | code[j + 4 + i] << 4 : code[j + i]);
    memcpy(to, word, 4);
  }
}

float rounded(float x, float lowest, float highest) {
  // 1.5 * 2^23: the last bit of the sum is worth one, so it is rounded, halves to even.
  return std::min(highest, std::max(lowest, x)) + 12582912.0f - 12582912.0f;
}

// The largest magnitude; NaN if there is one. Magnitudes are ordered as their bits are, with infinity and NaN at the
// end.
float largest(const float* x) {
  int32_t top = 0;
  for (int64_t j = 0; j < kGroup; ++j) {
    int32_t bits;
    memcpy(&bits, x + j, 4);
    top = std::max(top, bits & 0x7fffffff);
  }
  float value;
  memcpy(&value, &top, 4);
  return value;
}

// Whether the numbers are finite, and small enough that their scale is.
bool round_group(const float* x, CodedGroup& group) {
  group.scale = c10::Half(largest(x) / 127.0f);
  const float step = static_cast<float>(group.scale), inverse = step > 0.0f ? 1.0f / step : 0.0f;
  for (int64_t j = 0; j < kGroup; ++j) group.code[j] = rounded(x[j] * inverse, -127.0f, 127.0f);
  return std::isfinite(step);
}

// Whether codes from `lowest` to `highest` of this scale and offset, rounded to float16, stand for exactly x.
bool fit_group(const float* x, float scale, float offset, float lowest, float highest, CodedGroup& group) {
  group.scale = c10::Half(scale);
  group.offset = c10::Half(offset);
  const float step = static_cast<float>(group.scale), start = static_cast<float>(group.offset);
  const float inverse = step != 0.0f ? 1.0f / step : 0.0f;
  int exact = std::isfinite(step);
  for (int64_t j = 0; j < kGroup; ++j) {
    group.code[j] = rounded((x[j] - start) * inverse, lowest, highest);
    exact &= group.code[j] * step + start == x[j];
  }
  return exact;
}

// The candidates are those of `_four_bits` and `_eight_bits` in kernels/quantized_weight.py.
bool fit_four_bits(const float* x, CodedGroup& group) {
  float low = x[0], high = x[0];
  for (int64_t j = 1; j < kGroup; ++j) low = std::min(low, x[j]), high = std::max(high, x[j]);
  const float extreme = high > -low ? high : low;
  return fit_group(x, (high - low) / 15.0f, low, 0.0f, 15.0f, group) ||
         fit_group(x, extreme / -8.0f, extreme, 0.0f, 15.0f, group);
}

bool fit_eight_bits(const float* x, CodedGroup& group) {
  const float top = largest(x);
  return fit_group(x, top / 127.0f, 0.0f, -128.0f, 127.0f, group) ||
         fit_group(x, top / 16.0f, 0.0f, -128.0f, 127.0f, group);
}

// Makes codes of source: [rows, k], float32 or bfloat16, in the columns from `first` on of every `step`th panel from
// `start` on, as in `QuantizedWeight`: rounded to 8 bits, or where `exact` those that stand for exactly these values,
// of 4 bits if there is an offset. Returns whether there are such codes, which have finite scales; with the first group
// that has none it ends.
bool code_rows(const Tensor& source, const Tensor& data, const Tensor& scale, const MaybeTensor& offset, int64_t first,
               int64_t step, int64_t start, bool exact) {
  const bool wide = source.scalar_type() == at::kFloat, four_bits = offset.has_value();
  check_rows(source, wide ? at::kFloat : at::kBFloat16);
  const int64_t rows = source.size(0), k = source.size(1), groups = (k + kGroup - 1) / kGroup;
  const int64_t last = start + (first + rows - 1) / kPanel * step;
  const auto fits = [&](const Tensor& halves) {
    return halves.scalar_type() == at::kHalf && halves.is_contiguous() && halves.dim() == 3 && halves.size(0) > last &&
           halves.size(1) == groups && halves.size(2) == kPanel;
  };
  const int64_t group_bytes = kGroup / (four_bits ? 2 : 1) * kPanel;
  TORCH_CHECK_VALUE(rows > 0 && first >= 0 && step > 0 && start >= 0 && fits(scale) && (!four_bits || fits(*offset)) &&
                        data.scalar_type() == at::kByte && data.is_contiguous() &&
                        data.numel() == scale.size(0) * groups * group_bytes && (exact || !four_bits),
                    "rows ", source.sizes(), " do not fit into codes with scales ", scale.sizes(), " from column ",
                    first, " on");
  const auto make = !exact ? round_group : four_bits ? fit_four_bits : fit_eight_bits;
  uint8_t* codes = data.data_ptr<uint8_t>();
  c10::Half* scales = scale.data_ptr<c10::Half>();
  c10::Half* offsets = four_bits ? offset->data_ptr<c10::Half>() : nullptr;
  int found = 1;
  for_panels(first, rows, [&](int64_t row, int64_t column, int64_t count, int64_t at) {
    const int64_t panel = start + at * step;
    for (int64_t i = 0; i < count; ++i)
      for (int64_t g = 0; g < groups; ++g) {
        if (!__atomic_load_n(&found, __ATOMIC_RELAXED)) return;
        const int64_t from = (row + i) * source.stride(0) + g * kGroup;
        const int64_t some = std::min<int64_t>(kGroup, k - g * kGroup);
        float x[kGroup] = {};
        if (wide)
          memcpy(x, source.const_data_ptr<float>() + from, some * sizeof(float));
        else
          for (int64_t j = 0; j < some; ++j) x[j] = source.const_data_ptr<c10::BFloat16>()[from + j];
        CodedGroup group;
        if (!make(x, group)) {
          __atomic_store_n(&found, 0, __ATOMIC_RELAXED);
          return;
        }
        const int64_t place = panel * groups + g, cell = place * kPanel + column + i;
        store(group, four_bits, codes + place * group_bytes + (column + i) * 4);
        scales[cell] = group.scale;
        if (four_bits) offsets[cell] = group.offset;
      }
  });
  return found;
}

}  // namespace
