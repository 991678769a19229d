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

namespace nb = nanobind;
using namespace headrace;

namespace {

DType dtype_of(int code) {
  if (code < 0 || code > 2) throw std::invalid_argument("dtype must be 0 (float32), 1 (bfloat16) or 2 (float16)");
  return static_cast<DType>(code);
}

void rms_norm(uintptr_t x, uintptr_t weight, uintptr_t y, int64_t rows, int64_t hidden, int64_t x_stride, float eps,
              int dtype) {
  kernels().rms_norm({reinterpret_cast<const void*>(x), reinterpret_cast<const float*>(weight),
                      reinterpret_cast<void*>(y), rows, hidden, x_stride, eps, dtype_of(dtype)});
}

}  // namespace

NB_MODULE(_native, m) {
  m.def("available_isas", &available_isas);
  m.def("isa", &isa);
  m.def("select_isa", &select_isa, nb::arg("name"));
  m.def("rms_norm", &rms_norm, nb::arg("x"), nb::arg("weight"), nb::arg("y"), nb::arg("rows"), nb::arg("hidden"),
        nb::arg("x_stride"), nb::arg("eps"), nb::arg("dtype"), nb::call_guard<nb::gil_scoped_release>());
}
