// What a core can do at best: how fast it reads memory, and how fast it multiplies what its first cache holds.
//
// Measured with the same sixteen lanes and the same products of whole numbers as the ops use, so that an op can be
// compared with what its instruction set allows. What comes out is written to a sink, or the compiler would leave it out.
#pragma once

#include "dot.h"
#include "kernels.h"

namespace headrace::HEADRACE_ISA {
namespace {

constexpr int64_t kLineBytes = 64;
constexpr int kReads = 8;          // lines that are under way at once
constexpr int kLimitLines = 64;    // lines of weights, which stay in the first cache

// Sums that do not wait for one another, as many as registers hold.
#if defined(__AVX512F__)
constexpr int kChains = 10;
#elif defined(__AVX2__)
constexpr int kChains = 5;
#else
constexpr int kChains = 4;
#endif

void read_memory(const void* data, int64_t first, int64_t last, float* sink) {
  const float* lines = static_cast<const float*>(data);
  F32x16 sums[kReads];
  for (F32x16& sum : sums) sum = splat(0.0f);
  for (int64_t line = first; line + kReads <= last; line += kReads)
    unrolled<kReads>([&](auto i) { sums[i] = sums[i] + load(lines + (line + i) * kLanes); });
  F32x16 total = sums[0];
  for (int i = 1; i < kReads; ++i) total = total + sums[i];
  *sink = sum(total);
}

int64_t multiply_floats(int64_t rounds, float* sink) {
  alignas(64) float lines[kLimitLines * kLanes];
  for (float& x : lines) x = 1e-9f;
  F32x16 inputs[kChains], sums[kChains];
  for (int i = 0; i < kChains; ++i) {
    inputs[i] = splat(1.0f + 0.1f * static_cast<float>(i));
    sums[i] = splat(0.0f);
  }
  for (int64_t round = 0; round < rounds; ++round)
    for (int64_t line = 0; line < kLimitLines; ++line) {
      const F32x16 weights = load(lines + line * kLanes);
      unrolled<kChains>([&](auto i) { sums[i] = fma(weights, inputs[i], sums[i]); });
    }
  F32x16 total = sums[0];
  for (int i = 1; i < kChains; ++i) total = total + sums[i];
  *sink = sum(total);
  return rounds * kLimitLines * kChains * kLanes * 2;
}

int64_t multiply_codes(int64_t rounds, float* sink) {
  alignas(64) int8_t lines[kLimitLines * kLineBytes];
  for (int i = 0; i < kLimitLines * kLineBytes; ++i) lines[i] = static_cast<int8_t>(i % 16);
  F32x16 total = splat(0.0f);
  constexpr int kDots = 4;
  for (int64_t round = 0; round < rounds; ++round) {
    Line inputs[kDots];
    NibbleDot dots[kDots];
    unrolled<kDots>([&](auto i) { inputs[i] = four_inputs(lines + 4 * i); });
    for (int64_t line = 0; line < kLimitLines; ++line) {
      const Line weights = load_line(lines + line * kLineBytes);
      unrolled<kDots>([&](auto i) { dots[i].add(weights, inputs[i]); });  // may wrap; nobody looks at the sums
    }
    unrolled<kDots>([&](auto i) { total = total + to_float(dots[i].total()); });
  }
  *sink = sum(total);
  return rounds * kLimitLines * kDots * kLineBytes * 2;
}

}  // namespace
}  // namespace headrace::HEADRACE_ISA
