// The arguments of every op, and the table of ops that each instruction set fills.
//
// This file is compiled with every set of flags, so it holds declarations only: no function body, no C++ header.
#pragma once

#include <stdint.h>

namespace headrace {

enum class DType : int32_t { f32 = 0, bf16 = 1, f16 = 2 };

// y[r, i] = x[r, i] * (1 / sqrt(mean_i(x[r, i]^2) + eps)) * weight[i], in float32, rounded once to y's dtype.
//
// x: `rows` rows of `hidden` contiguous values, `x_stride` values apart. y: the same dtype, rows without gaps.
// The sum of squares has one order for every instruction set (sixteen partial sums over i mod 16, then a tree), so a
// row's bits depend on nothing but the row.
struct RmsNorm {
  const void* x;
  const float* weight;
  void* y;
  int64_t rows;
  int64_t hidden;
  int64_t x_stride;
  float eps;
  DType dtype;
};

struct Kernels {
  void (*rms_norm)(const RmsNorm&);
};

}  // namespace headrace
