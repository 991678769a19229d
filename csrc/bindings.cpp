// The Python module headrace._native.
//
// Tensors arrive as addresses, shapes and strides: importing a torch tensor through DLPack takes 3.6 us each, more
// than many kernels run. src/headrace/ops/cpu.py is the only caller and checks the tensors before it hands out their
// addresses. src/headrace/_native.pyi describes every function.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "isa.h"
#include "run.h"
#include "sample.h"
#include "threads.h"

namespace nb = nanobind;
using namespace headrace;

namespace {

DType dtype_of(int code) {
  if (code < 0 || code > 3) throw std::invalid_argument("dtype must be 0 (f32), 1 (bf16), 2 (f16) or 3 (i8)");
  return static_cast<DType>(code);
}

template <typename T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// A packed matrix, of one or more parts that stand one below the other. Python keeps the tensors alive.
struct Matrix {
  std::vector<Weights> parts;

  void add(int coding, int dtype, int64_t outputs, int64_t inputs, int64_t group, int32_t offset, int sharing,
           uintptr_t values, uintptr_t scales, uintptr_t minimums, uintptr_t order) {
    if (coding < 0 || coding > 2) throw std::invalid_argument("coding must be 0 (floats), 1 (nibbles) or 2 (bytes)");
    if (sharing < 0 || sharing > 2) throw std::invalid_argument("sharing must be 0 (halves), 1 (blocks) or 2 (rows)");
    parts.push_back({static_cast<Coding>(coding), dtype_of(dtype), outputs, inputs, group, offset, static_cast<Sharing>(sharing),
                     pointer<const void>(values), pointer<const void>(scales), pointer<const void>(minimums),
                     pointer<const int32_t>(order)});
  }
};

// The ops of a step, in order. Python keeps the tensors alive that they name.
struct Program {
  std::vector<Op> ops;
};

// Which number of a step an op goes by.
int64_t count(const Step& step, bool chosen) { return chosen ? step.chosen : step.tokens; }

}  // namespace

