// The `nanoserve` operators, and the choice of the instruction set.
#include <torch/library.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "attention_ops.h"
#include "checks.h"
#include "linear_ops.h"
#include "lora_ops.h"
#include "packing_ops.h"
#include "shared_sum.h"

namespace {

#if defined(__x86_64__)
// Not among the names that g++ 12 knows: leaf 7, sub-leaf 1, EAX bit 4.
bool has_avx_vnni() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax >> 4 & 1);
}
#endif

// "best" takes the widest that this CPU has; another name is an error where the CPU lacks it. Returns the name in use.
std::string use_isa(std::string name) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  struct Choice {
    const char* name;
    bool supported;
    const Kernels& (*kernels)();
  };
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  const bool avx512_vnni = avx512 && __builtin_cpu_supports("avx512vnni");
  const Choice choices[] = {
      {"avx512_bf16", avx512_vnni && __builtin_cpu_supports("avx512bf16"), avx512_bf16_kernels},
      {"avx512_vnni", avx512_vnni, avx512_vnni_kernels},
      {"avx512", avx512, avx512_kernels},
      {"avx2_vnni", avx2 && has_avx_vnni(), avx2_vnni_kernels},
      {"avx2", avx2, avx2_kernels},
      {"portable", true, portable_kernels},
  };
  for (const Choice& choice : choices) {
    if (!choice.supported || (name != "best" && name != choice.name)) continue;
    active = &choice.kernels();
    return choice.name;
  }
  TORCH_CHECK_VALUE(false, "this CPU has no instruction set called '", name,
                    "': use 'best', 'portable', or 'avx2', 'avx2_vnni', 'avx512', 'avx512_vnni' or 'avx512_bf16' where "
                    "the CPU has them");
#else
  TORCH_CHECK_VALUE(name == "best" || name == "portable", "this CPU has no instruction set called '", name,
                    "': use 'best' or 'portable'");
  active = &portable_kernels();
  return "portable";
#endif
}

Tensor rms_norm(const Tensor& x_in, const Tensor& weight, double eps) {
  check_weight(x_in, weight);
  Tensor x = x_in;
  const bool heads = x.dim() == 3 && x.stride(2) == 1;  // a slice of fused q, k and v needs no copy
  if (!heads) x = x.contiguous();
  Tensor out = at::empty(x.sizes(), x.options());
  const int64_t n = x.size(-1);
  if (out.numel() == 0) return out;
  const Rows rows = heads ? Rows{x.const_data_ptr<float>(), x.size(0), x.size(1), n, x.stride(0), x.stride(1)}
                          : Rows{x.const_data_ptr<float>(), x.numel() / n, 1, n, n, 0};
  active->rms_norm(rows, weight.const_data_ptr<float>(), static_cast<float>(eps), out.data_ptr<float>(), threads());
  return out;
}

std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& x_in, const Tensor& residual_in, const Tensor& weight,
                                        double eps) {
  check_weight(x_in, weight);
  check_float(residual_in, "residual");
  TORCH_CHECK_VALUE(x_in.sizes() == residual_in.sizes(), "x and residual must have one shape, got ", x_in.sizes(),
                    " and ", residual_in.sizes());
  const Tensor x = x_in.contiguous(), residual = residual_in.contiguous();
  Tensor out = at::empty(x.sizes(), x.options()), total = at::empty(x.sizes(), x.options());
  const int64_t n = x.size(-1);
  if (out.numel())
    active->add_rms_norm(x.const_data_ptr<float>(), residual.const_data_ptr<float>(), weight.const_data_ptr<float>(),
                         static_cast<float>(eps), out.data_ptr<float>(), total.data_ptr<float>(), x.numel() / n, n,
                         threads());
  return {out, total};
}

Tensor silu_and_mul(const Tensor& x_in) {
  check_float(x_in, "x");
  TORCH_CHECK_VALUE(x_in.dim() == 2 && x_in.size(1) % 2 == 0, "x must be [tokens, 2 * n], got ", x_in.sizes());
  const Tensor x = x_in.stride(1) == 1 ? x_in : x_in.contiguous();
  const int64_t rows = x.size(0), n = x.size(1) / 2;
  Tensor out = at::empty({rows, n}, x.options());
  if (out.numel())
    active->silu_and_mul(x.const_data_ptr<float>(), x.stride(0), out.data_ptr<float>(), rows, n, threads());
  return out;
}

Tensor argmax(const Tensor& x) {
  check_float(x, "x");
  TORCH_CHECK_VALUE(x.dim() == 2 && x.stride(1) == 1 && x.size(1) > 0, "x must be [rows, n], its rows contiguous, got ",
                    x.sizes());
  Tensor out = at::empty({x.size(0)}, x.options().dtype(at::kLong));
  if (out.numel())
    active->argmax(x.const_data_ptr<float>(), x.stride(0), x.size(0), x.size(1), out.data_ptr<int64_t>(), threads());
  return out;
}

}  // namespace

