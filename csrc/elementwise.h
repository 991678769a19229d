// Ops without sums over many values: rotary embedding, writing the cache, gated activations, sums, soft caps. Arguments: kernels.h.
#pragma once

#include "codes.h"
#include "functions.h"
#include "kernels.h"

namespace headrace::HEADRACE_ISA {
namespace {

// Calls function(T{}) for the type of activations.
template <typename Function>
inline void with_type(DType dtype, Function function) {
  switch (dtype) {
    case DType::f32: return function(float{});
    case DType::bf16: return function(Bf16{});
    case DType::f16: return function(F16{});
    case DType::i8: return;
  }
}

// Calls function(i, n) for sixteen values at a time from 0 to `count`; n is 16, and less at the end.
template <typename Function>
inline void by_lanes(int64_t count, Function function) {
  for (int64_t i = 0; i < count; i += kLanes) function(i, count - i < kLanes ? count - i : kLanes);
}

template <typename T>
inline F32x16 load_some(const T* p, int64_t count) {
  return count == kLanes ? load(p) : load_first(p, count);
}

template <typename T>
inline void store_some(T* p, F32x16 x, int64_t count) {
  if (count == kLanes) store(p, x);
  else store_first(p, x, count);
}

template <typename T>
void rotary_token(const Rotary& args, int64_t t) {
  const float* cosines = args.cosines + t * args.half;
  const float* sines = args.sines + t * args.half;
  for (int64_t h = 0; h < args.heads; ++h) {
    const T* x = static_cast<const T*>(args.x) + t * args.token_stride + h * args.head_stride;
    T* y = static_cast<T*>(args.y) + (t * args.heads + h) * args.dim;
    by_lanes(args.half, [&](int64_t i, int64_t n) {
      const F32x16 a = load_some(x + i, n), b = load_some(x + args.half + i, n);
      const F32x16 c = load_some(cosines + i, n), s = load_some(sines + i, n);
      store_some(y + i, a * c - b * s, n);
      store_some(y + args.half + i, b * c + a * s, n);
    });
    const int64_t rest = 2 * args.half;
    memcpy(y + rest, x + rest, (args.dim - rest) * sizeof(T));
  }
}

void rotary(const Rotary& args, int64_t first_token, int64_t last_token) {
  with_type(args.dtype, [&](auto type) {
    for (int64_t t = first_token; t < last_token; ++t) rotary_token<decltype(type)>(args, t);
  });
}

template <typename T>
void gated_token(const Gated& args, int64_t t) {
  const T* x = static_cast<const T*>(args.x) + t * 2 * args.n;
  T* y = static_cast<T*>(args.y) + t * args.n;
  by_lanes(args.n, [&](int64_t i, int64_t n) {
    const F32x16 gate = load_some(x + i, n);
    // The activation is rounded to the model's dtype before it is multiplied, as the network was trained.
    T rounded[kLanes];
    store(rounded, args.gelu ? gelu_tanh(gate) : silu(gate));
    store_some(y + i, load(rounded) * load_some(x + args.n + i, n), n);
  });
}

void gated(const Gated& args, int64_t first_token, int64_t last_token) {
  with_type(args.dtype, [&](auto type) {
    for (int64_t t = first_token; t < last_token; ++t) gated_token<decltype(type)>(args, t);
  });
}

void add(const Add& args, int64_t first, int64_t last) {
  with_type(args.dtype, [&](auto type) {
    using T = decltype(type);
    const T* x = static_cast<const T*>(args.x) + first;
    const T* y = static_cast<const T*>(args.y) + first;
    T* sums = static_cast<T*>(args.sum) + first;
    by_lanes(last - first, [&](int64_t i, int64_t n) { store_some(sums + i, load_some(x + i, n) + load_some(y + i, n), n); });
  });
}

void softcap(const Softcap& args, int64_t first, int64_t last) {
  const F32x16 cap = splat(args.cap);
  by_lanes(last - first, [&](int64_t i, int64_t n) {
    store_some(args.y + first + i, cap * tanh(load_some(args.x + first + i, n) / cap), n);
  });
}

void to_float(const ToFloat& args, int64_t first, int64_t last) {
  with_type(args.dtype, [&](auto type) {
    const auto* x = static_cast<const decltype(type)*>(args.x) + first;
    by_lanes(last - first, [&](int64_t i, int64_t n) { store_some(args.y + first + i, load_some(x + i, n), n); });
  });
}

// Where a slot's key begins, and where its value does; the entries of a key are `chunk` values apart.
inline int64_t key_offset(const Cache& cache, int64_t head, int64_t block, int64_t place) {
  return head * cache.head_stride + block * cache.block_stride + place / cache.chunk * cache.chunk * cache.dim +
         place % cache.chunk;
}

inline int64_t value_offset(const Cache& cache, int64_t head, int64_t block, int64_t place) {
  return head * cache.head_stride + block * cache.block_stride + place * cache.dim;
}

// Writes `dim` values as `Stored`, `stride` values apart.
template <typename Stored, typename T>
inline void write_row(const T* x, int64_t dim, Stored* p, int64_t stride) {
  by_lanes(dim, [&](int64_t i, int64_t n) {
    Stored values[kLanes];
    store(values, load_some(x + i, n));
    for (int64_t j = 0; j < n; ++j) p[(i + j) * stride] = values[j];
  });
}

// Writes codes and returns their scale, as Ops.store_kv says.
template <typename T, typename S>
inline void write_codes(const T* x, int64_t dim, int8_t* p, int64_t stride, S* scale_at) {
  F32x16 most = splat(0.0f), faults = splat(0.0f);
  by_lanes(dim, [&](int64_t i, int64_t n) {
    const F32x16 v = load_some(x + i, n);
    most = max(abs(v), most);
    faults = faults + v * splat(0.0f);
  });
  *scale_at = scale_above<S>(largest(most) / 127.0f + sum(faults));
  const float scale = to_float(*scale_at);
  by_lanes(dim, [&](int64_t i, int64_t n) {
    int8_t codes[kLanes];
    store_codes(codes, to_code(scale > 0.0f ? load_some(x + i, n) / splat(scale) : splat(0.0f)));
    for (int64_t j = 0; j < n; ++j) p[(i + j) * stride] = codes[j];
  });
}

template <typename T>
void store_token(const StoreKV& args, int64_t t) {
  const Cache& cache = args.cache;
  const int64_t block = args.slots[t] / cache.block_size, place = args.slots[t] % cache.block_size;
  for (int64_t h = 0; h < cache.heads; ++h) {
    const T* key = static_cast<const T*>(args.key) + t * args.token_stride_key + h * args.head_stride_key;
    const T* value = static_cast<const T*>(args.value) + t * args.token_stride_value + h * args.head_stride_value;
    const int64_t k = key_offset(cache, h, block, place), v = value_offset(cache, h, block, place);
    const auto plain = [&](auto type) {
      using Stored = decltype(type);
      write_row(key, cache.dim, static_cast<Stored*>(cache.keys) + k, cache.chunk);
      write_row(value, cache.dim, static_cast<Stored*>(cache.values) + v, 1);
    };
    if (cache.dtype != DType::i8) {
      with_type(cache.dtype, plain);
      continue;
    }
    const int64_t s = h * (cache.head_stride / cache.dim) + args.slots[t];
    with_type(cache.scale_dtype, [&](auto type) {
      using S = decltype(type);
      write_codes(key, cache.dim, static_cast<int8_t*>(cache.keys) + k, cache.chunk,
                  static_cast<S*>(cache.key_scales) + s);
      write_codes(value, cache.dim, static_cast<int8_t*>(cache.values) + v, 1, static_cast<S*>(cache.value_scales) + s);
    });
  }
}

void store_kv(const StoreKV& args, int64_t first_token, int64_t last_token) {
  with_type(args.dtype, [&](auto type) {
    for (int64_t t = first_token; t < last_token; ++t) store_token<decltype(type)>(args, t);
  });
}

}  // namespace
}  // namespace headrace::HEADRACE_ISA
