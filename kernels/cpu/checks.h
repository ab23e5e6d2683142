// Checks on tensors that the operators share, and the kernels in use.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include "kernels.h"

namespace {

using at::Tensor;

const Kernels* active = nullptr;

int threads() { return at::in_parallel_region() ? 1 : at::get_num_threads(); }

void check_float(const Tensor& x, const char* name) {
  TORCH_CHECK_TYPE(x.device().is_cpu() && x.scalar_type() == at::kFloat, name, " must be a float32 CPU tensor, got ",
                   x.scalar_type(), " on ", x.device());
}

void check_index(const Tensor& x, const char* name, at::ScalarType type, int64_t dims) {
  TORCH_CHECK_TYPE(x.device().is_cpu() && x.scalar_type() == type, name, " must be a CPU tensor of ", type, ", got ",
                   x.scalar_type(), " on ", x.device());
  TORCH_CHECK_VALUE(x.dim() == dims && x.is_contiguous(), name, " must be contiguous with ", dims,
                    " dimensions, got shape ", x.sizes());
}

void check_weight(const Tensor& x, const Tensor& weight) {
  check_float(x, "x");
  check_float(weight, "weight");
  TORCH_CHECK_VALUE(x.dim() >= 1 && weight.dim() == 1 && weight.size(0) == x.size(-1) && weight.is_contiguous(),
                    "weight must be contiguous [", x.dim() ? x.size(-1) : 0, "], got shape ", weight.sizes());
}

}  // namespace