TORCH_LIBRARY(nanoserve, m) {
  use_isa("best");
  m.def("use_isa(str name) -> str", &use_isa);
  m.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
  m.def("add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)");
  m.def("silu_and_mul(Tensor x) -> Tensor");
  m.def("apply_rotary(Tensor q, Tensor k, Tensor cos, Tensor sin, Tensor positions) -> (Tensor, Tensor)");
  m.def("kv_write(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slots) -> ()");
  m.def(
      "rotary_write(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, Tensor positions, Tensor(a!) k_cache, "
      "Tensor(b!) v_cache, Tensor slots) -> Tensor");
  m.def(
      "paged_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor query_start, Tensor seq_lens, "
      "Tensor block_tables, Tensor rows, float scale, int window=0, float soft_cap=0.0) -> Tensor");
  m.def(
      "rotary_attention(Tensor qkv, Tensor cos, Tensor sin, Tensor positions, Tensor(a!) k_cache, Tensor(b!) v_cache, "
      "Tensor slots, Tensor query_start, Tensor seq_lens, Tensor block_tables, Tensor rows, float scale, int window=0, "
      "float soft_cap=0.0) -> Tensor");
  m.def("linear(Tensor x, Tensor packed, int n, bool gated, bool activated, Tensor? bias) -> Tensor");
  m.def(
      "coded_linear(Tensor x, Tensor data, Tensor scale, Tensor? offset, int n, bool gated, bool activated, "
      "Tensor? bias) -> Tensor");
  m.def(
      "add_norm_linear(Tensor x, Tensor residual, Tensor weight, float eps, Tensor packed, int n, bool gated, "
      "Tensor? bias) -> (Tensor, Tensor)");
  m.def(
      "add_norm_coded_linear(Tensor x, Tensor residual, Tensor weight, float eps, Tensor data, Tensor scale, "
      "Tensor? offset, int n, bool gated, Tensor? bias) -> (Tensor, Tensor)");
  m.def("coded_rows(Tensor index, Tensor data, Tensor scale, Tensor? offset, int n, int k) -> Tensor");
  m.def(
      "add_lora(Tensor(a!) y, Tensor x, Tensor a, Tensor b, int[] parts, Tensor tokens, Tensor tiles) -> ()");
  m.def("argmax(Tensor x) -> Tensor");
  m.def(
      "quantized_linear(Tensor x, Tensor data, Tensor scale, Tensor? rest, int n, bool gated, Tensor? bias) -> Tensor");
  m.def(
      "add_quantized_linear(Tensor(a!) sum, Tensor x, Tensor data, Tensor scale, Tensor? rest, int n, Tensor? bias) "
      "-> ()");
  m.def("shared_sum(Tensor(a!) x, Tensor(b!) memory, int rank, int size, int number, float wait) -> int");
  m.def(
      "shared_gather(Tensor x, Tensor(a!) memory, int rank, int size, int number, float wait, Tensor(b!)? out) -> int");
  m.def("pack_rows(Tensor source, Tensor(a!) panels, int first) -> bool");
  m.def(
      "code_rows(Tensor source, Tensor(a!) data, Tensor(b!) scale, Tensor(c!)? offset, int first, int step, int start, "
      "bool exact) -> bool");
  m.def(
      "norm_quantized_linear(Tensor x, Tensor weight, float eps, Tensor data, Tensor scale, Tensor? rest, int n, "
      "bool gated, Tensor? bias) -> Tensor");
  m.def(
      "add_norm_quantized_linear(Tensor x, Tensor residual, Tensor weight, float eps, Tensor data, Tensor scale, "
      "Tensor? rest, int n, bool gated, Tensor? bias) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(nanoserve, CPU, m) {
  m.impl("rms_norm", &rms_norm);
  m.impl("add_rms_norm", &add_rms_norm);
  m.impl("silu_and_mul", &silu_and_mul);
  m.impl("apply_rotary", &apply_rotary);
  m.impl("kv_write", &kv_write);
  m.impl("rotary_write", &rotary_write);
  m.impl("paged_attention", &paged_attention);
  m.impl("rotary_attention", &rotary_attention);
  m.impl("linear", &linear);
  m.impl("coded_linear", &coded_linear);
  m.impl("add_norm_linear", &add_norm_linear);
  m.impl("add_norm_coded_linear", &add_norm_coded_linear);
  m.impl("coded_rows", &coded_rows);
  m.impl("add_lora", &add_lora);
  m.impl("shared_sum", &shared_sum);
  m.impl("shared_gather", &shared_gather);
  m.impl("pack_rows", &pack_rows);
  m.impl("code_rows", &code_rows);
  m.impl("argmax", &argmax);
  m.impl("quantized_linear", &quantized_linear);
  m.impl("add_quantized_linear", &add_quantized_linear);
  m.impl("norm_quantized_linear", &norm_quantized_linear);
  m.impl("add_norm_quantized_linear", &add_norm_quantized_linear);
}
