// Which instruction sets this CPU has, and which one the kernels use.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"

namespace headrace {

// Names of the instruction sets that this machine can run, the plainest first.
std::vector<std::string> available_isas();

// The instruction set in use: that of the environment variable HEADRACE_ISA, or else the best one available.
// Throws std::invalid_argument for a name that is unknown or cannot run here.
std::string isa();

// Uses another instruction set from now on, for tests and measurements. Throws like isa().
void select_isa(const std::string& name);

// The ops of the instruction set in use.
const Kernels& kernels();

}  // namespace headrace
