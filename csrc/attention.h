// Attention over the paged cache; see Attention in kernels.h for the arguments.
//
// Lanes are tokens while scores are computed (keys lie with sixteen tokens side by side), and entries of the head while
// values are added up, so no sum runs across lanes but that of a row's weights. Scores are kept for a tile of 128 keys
// at a time, with a running maximum (Milakov & Gimelshein 2018, https://arxiv.org/abs/1805.02867); tiles and parts begin
// at absolute positions. So what a query gets depends on its own sequence only: not on how the prompt was cut into
// chunks, on blocks, on other sequences, or on threads. Keys past a query's own position weigh exactly nothing.
#pragma once

#include "elementwise.h"

namespace headrace::HEADRACE_ISA {
namespace {

constexpr int64_t kTile = 128;
constexpr int64_t kMaxDim = 512;
constexpr int kQueries = 4;  // whose scores or values are computed at once

// One query head of one token, on its way through the keys.
struct Query {
  float q[kMaxDim];    // times the scale
  float out[kMaxDim];  // sum of weight * value
  float scores[kTile + kLanes];
  F32x16 total;  // sum of weights, by position mod 16
  float most;    // the largest score so far
  int64_t begin, end;  // keys it sees
};

inline float lane_exp(float x) {
  float y[kLanes];
  store(y, exp(splat(x)));
  return y[0];
}

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// Calls function(block, place, first, count, next) for the pieces of [begin, end) that lie in one block; next: the block
// after it, or the same again.
template <typename Function>
inline void by_blocks(const Attention& args, int64_t sequence, int64_t begin, int64_t end, Function function) {
  const int64_t* table = args.tables + sequence * args.table_stride;
  const int64_t size = args.cache.block_size;
  for (int64_t t = begin; t < end;) {
    const int64_t next = smaller(end, (t / size + 1) * size);
    function(table[t / size], t % size, t, next - t, table[(next < end ? next : t) / size]);
    t = next;
  }
}

// Scores of some queries with the keys [begin, end) of a tile, into `scores` from the tile's start on.
template <typename Stored, int kCount>
inline void score(const Attention& args, const AttentionTask& task, Query* queries, int64_t tile, int64_t begin,
                  int64_t end) {
  const Cache& cache = args.cache;
  const Stored* keys = static_cast<const Stored*>(cache.keys);
  by_blocks(args, task.sequence, begin, end, [&](int64_t block, int64_t place, int64_t first, int64_t count, int64_t next) {
    // Whole chunks, so that the first may begin before `begin`: what is read there is masked later.
    const int64_t before = place % cache.chunk;
    place -= before, first -= before, count += before;
    for (int64_t c = 0; c < count; c += cache.chunk) {
      const Stored* k = keys + key_offset(cache, task.kv_head, block, place + c);
      const Stored* after = keys + key_offset(cache, task.kv_head, next, 0);
      const int64_t at = first + c - tile;
      if (cache.chunk == kLanes) {
        F32x16 sums[kCount];
        unrolled<kCount>([&](auto r) { sums[r] = splat(0.0f); });
        for (int64_t d = 0; d < cache.dim; ++d) {
          __builtin_prefetch(after + d * kLanes);
          const F32x16 entries = load(k + d * kLanes);
          unrolled<kCount>([&](auto r) { sums[r] = fma(splat(queries[r].q[d]), entries, sums[r]); });
        }
        unrolled<kCount>([&](auto r) { store(queries[r].scores + at, sums[r]); });
      } else {
        for (int r = 0; r < kCount; ++r)
          for (int64_t i = 0; i < cache.chunk; ++i) {
            float s = 0.0f;
            for (int64_t d = 0; d < cache.dim; ++d) s = fmaf(queries[r].q[d], to_float(k[d * cache.chunk + i]), s);
            queries[r].scores[at + i] = s;
          }
      }
    }
  });
}

// Adds weight * value of the keys [begin, end) of a tile: a few keys at a time, whose values stay in a core's nearest
// cache while one part of the head after the other is added up.
template <typename Stored, int kCount>
inline void add_values(const Attention& args, const AttentionTask& task, Query* queries, int64_t tile, int64_t begin,
                       int64_t end) {
  const Cache& cache = args.cache;
  by_blocks(args, task.sequence, begin, end, [&](int64_t block, int64_t place, int64_t first, int64_t count, int64_t next) {
    const Stored* values =
        static_cast<const Stored*>(cache.values) + value_offset(cache, task.kv_head, block, place);
    const Stored* after = static_cast<const Stored*>(cache.values) + value_offset(cache, task.kv_head, next, 0);
    for (int64_t c = 0; c < count; c += kLanes, values += kLanes * cache.dim) {
      const int64_t keys = smaller(kLanes, count - c), at = first - tile + c;
      by_lanes(cache.dim, [&](int64_t d, int64_t lanes) {
        F32x16 sums[kCount];
        unrolled<kCount>([&](auto r) { sums[r] = load_some(queries[r].out + d, lanes); });
        for (int64_t i = 0; i < keys; ++i) {
          __builtin_prefetch(after + i * cache.dim + d);
          const F32x16 entries = load_some(values + i * cache.dim + d, lanes);
          unrolled<kCount>([&](auto r) { sums[r] = fma(splat(queries[r].scores[at + i]), entries, sums[r]); });
        }
        unrolled<kCount>([&](auto r) { store_some(queries[r].out + d, sums[r], lanes); });
      });
    }
  });
}

// Multiplies the tile's numbers by the scales of its keys or values [begin, end).
inline void apply_scales(const Attention& args, const AttentionTask& task, const void* scales, Query& query,
                         int64_t tile, int64_t begin, int64_t end) {
  const Cache& cache = args.cache;
  with_type(cache.scale_dtype, [&](auto type) {
    const auto* all = static_cast<const decltype(type)*>(scales) + task.kv_head * (cache.head_stride / cache.dim);
    by_blocks(args, task.sequence, begin, end, [&](int64_t block, int64_t place, int64_t first, int64_t count, int64_t) {
      for (int64_t i = 0; i < count; ++i)
        query.scores[first - tile + i] *= to_float(all[block * cache.block_size + place + i]);
    });
  });
}

// From scores to weights: the tile's own, against the largest score so far.
inline void weigh(const Attention& args, Query& query, int64_t tile) {
  float* scores = query.scores;
  if (args.softcap > 0.0f)
    for (int64_t i = 0; i < kTile; i += kLanes)
      store(scores + i, splat(args.softcap) * tanh(load(scores + i) / splat(args.softcap)));
  for (int64_t i = 0, n = smaller(kTile, query.begin - tile); i < n; ++i) scores[i] = -INFINITY;
  for (int64_t i = larger(0, query.end - tile); i < kTile; ++i) scores[i] = -INFINITY;
  F32x16 most = splat(query.most);
  for (int64_t i = 0; i < kTile; i += kLanes) most = max(load(scores + i), most);
  const float highest = largest(most);
  if (highest != query.most) {
    const F32x16 shrink = splat(lane_exp(query.most - highest));
    query.total = query.total * shrink;
    by_lanes(args.cache.dim, [&](int64_t d, int64_t) { store(query.out + d, load(query.out + d) * shrink); });
    query.most = highest;
  }
  // Where nothing is above -infinity yet, weights are zero, and those of NaN are NaN: a fault upstream is not hidden.
  const F32x16 base = splat(highest == -INFINITY ? 0.0f : highest);
  for (int64_t i = 0; i < kTile; i += kLanes) {
    const F32x16 weights = exp(load(scores + i) - base);
    query.total = query.total + weights;
    store(scores + i, weights);
  }
}

// Some queries over the keys of one part, from scratch.
template <typename Stored, int kCount>
void attend(const Attention& args, const AttentionTask& task, Query* queries, int64_t part) {
  int64_t begin = INT64_MAX, end = 0;
  for (int r = 0; r < kCount; ++r) {
    Query& query = queries[r];
    query.most = -INFINITY;
    query.total = splat(0.0f);
    memset(query.out, 0, args.cache.dim * sizeof(float));
    begin = smaller(begin, query.begin);
    end = larger(end, query.end);
  }
  begin = larger(begin, part * kPart);
  end = smaller(end, (part + 1) * kPart);
  const bool coded = args.cache.dtype == DType::i8;
  for (int64_t tile = begin / kTile * kTile; tile < end; tile += kTile) {
    const int64_t from = larger(begin, tile), to = smaller(end, tile + kTile);
    score<Stored, kCount>(args, task, queries, tile, from, to);
    for (int r = 0; r < kCount; ++r) {
      if (coded) apply_scales(args, task, args.cache.key_scales, queries[r], tile, from, to);
      weigh(args, queries[r], tile);
      if (coded) apply_scales(args, task, args.cache.value_scales, queries[r], tile, from, to);
    }
    add_values<Stored, kCount>(args, task, queries, tile, from, to);
  }
}

// What a query has found in some keys: like its fields.
struct Found {
  const float* out;
  float most, total;
};

// Puts what was found in the next part to what is there.
inline void merge(Found next, int64_t dim, float* out, float& most, float& total) {
  if (next.most == -INFINITY && next.total == 0.0f) return;  // it saw nothing there
  const float highest = next.most > most ? next.most : most;
  const float shrink = lane_exp(most - highest), shrink_next = lane_exp(next.most - highest);
  for (int64_t d = 0; d < dim; ++d) out[d] = out[d] * shrink + next.out[d] * shrink_next;
  total = total * shrink + next.total * shrink_next;
  most = highest;
}

inline void finish_query(const Attention& args, const AttentionTask& task, int64_t row, const float* out, float most,
                         float total) {
  const int64_t group = args.heads / args.cache.heads, dim = args.cache.dim;
  const int64_t head = task.kv_head * group + row % group;
  float shrink = 1.0f;
  if (args.sinks) {
    const float highest = args.sinks[head] > most ? args.sinks[head] : most;
    shrink = lane_exp(most - highest);
    total = total * shrink + lane_exp(args.sinks[head] - highest);
  }
  with_type(args.dtype, [&](auto type) {
    auto* y = static_cast<decltype(type)*>(args.out) + ((task.token + row / group) * args.heads + head) * dim;
    by_lanes(dim, [&](int64_t d, int64_t n) {
      store_some(y + d, load_some(out + d, n) * splat(shrink) / splat(total), n);
    });
  });
}

template <int kCount>
void attend_rows(const Attention& args, const AttentionTask& task, int64_t first_row) {
  const int64_t group = args.heads / args.cache.heads, dim = args.cache.dim;
  Query queries[kCount];
  for (int r = 0; r < kCount; ++r) {
    const int64_t row = first_row + r, token = row / group;
    Query& query = queries[r];
    memset(query.scores, 0, sizeof query.scores);
    query.end = task.position + token + 1;
    query.begin = args.window ? larger(0, query.end - args.window) : 0;
    with_type(args.dtype, [&](auto type) {
      const auto* q = static_cast<const decltype(type)*>(args.query) + (task.token + token) * args.token_stride +
                      (task.kv_head * group + row % group) * dim;
      by_lanes(dim, [&](int64_t d, int64_t n) {
        store(query.q + d, load_some(q + d, n) * splat(args.scale));
      });
    });
  }
  float out[kCount][kMaxDim], most[kCount] = {}, total[kCount] = {};
  for (int64_t part = task.first_part; part < task.last_part; ++part) {
    switch (args.cache.dtype) {
      case DType::f32: attend<float, kCount>(args, task, queries, part); break;
      case DType::bf16: attend<Bf16, kCount>(args, task, queries, part); break;
      case DType::f16: attend<F16, kCount>(args, task, queries, part); break;
      case DType::i8: attend<int8_t, kCount>(args, task, queries, part); break;
    }
    for (int r = 0; r < kCount; ++r) {
      const Found found = {queries[r].out, queries[r].most, sum(queries[r].total)};
      if (task.partial) {
        float* p = task.partial + (first_row + r) * task.partial_stride + (part - task.first_part) * (dim + 2);
        memcpy(p, found.out, dim * sizeof(float));
        p[dim] = found.most;
        p[dim + 1] = found.total;
      } else if (part == task.first_part) {
        memcpy(out[r], found.out, dim * sizeof(float));
        most[r] = found.most;
        total[r] = found.total;
      } else {
        merge(found, dim, out[r], most[r], total[r]);
      }
    }
  }
  if (!task.partial)
    for (int r = 0; r < kCount; ++r) finish_query(args, task, first_row + r, out[r], most[r], total[r]);
}

void attention(const Attention& args, const AttentionTask& task) {
  const int64_t rows = task.tokens * (args.heads / args.cache.heads);
  int64_t row = 0;
  for (; row + kQueries <= rows; row += kQueries) attend_rows<kQueries>(args, task, row);
  switch (rows - row) {
    case 3: return attend_rows<3>(args, task, row);
    case 2: return attend_rows<2>(args, task, row);
    case 1: return attend_rows<1>(args, task, row);
  }
}

// Puts the parts of a task's queries together; `partial` and the parts are those of all its pieces.
void merge_attention(const Attention& args, const AttentionTask& task) {
  const int64_t rows = task.tokens * (args.heads / args.cache.heads), dim = args.cache.dim;
  const int64_t parts = task.last_part - task.first_part;
  for (int64_t row = 0; row < rows; ++row) {
    float* first = task.partial + row * task.partial_stride;
    for (int64_t part = 1; part < parts; ++part) {
      const float* p = first + part * (dim + 2);
      merge({p, p[dim], p[dim + 1]}, dim, first, first[dim], first[dim + 1]);
    }
    finish_query(args, task, row, first, first[dim], first[dim + 1]);
  }
}

}  // namespace
}  // namespace headrace::HEADRACE_ISA
