// The operator of low-rank adapters.
#pragma once

#include "checks.h"

namespace {

void add_lora(Tensor& y, const Tensor& x, const Tensor& a, const Tensor& b, at::IntArrayRef parts,
              const Tensor& tokens, const Tensor& tiles) {
  for (const auto& [tensor, name] : {std::pair<const Tensor&, const char*>{y, "y"}, {x, "x"}, {a, "a"}, {b, "b"}})
    check_float(tensor, name);
  TORCH_CHECK_VALUE(x.dim() == 2 && y.dim() == 2 && x.size(0) == y.size(0) && x.stride(1) == 1 && y.stride(1) == 1,
                    "x and y must be [tokens, n], rows contiguous, got ", x.sizes(), " and ", y.sizes());
  const int64_t k = x.size(1), n = y.size(1), count = static_cast<int64_t>(parts.size());
  int64_t columns = 0;
  for (const int64_t part : parts) columns += part;
  TORCH_CHECK_VALUE(columns == n, "parts must add up to the ", n, " columns of y, got ", parts);
  const int64_t rank = b.dim() == 3 ? b.size(1) : 0;
  TORCH_CHECK_VALUE(rank > 0 && rank % 16 == 0 && count * rank <= kMaxLoraWidth && b.is_contiguous() &&
                        a.is_contiguous() && b.size(2) == n && a.dim() == 3 && a.size(0) == b.size(0) &&
                        a.size(1) == k && a.size(2) == count * rank,
                    "a and b must be contiguous [slots, ", k, ", parts * rank] and [slots, rank, ", n,
                    "], rank a multiple of 16 and parts * rank up to ", kMaxLoraWidth, ", got ", a.sizes(), " and ",
                    b.sizes());
  check_index(tokens, "tokens", at::kInt, 1);
  check_index(tiles, "tiles", at::kInt, 2);
  const int32_t *token = tokens.const_data_ptr<int32_t>(), *tile = tiles.const_data_ptr<int32_t>();
  for (int64_t i = 0; i < tokens.size(0); ++i)
    TORCH_CHECK_INDEX(token[i] >= 0 && token[i] < x.size(0), "token ", token[i], " of ", x.size(0));
  for (int64_t i = 0; i < tiles.size(0); ++i, tile += 3)
    TORCH_CHECK_INDEX(tiles.size(1) == 3 && tile[0] >= 0 && tile[0] < a.size(0) && tile[1] >= 0 &&
                          tile[2] - tile[1] <= kLoraTile && tile[2] <= tokens.size(0),
                      "tile ", i, " is no (slot, first, last + 1) of at most ", kLoraTile, " tokens");
  active->add_lora({x.const_data_ptr<float>(), x.stride(0), k, y.data_ptr<float>(), y.stride(0), n,
                    a.const_data_ptr<float>(), b.const_data_ptr<float>(), rank, parts.data(), count, token,
                    tokens.size(0), tiles.const_data_ptr<int32_t>(), tiles.size(0)},
                   threads());
}

}  // namespace
