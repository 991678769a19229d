// Checks the kernels without Python, so that a cross build can run them under an emulator.
//
// Compares every op on every instruction set at hand with the same formula in double precision, and prints a digest
// of the result's bits for each: the same on every instruction set and every machine. Exits 1 if something differs.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "isa.h"

using namespace headrace;

namespace {

int failures = 0;

// Numbers in [-8, 8) that all three dtypes hold exactly; some rows are scaled by powers of two.
struct Random {
  uint32_t state = 1;
  int operator()() {
    state = state * 1664525 + 1013904223;
    return static_cast<int>(state >> 25) - 64;
  }
};

// Bits of v, which the dtype holds exactly, in the low bytes.
uint32_t encode(float v, DType dtype) {
  uint32_t bits;
  std::memcpy(&bits, &v, sizeof bits);
  if (dtype == DType::f32) return bits;
  if (dtype == DType::bf16) return bits >> 16;
  if (v == 0) return bits >> 16;
  return ((bits >> 16) & 0x8000) | (((bits & 0x7fffffff) - (112u << 23)) >> 13);
}

double decode(uint32_t bits, DType dtype) {
  if (dtype == DType::f16) {
    const int exponent = (bits >> 10) & 31;
    const double magnitude =
        exponent ? std::ldexp(1024 + (bits & 1023), exponent - 25) : std::ldexp(bits & 1023, -24);
    return bits & 0x8000 ? -magnitude : magnitude;
  }
  float v;
  const uint32_t wide = dtype == DType::bf16 ? bits << 16 : bits;
  std::memcpy(&v, &wide, sizeof v);
  return v;
}

size_t size_of(DType dtype) { return dtype == DType::f32 ? 4 : 2; }

struct Buffer {
  DType dtype;
  std::vector<unsigned char> bytes;
  Buffer(DType dtype, int64_t count) : dtype(dtype), bytes(count * size_of(dtype)) {}
  void set(int64_t i, float v) {
    const uint32_t bits = encode(v, dtype);
    std::memcpy(&bytes[i * size_of(dtype)], &bits, size_of(dtype));
  }
  double get(int64_t i) const {
    uint32_t bits = 0;
    std::memcpy(&bits, &bytes[i * size_of(dtype)], size_of(dtype));
    return decode(bits, dtype);
  }
};

// FNV-1a over the results of all shapes and dtypes.
uint64_t rms_norm_digest() {
  uint64_t digest = 0xcbf29ce484222325u;
  Random random;
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16})
    for (const int64_t hidden : {1, 2, 15, 16, 17, 31, 64, 576, 1000}) {
      const int64_t rows = 5, stride = hidden + 3;
      const float eps = 1e-5f;
      Buffer x(dtype, rows * stride), y(dtype, rows * hidden);
      std::vector<float> weight(hidden);
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t i = 0; i < stride; ++i) x.set(r * stride + i, std::ldexp(random(), 3 * r - 9));
      for (float& w : weight) w = std::ldexp(random(), -5);
      const RmsNorm args{x.bytes.data(), weight.data(), y.bytes.data(), dtype, 1, hidden, stride, 0, eps};
      kernels().rms_norm(args, 0, rows);

      const double tolerance = dtype == DType::f32 ? 1e-5 : dtype == DType::bf16 ? 0x1p-8 : 0x1p-10;
      for (int64_t r = 0; r < rows; ++r) {
        double squares = 0;
        for (int64_t i = 0; i < hidden; ++i) squares += std::pow(x.get(r * stride + i), 2);
        for (int64_t i = 0; i < hidden; ++i) {
          const double want = x.get(r * stride + i) / std::sqrt(squares / hidden + eps) * weight[i];
          const double got = y.get(r * hidden + i);
          if (!(std::abs(got - want) <= tolerance * std::abs(want) + 1e-7)) {
            ++failures;
            std::printf("rms_norm: hidden %ld row %ld [%ld]: got %.9g, want %.9g\n", static_cast<long>(hidden),
                        static_cast<long>(r), static_cast<long>(i), got, want);
          }
        }
      }
      for (const unsigned char byte : y.bytes) digest = (digest ^ byte) * 0x100000001b3u;
    }
  return digest;
}

}  // namespace

int main() {
  uint64_t first = 0;
  for (const std::string& name : available_isas()) {
    select_isa(name);
    const uint64_t digest = rms_norm_digest();
    std::printf("rms_norm %-8s %016llx\n", name.c_str(), static_cast<unsigned long long>(digest));
    if (name == available_isas().front()) first = digest;
    if (digest != first) {
      ++failures;
      std::printf("rms_norm: %s gives other bits than %s\n", name.c_str(), available_isas().front().c_str());
    }
  }
  std::printf(failures ? "FAILED\n" : "ok\n");
  return failures ? 1 : 0;
}
