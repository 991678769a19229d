// All ops of one instruction set. Compiled once for each; HEADRACE_ISA is its name and its namespace.
#include "kernels.h"

#include "attention.h"
#include "elementwise.h"
#include "linear.h"
#include "peak.h"
#include "rms_norm.h"
#include "shares.h"

namespace headrace::HEADRACE_ISA {

extern const Kernels kernels = {rms_norm,  prepare,         product, embedding,   rotary,          store_kv,
                         attention, merge_attention, gated,   add,         softcap,         to_float,
                         largest_logit, shares, read_memory, multiply_floats, multiply_codes};

}  // namespace headrace::HEADRACE_ISA
