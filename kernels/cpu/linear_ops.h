// The operators of dense layers.
#pragma once

#include <ATen/ops/empty.h>
#include <c10/util/Half.h>

#include <optional>
#include <tuple>
#include <vector>

#include "checks.h"
#include "team.h"

namespace {

using MaybeTensor = std::optional<Tensor>;

// [..., k] as rows of k values: a 2-dimensional x keeps its stride.
Tensor rows_of(const Tensor& x, int64_t k) {
  check_float(x, "x");
  TORCH_CHECK_VALUE(x.dim() >= 1 && x.size(-1) == k, "x must be [..., ", k, "], got ", x.sizes());
  return x.dim() == 2 && x.stride(1) == 1 ? x : x.contiguous();
}

Tensor empty_result(const Tensor& x, int64_t n) {
  std::vector<int64_t> shape(x.sizes().begin(), x.sizes().end());
  shape.back() = n;
  return at::empty(shape, x.options());
}

Tensor values_of(const Tensor& x, int64_t n, const char* name) {
  check_float(x, name);
  TORCH_CHECK_VALUE(x.dim() == 1 && x.size(0) == n, name, " must be [", n, "], got ", x.sizes());
  return x.contiguous();
}

// Panels of a weight of n columns, or of a gate and an up projection of n / 2 each.
int64_t panels_of(int64_t n, bool gated) {
  TORCH_CHECK_VALUE(!gated || n % 2 == 0, "a gate and an up projection have as many columns, got ", n, " in all");
  return ((gated ? n / 2 : n) + kPanel - 1) / kPanel << gated;
}

struct DenseWeight {
  const float* in_float;
  const uint16_t* in_bfloat16;
  Codes codes;
  int64_t n, k;
  bool gated;
};

DenseWeight dense_weight(const Tensor& packed, int64_t n, bool gated) {
  const bool wide = packed.scalar_type() == at::kFloat;
  TORCH_CHECK_TYPE(packed.device().is_cpu() && (wide || packed.scalar_type() == at::kBFloat16),
                   "a packed weight is a float32 or bfloat16 CPU tensor, got ", packed.scalar_type(), " on ",
                   packed.device());
  const int64_t panels = panels_of(n, gated);
  TORCH_CHECK_VALUE(n > 0 && packed.dim() == (wide ? 3 : 4) && packed.is_contiguous() && packed.size(0) == panels &&
                        packed.size(2) == kPanel && (wide || packed.size(3) == 2),
                    "a packed weight of ", n, " columns is contiguous [", panels, ", k, ", kPanel, "] in float32 or [",
                    panels, ", k / 2, ", kPanel, ", 2] in bfloat16, got ", packed.sizes());
  return {wide ? packed.const_data_ptr<float>() : nullptr,
          wide ? nullptr : reinterpret_cast<const uint16_t*>(packed.const_data_ptr()),
          {},
          n,
          packed.size(1) * (wide ? 1 : 2),
          gated};
}

Linear linear_of(const Tensor& x, const DenseWeight& w, bool activated, const Tensor& bias, Tensor& out) {
  TORCH_CHECK_VALUE(w.gated || !activated, "only a gate's product is activated");
  const int64_t width = activated ? w.n / 2 : w.n;
  out = empty_result(x, width);
  Linear a{};
  a.x = x.const_data_ptr<float>();
  a.x_stride = x.dim() == 2 ? x.stride(0) : w.k;
  a.rows = out.numel() / width;
  a.n = w.n;
  a.k = w.k;
  a.w_float = w.in_float;
  a.w_bfloat16 = w.in_bfloat16;
  a.codes = w.codes;
  a.bias = bias.defined() ? bias.const_data_ptr<float>() : nullptr;
  a.gated = w.gated;
  a.activated = activated;
  a.out = out.data_ptr<float>();
  return a;
}

Tensor product(const Tensor& x_in, const DenseWeight& w, bool activated, const MaybeTensor& bias_in) {
  const Tensor x = rows_of(x_in, w.k), bias = bias_in ? values_of(*bias_in, w.n, "bias") : Tensor();
  Tensor out;
  const Linear a = linear_of(x, w, activated, bias, out);
  if (a.rows) active->linear(a, threads());
  return out;
}

// (y of the RMSNorm of x + residual, x + residual); a gated weight's y is activated.
std::tuple<Tensor, Tensor> product_after_norm(const Tensor& x_in, const Tensor& residual_in, const Tensor& norm_in,
                                              double eps, const DenseWeight& w, const MaybeTensor& bias_in) {
  const Tensor x = rows_of(x_in, w.k), bias = bias_in ? values_of(*bias_in, w.n, "bias") : Tensor();
  const Tensor norm = values_of(norm_in, w.k, "weight");
  check_float(residual_in, "residual");
  TORCH_CHECK_VALUE(residual_in.sizes() == x.sizes(), "x and residual must have one shape, got ", x.sizes(), " and ",
                    residual_in.sizes());
  const Tensor residual = residual_in.contiguous();
  Tensor out, total = at::empty(x.sizes(), x.options());
  Linear a = linear_of(x, w, w.gated, bias, out);
  if (a.rows == 0) return {out, total};
  Tensor normed = at::empty({a.rows <= kLoneRows ? kLoneRows * threads() : a.rows, a.k}, x.options());
  a.residual = residual.const_data_ptr<float>();
  a.norm = norm.const_data_ptr<float>();
  a.eps = static_cast<float>(eps);
  a.total = total.data_ptr<float>();
  a.normed = normed.data_ptr<float>();
  active->linear(a, threads());
  return {out, total};
}

Tensor linear(const Tensor& x, const Tensor& packed, int64_t n, bool gated, bool activated, const MaybeTensor& bias) {
  return product(x, dense_weight(packed, n, gated), activated, bias);
}

std::tuple<Tensor, Tensor> add_norm_linear(const Tensor& x, const Tensor& residual, const Tensor& weight, double eps,
                                           const Tensor& packed, int64_t n, bool gated, const MaybeTensor& bias) {
  return product_after_norm(x, residual, weight, eps, dense_weight(packed, n, gated), bias);
}

// A weight of n columns, or of a gate and an up projection of n / 2 each, for inputs of k.
Codes codes_of(const Tensor& data, const Tensor& scale, const MaybeTensor& offset, bool nibbles, int64_t n, int64_t k,
               bool gated) {
  const int64_t groups = (k + kGroup - 1) / kGroup, panels = panels_of(n, gated);
  const int64_t per_word = nibbles ? 8 : 4;
  TORCH_CHECK_TYPE(data.device().is_cpu() && data.scalar_type() == at::kByte,
                   "a quantized weight is a uint8 CPU tensor, got ", data.scalar_type(), " on ", data.device());
  TORCH_CHECK_VALUE(n > 0 && data.is_contiguous() && data.dim() == 4 && data.size(0) == panels &&
                        data.size(2) == kPanel && data.size(3) == 4,
                    "a quantized weight of ", n, " columns is contiguous [", panels, ", k / ", per_word, ", ", kPanel,
                    ", 4], got ", data.sizes());
  TORCH_CHECK_VALUE(data.size(1) * per_word == groups * kGroup, "x must be [..., k] with k up to ",
                    data.size(1) * per_word, " and above ", data.size(1) * per_word - kGroup, ", got ", k);
  const auto halves = [&](const Tensor& x, const char* name) {
    TORCH_CHECK_TYPE(x.device().is_cpu() && x.scalar_type() == at::kHalf, "the ", name,
                     " of a quantized weight is a float16 CPU tensor, got ", x.scalar_type(), " on ", x.device());
    TORCH_CHECK_VALUE(x.is_contiguous() && x.dim() == 3 && x.size(0) == panels && x.size(1) == groups &&
                          x.size(2) == kPanel,
                      "the ", name, " of a quantized weight must be contiguous [", panels, ", ", groups, ", ", kPanel,
                      "], got ", x.sizes());
    return reinterpret_cast<const uint16_t*>(x.const_data_ptr());
  };
  return {data.const_data_ptr<uint8_t>(), halves(scale, "scale"), offset ? halves(*offset, "offset") : nullptr};
}

// As `codes_of`, for products of whole numbers: codes of 4 bits if there is a `rest`, see `Codes`.
Codes whole_codes_of(const Tensor& data, const Tensor& scale, const MaybeTensor& rest, int64_t n, int64_t k,
                     bool gated) {
  Codes codes = codes_of(data, scale, std::nullopt, rest.has_value(), n, k, gated);
  if (rest) {
    TORCH_CHECK_VALUE(rest->scalar_type() == at::kByte && rest->is_contiguous() &&
                          rest->sizes() == at::IntArrayRef({scale.size(0), rest_bytes(scale.size(1))}),
                      "the rest of a quantized weight must be contiguous uint8 [", scale.size(0), ", ",
                      rest_bytes(scale.size(1)), "], got ", rest->scalar_type(), " ", rest->sizes());
    codes.rest = rest->const_data_ptr<uint8_t>();
  }
  return codes;
}

// As `codes_of`, for float32 inputs, whose k is the weight's.
DenseWeight dense_weight(const Tensor& x, const Tensor& data, const Tensor& scale, const MaybeTensor& offset, int64_t n,
                         bool gated) {
  TORCH_CHECK_VALUE(x.dim() >= 1 && x.size(-1) % kGroup == 0, "x must be [..., k], k a multiple of ", kGroup, ", got ",
                    x.sizes());
  const int64_t k = x.size(-1);
  return {nullptr, nullptr, codes_of(data, scale, offset, offset.has_value(), n, k, gated), n, k, gated};
}

Tensor coded_linear(const Tensor& x, const Tensor& data, const Tensor& scale, const MaybeTensor& offset, int64_t n,
                    bool gated, bool activated, const MaybeTensor& bias) {
  return product(x, dense_weight(x, data, scale, offset, n, gated), activated, bias);
}

std::tuple<Tensor, Tensor> add_norm_coded_linear(const Tensor& x, const Tensor& residual, const Tensor& weight,
                                                 double eps, const Tensor& data, const Tensor& scale,
                                                 const MaybeTensor& offset, int64_t n, bool gated,
                                                 const MaybeTensor& bias) {
  return product_after_norm(x, residual, weight, eps, dense_weight(x, data, scale, offset, n, gated), bias);
}

// index: [m] -> [m, k], those rows of the weight.
Tensor coded_rows(const Tensor& index, const Tensor& data, const Tensor& scale, const MaybeTensor& offset, int64_t n,
                  int64_t k) {
  const Codes codes = codes_of(data, scale, offset, offset.has_value(), n, k, false);
  check_index(index, "index", at::kLong, 1);
  const int64_t* rows = index.const_data_ptr<int64_t>();
  const int64_t count = index.size(0), groups = (k + kGroup - 1) / kGroup;
  for (int64_t i = 0; i < count; ++i)
    TORCH_CHECK_INDEX(rows[i] >= 0 && rows[i] < n, "row ", rows[i], " is outside a weight of ", n, " rows");
  Tensor out = at::empty({count, k}, index.options().dtype(at::kFloat));
  float* values = out.data_ptr<float>();
  const auto half = [](uint16_t bits) { return static_cast<float>(c10::Half(bits, c10::Half::from_bits())); };
  const bool nibbles = codes.offset;
  const int64_t in_word = nibbles ? 8 : 4, words = kGroup / in_word;
  team_for(count < 64 ? 1 : threads(), count, 16, [&](int64_t i) {
    const int64_t column = rows[i] % kPanel, panel = rows[i] / kPanel * groups;
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t at = (panel + g) * kPanel + column;
      const float step = half(codes.scale[at]), start = nibbles ? half(codes.offset[at]) : 0.0f;
      uint8_t code[kGroup];
      for (int64_t word = 0; word < words; ++word) {
        const uint8_t* four = codes.data + (((panel + g) * words + word) * kPanel + column) * 4;
        for (int64_t b = 0; b < 4; ++b) {
          code[word * in_word + b] = nibbles ? four[b] & 15 : four[b];
          if (nibbles) code[word * in_word + 4 + b] = four[b] >> 4;
        }
      }
      float* to = values + i * k + g * kGroup;
      const int64_t some = std::min<int64_t>(kGroup, k - g * kGroup);
      for (int64_t d = 0; d < some; ++d) to[d] = step * static_cast<float>(code[d] - (nibbles ? 0 : 128)) + start;
    }
  });
  return out;
}

