// Numbers as eight bits and a scale.
#pragma once

#include "simd.h"

namespace headrace::HEADRACE_ISA {
namespace {

// The nearest whole numbers from -127 to 127; of a NaN -127, which its scale makes a NaN again.
inline F32x16 to_code(F32x16 x) { return min(splat(127.0f), max(splat(-127.0f), round(x))); }

// The smallest number of type S that is not below a scale, at most the largest one; NaN of NaN.
template <typename S>
inline S scale_above(float exact) {
  S stored[kLanes];
  store(stored, splat(exact));
  return stored[0];
}

template <>
inline F16 scale_above<F16>(float exact) {
  F16 stored[kLanes];
  store(stored, splat(exact));
  // The bits of positive numbers are in order, so the next larger number is the next one.
  if (to_float(stored[0]) < exact) ++stored[0].bits;
  const bool too_large = stored[0].bits == 0x7c00;
  return {static_cast<uint16_t>(too_large ? 0x7bff : stored[0].bits)};
}

}  // namespace
}  // namespace headrace::HEADRACE_ISA
