// Sixteen float32 lanes, the same on every instruction set: kernels are written once, over these.
//
// `round` is to the nearest, halves to even. `power_of_two` takes whole numbers from -126 to 127. `store_codes` takes
// whole numbers that fit eight bits. `fma` rounds once. Of a NaN and another number, `max` and `min` give the second.
// `zero_if_less` is y, with zeros where x is less than the limit.
//
// F32x16 is one AVX-512 register, two AVX registers, or an array that the compiler may vectorise as it likes. Every
// function does exactly the same float32 operations per lane, and `sum` adds in the same order, so results agree bit
// by bit (a NaN's payload aside). Conversions to 16 bits round to nearest even, keep infinities, and keep NaNs NaN.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace headrace::HEADRACE_ISA {
namespace {

struct Bf16 {
  uint16_t bits;
};

struct F16 {
  uint16_t bits;
};

constexpr int64_t kLanes = 16;

// Calls function(i) for i = 0 ... kCount - 1, with i known to the compiler: what an array holds stays in registers,
// which a loop over it does not always achieve.
template <int kIndex>
struct Index {
  static constexpr int value = kIndex;
  constexpr operator int() const { return kIndex; }
};

template <int kCount, int kIndex = 0, typename Function>
__attribute__((always_inline)) inline void unrolled(const Function& function) {
  if constexpr (kIndex < kCount) {
    function(Index<kIndex>());
    unrolled<kCount, kIndex + 1>(function);
  }
}

inline uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

inline float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

inline float to_float(float x) { return x; }
inline float to_float(int8_t x) { return x; }
inline float to_float(Bf16 x) { return float_of(uint32_t{x.bits} << 16); }

inline float to_float(F16 x) {
#if defined(__AVX2__)
  return _cvtsh_ss(x.bits);
#else
  const uint32_t sign = (x.bits & 0x8000u) << 16;
  const uint32_t exponent = (x.bits >> 10) & 0x1f;
  const uint32_t fraction = x.bits & 0x3ff;
  const uint32_t normal = ((exponent + 112) << 23) | (fraction << 13);
  const uint32_t subnormal = bits_of(static_cast<float>(fraction) * 0x1p-24f);
  const uint32_t special = 0x7f800000u | (fraction << 13) | (fraction ? 0x400000u : 0);
  return float_of(sign | (exponent == 0 ? subnormal : exponent == 31 ? special : normal));
#endif
}

#if defined(__AVX512F__)

struct F32x16 {
  __m512 v;
};

inline F32x16 splat(float x) { return {_mm512_set1_ps(x)}; }
inline F32x16 operator+(F32x16 a, F32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F32x16 operator-(F32x16 a, F32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F32x16 operator*(F32x16 a, F32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F32x16 operator/(F32x16 a, F32x16 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F32x16 fma(F32x16 a, F32x16 b, F32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline F32x16 max(F32x16 a, F32x16 b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F32x16 min(F32x16 a, F32x16 b) { return {_mm512_min_ps(a.v, b.v)}; }
inline F32x16 abs(F32x16 a) { return {_mm512_abs_ps(a.v)}; }
inline F32x16 round(F32x16 a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline F32x16 power_of_two(F32x16 n) {
  return {_mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127)), 23))};
}
inline F32x16 zero_if_less(F32x16 x, F32x16 limit, F32x16 y) {
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, limit.v, _CMP_NLT_UQ), y.v)};
}
inline void store_codes(int8_t* p, F32x16 x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x.v)));
}

inline F32x16 load(const float* p) { return {_mm512_loadu_ps(p)}; }

inline F32x16 load(const int8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}

inline F32x16 load(const Bf16* p) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16))};
}

inline F32x16 load(const F16* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}

inline void store(float* p, F32x16 x) { _mm512_storeu_ps(p, x.v); }

inline void store(Bf16* p, F32x16 x) {
  const __m512i bits = _mm512_castps_si512(x.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
  const __mmask16 nan = _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q);
  const __m512i high = _mm512_srli_epi32(_mm512_mask_mov_epi32(rounded, nan, quiet), 16);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(high));
}

