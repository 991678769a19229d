#include "threads.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace headrace {
namespace {

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Waking a sleeping thread takes tens of microseconds, longer than most ops: helpers look for work for about that long
// before they sleep. An idle program has all of them asleep.
constexpr int kSpins = 4000;

// One job at a time. A helper that comes late finds the job closed, or works on the next one.
class Pool {
 public:
  explicit Pool(int helpers) {
    for (int i = 0; i < helpers; ++i) helpers_.emplace_back([this] { help(); });
  }

  ~Pool() {
    stop_ = true;
    announce();
    for (std::thread& helper : helpers_) helper.join();
  }

  void run(int64_t tasks, void (*function)(void*, int64_t), void* context) {
    tasks_ = tasks;
    function_ = function;
    context_ = context;
    next_ = 0;
    open_ = true;
    announce();
    work();
    open_ = false;
    // A helper that was counted before this may still be at its task.
    for (int spins = 0; active_ != 0; ++spins) {
      if (spins < kSpins) relax();
      else std::this_thread::yield();
    }
  }

  int size() const { return static_cast<int>(helpers_.size()) + 1; }

 private:
  void announce() {
    ++jobs_;
    if (sleeping_ != 0) jobs_.notify_all();
  }

  void work() {
    for (int64_t task; (task = next_++) < tasks_;) function_(context_, task);
  }

  void help() {
    uint32_t seen = 0;
    for (;;) {
      for (int spins = 0; jobs_ == seen && spins < kSpins; ++spins) relax();
      if (jobs_ == seen) {
        ++sleeping_;
        jobs_.wait(seen);
        --sleeping_;
      }
      seen = jobs_;
      if (stop_) return;
      ++active_;
      if (open_) work();
      --active_;
    }
  }

  std::vector<std::thread> helpers_;
  int64_t tasks_ = 0;
  void (*function_)(void*, int64_t) = nullptr;
  void* context_ = nullptr;
  std::atomic<bool> open_ = false, stop_ = false;
  std::atomic<int> sleeping_ = 0;
  alignas(64) std::atomic<uint32_t> jobs_ = 0;
  alignas(64) std::atomic<int64_t> next_ = 0;
  alignas(64) std::atomic<int> active_ = 0;
};

std::mutex mutex;
Pool* pool = nullptr;  // never destroyed at exit: helpers may be running
std::atomic<int> wanted = 1;

// A child process has none of its parent's threads: it forgets them, and makes its own when it needs them.
void after_fork() {
  pool = nullptr;
  new (&mutex) std::mutex;
}

}  // namespace

void set_threads(int count) { wanted = std::max(1, count); }
int threads() { return wanted; }

void parallel(int64_t tasks, void (*run)(void*, int64_t), void* context) {
  const std::unique_lock<std::mutex> lock(mutex, std::try_to_lock);
  const int count = wanted;
  if (tasks < 2 || !lock || count == 1) {
    for (int64_t task = 0; task < tasks; ++task) run(context, task);
    return;
  }
  if (!pool || pool->size() != count) {
    [[maybe_unused]] static const int once = pthread_atfork(nullptr, nullptr, after_fork);
    delete pool;
    pool = new Pool(count - 1);
  }
  pool->run(tasks, run, context);
}

}  // namespace headrace
