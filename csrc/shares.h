// What drawing tokens needs of a whole row of logits; see Shares in kernels.h for the arguments.
#pragma once

#include "elementwise.h"

namespace headrace::HEADRACE_ISA {
namespace {

// A NaN as -infinity, and infinity as the largest finite number.
inline F32x16 without_nan(F32x16 x) { return min(max(x, splat(-INFINITY)), splat(3.40282347e38f)); }

// Adding zeros does not do for the last lanes: the largest of a row may be negative.
inline F32x16 load_logits(const float* p, int64_t count) {
  if (count == kLanes) return without_nan(load(p));
  float padded[kLanes];
  for (int64_t i = 0; i < kLanes; ++i) padded[i] = i < count ? p[i] : -INFINITY;
  return without_nan(load(padded));
}

float largest_logit(const float* x, int64_t count) {
  F32x16 most = splat(-INFINITY);
  by_lanes(count, [&](int64_t i, int64_t n) { most = max(load_logits(x + i, n), most); });
  return largest(most);
}

void shares(const Shares& args) {
  const F32x16 best = splat(args.best), temperature = splat(args.temperature);
  by_lanes(args.count, [&](int64_t i, int64_t n) {
    store_some(args.shares + i, exp((load_logits(args.logits + i, n) - best) / temperature), n);
  });
}

}  // namespace
}  // namespace headrace::HEADRACE_ISA
