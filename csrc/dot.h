// Products of 8-bit whole numbers, sixteen outputs at a time: exact, so equal on every instruction set.
//
// A line is 64 bytes: four consecutive inputs of each of sixteen outputs. NibbleDot takes weights from 0 to 15, ByteDot
// from -128 to 127, and both take inputs from -127 to 127; `add` adds a line times four inputs. At most kMaxLines lines
// may be added before `total` is called.
#pragma once

#include "simd.h"

namespace headrace::HEADRACE_ISA {
namespace {

// Eight lines make the 32 inputs of a block. Eight products of a pair, 2 * 15 * 127 each, just fit sixteen bits.
constexpr int kMaxLines = 8;

#if defined(__AVX512F__)

struct Line {
  __m512i v;
};

struct I32x16 {
  __m512i v;
};

inline Line load_line(const void* p) { return {_mm512_loadu_si512(p)}; }
inline Line low_nibbles(Line x) { return {_mm512_and_si512(x.v, _mm512_set1_epi8(15))}; }
inline Line high_nibbles(Line x) { return low_nibbles({_mm512_srli_epi16(x.v, 4)}); }

inline Line four_inputs(const int8_t* p) {
  int32_t bits;
  memcpy(&bits, p, sizeof bits);
  return {_mm512_set1_epi32(bits)};
}

inline I32x16 operator-(I32x16 a, int32_t b) { return {_mm512_sub_epi32(a.v, _mm512_set1_epi32(b))}; }
inline F32x16 to_float(I32x16 x) { return {_mm512_cvtepi32_ps(x.v)}; }

#if defined(__AVX512VNNI__)

struct NibbleDot {
  __m512i sums = _mm512_setzero_si512();
  void add(Line weights, Line inputs) { sums = _mm512_dpbusd_epi32(sums, weights.v, inputs.v); }
  I32x16 total() const { return {sums}; }
};

// The instruction takes unsigned weights: 128 more than they are, so that 128 times the inputs must be taken off.
struct ByteDot {
  __m512i sums = _mm512_setzero_si512(), excess = _mm512_setzero_si512();
  void add(Line weights, Line inputs) {
    const __m512i bias = _mm512_set1_epi8(-128);
    sums = _mm512_dpbusd_epi32(sums, _mm512_xor_si512(weights.v, bias), inputs.v);
    excess = _mm512_dpbusd_epi32(excess, bias, inputs.v);
  }
  I32x16 total() const { return {_mm512_sub_epi32(sums, excess)}; }
};

#else

inline __m512i add_pairs(__m512i x) { return _mm512_madd_epi16(x, _mm512_set1_epi16(1)); }

struct NibbleDot {
  __m512i pairs = _mm512_setzero_si512();
  void add(Line weights, Line inputs) {
    pairs = _mm512_add_epi16(pairs, _mm512_maddubs_epi16(weights.v, inputs.v));
  }
  I32x16 total() const { return {add_pairs(pairs)}; }
};

struct ByteDot {
  __m512i sums = _mm512_setzero_si512();
  void add(Line weights, Line inputs) {
    const __m512i turned =
        _mm512_mask_sub_epi8(inputs.v, _mm512_movepi8_mask(weights.v), _mm512_setzero_si512(), inputs.v);
    sums = _mm512_add_epi32(sums, add_pairs(_mm512_maddubs_epi16(_mm512_abs_epi8(weights.v), turned)));
  }
  I32x16 total() const { return {sums}; }
};

#endif

#elif defined(__AVX2__)

struct Line {
  __m256i low, high;
};

struct I32x16 {
  __m256i low, high;
};

inline Line load_line(const void* p) {
  const __m256i* halves = static_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(halves), _mm256_loadu_si256(halves + 1)};
}

inline Line low_nibbles(Line x) {
  const __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(x.low, mask), _mm256_and_si256(x.high, mask)};
}

inline Line high_nibbles(Line x) { return low_nibbles({_mm256_srli_epi16(x.low, 4), _mm256_srli_epi16(x.high, 4)}); }

inline Line four_inputs(const int8_t* p) {
  int32_t bits;
  memcpy(&bits, p, sizeof bits);
  const __m256i both = _mm256_set1_epi32(bits);
  return {both, both};
}

inline I32x16 operator-(I32x16 a, int32_t b) {
  const __m256i both = _mm256_set1_epi32(b);
  return {_mm256_sub_epi32(a.low, both), _mm256_sub_epi32(a.high, both)};
}

inline F32x16 to_float(I32x16 x) { return {_mm256_cvtepi32_ps(x.low), _mm256_cvtepi32_ps(x.high)}; }
inline __m256i add_pairs(__m256i x) { return _mm256_madd_epi16(x, _mm256_set1_epi16(1)); }

struct NibbleDot {
  __m256i low = _mm256_setzero_si256(), high = _mm256_setzero_si256();
  void add(Line weights, Line inputs) {
    low = _mm256_add_epi16(low, _mm256_maddubs_epi16(weights.low, inputs.low));
    high = _mm256_add_epi16(high, _mm256_maddubs_epi16(weights.high, inputs.high));
  }
  I32x16 total() const { return {add_pairs(low), add_pairs(high)}; }
};

// Of the two factors the instruction takes the first unsigned: the weight's sign goes over to the input.
struct ByteDot {
  __m256i low = _mm256_setzero_si256(), high = _mm256_setzero_si256();
  static __m256i product(__m256i weights, __m256i inputs) {
    return add_pairs(_mm256_maddubs_epi16(_mm256_abs_epi8(weights), _mm256_sign_epi8(inputs, weights)));
  }
  void add(Line weights, Line inputs) {
    low = _mm256_add_epi32(low, product(weights.low, inputs.low));
    high = _mm256_add_epi32(high, product(weights.high, inputs.high));
  }
  I32x16 total() const { return {low, high}; }
};

#else

struct Line {
  uint8_t byte[64];
};

struct I32x16 {
  int32_t lane[kLanes];
};

inline Line load_line(const void* p) {
  Line x;
  memcpy(x.byte, p, sizeof x.byte);
  return x;
}

inline Line low_nibbles(Line x) {
  for (uint8_t& byte : x.byte) byte &= 15;
  return x;
}

inline Line high_nibbles(Line x) {
  for (uint8_t& byte : x.byte) byte >>= 4;
  return x;
}

inline Line four_inputs(const int8_t* p) {
  Line x;
  for (int i = 0; i < 64; i += 4) memcpy(x.byte + i, p, 4);
  return x;
}

inline I32x16 operator-(I32x16 a, int32_t b) {
  for (int32_t& lane : a.lane) lane -= b;
  return a;
}

inline F32x16 to_float(I32x16 x) {
  F32x16 y;
  for (int i = 0; i < kLanes; ++i) y.lane[i] = static_cast<float>(x.lane[i]);
  return y;
}

template <typename T>
struct PlainDot {
  I32x16 sums = {};
  void add(Line weights, Line inputs) {
    for (int i = 0; i < 64; ++i)
      sums.lane[i / 4] += static_cast<T>(weights.byte[i]) * static_cast<int8_t>(inputs.byte[i]);
  }
  I32x16 total() const { return sums; }
};

using NibbleDot = PlainDot<uint8_t>;
using ByteDot = PlainDot<int8_t>;

#endif

}  // namespace
}  // namespace headrace::HEADRACE_ISA
