// RMS norm (Zhang & Sennrich 2019, https://arxiv.org/abs/1910.07467); see RmsNorm in kernels.h for the arguments.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace headrace::HEADRACE_ISA {
namespace {

template <typename T>
float sum_of_squares(const T* x, int64_t n) {
  F32x16 sums = splat(0.0f);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const F32x16 v = load(x + i);
    sums = sums + v * v;
  }
  if (i < n) {
    const F32x16 v = load_first(x + i, n - i);
    sums = sums + v * v;
  }
  return sum(sums);
}

template <typename T>
void rms_norm_rows(const RmsNorm& args, int64_t first_row, int64_t last_row) {
  const int64_t n = args.hidden;
  const float* weight = args.weight;
  for (int64_t row = first_row; row < last_row; ++row) {
    const T* x = static_cast<const T*>(args.x) + row / args.heads * args.token_stride +
                 row % args.heads * args.head_stride;
    T* y = static_cast<T*>(args.y) + row * n;
    const float mean = sum_of_squares(x, n) / static_cast<float>(n);
    const F32x16 scale = splat(1.0f / sqrtf(mean + args.eps));
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) store(y + i, load(x + i) * scale * load(weight + i));
    if (i < n) store_first(y + i, load_first(x + i, n - i) * scale * load_first(weight + i, n - i), n - i);
  }
}

void rms_norm(const RmsNorm& args, int64_t first_row, int64_t last_row) {
  switch (args.dtype) {
    case DType::f32: return rms_norm_rows<float>(args, first_row, last_row);
    case DType::bf16: return rms_norm_rows<Bf16>(args, first_row, last_row);
    case DType::f16: return rms_norm_rows<F16>(args, first_row, last_row);
    case DType::i8: return;
  }
}

}  // namespace
}  // namespace headrace::HEADRACE_ISA
