// Threads that share the work of an op.
#pragma once

#include <cstdint>

namespace headrace {

// How many threads share the work from now on, the caller's own among them. At least 1.
void set_threads(int count);
int threads();

// Calls run(context, task) once for every task from 0 to tasks - 1, on some thread each, and returns when all are done.
//
// Whoever is free takes the next task, so a helper that wakes late costs nothing but its help. While another thread of
// the program is in here, the caller does its tasks alone.
void parallel(int64_t tasks, void (*run)(void* context, int64_t task), void* context);

template <typename Function>
void parallel(int64_t tasks, Function function) {
  parallel(tasks, [](void* context, int64_t task) { (*static_cast<Function*>(context))(task); }, &function);
}

}  // namespace headrace