NB_MODULE(_native, m) {
  m.def("available_isas", &available_isas);
  m.def("isa", &isa);
  m.def("select_isa", &select_isa, nb::arg("name"));
  m.def("set_threads", &set_threads, nb::arg("count"));
  m.def("threads", &threads);
  m.def(
      "read_memory",
      [](uintptr_t data, int64_t bytes, int64_t rounds) {
        return read_memory(pointer<const void>(data), bytes, rounds);
      },
      nb::arg("data"), nb::arg("bytes"), nb::arg("rounds"), nb::call_guard<nb::gil_scoped_release>());
  m.def("multiply", &multiply, nb::arg("codes"), nb::arg("rounds"), nb::call_guard<nb::gil_scoped_release>());

  using Release = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<Op>(m, "Op").def(
      "run",
      [](const Op& op, int64_t tokens, int64_t chosen, int64_t sequences) { op({tokens, chosen, sequences}); },
      nb::arg("tokens"), nb::arg("chosen") = 0, nb::arg("sequences") = 0, Release());
  nb::class_<Program>(m, "Program")
      .def(nb::init<>())
      .def("add", [](Program& program, const Op& op) { program.ops.push_back(op); }, nb::arg("op"))
      .def(
          "run",
          [](const Program& program, int64_t tokens, int64_t chosen, int64_t sequences) {
            for (const Op& op : program.ops) op({tokens, chosen, sequences});
          },
          nb::arg("tokens"), nb::arg("chosen"), nb::arg("sequences"), Release());

  nb::class_<Matrix>(m, "Matrix")
      .def(nb::init<>())
      .def("add", &Matrix::add, nb::arg("coding"), nb::arg("dtype"), nb::arg("outputs"), nb::arg("inputs"),
           nb::arg("group"), nb::arg("offset"), nb::arg("sharing"), nb::arg("values"), nb::arg("scales"),
           nb::arg("minimums"), nb::arg("order"));
  m.def(
      "pack_codes",
      [](uintptr_t codes, int64_t rows, int64_t columns, int64_t first, int add, int coding, uintptr_t values) {
        if (coding != 1 && coding != 2) throw std::invalid_argument("coding must be 1 (nibbles) or 2 (bytes)");
        pack_codes({pointer<const uint8_t>(codes), rows, columns, first, static_cast<uint8_t>(add),
                    static_cast<Coding>(coding), pointer<uint8_t>(values)});
      },
      nb::arg("codes"), nb::arg("rows"), nb::arg("columns"), nb::arg("first"), nb::arg("add"), nb::arg("coding"),
      nb::arg("values"), Release());
  nb::class_<Cache>(m, "Cache")
      .def(
          "__init__",
          [](Cache* cache, uintptr_t keys, uintptr_t values, uintptr_t key_scales, uintptr_t value_scales, int dtype,
             int scale_dtype, int64_t heads, int64_t dim, int64_t block_size, int64_t chunk, int64_t blocks) {
            const int64_t block = block_size * dim;
            new (cache) Cache{pointer<void>(keys), pointer<void>(values), pointer<void>(key_scales),
                              pointer<void>(value_scales), dtype_of(dtype), dtype_of(scale_dtype), heads, dim,
                              block_size, chunk, blocks * block, block};
          },
          nb::arg("keys"), nb::arg("values"), nb::arg("key_scales"), nb::arg("value_scales"), nb::arg("dtype"),
          nb::arg("scale_dtype"), nb::arg("heads"), nb::arg("dim"), nb::arg("block_size"), nb::arg("chunk"),
          nb::arg("blocks"));

  m.def(
      "embedding",
      [](const Matrix& matrix, uintptr_t ids, uintptr_t y, int dtype, float scale) -> Op {
        if (matrix.parts.size() != 1) throw std::invalid_argument("a table has one part");
        const Embedding args = {matrix.parts[0], pointer<const int64_t>(ids), pointer<void>(y), dtype_of(dtype), scale};
        return [args](const Step& step) { embedding(args, step.tokens); };
      },
      nb::arg("matrix"), nb::arg("ids"), nb::arg("y"), nb::arg("dtype"), nb::arg("scale"));
  m.def(
      "rms_norm",
      [](uintptr_t x, uintptr_t weight, uintptr_t y, int dtype, int64_t heads, int64_t hidden, int64_t token_stride,
         int64_t head_stride, float eps, bool chosen) -> Op {
        const RmsNorm args = {pointer<const void>(x), pointer<const float>(weight), pointer<void>(y), dtype_of(dtype),
                              heads, hidden, token_stride, head_stride, eps};
        return [args, chosen](const Step& step) { rms_norm(args, count(step, chosen)); };
      },
      nb::arg("x"), nb::arg("weight"), nb::arg("y"), nb::arg("dtype"), nb::arg("heads"), nb::arg("hidden"),
      nb::arg("token_stride"), nb::arg("head_stride"), nb::arg("eps"), nb::arg("chosen") = false);
  m.def(
      "linear",
      [](const Matrix& matrix, uintptr_t x, int64_t x_stride, uintptr_t bias, uintptr_t y, int dtype,
         bool chosen) -> Op {
        return [parts = matrix.parts, x = pointer<const void>(x), x_stride, bias = pointer<const void>(bias),
                y = pointer<void>(y), dtype = dtype_of(dtype), chosen](const Step& step) {
          linear(parts, x, count(step, chosen), x_stride, bias, y, dtype);
        };
      },
      nb::arg("matrix"), nb::arg("x"), nb::arg("x_stride"), nb::arg("bias"), nb::arg("y"), nb::arg("dtype"),
      nb::arg("chosen") = false);
  m.def(
      "rotary",
      [](uintptr_t x, uintptr_t y, uintptr_t cosines, uintptr_t sines, int dtype, int64_t heads, int64_t dim,
         int64_t half, int64_t token_stride, int64_t head_stride) -> Op {
        const Rotary args = {pointer<const void>(x), pointer<void>(y), pointer<const float>(cosines),
                             pointer<const float>(sines), dtype_of(dtype), heads, dim, half, token_stride, head_stride};
        return [args](const Step& step) { rotary(args, step.tokens); };
      },
      nb::arg("x"), nb::arg("y"), nb::arg("cosines"), nb::arg("sines"), nb::arg("dtype"), nb::arg("heads"),
      nb::arg("dim"), nb::arg("half"), nb::arg("token_stride"), nb::arg("head_stride"));
  m.def(
      "store_kv",
      [](const Cache& cache, uintptr_t key, uintptr_t value, int dtype, int64_t key_token_stride,
         int64_t value_token_stride, int64_t key_head_stride, int64_t value_head_stride, uintptr_t slots) -> Op {
        const StoreKV args = {cache, pointer<const void>(key), pointer<const void>(value), dtype_of(dtype),
                              key_token_stride, value_token_stride, key_head_stride, value_head_stride,
                              pointer<const int64_t>(slots)};
        return [args](const Step& step) { store_kv(args, step.tokens); };
      },
      nb::arg("cache"), nb::arg("key"), nb::arg("value"), nb::arg("dtype"), nb::arg("key_token_stride"),
      nb::arg("value_token_stride"), nb::arg("key_head_stride"), nb::arg("value_head_stride"), nb::arg("slots"));
  m.def(
      "attention",
      [](const Cache& cache, uintptr_t query, uintptr_t out, int dtype, int64_t heads, int64_t token_stride,
         uintptr_t tables, int64_t table_stride, float scale, float softcap, int64_t window, uintptr_t sinks,
         uintptr_t query_lens, uintptr_t context_lens) -> Op {
        const Attention args = {pointer<const void>(query), pointer<void>(out), dtype_of(dtype), heads, token_stride,
                                cache, pointer<const int64_t>(tables), table_stride, scale, softcap, window,
                                pointer<const float>(sinks)};
        return [args, query_lens = pointer<const int64_t>(query_lens),
                context_lens = pointer<const int64_t>(context_lens)](const Step& step) {
          attention(args, step.sequences, query_lens, context_lens);
        };
      },
      nb::arg("cache"), nb::arg("query"), nb::arg("out"), nb::arg("dtype"), nb::arg("heads"), nb::arg("token_stride"),
      nb::arg("tables"), nb::arg("table_stride"), nb::arg("scale"), nb::arg("softcap"), nb::arg("window"),
      nb::arg("sinks"), nb::arg("query_lens"), nb::arg("context_lens"));
  m.def(
      "gated",
      [](uintptr_t x, uintptr_t y, int dtype, int64_t n, bool gelu) -> Op {
        const Gated args = {pointer<const void>(x), pointer<void>(y), dtype_of(dtype), n, gelu};
        return [args](const Step& step) { gated(args, step.tokens); };
      },
      nb::arg("x"), nb::arg("y"), nb::arg("dtype"), nb::arg("n"), nb::arg("gelu"));
  m.def(
      "add",
      [](uintptr_t x, uintptr_t y, uintptr_t sum, int dtype, int64_t n) -> Op {
        const Add args = {pointer<const void>(x), pointer<const void>(y), pointer<void>(sum), dtype_of(dtype)};
        return [args, n](const Step& step) { add(args, step.tokens * n); };
      },
      nb::arg("x"), nb::arg("y"), nb::arg("sum"), nb::arg("dtype"), nb::arg("n"));
  m.def(
      "take",
      [](uintptr_t x, uintptr_t rows, uintptr_t y, int64_t bytes) -> Op {
        return [x = pointer<const void>(x), rows = pointer<const int64_t>(rows), y = pointer<void>(y),
                bytes](const Step& step) { take(x, rows, y, bytes, step.tokens, step.chosen); };
      },
      nb::arg("x"), nb::arg("rows"), nb::arg("y"), nb::arg("bytes"));
  m.def(
      "to_float",
      [](uintptr_t x, int dtype, uintptr_t y, int64_t n, bool chosen) -> Op {
        const ToFloat args = {pointer<const void>(x), dtype_of(dtype), pointer<float>(y)};
        return [args, n, chosen](const Step& step) { to_float(args, count(step, chosen) * n); };
      },
      nb::arg("x"), nb::arg("dtype"), nb::arg("y"), nb::arg("n"), nb::arg("chosen") = false);
  m.def(
      "softcap",
      [](uintptr_t x, uintptr_t y, int64_t n, float cap, bool chosen) -> Op {
        const Softcap args = {pointer<const float>(x), pointer<float>(y), cap};
        return [args, n, chosen](const Step& step) { softcap(args, count(step, chosen) * n); };
      },
      nb::arg("x"), nb::arg("y"), nb::arg("n"), nb::arg("cap"), nb::arg("chosen") = false);

  m.def(
      "sample",
      [](uintptr_t logits, int64_t rows, int64_t vocabulary, int64_t stride, uintptr_t temperature, uintptr_t top_k,
         uintptr_t top_p, uintptr_t min_p, uintptr_t uniform, uintptr_t xtc_threshold, uintptr_t tokens) {
        sample({pointer<const float>(logits), vocabulary, stride, pointer<const double>(temperature),
                pointer<const int64_t>(top_k), pointer<const double>(top_p), pointer<const double>(min_p),
                pointer<const double>(uniform), pointer<const double>(xtc_threshold), pointer<int64_t>(tokens)},
               rows);
      },
      nb::arg("logits"), nb::arg("rows"), nb::arg("vocabulary"), nb::arg("stride"), nb::arg("temperature"),
      nb::arg("top_k"), nb::arg("top_p"), nb::arg("min_p"), nb::arg("uniform"), nb::arg("xtc_threshold"),
      nb::arg("tokens"), Release());
  m.def(
      "logprobs",
      [](uintptr_t logits, int64_t rows, int64_t vocabulary, int64_t stride, uintptr_t token_ids, int64_t top,
         uintptr_t chosen, uintptr_t top_values, uintptr_t top_ids) {
        logprobs({pointer<const float>(logits), vocabulary, stride, pointer<const int64_t>(token_ids), top,
                  pointer<float>(chosen), pointer<float>(top_values), pointer<int64_t>(top_ids)},
                 rows);
      },
      nb::arg("logits"), nb::arg("rows"), nb::arg("vocabulary"), nb::arg("stride"), nb::arg("token_ids"),
      nb::arg("top"), nb::arg("chosen"), nb::arg("top_values"), nb::arg("top_ids"), Release());
}
