#include "run.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "isa.h"
#include "threads.h"

namespace headrace {
namespace {

// A task should take some microseconds, and more than one should fall to each thread.
constexpr int64_t kTaskValues = 1 << 14;    // of an op that touches each value once
constexpr int64_t kTaskBytes = 1 << 16;     // of weights
constexpr int64_t kTaskInputs = 1 << 18;    // bytes of activations that stay in a core's cache with a panel
constexpr int64_t kTaskQueries = 16;        // rows of one key/value head
constexpr int64_t kTaskParts = 4;           // parts that one task takes before it is worth splitting

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Calls function(first, last) for ranges of `count` items that touch `values` values each.
template <typename Function>
void by_ranges(int64_t count, int64_t values, Function function) {
  const int64_t size = std::max<int64_t>(1, kTaskValues / std::max<int64_t>(1, values));
  parallel(ceil_div(count, size),
           [&](int64_t task) { function(task * size, std::min(count, (task + 1) * size)); });
}

// Memory that is kept from call to call, one for each thread that calls.
template <typename T>
T* scratch(std::vector<T>& memory, int64_t size) {
  if (memory.size() < static_cast<size_t>(size)) memory.resize(size);
  return memory.data();
}

thread_local std::vector<int8_t> code_memory;
thread_local std::vector<float> scale_memory, sum_memory, float_memory, partial_memory;

int64_t bytes_of(DType dtype) { return dtype == DType::f32 ? 4 : dtype == DType::i8 ? 1 : 2; }

int64_t panel_bytes(const Weights& w) {
  const int64_t values = ceil_div(w.inputs, kBlock) * kBlock * 16;
  if (w.coding == Coding::floats) return w.inputs * 16 * bytes_of(w.dtype);
  const int64_t scales = ceil_div(w.inputs, w.group) * 16 * bytes_of(w.dtype) * (w.minimums ? 2 : 1);
  return scales + (w.coding == Coding::nibbles ? values / 2 : values);
}

Inputs prepare(const Weights& w, const void* x, int64_t rows, int64_t x_stride, DType dtype) {
  Prepare args = {x, dtype, x_stride, w.inputs, w.order, w.sharing, {}, nullptr};
  if (w.coding == Coding::floats) {
    if (dtype == DType::f32 && !w.order) return {static_cast<const float*>(x), x_stride, nullptr, nullptr, nullptr};
    args.floats = scratch(float_memory, rows * w.inputs);
    args.inputs.floats = args.floats;
    args.inputs.stride = w.inputs;
  } else {
    const int64_t blocks = rows * ceil_div(w.inputs, kBlock);
    args.inputs.codes = scratch(code_memory, blocks * kBlock);
    args.inputs.scales = scratch(scale_memory, 2 * blocks);
    args.inputs.sums = scratch(sum_memory, 2 * blocks);
  }
  by_ranges(rows, w.inputs, [&](int64_t first, int64_t last) { kernels().prepare(args, first, last); });
  return args.inputs;
}

void product(const Product& args, int64_t rows) {
  const Weights& w = args.weights;
  const int64_t panels = ceil_div(w.outputs, 16);
  const int64_t row_bytes = w.inputs * (w.coding == Coding::floats ? 4 : 1);
  // A multiple of every number of rows that a tile has, so that only the last range ends in a smaller one.
  const int64_t row_size = std::max<int64_t>(12, kTaskInputs / std::max<int64_t>(1, row_bytes) / 12 * 12);
  const int64_t by_size = kTaskBytes / std::max<int64_t>(1, panel_bytes(w) * std::min(rows, row_size) / 4);
  const int64_t panel_size = std::clamp<int64_t>(by_size, 1, std::max<int64_t>(1, panels / (4 * threads())));
  const int64_t across = ceil_div(panels, panel_size);
  parallel(across * ceil_div(rows, row_size), [&](int64_t task) {
    const int64_t panel = task % across * panel_size, row = task / across * row_size;
    kernels().product(args, panel, std::min(panels, panel + panel_size), row, std::min(rows, row + row_size));
  });
}

}  // namespace

void rms_norm(const RmsNorm& args, int64_t tokens) {
  by_ranges(tokens * args.heads, args.hidden,
            [&](int64_t first, int64_t last) { kernels().rms_norm(args, first, last); });
}

void linear(const std::vector<Weights>& parts, const void* x, int64_t rows, int64_t x_stride, const void* bias, void* y,
            DType dtype) {
  int64_t outputs = 0, done = 0;
  for (const Weights& w : parts) outputs += w.outputs;
  Inputs inputs = {};
  const Weights* ready_for = nullptr;
  for (const Weights& w : parts) {
    const bool floats = w.coding == Coding::floats;
    if (!ready_for || (ready_for->coding == Coding::floats) != floats || ready_for->order != w.order ||
        ready_for->sharing != w.sharing) {
      inputs = prepare(w, x, rows, x_stride, dtype);
      ready_for = &w;
    }
    const int64_t offset = done * bytes_of(dtype);
    product({w, inputs, bias ? static_cast<const char*>(bias) + offset : nullptr, static_cast<char*>(y) + offset, dtype,
             outputs},
            rows);
    done += w.outputs;
  }
}

void embedding(const Embedding& args, int64_t tokens) {
  for (int64_t t = 0; t < tokens; ++t)
    if (args.ids[t] < 0 || args.ids[t] >= args.weights.outputs)
      throw std::out_of_range("token ids must be from 0 to " + std::to_string(args.weights.outputs - 1));
  by_ranges(tokens, args.weights.inputs * 4,
            [&](int64_t first, int64_t last) { kernels().embedding(args, first, last); });
}

void rotary(const Rotary& args, int64_t tokens) {
  by_ranges(tokens, args.heads * args.dim, [&](int64_t first, int64_t last) { kernels().rotary(args, first, last); });
}

void store_kv(const StoreKV& args, int64_t tokens) {
  by_ranges(tokens, args.cache.heads * args.cache.dim * 4,
            [&](int64_t first, int64_t last) { kernels().store_kv(args, first, last); });
}

void gated(const Gated& args, int64_t tokens) {
  by_ranges(tokens, args.n * 4, [&](int64_t first, int64_t last) { kernels().gated(args, first, last); });
}

void add(const Add& args, int64_t count) {
  by_ranges(count, 1, [&](int64_t first, int64_t last) { kernels().add(args, first, last); });
}

void softcap(const Softcap& args, int64_t count) {
  by_ranges(count, 4, [&](int64_t first, int64_t last) { kernels().softcap(args, first, last); });
}

void to_float(const ToFloat& args, int64_t count) {
  by_ranges(count, 1, [&](int64_t first, int64_t last) { kernels().to_float(args, first, last); });
}

void take(const void* x, const int64_t* rows, void* y, int64_t bytes, int64_t tokens, int64_t count) {
  for (int64_t r = 0; r < count; ++r) {
    if (rows[r] < 0 || rows[r] >= tokens) throw std::out_of_range("there is no row " + std::to_string(rows[r]));
    std::memcpy(static_cast<char*>(y) + r * bytes, static_cast<const char*>(x) + rows[r] * bytes, bytes);
  }
}

void pack_codes(const PackCodes& args) {
  const bool nibbles = args.coding == Coding::nibbles;
  const int64_t blocks = ceil_div(args.columns, kBlock), line = 64, block_bytes = nibbles ? 4 * line : 8 * line;
  by_ranges(args.rows, args.columns, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      const uint8_t* codes = args.codes + row * args.columns;
      const int64_t output = args.first + row;
      uint8_t* y = args.values + output / 16 * blocks * block_bytes + output % 16 * 4;
      for (int64_t k = 0; k < args.columns; k += kBlock, codes += kBlock, y += block_bytes) {
        uint8_t block[kBlock] = {};
        const int64_t count = std::min(kBlock, args.columns - k);
        for (int64_t i = 0; i < count; ++i) block[i] = static_cast<uint8_t>(codes[i] + args.add);
        if (nibbles)
          for (int64_t i = 0; i < kBlock / 2; ++i) block[i] = static_cast<uint8_t>(block[i] | block[16 + i] << 4);
        for (int64_t i = 0; i < (nibbles ? 4 : 8); ++i) std::memcpy(y + i * line, block + 4 * i, 4);
      }
    }
  });
}