inline void store(F16* p, F32x16 x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

inline __m256 low_half(F32x16 x) { return _mm512_castps512_ps256(x.v); }
inline __m256 high_half(F32x16 x) { return _mm512_extractf32x8_ps(x.v, 1); }

#elif defined(__AVX2__)

struct F32x16 {
  __m256 low, high;
};

inline F32x16 splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F32x16 operator+(F32x16 a, F32x16 b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
inline F32x16 operator-(F32x16 a, F32x16 b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
inline F32x16 operator*(F32x16 a, F32x16 b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
inline F32x16 operator/(F32x16 a, F32x16 b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
inline F32x16 fma(F32x16 a, F32x16 b, F32x16 c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
inline F32x16 max(F32x16 a, F32x16 b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
inline F32x16 min(F32x16 a, F32x16 b) { return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)}; }
inline F32x16 abs(F32x16 a) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, a.low), _mm256_andnot_ps(sign, a.high)};
}
inline F32x16 round(F32x16 a) {
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(a.low, kNearest), _mm256_round_ps(a.high, kNearest)};
}
inline __m256 power_of_two(__m256 n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
inline F32x16 power_of_two(F32x16 n) { return {power_of_two(n.low), power_of_two(n.high)}; }
inline F32x16 zero_if_less(F32x16 x, F32x16 limit, F32x16 y) {
  return {_mm256_and_ps(_mm256_cmp_ps(x.low, limit.low, _CMP_NLT_UQ), y.low),
          _mm256_and_ps(_mm256_cmp_ps(x.high, limit.high, _CMP_NLT_UQ), y.high)};
}
inline void store_codes(int8_t* p, F32x16 x) {
  // Packing works within the halves of a register: quarters 0, 2, 1, 3 must change places.
  const __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(x.low), _mm256_cvtps_epi32(x.high));
  const __m256i sorted = _mm256_permute4x64_epi64(words, _MM_SHUFFLE(3, 1, 2, 0));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm_packs_epi16(_mm256_castsi256_si128(sorted), _mm256_extracti128_si256(sorted, 1)));
}

inline __m128i load8(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }

inline __m256 widen(__m128i bf16) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bf16), 16));
}

inline F32x16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }

inline F32x16 load(const int8_t* p) {
  const __m128i codes = load8(p);
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes)),
          _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(codes, 8)))};
}

inline F32x16 load(const Bf16* p) { return {widen(load8(p)), widen(load8(p + 8))}; }
inline F32x16 load(const F16* p) { return {_mm256_cvtph_ps(load8(p)), _mm256_cvtph_ps(load8(p + 8))}; }

// The bfloat16 nearest to each lane, in the low half of a 32-bit integer.
inline __m256i to_bf16(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
}

inline void store(float* p, F32x16 x) {
  _mm256_storeu_ps(p, x.low);
  _mm256_storeu_ps(p + 8, x.high);
}

inline void store(Bf16* p, F32x16 x) {
  const __m256i packed = _mm256_packus_epi32(to_bf16(x.low), to_bf16(x.high));  // in the order 0, 2, 1, 3 of quarters
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, _MM_SHUFFLE(3, 1, 2, 0)));
}

inline void store(F16* p, F32x16 x) {
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x.low, kNearest));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), _mm256_cvtps_ph(x.high, kNearest));
}

inline __m256 low_half(F32x16 x) { return x.low; }
inline __m256 high_half(F32x16 x) { return x.high; }

#else

struct F32x16 {
  float lane[kLanes];
};

inline void from_float(float* p, float x) { *p = x; }

inline void from_float(Bf16* p, float x) {
  const uint32_t bits = bits_of(x);
  const uint32_t rounded = bits + 0x7fff + ((bits >> 16) & 1);
  p->bits = static_cast<uint16_t>((x != x ? bits | 0x400000 : rounded) >> 16);
}

