#include "sample.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "isa.h"
#include "threads.h"

namespace headrace {
namespace {

constexpr float kNothing = -std::numeric_limits<float>::infinity();
constexpr int64_t kStride = 1024;  // shares between two sums that are remembered

// As the kernels count logits.
float counted(float x) { return std::isnan(x) ? kNothing : std::min(x, FLT_MAX); }

// Memory that each thread keeps from row to row.
thread_local std::vector<float> values, share_memory, falling;
thread_local std::vector<int64_t> ids;
thread_local std::vector<double> sums;

int64_t first_of(const float* logits, int64_t count, float best) {
  for (int64_t i = 0; i < count; ++i)
    if (counted(logits[i]) == best) return i;
  return 0;
}

// The k-th largest, for k from 1 to count. Few values are above the k largest so far, so it takes little more than one
// look at each.
float kth_largest(const float* logits, int64_t count, int64_t k) {
  const size_t room = static_cast<size_t>(std::max(2 * k, k + 1024));
  float least = kNothing;
  falling.clear();
  const auto cut = [&] {
    std::nth_element(falling.begin(), falling.begin() + (k - 1), falling.end(), std::greater<float>());
    least = falling[k - 1];
    falling.resize(k);
  };
  for (int64_t i = 0; i < count; ++i) {
    const float x = counted(logits[i]);
    if (x <= least && static_cast<int64_t>(falling.size()) >= k) continue;
    falling.push_back(x);
    if (falling.size() == room) cut();
  }
  cut();
  return least;
}

// The ids whose logits are not below the least one, rising, and those logits in `values`.
void keep_from(const float* logits, int64_t count, float least) {
  ids.clear();
  values.clear();
  for (int64_t i = 0; i < count; ++i) {
    const float x = counted(logits[i]);
    if (x >= least) {
      ids.push_back(i);
      values.push_back(x);
    }
  }
}

double total(const float* shares, int64_t count) {
  double sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += shares[i];
  return sum;
}

// The share of the least likely token that top_p keeps; see `_least_of_nucleus` in ops/sample.py.
float least_of_nucleus(const float* shares, int64_t count, double top_p) {
  const double sum = total(shares, count);
  const float bound = static_cast<float>((1 - top_p) * sum / (2 * static_cast<double>(count)));
  falling.clear();
  for (int64_t i = 0; i < count; ++i)
    if (shares[i] >= bound) falling.push_back(shares[i]);
  std::sort(falling.begin(), falling.end(), std::greater<float>());
  double reached = 0;
  for (const float share : falling) {
    reached += share;
    if (reached >= top_p * sum) return share;
  }
  return falling.back();
}

template <typename Drop>
void drop_if(float* shares, int64_t count, Drop drop) {
  for (int64_t i = 0; i < count; ++i)
    if (drop(shares[i])) shares[i] = 0;
}

int64_t draw(const Sample& args, int64_t row) {
  const float* logits = args.logits + row * args.stride;
  const float best = kernels().largest_logit(logits, args.vocabulary);
  const double temperature = args.temperature[row];
  if (!(temperature >= FLT_MIN) || best == kNothing) return first_of(logits, args.vocabulary, best);
  int64_t count = args.vocabulary;
  const bool some = args.top_k[row] > 0 && args.top_k[row] < count;
  if (some) {
    keep_from(logits, count, kth_largest(logits, count, args.top_k[row]));
    count = static_cast<int64_t>(ids.size());
  }
  share_memory.resize(std::max<size_t>(share_memory.size(), count));
  float* shares = share_memory.data();
  kernels().shares({some ? values.data() : logits, count, best, static_cast<float>(temperature), shares});
  if (args.top_p[row] < 1) {
    const float least = least_of_nucleus(shares, count, args.top_p[row]);
    drop_if(shares, count, [&](float share) { return share < least; });
  }
  if (args.min_p[row] != 0) {
    const float least = static_cast<float>(args.min_p[row]);
    drop_if(shares, count, [&](float share) { return share < least; });
  }
  if (args.xtc_threshold && args.xtc_threshold[row] <= 1) {
    const double threshold = args.xtc_threshold[row] * total(shares, count);
    float reaching = std::numeric_limits<float>::infinity();
    for (int64_t i = 0; i < count; ++i)
      if (shares[i] >= threshold) reaching = std::min(reaching, shares[i]);
    drop_if(shares, count, [&](float share) { return share > reaching; });
  }
  sums.clear();
  double sum = 0;
  for (int64_t i = 0; i < count; i += kStride) {
    sums.push_back(sum);
    for (int64_t j = i, end = std::min(count, i + kStride); j < end; ++j) sum += shares[j];
  }
  // The first token at which the sum exceeds the target: from the last remembered sum that does not.
  const double target = args.uniform[row] * sum;
  const auto above = std::upper_bound(sums.begin() + 1, sums.end(), target);
  int64_t i = (above - sums.begin() - 1) * kStride;
  for (sum = above[-1]; i < count; ++i) {
    sum += shares[i];
    if (sum > target) break;
  }
  i = std::min(i, count - 1);
  return some ? ids[i] : i;
}

void report(const Logprobs& args, int64_t row) {
  const float* logits = args.logits + row * args.stride;
  const float best = kernels().largest_logit(logits, args.vocabulary);
  double log_total = 0;
  if (best != kNothing) {
    share_memory.resize(std::max<size_t>(share_memory.size(), args.vocabulary));
    kernels().shares({logits, args.vocabulary, best, 1.0f, share_memory.data()});
    log_total = std::log(total(share_memory.data(), args.vocabulary));
  }
  const auto logprob = [&](float x) {
    // In this order nothing is lost where the largest logit is huge.
    return best == kNothing ? kNothing : static_cast<float>(static_cast<double>(x) - best - log_total);
  };
  args.chosen[row] = logprob(counted(logits[args.token_ids[row]]));
  if (args.top == 0) return;
  keep_from(logits, args.vocabulary, kth_largest(logits, args.vocabulary, args.top));
  std::vector<int64_t> order(ids.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int64_t>(i);
  std::stable_sort(order.begin(), order.end(), [](int64_t a, int64_t b) { return values[a] > values[b]; });
  for (int64_t i = 0; i < args.top; ++i) {
    args.top_ids[row * args.top + i] = ids[order[i]];
    args.top_values[row * args.top + i] = logprob(values[order[i]]);
  }
}

}  // namespace

void sample(const Sample& args, int64_t rows) {
  parallel(rows, [&](int64_t row) { args.tokens[row] = draw(args, row); });
}

void logprobs(const Logprobs& args, int64_t rows) {
  parallel(rows, [&](int64_t row) { report(args, row); });
}

}  // namespace headrace
