// From logits to tokens, rows in parallel; src/headrace/ops/sample.py says what each argument means, and is the truth.
#pragma once

#include <cstdint>

namespace headrace {

// logits: rows of `vocabulary` values, `stride` apart. xtc_threshold: or null.
struct Sample {
  const float* logits;
  int64_t vocabulary, stride;
  const double* temperature;
  const int64_t* top_k;
  const double* top_p;
  const double* min_p;
  const double* uniform;
  const double* xtc_threshold;
  int64_t* tokens;
};
void sample(const Sample& args, int64_t rows);

// token_ids are of the vocabulary, and `top` is at most its size. top_values, top_ids: [rows, top].
struct Logprobs {
  const float* logits;
  int64_t vocabulary, stride;
  const int64_t* token_ids;
  int64_t top;
  float* chosen;
  float* top_values;
  int64_t* top_ids;
};
void logprobs(const Logprobs& args, int64_t rows);

}  // namespace headrace
