// Matrix products over packed weights; see Weights, Prepare and Product in kernels.h for the arguments.
//
// Lanes are outputs: no sum ever runs across lanes, and each output has one order of additions, whatever the number of
// rows. A tile is a few rows times one panel of sixteen outputs; it reads each line of weights once for all its rows.
#pragma once

#include "dot.h"
#include "elementwise.h"

namespace headrace::HEADRACE_ISA {
namespace {

// Activations whose largest is smaller than this count as zeros: 127 over it must be finite.
constexpr float kSmallest = 0x1p-110f;

inline int64_t blocks_of(int64_t inputs) { return (inputs + kBlock - 1) / kBlock; }

// Activations

// Sixteen values of a row from column k on, in the weight's order; past the end they are zero.
template <typename T>
inline F32x16 load_columns(const T* x, const int32_t* order, int64_t k, int64_t columns) {
  if (!order) return k + kLanes <= columns ? load(x + k) : k < columns ? load_first(x + k, columns - k) : splat(0.0f);
  float values[kLanes] = {};
  for (int64_t i = 0; i < kLanes && k + i < columns; ++i) values[i] = to_float(x[order[k + i]]);
  return load(values);
}

template <typename T>
void prepare_row(const Prepare& args, int64_t row) {
  const T* x = static_cast<const T*>(args.x) + row * args.x_stride;
  if (args.floats) {
    float* y = args.floats + row * args.columns;
    for (int64_t k = 0; k < args.columns; k += kLanes) {
      const F32x16 values = load_columns(x, args.order, k, args.columns);
      if (k + kLanes <= args.columns) store(y + k, values);
      else store_first(y + k, values, args.columns - k);
    }
    return;
  }
  const int64_t blocks = blocks_of(args.columns);
  float row_scale = 0.0f;
  if (args.whole_rows) {
    F32x16 most = splat(0.0f), faults = splat(0.0f);
    for (int64_t k = 0; k < args.columns; k += kLanes) {
      const F32x16 values = load_columns(x, args.order, k, args.columns);
      most = max(abs(values), most);
      faults = faults + values * splat(0.0f);
    }
    row_scale = largest(most) / 127.0f + sum(faults);
  }
  for (int64_t b = row * blocks; b < (row + 1) * blocks; ++b) {
    const int64_t k = (b - row * blocks) * kBlock;
    F32x16 low = load_columns(x, args.order, k, args.columns);
    F32x16 high = load_columns(x, args.order, k + kLanes, args.columns);
    float scale;
    if (args.whole_rows) {
      scale = row_scale;
      low = scale > 0.0f ? low / splat(scale) : splat(0.0f);
      high = scale > 0.0f ? high / splat(scale) : splat(0.0f);
    } else {
      const float most = largest(max(abs(low), abs(high)));
      // Infinities and NaN make the scale NaN, and with it all outputs: a fault upstream is not hidden.
      const float fault = sum(low * splat(0.0f) + high * splat(0.0f));
      scale = most > kSmallest ? most / 127.0f + fault : fault;
      const F32x16 inverse = splat(most > kSmallest ? 127.0f / most : 0.0f);
      low = low * inverse;
      high = high * inverse;
    }
    args.inputs.scales[b] = scale;
    int8_t* codes = args.inputs.codes + b * kBlock;
    store_codes(codes, to_code(low));
    store_codes(codes + kLanes, to_code(high));
    for (int half = 0; half < 2; ++half) {
      int32_t total = 0;
      for (int i = 0; i < kLanes; ++i) total += codes[half * kLanes + i];
      args.inputs.sums[2 * b + half] = scale * static_cast<float>(total);
    }
  }
}

void prepare(const Prepare& args, int64_t first_row, int64_t last_row) {
  for (int64_t row = first_row; row < last_row; ++row) switch (args.dtype) {
      case DType::f32: prepare_row<float>(args, row); break;
      case DType::bf16: prepare_row<Bf16>(args, row); break;
      case DType::f16: prepare_row<F16>(args, row); break;
      case DType::i8: break;
    }
}

// Products

// Writes what a tile has summed up, sixteen outputs for each row. Not inline: sums whose address is taken would be kept in
// memory all the time, so the tiles copy them when they are done.
__attribute__((noinline)) void finish(const Product& args, const F32x16* sums, int64_t rows, int64_t row,
                                      int64_t panel) {
  const int64_t n = panel * kLanes, left = args.weights.outputs - n, count = left < kLanes ? left : kLanes;
  with_type(args.dtype, [&](auto type) {
    using T = decltype(type);
    const T* bias = static_cast<const T*>(args.bias);
    for (int64_t r = 0; r < rows; ++r) {
      T* y = static_cast<T*>(args.y) + (row + r) * args.y_stride + n;
      store_some(y, bias ? sums[r] + load_some(bias + n, count) : sums[r], count);
    }
  });
}

template <int kRows>
inline void finish(const Product& args, const F32x16 (&y)[kRows], int64_t row, int64_t panel) {
  F32x16 sums[kRows];
  unrolled<kRows>([&](auto r) { sums[r] = y[r]; });
  finish(args, sums, kRows, row, panel);
}

// For few rows several panels at once: a sum waits for its last addition, and more sums keep the unit busy.
template <typename W, int kRows, int kPanels>
void float_tile(const Product& args, int64_t panel, int64_t row) {
  const int64_t inputs = args.weights.inputs, stride = args.inputs.stride;
  const W* w = static_cast<const W*>(args.weights.values) + panel * inputs * kLanes;
  const float* x = args.inputs.floats + row * stride;
  F32x16 y[kPanels][kRows];
  for (auto& panel_sums : y)
    for (F32x16& sums : panel_sums) sums = splat(0.0f);
  for (int64_t k = 0; k < inputs; ++k)
    for (int p = 0; p < kPanels; ++p) {
      const F32x16 weights = load(w + (p * inputs + k) * kLanes);
      for (int r = 0; r < kRows; ++r) y[p][r] = fma(splat(x[r * stride + k]), weights, y[p][r]);
    }
  for (int p = 0; p < kPanels; ++p) finish(args, y[p], row, panel + p);
}

struct NibbleCodes {
  using Dot = NibbleDot;
  static constexpr int64_t kBytes = kBlock * kLanes / 2;

