// Checks the kernels without Python, so that a cross build can run them under an emulator.
//
// Compares every op on every instruction set at hand with the same formula in double precision, and prints a digest
// of the result's bits for each: the same on every instruction set and every machine. Exits 1 if something differs.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "isa.h"
#include "run.h"

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

// FNV-1a.
uint64_t digest_of(const void* data, size_t bytes, uint64_t digest = 0xcbf29ce484222325u) {
  for (size_t i = 0; i < bytes; ++i) digest = (digest ^ static_cast<const unsigned char*>(data)[i]) * 0x100000001b3u;
  return digest;
}

template <typename T>
uint64_t digest_of(const std::vector<T>& v, uint64_t digest = 0xcbf29ce484222325u) {
  return digest_of(v.data(), v.size() * sizeof(T), digest);
}

uint64_t rms_norm_digest() {
  uint64_t digest = 0;
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
      digest = digest_of(y.bytes, digest);
    }
  return digest;
}

void expect(const char* what, double got, double want, double tolerance) {
  if (std::abs(got - want) <= tolerance) return;
  ++failures;
  std::printf("%s: got %.9g, want %.9g\n", what, got, want);
}

std::vector<float> numbers(int64_t count, Random& random) {
  std::vector<float> v(count);
  for (float& x : v) x = static_cast<float>(random()) / 16 + static_cast<float>(random()) / 1024;
  return v;
}

// Rows of activations by a matrix of codes: packed, multiplied, and a row of it read as an embedding.
uint64_t product_digest() {
  const int64_t outputs = 40, inputs = 80, rows = 6, blocks = 3, panels = 3;
  uint64_t digest = 0;
  for (const Coding coding : {Coding::nibbles, Coding::bytes})
    for (const int kind : {0, 1, 2}) {
      const Sharing sharing = kind == 2 ? Sharing::blocks : Sharing::halves;
      const int64_t group = kind == 0 ? 16 : 32, shared = kind == 2 ? kBlock : kHalfBlock;
      const bool nibbles = coding == Coding::nibbles;
      const int64_t groups = (inputs + group - 1) / group;
      Random random;
      std::vector<uint8_t> codes(outputs * inputs), values(panels * blocks * 512);
      for (uint8_t& c : codes) c = static_cast<uint8_t>(nibbles ? (random() + 64) % 16 : 2 * random());
      pack_codes({codes.data(), outputs, inputs, 0, 0, coding, values.data()});
      std::vector<float> scales = numbers(panels * groups * 16, random), minimums = numbers(panels * groups * 16, random);
      const std::vector<float> x = numbers(rows * inputs, random), bias = numbers(outputs, random);
      const Weights weights = {coding, DType::f32, outputs, inputs, group, nibbles ? 8 : 0, sharing,
                               values.data(), scales.data(), minimums.data(), nullptr};
      std::vector<float> y(rows * outputs);
      linear({weights}, x.data(), rows, inputs, bias.data(), y.data(), DType::f32);
      const auto value = [&](int64_t n, int64_t k) {
        const int64_t at = (n / 16 * groups + k / group) * 16 + n % 16;
        const int code = nibbles ? codes[n * inputs + k] - 8 : static_cast<int8_t>(codes[n * inputs + k]);
        return static_cast<double>(scales[at]) * code + minimums[at];
      };
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t n = 0; n < outputs; ++n) {
          double want = bias[n], size = 0;
            for (int64_t first = 0; first < inputs; first += shared) {
            float most = 0;
            const int64_t last = std::min(inputs, first + shared);
            for (int64_t k = first; k < last; ++k) most = std::max(most, std::abs(x[r * inputs + k]));
            for (int64_t k = first; k < last; ++k) {
              const double term = std::nearbyint(x[r * inputs + k] * (127.0f / most)) * (most / 127.0) * value(n, k);
              want += term, size += std::abs(term);
            }
          }
          expect("product", y[r * outputs + n], want, 1e-5 * size);
        }
      const std::vector<int64_t> ids = {0, 39, 17};
      std::vector<float> found(ids.size() * inputs);
      embedding({weights, ids.data(), found.data(), DType::f32, 1.0f}, static_cast<int64_t>(ids.size()));
      for (size_t t = 0; t < ids.size(); ++t)
        for (int64_t k = 0; k < inputs; ++k)
          expect("embedding", found[t * inputs + k], value(ids[t], k), 1e-5 * (1 + std::abs(value(ids[t], k))));
      digest = digest_of(found, digest_of(y, digest));
    }
  Random random;
  const std::vector<float> x = numbers(rows * inputs, random), w = numbers(outputs * inputs, random);
  std::vector<float> packed(panels * inputs * 16), y(rows * outputs);
  for (int64_t n = 0; n < outputs; ++n)
    for (int64_t k = 0; k < inputs; ++k) packed[(n / 16 * inputs + k) * 16 + n % 16] = w[n * inputs + k];
  linear({{Coding::floats, DType::f32, outputs, inputs, 32, 0, Sharing::halves, packed.data(), nullptr, nullptr, nullptr}},
         x.data(), rows, inputs, nullptr, y.data(), DType::f32);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t n = 0; n < outputs; ++n) {
      double want = 0, size = 0;
      for (int64_t k = 0; k < inputs; ++k) {
        const double term = static_cast<double>(x[r * inputs + k]) * w[n * inputs + k];
        want += term, size += std::abs(term);
      }
      expect("product of floats", y[r * outputs + n], want, 1e-5 * size);
    }
  return digest_of(y, digest);
}