// (y, the sum of x and residual if there is one); norm and residual as in `QuantizedLinear`. sum: y is added to it and
// is it, unless it is undefined.
std::tuple<Tensor, Tensor> quantized_product(const Tensor& x_in, const MaybeTensor& residual_in,
                                             const MaybeTensor& norm_in, double eps, const Tensor& data,
                                             const Tensor& scale, const MaybeTensor& rest, int64_t n, bool gated,
                                             const MaybeTensor& bias, const Tensor& sum = {}) {
  TORCH_CHECK_VALUE(x_in.dim() >= 1, "x must be [..., k], got a scalar");
  const int64_t k = x_in.size(-1), groups = (k + kGroup - 1) / kGroup, width = gated ? n / 2 : n;
  const Codes codes = whole_codes_of(data, scale, rest, n, k, gated);
  const Tensor x = rows_of(x_in, k);
  const Tensor bias_values = bias ? values_of(*bias, n, "bias") : Tensor();
  const Tensor norm = norm_in ? values_of(*norm_in, k, "weight") : Tensor();
  Tensor residual, total, out = sum.defined() ? sum : empty_result(x, width);
  if (residual_in) {
    check_float(*residual_in, "residual");
    TORCH_CHECK_VALUE(residual_in->sizes() == x.sizes(), "x and residual must have one shape, got ", x.sizes(), " and ",
                      residual_in->sizes());
    residual = residual_in->contiguous();
    total = at::empty(x.sizes(), x.options());
  }
  if (out.numel() == 0) return {out, total};
  const int64_t rows = out.numel() / width, team = threads();
  const int64_t lines = team * kRowsAtOnce * line_floats(groups);
  const int64_t quantized = std::max(rows, kLoneRows * team) * row_groups(groups, rest.has_value()) *
                            (kActivationGroupBytes / 4);
  const int64_t outliers = team * outlier_bytes(rows, groups) / 4;
  const int64_t progress = (row_blocks_in(rows) + 3) / 4 * 16;  // in whole cache lines, as `outliers` is
  Tensor scratch = at::empty({outliers + progress + lines + quantized}, x.options());
  float* memory = scratch.data_ptr<float>();
  const auto data_of = [](const Tensor& t) { return t.defined() ? t.const_data_ptr<float>() : nullptr; };
  active->quantized_linear(
      {x.const_data_ptr<float>(), x.dim() == 2 ? x.stride(0) : k, rows, n, k, data_of(residual), data_of(norm),
       static_cast<float>(eps), residual_in ? total.data_ptr<float>() : nullptr, codes, data_of(bias_values), gated,
       sum.defined(), out.data_ptr<float>(), memory + outliers + progress, memory + outliers + progress + lines, memory,
       reinterpret_cast<BlockProgress*>(memory + outliers)},
      static_cast<int>(team));
  return {out, total};
}