  // Adds the products of a block (kHalf -1) or one half of it. Low nibbles are its first half.
  template <int kHalf, int kRows>
  __attribute__((always_inline)) static void add(const uint8_t* codes, const int8_t* x, int64_t stride, Dot (&dots)[kRows]) {
    unrolled<4>([&](auto i) {
      __builtin_prefetch(codes + 64 * i + 4096);
      const Line line = load_line(codes + 64 * i);
      if (kHalf != 1) {
        const Line w = low_nibbles(line);
        unrolled<kRows>([&](auto r) { dots[r].add(w, four_inputs(x + r * stride + 4 * i)); });
      }
      if (kHalf != 0) {
        const Line w = high_nibbles(line);
        unrolled<kRows>([&](auto r) { dots[r].add(w, four_inputs(x + r * stride + 16 + 4 * i)); });
      }
    });
  }
};

struct ByteCodes {
  using Dot = ByteDot;
  static constexpr int64_t kBytes = kBlock * kLanes;

  template <int kHalf, int kRows>
  __attribute__((always_inline)) static void add(const uint8_t* codes, const int8_t* x, int64_t stride, Dot (&dots)[kRows]) {
    constexpr int kFirst = kHalf == 1 ? 4 : 0;
    unrolled<kHalf == -1 ? 8 : 4>([&](auto i) {
      __builtin_prefetch(codes + 64 * (kFirst + i) + 4096);
      const Line w = load_line(codes + 64 * (kFirst + i));
      unrolled<kRows>([&](auto r) { dots[r].add(w, four_inputs(x + r * stride + 4 * (kFirst + i))); });
    });
  }
};

// Sixteen scales or minimums.
inline F32x16 load_numbers(const void* p, DType dtype, int64_t i) {
  return dtype == DType::f16 ? load(static_cast<const F16*>(p) + i) : load(static_cast<const float*>(p) + i);
}

// A block, or half of one, with its scales at `at`, onto the sums. What does not change from block to block is asked for
// in every block: the branches are always foreseen, and one kernel serves all.
template <typename Codes, int kHalf, int kRows>
__attribute__((always_inline)) inline void add_block(const Product& args, const uint8_t* codes, int64_t at, int64_t row,
                                                     int64_t block, int64_t blocks, F32x16 (&y)[kRows]) {
  const Weights& w = args.weights;
  const int64_t first = row * blocks + block;
  typename Codes::Dot dots[kRows];
  Codes::template add<kHalf, kRows>(codes, args.inputs.codes + first * kBlock, blocks * kBlock, dots);
  const F32x16 scale = load_numbers(w.scales, w.dtype, at);
  unrolled<kRows>([&](auto r) {
    y[r] = fma(to_float(dots[r].total()), scale * splat(args.inputs.scales[first + r * blocks]), y[r]);
  });
  if (!w.offset && !w.minimums) return;
  F32x16 shift = scale * splat(static_cast<float>(-w.offset));
  if (w.minimums) shift = shift + load_numbers(w.minimums, w.dtype, at);
  unrolled<kRows>([&](auto r) {
    const float* sums = args.inputs.sums + 2 * (first + r * blocks);
    y[r] = fma(shift, splat(kHalf < 0 ? sums[0] + sums[1] : sums[kHalf]), y[r]);
  });
}

template <typename Codes, int kRows>
void integer_tile(const Product& args, int64_t panel, int64_t row) {
  const Weights& w = args.weights;
  const int64_t blocks = blocks_of(w.inputs), groups = (w.inputs + w.group - 1) / w.group;
  const uint8_t* codes = static_cast<const uint8_t*>(w.values) + panel * blocks * Codes::kBytes;
  int64_t at = panel * groups * kLanes;
  F32x16 y[kRows];
  unrolled<kRows>([&](auto r) { y[r] = splat(0.0f); });
  if (w.group >= kBlock) {
    const int64_t per_group = w.group / kBlock;
    for (int64_t first = 0; first < blocks; first += per_group, at += kLanes) {
      const int64_t last = first + per_group < blocks ? first + per_group : blocks;
      for (int64_t b = first; b < last; ++b, codes += Codes::kBytes)
        add_block<Codes, -1>(args, codes, at, row, b, blocks, y);
    }
  } else {
    for (int64_t b = 0; b < blocks; ++b, codes += Codes::kBytes) {
      add_block<Codes, 0>(args, codes, at, row, b, blocks, y);
      if (2 * b + 1 == groups) break;
      add_block<Codes, 1>(args, codes, at + kLanes, row, b, blocks, y);
      at += 2 * kLanes;
    }
  }
  finish(args, y, row, panel);
}

template <typename W>
struct FloatTiles {
  static constexpr int kMost = 6;
  template <int kRows>
  static void rows(const Product& args, int64_t panel, int64_t last_panel, int64_t row) {
    constexpr int kPanels = kRows == 1 ? 4 : kRows == 2 ? 2 : 1;
    for (; panel + kPanels <= last_panel; panel += kPanels) float_tile<W, kRows, kPanels>(args, panel, row);
    for (; panel < last_panel; ++panel) float_tile<W, kRows, 1>(args, panel, row);
  }
};

template <typename Codes>
struct IntegerTiles {
  static constexpr int kMost = 4;
  template <int kRows>
  static void rows(const Product& args, int64_t panel, int64_t last_panel, int64_t row) {
    for (; panel < last_panel; ++panel) integer_tile<Codes, kRows>(args, panel, row);
  }
};

// The last rows, fewer than a whole tile.
template <typename Tiles, int kRows>
inline void last_rows(const Product& args, int64_t first_panel, int64_t last_panel, int64_t row, int64_t count) {
  if (count == kRows) Tiles::template rows<kRows>(args, first_panel, last_panel, row);
  else if constexpr (kRows > 1) last_rows<Tiles, kRows - 1>(args, first_panel, last_panel, row, count);
}

template <typename Tiles>
void all_tiles(const Product& args, int64_t first_panel, int64_t last_panel, int64_t first_row, int64_t last_row) {
  const int64_t whole = first_row + (last_row - first_row) / Tiles::kMost * Tiles::kMost;
  if (whole > first_row)
    for (int64_t panel = first_panel; panel < last_panel; ++panel)
      for (int64_t row = first_row; row < whole; row += Tiles::kMost)
        Tiles::template rows<Tiles::kMost>(args, panel, panel + 1, row);
  last_rows<Tiles, Tiles::kMost - 1>(args, first_panel, last_panel, whole, last_row - whole);
}

void product(const Product& args, int64_t first_panel, int64_t last_panel, int64_t first_row, int64_t last_row) {
  const DType dtype = args.weights.dtype;
  const auto function = args.weights.coding == Coding::nibbles ? all_tiles<IntegerTiles<NibbleCodes>>
                        : args.weights.coding == Coding::bytes ? all_tiles<IntegerTiles<ByteCodes>>
                        : dtype == DType::f16                  ? all_tiles<FloatTiles<F16>>
                        : dtype == DType::bf16                 ? all_tiles<FloatTiles<Bf16>>
                                                               : all_tiles<FloatTiles<float>>;
  function(args, first_panel, last_panel, first_row, last_row);
}

// Single rows of a packed matrix

template <typename W>
inline float number(const void* values, int64_t i) {
  return to_float(static_cast<const W*>(values)[i]);
}

inline float number(const void* values, DType dtype, int64_t i) {
  switch (dtype) {
    case DType::f32: return number<float>(values, i);
    case DType::bf16: return number<Bf16>(values, i);
    case DType::f16: return number<F16>(values, i);
    case DType::i8: break;
  }
  return number<int8_t>(values, i);
}

// Column k of one output, in the order of the columns as they are packed.
inline float packed_value(const Weights& w, int64_t panel, int64_t lane, int64_t k) {
  if (w.coding == Coding::floats) return number(w.values, w.dtype, (panel * w.inputs + k) * kLanes + lane);
  const int64_t blocks = blocks_of(w.inputs), groups = (w.inputs + w.group - 1) / w.group;
  const int64_t block = panel * blocks + k / kBlock, place = k % kBlock;
  const uint8_t* codes = static_cast<const uint8_t*>(w.values);
  int32_t code;
  if (w.coding == Coding::nibbles) {
    const uint8_t pair = codes[block * NibbleCodes::kBytes + place % 16 / 4 * 64 + lane * 4 + place % 4];
    code = place < 16 ? pair & 15 : pair >> 4;
  } else {
    code = static_cast<int8_t>(codes[block * ByteCodes::kBytes + place / 4 * 64 + lane * 4 + place % 4]);
  }
  const int64_t group = (panel * groups + k / w.group) * kLanes + lane;
  const float value = number(w.scales, w.dtype, group) * static_cast<float>(code - w.offset);
  return w.minimums ? value + number(w.minimums, w.dtype, group) : value;
}

void embedding(const Embedding& args, int64_t first_token, int64_t last_token) {
  const Weights& w = args.weights;
  with_type(args.dtype, [&](auto type) {
    using T = decltype(type);
    for (int64_t t = first_token; t < last_token; ++t) {
      T* y = static_cast<T*>(args.y) + t * w.inputs;
      by_lanes(w.inputs, [&](int64_t k, int64_t n) {
        float values[kLanes] = {};
        for (int64_t i = 0; i < n; ++i) values[i] = packed_value(w, args.ids[t] / kLanes, args.ids[t] % kLanes, k + i);
        T rounded[kLanes];
        store(rounded, load(values));
        if (args.scale != 1.0f) store(rounded, load(rounded) * splat(args.scale));
        for (int64_t i = 0; i < n; ++i) y[w.order ? w.order[k + i] : k + i] = rounded[i];
      });
    }
  });
}

}  // namespace
}  // namespace headrace::HEADRACE_ISA
