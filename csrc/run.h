// Whole ops: how the kernels' work is divided among the threads, and where what they hand on is kept meanwhile.
#pragma once

#include <vector>

#include "kernels.h"

namespace headrace {

void rms_norm(const RmsNorm& args);

// y = x @ weightsᵀ + bias, for several matrices that stand one below the other. x: rows of contiguous values, `x_stride`
// apart. bias and y (without gaps) are of x's dtype; bias may be null.
void linear(const std::vector<Weights>& parts, const void* x, int64_t rows, int64_t x_stride, const void* bias, void* y,
            DType dtype);

void embedding(const Embedding& args, int64_t tokens);
void rotary(const Rotary& args, int64_t tokens);
void store_kv(const StoreKV& args, int64_t tokens);
void gated(const Gated& args, int64_t tokens);

// query_lens, context_lens: tokens of each sequence in this step, and of its keys in the cache.
void attention(const Attention& args, int64_t sequences, const int64_t* query_lens, const int64_t* context_lens);

}  // namespace headrace
