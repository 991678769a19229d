// Whole ops: how the kernels' work is divided among the threads, and where what they hand on is kept meanwhile.
#pragma once

#include <functional>
#include <vector>

#include "kernels.h"

namespace headrace {

// How much there is of what changes from step to step: tokens, those of them whose logits are asked for, sequences.
struct Step {
  int64_t tokens, chosen, sequences;
};

// An op whose arguments are all settled but for a step's size, ready to be run any number of times.
using Op = std::function<void(const Step&)>;

void rms_norm(const RmsNorm& args, int64_t tokens);

// y = x @ weightsᵀ + bias, for several matrices that stand one below the other. x: rows of contiguous values, `x_stride`
// apart. bias and y (without gaps) are of x's dtype; bias may be null.
void linear(const std::vector<Weights>& parts, const void* x, int64_t rows, int64_t x_stride, const void* bias, void* y,
            DType dtype);

// Throws std::out_of_range for an id that is no row of the table.
void embedding(const Embedding& args, int64_t tokens);
void rotary(const Rotary& args, int64_t tokens);
void store_kv(const StoreKV& args, int64_t tokens);
void gated(const Gated& args, int64_t tokens);
void add(const Add& args, int64_t count);
void softcap(const Softcap& args, int64_t count);
void to_float(const ToFloat& args, int64_t count);

// y[r] = x[rows[r]], of `bytes` bytes each. Throws std::out_of_range for a row that is not one of `tokens`.
void take(const void* x, const int64_t* rows, void* y, int64_t bytes, int64_t tokens, int64_t count);

// Puts rows of codes [rows, columns] into the panels of a matrix with as many columns, from row `first` on: `add` is added
// to each, and it becomes four bits, or eight. docs/kernels.md shows how they lie; what no row reaches is left alone.
struct PackCodes {
  const uint8_t* codes;
  int64_t rows, columns, first;
  uint8_t add;
  Coding coding;
  uint8_t* values;
};
void pack_codes(const PackCodes& args);

// query_lens, context_lens: tokens of each sequence in this step, and of its keys in the cache.
void attention(const Attention& args, int64_t sequences, const int64_t* query_lens, const int64_t* context_lens);

// Every thread reads its share of the memory, `rounds` times. Returns the bytes read in all.
int64_t read_memory(const void* data, int64_t bytes, int64_t rounds);

// Every thread multiplies floats, or whole numbers of eight bits. Returns the operations done in all.
int64_t multiply(bool codes, int64_t rounds);

}  // namespace headrace
