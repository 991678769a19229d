// Functions of sixteen lanes that the network needs, accurate to a few units in the last place.
#pragma once

#include "simd.h"

namespace headrace::HEADRACE_ISA {
namespace {

// From the highest power of r on, without the two lowest; the polynomial is that of Cephes' expf (Moshier).
constexpr float kExpCoefficients[] = {1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f,
                                      4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};

// e^x; zero below -87.3, and no larger than e^88. 
inline F32x16 exp(F32x16 x) {
  const F32x16 lowest = splat(-87.3f);
  const F32x16 clamped = min(splat(88.0f), max(lowest, x));
  const F32x16 n = round(clamped * splat(1.44269504f));
  const F32x16 r = fma(n, splat(2.12194440e-4f), fma(n, splat(-0.693359375f), clamped));
  F32x16 p = splat(0.0f);
  for (const float c : kExpCoefficients) p = fma(p, r, splat(c));
  const F32x16 y = fma(p, r * r, r) + splat(1.0f);
  return zero_if_less(x, lowest, y * power_of_two(n));
}

inline F32x16 tanh(F32x16 x) { return splat(1.0f) - splat(2.0f) / (exp(x + x) + splat(1.0f)); }
inline F32x16 silu(F32x16 x) { return x / (splat(1.0f) + exp(splat(0.0f) - x)); }

// x/2 (1 + tanh u) is x / (1 + e^-2u), which loses nothing where tanh u is near -1.
inline F32x16 gelu_tanh(F32x16 x) {
  const F32x16 u = splat(0.797884561f) * fma(splat(0.044715f) * x * x, x, x);
  return x / (splat(1.0f) + exp(splat(-2.0f) * u));
}

}  // namespace
}  // namespace headrace::HEADRACE_ISA
