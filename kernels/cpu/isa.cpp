// All kernels for one instruction set. Compiled once for each, with KERNELS naming the function that hands them out.
#include "argmax.h"
#include "attention.h"
#include "elementwise.h"
#include "kv_store.h"
#include "linear.h"
#include "lora.h"
#include "quantized_linear.h"

const Kernels& KERNELS() {
  static constexpr Kernels kernels = {rms_norm, add_rms_norm, silu_and_mul,     apply_rotary, write,
                                      attend,   linear,       quantized_linear, add_lora,     argmax};
  return kernels;
}
