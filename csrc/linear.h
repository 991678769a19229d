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
  if (args.sharing == Sharing::rows) {
    F32x16 most = splat(0.0f), faults = splat(0.0f);
    for (int64_t k = 0; k < args.columns; k += kLanes) {
      const F32x16 values = load_columns(x, args.order, k, args.columns);
      most = max(abs(values), most);
      faults = faults + values * splat(0.0f);
    }
    row_scale = largest(most) / 127.0f + sum(faults);
  }
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t k = block * kBlock;
    F32x16 x16[2] = {load_columns(x, args.order, k, args.columns),
                     load_columns(x, args.order, k + kHalfBlock, args.columns)};
    F32x16 sizes[2] = {abs(x16[0]), abs(x16[1])};
    // Infinities and NaN make the scale NaN, and with it all outputs: a fault upstream is not hidden.
    F32x16 faults[2] = {x16[0] * splat(0.0f), x16[1] * splat(0.0f)};
    if (args.sharing == Sharing::blocks) {
      sizes[0] = sizes[1] = max(sizes[0], sizes[1]);
      faults[0] = faults[1] = faults[0] + faults[1];
    }
    for (int half = 0; half < 2; ++half) {
      const int64_t at = 2 * (row * blocks + block) + half;
      float scale = row_scale;
      if (args.sharing == Sharing::rows) {
        x16[half] = scale > 0.0f ? x16[half] / splat(scale) : splat(0.0f);
      } else {
        const float most = largest(sizes[half]), fault = sum(faults[half]);
        scale = most > kSmallest ? most / 127.0f + fault : fault;
        x16[half] = x16[half] * splat(most > kSmallest ? 127.0f / most : 0.0f);
      }
      int8_t* codes = args.inputs.codes + at * kHalfBlock;
      store_codes(codes, to_code(x16[half]));
      int32_t total = 0;
      for (int64_t i = 0; i < kHalfBlock; ++i) total += codes[i];
      args.inputs.scales[at] = scale;
      args.inputs.sums[at] = scale * static_cast<float>(total);
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

// How far ahead weights are asked for, in bytes: for few rows the product waits for memory.
constexpr int64_t kAhead = 4096;

struct NibbleCodes {
  using Dot = NibbleDot;
  static constexpr int64_t kBytes = kBlock * kLanes / 2;

  // Adds the products of a half block. Low nibbles are the first half.
  template <int kHalf, int kRows>
  __attribute__((always_inline)) static void add(const uint8_t* codes, const int8_t* x, int64_t stride,
                                                 Dot (&dots)[kRows]) {
    unrolled<4>([&](auto i) {
      if (kHalf == 0) __builtin_prefetch(codes + 64 * i + kAhead);
      const Line line = load_line(codes + 64 * i);
      const Line w = kHalf == 0 ? low_nibbles(line) : high_nibbles(line);
      unrolled<kRows>([&](auto r) { dots[r].add(w, four_inputs(x + r * stride + 16 * kHalf + 4 * i)); });
    });
  }
};

struct ByteCodes {
  using Dot = ByteDot;
  static constexpr int64_t kBytes = kBlock * kLanes;

  template <int kHalf, int kRows>
  __attribute__((always_inline)) static void add(const uint8_t* codes, const int8_t* x, int64_t stride,
                                                 Dot (&dots)[kRows]) {
    unrolled<4>([&](auto i) {
      __builtin_prefetch(codes + 64 * (4 * kHalf + i) + kAhead);
      const Line w = load_line(codes + 64 * (4 * kHalf + i));
      unrolled<kRows>([&](auto r) { dots[r].add(w, four_inputs(x + r * stride + 16 * kHalf + 4 * i)); });
    });
  }
};

// Sixteen scales or minimums.
inline F32x16 load_numbers(const void* p, DType dtype, int64_t i) {
  return dtype == DType::f16 ? load(static_cast<const F16*>(p) + i) : load(static_cast<const float*>(p) + i);
}

// Adds the products of a half block of some rows. half: of all halves of a row, which one.
template <typename Codes, int kHalf, int kRows>
__attribute__((always_inline)) inline void add_half(const Product& args, const uint8_t* codes, int64_t row,
                                                    int64_t half, int64_t halves, typename Codes::Dot (&dots)[kRows]) {
  const int8_t* x = args.inputs.codes + (row * halves + half - kHalf) * kHalfBlock;
  Codes::template add<kHalf, kRows>(codes, x, halves * kHalfBlock, dots);
}

// The products of a block, times the scales of the activations. kJoined: whether both halves have the same.
template <typename Codes, bool kJoined, int kRows>
__attribute__((always_inline)) inline void add_block(const Product& args, const uint8_t* codes, int64_t row,
                                                     int64_t block, int64_t halves, F32x16 (&totals)[kRows]) {
  const float* scales = args.inputs.scales + row * halves + 2 * block;
  typename Codes::Dot first[kRows], second[kRows];
  add_half<Codes, 0>(args, codes, row, 2 * block, halves, first);
  if constexpr (kJoined) {
    add_half<Codes, 1>(args, codes, row, 2 * block + 1, halves, first);
    unrolled<kRows>([&](auto r) { totals[r] = to_float(first[r].total()) * splat(scales[r * halves]); });
  } else {
    unrolled<kRows>([&](auto r) { totals[r] = to_float(first[r].total()) * splat(scales[r * halves]); });
    add_half<Codes, 1>(args, codes, row, 2 * block + 1, halves, second);
    unrolled<kRows>([&](auto r) {
      totals[r] = fma(to_float(second[r].total()), splat(scales[r * halves + 1]), totals[r]);
    });
  }
}

// What the weights' offset and minimums add: a number for each output, times the sum of the inputs.
template <int kRows>
__attribute__((always_inline)) inline void add_shift(const Product& args, F32x16 scale, int64_t at, const float* sums,
                                                     bool both, int64_t halves, F32x16 (&y)[kRows]) {
  const Weights& w = args.weights;
  if (!w.offset && !w.minimums) return;
  F32x16 shift = scale * splat(static_cast<float>(-w.offset));
  if (w.minimums) shift = shift + load_numbers(w.minimums, w.dtype, at);
  unrolled<kRows>([&](auto r) {
    const float* p = sums + r * halves;
    y[r] = fma(shift, splat(both ? p[0] + p[1] : p[0]), y[r]);
  });
}

// What does not change from block to block, such as the dtype of scales, is asked for in every block: the branches are
// always foreseen, and one kernel serves all.
template <typename Codes, bool kJoined, int kRows>
void integer_tile(const Product& args, int64_t panel, int64_t row) {
  const Weights& w = args.weights;
  const int64_t blocks = blocks_of(w.inputs), halves = 2 * blocks, groups = (w.inputs + w.group - 1) / w.group;
  const uint8_t* codes = static_cast<const uint8_t*>(w.values) + panel * blocks * Codes::kBytes;
  const float* sums = args.inputs.sums + row * halves;
  const float* scales = args.inputs.scales + row * halves;
  int64_t at = panel * groups * kLanes;
  F32x16 y[kRows];
  unrolled<kRows>([&](auto r) { y[r] = splat(0.0f); });
  if (w.group >= kBlock) {
    const int64_t per_group = w.group / kBlock;
    for (int64_t first = 0; first < blocks; first += per_group, at += kLanes) {
      const int64_t last = first + per_group < blocks ? first + per_group : blocks;
      for (int64_t b = first; b < last; ++b, codes += Codes::kBytes) {
        const F32x16 scale = load_numbers(w.scales, w.dtype, at);
        F32x16 totals[kRows];
        add_block<Codes, kJoined>(args, codes, row, b, halves, totals);
        unrolled<kRows>([&](auto r) { y[r] = fma(scale, totals[r], y[r]); });
        add_shift(args, scale, at, sums + 2 * b, true, halves, y);
      }
    }
  } else {
    const auto half = [&](auto which, int64_t b) __attribute__((always_inline)) {
      const F32x16 scale = load_numbers(w.scales, w.dtype, at);
      typename Codes::Dot dots[kRows];
      add_half<Codes, which.value>(args, codes, row, 2 * b + which, halves, dots);
      unrolled<kRows>([&](auto r) {
        y[r] = fma(scale, to_float(dots[r].total()) * splat(scales[r * halves + 2 * b + which]), y[r]);
      });
      add_shift(args, scale, at, sums + 2 * b + which, false, halves, y);
      at += kLanes;
    };
    for (int64_t b = 0; b < blocks; ++b, codes += Codes::kBytes) {
      half(Index<0>(), b);
      if (2 * b + 1 < groups) half(Index<1>(), b);
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

template <typename Codes, bool kJoined>
struct IntegerTiles {
  static constexpr int kMost = 4;
  template <int kRows>
  static void rows(const Product& args, int64_t panel, int64_t last_panel, int64_t row) {
    for (; panel < last_panel; ++panel) integer_tile<Codes, kJoined, kRows>(args, panel, row);
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
  const Weights& w = args.weights;
  const bool joined = w.sharing != Sharing::halves;
  const auto function =
      w.coding == Coding::nibbles
          ? joined ? all_tiles<IntegerTiles<NibbleCodes, true>> : all_tiles<IntegerTiles<NibbleCodes, false>>
      : w.coding == Coding::bytes
          ? joined ? all_tiles<IntegerTiles<ByteCodes, true>> : all_tiles<IntegerTiles<ByteCodes, false>>
      : w.dtype == DType::f16  ? all_tiles<FloatTiles<F16>>
      : w.dtype == DType::bf16 ? all_tiles<FloatTiles<Bf16>>
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
