#include "isa.h"

#include <atomic>
#include <cstdlib>
#include <stdexcept>

namespace headrace {

namespace generic {
extern const Kernels kernels;
}
#if defined(__x86_64__)
namespace avx2 {
extern const Kernels kernels;
}
namespace avx512 {
extern const Kernels kernels;
}
#endif

namespace {

struct Isa {
  const char* name;
  const Kernels* kernels;
  bool available;
};

// The plainest first. __builtin_cpu_supports also asks whether the operating system saves the wide registers.
const std::vector<Isa>& isas() {
#if defined(__x86_64__)
  static const bool has_avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  static const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                                 __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  static const std::vector<Isa> all = {{"generic", &generic::kernels, true},
                                       {"avx2", &avx2::kernels, has_avx2},
                                       {"avx512", &avx512::kernels, has_avx512}};
#else
  static const std::vector<Isa> all = {{"generic", &generic::kernels, true}};
#endif
  return all;
}

const Isa& find(const std::string& name) {
  std::string message = "there is no instruction set '" + name + "'";
  for (const Isa& isa : isas()) {
    if (name != isa.name) continue;
    if (isa.available) return isa;
    message = "this machine cannot run '" + name + "'";
  }
  message += "; available here:";
  for (const std::string& known : available_isas()) message += " " + known;
  throw std::invalid_argument(message);
}

const Isa& choose() {
  const char* wanted = std::getenv("HEADRACE_ISA");
  try {
    return find(wanted && *wanted ? wanted : available_isas().back());
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument("HEADRACE_ISA: " + std::string(error.what()));
  }
}

std::atomic<const Isa*> selected = nullptr;

const Isa& current() {
  if (!selected) selected = &choose();
  return *selected;
}

}  // namespace

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (const Isa& isa : isas())
    if (isa.available) names.push_back(isa.name);
  return names;
}

std::string isa() { return current().name; }
void select_isa(const std::string& name) { selected = &find(name); }
const Kernels& kernels() { return *current().kernels; }

}  // namespace headrace