// Keys and values written to the cache and attended to, over more than one part.
uint64_t attention_digest() {
  const int64_t heads = 3, dim = 20, block = 16, context = 600, tokens = 2, blocks = (context + block - 1) / block;
  uint64_t digest = 0;
  for (const DType stored : {DType::f32, DType::bf16, DType::i8})
    for (const int64_t window : {0, 100}) {
      Random random;
      const std::vector<float> q = numbers(tokens * heads * dim, random), k = numbers(context * dim, random),
                               v = numbers(context * dim, random);
      std::vector<float> keys(blocks * block * dim), values(keys), key_scales(blocks * block), value_scales(key_scales);
      const Cache cache = {keys.data(), values.data(), key_scales.data(), value_scales.data(), stored, DType::f32,
                           1, dim, block, 16, blocks * block * dim, block * dim};
      std::vector<int64_t> slots(context), table(blocks);
      for (int64_t i = 0; i < blocks; ++i) table[i] = blocks - 1 - i;
      for (int64_t i = 0; i < context; ++i) slots[i] = table[i / block] * block + i % block;
      store_kv({cache, k.data(), v.data(), DType::f32, dim, dim, dim, dim, slots.data()}, context);
      std::vector<float> out(q.size());
      const float scale = 0.05f, cap = 20.0f;
      attention({q.data(), out.data(), DType::f32, heads, heads * dim, cache, table.data(), blocks, scale, cap, window,
                 nullptr},
                1, &tokens, &context);
      for (int64_t t = 0; t < tokens; ++t)
        for (int64_t h = 0; h < heads; ++h) {
          const int64_t end = context - tokens + t + 1, begin = window ? end - window : 0;
          std::vector<double> want(dim);
          double sum = 0;
          for (int64_t i = begin; i < end; ++i) {
            double score = 0;
            for (int64_t d = 0; d < dim; ++d) score += static_cast<double>(q[(t * heads + h) * dim + d]) * k[i * dim + d];
            const double weight = std::exp(cap * std::tanh(scale * score / cap));
            sum += weight;
            for (int64_t d = 0; d < dim; ++d) want[d] += weight * v[i * dim + d];
          }
          for (int64_t d = 0; d < dim; ++d)
            expect("attention", out[(t * heads + h) * dim + d], want[d] / sum, stored == DType::f32 ? 1e-4 : 0.1);
        }
      digest = digest_of(out, digest);
    }
  return digest;
}