Tensor quantized_linear(const Tensor& x, const Tensor& data, const Tensor& scale, const MaybeTensor& rest, int64_t n,
                        bool gated, const MaybeTensor& bias) {
  return std::get<0>(quantized_product(x, std::nullopt, std::nullopt, 0.0, data, scale, rest, n, gated, bias));
}

void add_quantized_linear(const Tensor& sum, const Tensor& x, const Tensor& data, const Tensor& scale,
                          const MaybeTensor& rest, int64_t n, const MaybeTensor& bias) {
  check_float(sum, "sum");
  TORCH_CHECK_VALUE(sum.dim() == 2 && x.dim() == 2 && sum.size(0) == x.size(0) && sum.size(1) == n &&
                        sum.is_contiguous(),
                    "sum must be contiguous [rows, ", n, "] for x [rows, k], got ", sum.sizes(), " and ", x.sizes());
  quantized_product(x, std::nullopt, std::nullopt, 0.0, data, scale, rest, n, false, bias, sum);
}

Tensor norm_quantized_linear(const Tensor& x, const Tensor& weight, double eps, const Tensor& data,
                             const Tensor& scale, const MaybeTensor& rest, int64_t n, bool gated,
                             const MaybeTensor& bias) {
  return std::get<0>(quantized_product(x, std::nullopt, weight, eps, data, scale, rest, n, gated, bias));
}

std::tuple<Tensor, Tensor> add_norm_quantized_linear(const Tensor& x, const Tensor& residual, const Tensor& weight,
                                                     double eps, const Tensor& data, const Tensor& scale,
                                                     const MaybeTensor& rest, int64_t n, bool gated,
                                                     const MaybeTensor& bias) {
  return quantized_product(x, residual, weight, eps, data, scale, rest, n, gated, bias);
}

}  // namespace
