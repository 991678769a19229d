// The arguments of every op, and the table of ops that each instruction set fills.
//
// This file is compiled with every set of flags, so it holds declarations only: no function body, no C++ header.
#pragma once

#include <stdint.h>

namespace headrace {

enum class DType : int32_t { f32 = 0, bf16 = 1, f16 = 2, i8 = 3 };

// y[t, h, i] = x[t, h, i] * (1 / sqrt(mean_i(x[t, h, i]^2) + eps)) * weight[i], in float32, rounded once to y's dtype.
//
// x: [tokens, heads, hidden], the values of a head contiguous; heads is 1 for a norm over whole tokens. y: the same
// dtype, without gaps. The sum of squares has one order for every instruction set (sixteen partial sums over i mod 16,
// then a tree), so a row's bits depend on nothing but the row.
struct RmsNorm {
  const void* x;
  const float* weight;
  void* y;
  DType dtype;
  int64_t heads, hidden, token_stride, head_stride;
  float eps;
};

// Inputs per block of packed weights, and per half of one.
constexpr int64_t kBlock = 32;
constexpr int64_t kHalfBlock = 16;

// How many inputs share a scale of the activations: a half block, a block, or all of a row.
enum class Sharing : int32_t { halves = 0, blocks = 1, rows = 2 };

// How a weight's values are coded; docs/kernels.md shows how they lie.
enum class Coding : int32_t { floats = 0, nibbles = 1, bytes = 2 };

// A matrix [outputs, inputs] in panels of sixteen outputs. value = scale * (code - offset) + minimum for codes.
//
// dtype: of float values, or of scales and minimums (f32 or f16). group: inputs per scale, 16 or a multiple of 32.
// order: input feature of each column, or null. minimums: or null. sharing: how the activations are to be rounded; for
// rows as Ops.linear says for weights with `activation_bits`.
struct Weights {
  Coding coding;
  DType dtype;
  int64_t outputs;
  int64_t inputs;
  int64_t group;
  int32_t offset;
  Sharing sharing;
  const void* values;
  const void* scales;
  const void* minimums;
  const int32_t* order;
};

// Rows of activations as a product takes them.
//
// For float weights: `floats`, `stride` values apart, with the columns in the weight's order.
// For codes: each half block as whole numbers from -127 to 127 and a scale; the last block is filled up with zeros. Halves
// that share a scale have it twice.
//   codes [rows, 32 * blocks], scales [rows, 2 * blocks], sums of the codes of each half, times its scale.
struct Inputs {
  const float* floats;
  int64_t stride;
  int8_t* codes;
  float* scales;
  float* sums;
};

// Makes rows of activations ready for a weight. x: rows of contiguous values of `dtype`, `x_stride` values apart.
struct Prepare {
  const void* x;
  DType dtype;
  int64_t x_stride;
  int64_t columns;
  const int32_t* order;
  Sharing sharing;
  Inputs inputs;
  float* floats;  // where float rows go, `columns` values apart; null to make codes
};

// y[r, n] = sum_k x[r, k] * value[n, k] + bias[n]. y and bias are of `dtype`; rows of y are `y_stride` values apart.
//
// Codes: the products of inputs that share their scales are added as whole numbers, within a block; blocks are added in
// order, in float32. Floats: one product
// is added after the other, in order, rounding once for each. So a row's bits depend on nothing but the row.
struct Product {
  Weights weights;
  Inputs inputs;
  const void* bias;
  void* y;
  DType dtype;
  int64_t y_stride;
};

// y[t] = scale * row ids[t] of the weights, rounded to y's dtype before the multiplication and after it. y: [tokens,
// inputs], without gaps.
struct Embedding {
  Weights weights;
  const int64_t* ids;
  void* y;
  DType dtype;
  float scale;
};

// Turns each pair (x[i], x[i + half]) of a head by its token's angle; entries past 2 * half are copied.
//
// x: [tokens, heads, dim], a head's values contiguous. y: the same shape and dtype, without gaps.
// cosines, sines: [tokens, half].
struct Rotary {
  const void* x;
  void* y;
  const float* cosines;
  const float* sines;
  DType dtype;
  int64_t heads, dim, half;
  int64_t token_stride, head_stride;
};

// Keys and values of one layer, in blocks. For each key/value head and block, `head_stride` and `block_stride` values
// apart: keys as [block_size / chunk, dim, chunk], values as [block_size, dim].
//
// chunk: tokens whose keys stand side by side, 16 or a divisor of it. dtype i8: with scales [head][block][block_size] of
// `scale_dtype` (f32 or f16).
struct Cache {
  void* keys;
  void* values;
  void* key_scales;
  void* value_scales;
  DType dtype, scale_dtype;
  int64_t heads, dim, block_size, chunk, head_stride, block_stride;
};

// Writes tokens' keys and values [tokens, heads, dim] of `dtype` to their slots.
struct StoreKV {
  Cache cache;
  const void* key;
  const void* value;
  DType dtype;
  int64_t token_stride_key, token_stride_value, head_stride_key, head_stride_value;
  const int64_t* slots;
};

// Keys that are attended to from scratch; the results of several parts are put together in order.
constexpr int64_t kPart = 512;

// Causal attention; see Ops.attention. query, out: [tokens, heads, dim] of `dtype`; out is without gaps.
//
// tables: blocks of each sequence, `table_stride` apart. window: 0 for none. softcap: 0 for none. sinks: [heads], or null.
struct Attention {
  const void* query;
  void* out;
  DType dtype;
  int64_t heads, token_stride;
  Cache cache;
  const int64_t* tables;
  int64_t table_stride;
  float scale, softcap;
  int64_t window;
  const float* sinks;
};

// A piece of the work: the queries of `tokens` tokens in one key/value head, over the parts first_part ... last_part - 1.
//
// token: the first one's row in query and out; position: its place in the sequence.
// partial: where unfinished results go, for each part one after the other, and for each token and query head of the group
// `partial_stride` values apart: dim sums, then the largest score and the sum of weights. Null where the parts are all
// there are, and the result goes to `out`.
struct AttentionTask {
  int64_t sequence, token, tokens, position, kv_head, first_part, last_part;
  float* partial;
  int64_t partial_stride;
};

// y[t, i] = activation(x[t, i]) * x[t, n + i]. x: rows of 2n values without gaps; y: rows of n.
struct Gated {
  const void* x;
  void* y;
  DType dtype;
  int64_t n;
  bool gelu;
};

// sum[i] = x[i] + y[i], rounded once.
struct Add {
  const void* x;
  const void* y;
  void* sum;
  DType dtype;
};

// y[i] = cap * tanh(x[i] / cap)
struct Softcap {
  const float* x;
  float* y;
  float cap;
};

// y[i] = x[i]
struct ToFloat {
  const void* x;
  DType dtype;
  float* y;
};

// shares[i] = e^((logits[i] - best) / temperature), where a NaN counts as -infinity, and infinity as the largest finite
// number. best: the largest logit, counted so.
struct Shares {
  const float* logits;
  int64_t count;
  float best, temperature;
  float* shares;
};

// Each function does a range of rows, panels, tokens or values, so that several threads can share the work.
struct Kernels {
  void (*rms_norm)(const RmsNorm&, int64_t first_row, int64_t last_row);  // rows: heads of all tokens
  void (*prepare)(const Prepare&, int64_t first_row, int64_t last_row);
  void (*product)(const Product&, int64_t first_panel, int64_t last_panel, int64_t first_row, int64_t last_row);
  void (*embedding)(const Embedding&, int64_t first_token, int64_t last_token);
  void (*rotary)(const Rotary&, int64_t first_token, int64_t last_token);
  void (*store_kv)(const StoreKV&, int64_t first_token, int64_t last_token);
  void (*attention)(const Attention&, const AttentionTask&);
  void (*merge_attention)(const Attention&, const AttentionTask&);
  void (*gated)(const Gated&, int64_t first_token, int64_t last_token);
  void (*add)(const Add&, int64_t first, int64_t last);
  void (*softcap)(const Softcap&, int64_t first, int64_t last);
  void (*to_float)(const ToFloat&, int64_t first, int64_t last);
  float (*largest_logit)(const float* logits, int64_t count);  // counted as Shares says
  void (*shares)(const Shares&);

  // No ops, but what they are measured by (peak.h). read_memory: lines of 64 bytes, in eights. The others return how
  // many operations they have done, a product and a sum being two.
  void (*read_memory)(const void*, int64_t first_line, int64_t last_line, float* sink);
  int64_t (*multiply_floats)(int64_t rounds, float* sink);
  int64_t (*multiply_codes)(int64_t rounds, float* sink);
};

}  // namespace headrace
