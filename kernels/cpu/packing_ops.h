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

#include "checks.h"
#include "team.h"

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
      for (int64_t r = 0; r < 4; ++r) lines[r] = _mm_loadu_ps(reinterpret_cast<const float*>(from + r * stride + j * 4));
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
// float32 or [panels, k / 2, kPanel, 2] in bfloat16. Either way it is a transposition of words of 32 bits.
void pack_rows(const Tensor& source, const Tensor& panels, int64_t first) {
  check_rows(source, panels.scalar_type());
  const int64_t depth = panels.scalar_type() == at::kFloat ? 1 : 2;
  TORCH_CHECK_VALUE(panels.is_contiguous() && panels.dim() == depth + 2 && panels.size(2) == kPanel && first >= 0 &&
                        panels.size(1) * depth == source.size(1) && first + source.size(0) <= panels.size(0) * kPanel,
                    "rows ", source.sizes(), " do not fit into panels ", panels.sizes(), " from column ", first, " on");
  const int64_t words = panels.size(1), stride = source.stride(0) * source.element_size();
  const char* in = static_cast<const char*>(source.const_data_ptr());
  uint32_t* out = static_cast<uint32_t*>(panels.data_ptr());
  for_panels(first, source.size(0), [&](int64_t row, int64_t column, int64_t count, int64_t panel) {
    for (int64_t word = 0; word < words; word += kPackedWords)
      transpose(in + row * stride + word * 4, stride, count, std::min(kPackedWords, words - word),
                out + (panel * words + word) * kPanel + column);
  });
}

template <typename T>
void quantize_rows_of(const Tensor& source, uint8_t* codes, c10::Half* scales, int64_t first, int64_t step,
                      int64_t start) {
  const T* in = source.const_data_ptr<T>();
  const int64_t k = source.size(1), stride = source.stride(0), groups = (k + kGroup - 1) / kGroup;
  for_panels(first, source.size(0), [&](int64_t row, int64_t column, int64_t count, int64_t at) {
    const int64_t panel = start + at * step;
    for (int64_t i = 0; i < count; ++i)
      for (int64_t group = 0; group < groups; ++group) {
        const T* from = in + (row + i) * stride + group * kGroup;
        const int64_t some = std::min<int64_t>(kGroup, k - group * kGroup), place = panel * groups + group;
        float x[kGroup] = {}, top = 0.0f;
        for (int64_t j = 0; j < some; ++j) x[j] = static_cast<float>(from[j]);
        for (float value : x) top = std::max(top, std::abs(value));
        const c10::Half scale(top / 127.0f);
        const float width = static_cast<float>(scale), inverse = width > 0.0f ? 1.0f / width : 0.0f;
        scales[place * kPanel + column + i] = scale;
        int32_t code[kGroup];
        // 1.5 * 2^23: the last bit of the sum is worth one, so it is rounded, halves to even.
        for (int64_t j = 0; j < kGroup; ++j)
          code[j] = static_cast<int32_t>(std::min(127.0f, std::max(-127.0f, x[j] * inverse)) + 12582912.0f - 12582912.0f);
        uint8_t* to = codes + (place * kGroup * kPanel + (column + i) * 4);
        for (int64_t j = 0; j < kGroup; j += 4) {
          const uint8_t word[4] = {static_cast<uint8_t>(code[j] + 128), static_cast<uint8_t>(code[j + 1] + 128),
                                   static_cast<uint8_t>(code[j + 2] + 128), static_cast<uint8_t>(code[j + 3] + 128)};
          memcpy(to + j * kPanel, word, 4);
        }
      }
  });
}

// Rounds source: [rows, k], float32 or bfloat16, to 8 bits, into the columns from `first` on of every `step`th panel
// from `start` on of data and scale, as in `QuantizedWeight`.
void quantize_rows(const Tensor& source, const Tensor& data, const Tensor& scale, int64_t first, int64_t step,
                   int64_t start) {
  const bool wide = source.scalar_type() == at::kFloat;
  check_rows(source, wide ? at::kFloat : at::kBFloat16);
  const int64_t rows = source.size(0), groups = (source.size(1) + kGroup - 1) / kGroup;
  const int64_t last = start + (first + rows - 1) / kPanel * step;
  TORCH_CHECK_VALUE(rows > 0 && first >= 0 && step > 0 && start >= 0 && data.scalar_type() == at::kByte &&
                        scale.scalar_type() == at::kHalf && data.is_contiguous() && scale.is_contiguous() &&
                        scale.dim() == 3 && scale.size(0) > last && scale.size(1) == groups &&
                        scale.size(2) == kPanel && data.numel() == scale.numel() * kGroup,
                    "rows ", source.sizes(), " do not fit into codes with scales ", scale.sizes(), " from column ",
                    first, " on");
  const auto run = wide ? &quantize_rows_of<float> : &quantize_rows_of<c10::BFloat16>;
  run(source, data.data_ptr<uint8_t>(), scale.data_ptr<c10::Half>(), first, step, start);
}

}  // namespace