void attention(const Attention& args, int64_t sequences, const int64_t* query_lens, const int64_t* context_lens) {
  const int64_t group = args.heads / args.cache.heads, partial_size = args.cache.dim + 2;
  const int64_t step = std::max<int64_t>(1, kTaskQueries / group);
  std::vector<AttentionTask> tasks, merges;
  int64_t token = 0, partials = 0;
  for (int64_t s = 0; s < sequences; ++s) {
    const int64_t length = query_lens[s], before = context_lens[s] - length;
    for (int64_t first = 0; first < length; first += step) {
      const int64_t count = std::min(step, length - first), position = before + first;
      const int64_t begin = args.window ? std::max<int64_t>(0, position + 1 - args.window) : 0;
      const int64_t first_part = begin / kPart, last_part = ceil_div(position + count, kPart);
      const int64_t parts = last_part - first_part;
      // Split where it can help; what comes out does not depend on it.
      const bool split = parts > kTaskParts && threads() > 1 && length <= kTaskQueries;
      for (int64_t head = 0; head < args.cache.heads; ++head) {
        const AttentionTask whole = {s, token + first, count, position, head, first_part, last_part, nullptr, 0};
        if (!split) {
          tasks.push_back(whole);
          continue;
        }
        merges.push_back(whole);
        merges.back().partial_stride = parts * partial_size;
        partials += count * group * parts * partial_size;
      }
    }
    token += length;
  }
  float* memory = scratch(partial_memory, partials);
  for (AttentionTask& merge : merges) {
    merge.partial = memory;
    memory += merge.tokens * group * merge.partial_stride;
    for (int64_t part = merge.first_part; part < merge.last_part; part += kTaskParts) {
      AttentionTask piece = merge;
      piece.first_part = part;
      piece.last_part = std::min(part + kTaskParts, merge.last_part);
      piece.partial += (part - merge.first_part) * partial_size;
      tasks.push_back(piece);
    }
  }
  parallel(static_cast<int64_t>(tasks.size()), [&](int64_t task) { kernels().attention(args, tasks[task]); });
  parallel(static_cast<int64_t>(merges.size()), [&](int64_t task) { kernels().merge_attention(args, merges[task]); });
}

int64_t read_memory(const void* data, int64_t bytes, int64_t rounds) {
  const int64_t shares = threads(), lines = bytes / 64 / 8 / shares * 8;
  std::vector<float> sinks(shares * 16);  // a line of the cache for each
  parallel(shares, [&](int64_t share) {
    for (int64_t round = 0; round < rounds; ++round)
      kernels().read_memory(data, share * lines, (share + 1) * lines, &sinks[share * 16]);
  });
  return shares * lines * 64 * rounds;
}

int64_t multiply(bool codes, int64_t rounds) {
  const int64_t shares = threads();
  std::vector<float> sinks(shares * 16);
  std::vector<int64_t> done(shares);
  parallel(shares, [&](int64_t share) {
    const auto run = codes ? kernels().multiply_codes : kernels().multiply_floats;
    done[share] = run(rounds, &sinks[share * 16]);
  });
  int64_t all = 0;
  for (int64_t each : done) all += each;
  return all;
}

}  // namespace headrace