inline void from_float(F16* p, float x) {
  const uint32_t sign = (bits_of(x) >> 16) & 0x8000;
  const uint32_t magnitude = bits_of(x) & 0x7fffffff;
  const uint32_t nan = 0x7e00 | ((magnitude >> 13) & 0x3ff);
  // 0.5 has the spacing of float16's subnormals, so the addition rounds to it.
  const uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
  const uint32_t normal = (magnitude - (112u << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  const uint32_t finite = magnitude < 0x38800000 ? subnormal : magnitude < 0x477ff000 ? normal : 0x7c00;
  p->bits = static_cast<uint16_t>(sign | (magnitude > 0x7f800000 ? nan : finite));
}

inline F32x16 splat(float x) {
  F32x16 y;
  for (float& lane : y.lane) lane = x;
  return y;
}

inline F32x16 operator+(F32x16 a, F32x16 b) {
  for (int i = 0; i < kLanes; ++i) a.lane[i] += b.lane[i];
  return a;
}

inline F32x16 operator-(F32x16 a, F32x16 b) {
  for (int i = 0; i < kLanes; ++i) a.lane[i] -= b.lane[i];
  return a;
}

inline F32x16 operator*(F32x16 a, F32x16 b) {
  for (int i = 0; i < kLanes; ++i) a.lane[i] *= b.lane[i];
  return a;
}

inline F32x16 operator/(F32x16 a, F32x16 b) {
  for (int i = 0; i < kLanes; ++i) a.lane[i] /= b.lane[i];
  return a;
}

inline F32x16 fma(F32x16 a, F32x16 b, F32x16 c) {
  for (int i = 0; i < kLanes; ++i) c.lane[i] = fmaf(a.lane[i], b.lane[i], c.lane[i]);
  return c;
}

inline F32x16 max(F32x16 a, F32x16 b) {
  for (int i = 0; i < kLanes; ++i) a.lane[i] = a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i];
  return a;
}

inline F32x16 min(F32x16 a, F32x16 b) {
  for (int i = 0; i < kLanes; ++i) a.lane[i] = a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i];
  return a;
}

inline F32x16 abs(F32x16 a) {
  for (float& lane : a.lane) lane = fabsf(lane);
  return a;
}

inline F32x16 round(F32x16 a) {
  for (float& lane : a.lane) lane = rintf(lane);
  return a;
}

inline F32x16 power_of_two(F32x16 n) {
  for (float& lane : n.lane)
    lane = lane == lane ? float_of(static_cast<uint32_t>(static_cast<int32_t>(lane) + 127) << 23) : lane;
  return n;
}

inline F32x16 zero_if_less(F32x16 x, F32x16 limit, F32x16 y) {
  for (int i = 0; i < kLanes; ++i) y.lane[i] = x.lane[i] < limit.lane[i] ? 0.0f : y.lane[i];
  return y;
}

inline void store_codes(int8_t* p, F32x16 x) {
  for (int i = 0; i < kLanes; ++i) p[i] = static_cast<int8_t>(x.lane[i]);
}

template <typename T>
inline F32x16 load(const T* p) {
  F32x16 y;
  for (int i = 0; i < kLanes; ++i) y.lane[i] = to_float(p[i]);
  return y;
}

template <typename T>
inline void store(T* p, F32x16 x) {
  for (int i = 0; i < kLanes; ++i) from_float(p + i, x.lane[i]);
}

#endif

// The sum of the lanes: i and i + 8 first, then i and i + 4, i and i + 2, and the last two.
inline float sum(F32x16 x) {
#if defined(__AVX2__)
  const __m256 eight = _mm256_add_ps(low_half(x), high_half(x));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#else
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) x.lane[i] += x.lane[i + width];
  return x.lane[0];
#endif
}

// The largest lane; of a NaN nothing is promised.
inline float largest(F32x16 x) {
#if defined(__AVX2__)
  const __m256 eight = _mm256_max_ps(low_half(x), high_half(x));
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
#else
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i)
      x.lane[i] = x.lane[i] > x.lane[i + width] ? x.lane[i] : x.lane[i + width];
  return x.lane[0];
#endif
}

// The first `count` (below 16) values at p; the other lanes are zero.
template <typename T>
inline F32x16 load_first(const T* p, int64_t count) {
  T padded[kLanes] = {};
  memcpy(padded, p, count * sizeof(T));
  return load(padded);
}

template <typename T>
inline void store_first(T* p, F32x16 x, int64_t count) {
  T all[kLanes];
  store(all, x);
  memcpy(p, all, count * sizeof(T));
}

}  // namespace
}  // namespace headrace::HEADRACE_ISA