uint64_t elementwise_digest() {
  const int64_t tokens = 3, n = 38, half = 7, dim = 19;
  Random random;
  const std::vector<float> x = numbers(tokens * 2 * n, random), angles = numbers(tokens * half, random);
  std::vector<float> y(tokens * n), turned(tokens * 2 * dim), capped(x.size()), sums(x.size()), shares(x.size());
  uint64_t digest = 0;
  for (const bool gelu : {false, true}) {
    gated({x.data(), y.data(), DType::f32, n, gelu}, tokens);
    for (int64_t t = 0; t < tokens; ++t)
      for (int64_t i = 0; i < n; ++i) {
        const double g = x[t * 2 * n + i], up = x[t * 2 * n + n + i];
        const double tanh = std::tanh(std::sqrt(2 / 3.14159265358979) * (g + 0.044715 * g * g * g));
        const double active = gelu ? g / 2 * (1 + tanh) : g / (1 + std::exp(-g));
        expect("gated", y[t * n + i], active * up, 1e-5 * (1 + std::abs(active * up)));
      }
    digest = digest_of(y, digest);
  }
  std::vector<float> cosines(angles), sines(angles);
  for (float& a : cosines) a = static_cast<float>(std::nearbyint(64 * std::cos(a)) / 64);  // the same on every machine
  for (float& a : sines) a = static_cast<float>(std::nearbyint(64 * std::sin(a)) / 64);
  rotary({x.data(), turned.data(), cosines.data(), sines.data(), DType::f32, 2, dim, half, 2 * n, dim}, tokens);
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t h = 0; h < 2; ++h)
      for (int64_t i = 0; i < dim; ++i) {
        const float* row = x.data() + t * 2 * n + h * dim;
        double want = row[i];
        if (i < 2 * half) {
          const double c = cosines[t * half + i % half], s = sines[t * half + i % half];
          want = i < half ? row[i] * c - row[i + half] * s : row[i] * c + row[i - half] * s;
        }
        expect("rotary", turned[(t * 2 + h) * dim + i], want, 1e-5);
      }
  const int64_t count = static_cast<int64_t>(x.size());
  softcap({x.data(), capped.data(), 3.0f}, count);
  add({x.data(), capped.data(), sums.data(), DType::f32}, count);
  const float best = kernels().largest_logit(x.data(), count);
  kernels().shares({x.data(), count, best, 0.7f, shares.data()});
  for (int64_t i = 0; i < count; ++i) {
    expect("softcap", capped[i], 3 * std::tanh(x[i] / 3.0), 1e-5);
    expect("add", sums[i], x[i] + capped[i], 0);
    const double share = std::exp((x[i] - static_cast<double>(best)) / 0.7);
    expect("shares", shares[i], share, 1e-6 * share);
    expect("largest_logit", best < x[i], 0, 0);
  }
  return digest_of(shares, digest_of(sums, digest_of(turned, digest)));
}

struct Family {
  const char* name;
  uint64_t (*digest)();
};

}  // namespace

int main() {
  for (const Family& family : {Family{"rms_norm", rms_norm_digest}, Family{"product", product_digest},
                               Family{"attention", attention_digest}, Family{"elementwise", elementwise_digest}}) {
    uint64_t first = 0;
    for (const std::string& name : available_isas()) {
      select_isa(name);
      const uint64_t digest = family.digest();
      std::printf("%-11s %-8s %016llx\n", family.name, name.c_str(), static_cast<unsigned long long>(digest));
      if (name == available_isas().front()) first = digest;
      if (digest != first) {
        ++failures;
        std::printf("%s: %s gives other bits than %s\n", family.name, name.c_str(), available_isas().front().c_str());
      }
    }
  }
  std::printf(failures ? "FAILED\n" : "ok\n");
  return failures ? 1 : 0;
}
