// Attention of a step over one layer's pages.

#pragma once

#include <atomic>
#include <cstdint>

#include "attention_plan.h"
#include "threads.h"

namespace stepwell {

// Queries, keys and values of a step's tokens, in rows `stride` elements apart, and the cosines and
// sines of the tokens' angles, [tokens, half]. half 0: nothing is rotated.
template <class T>
struct Heads {
  const T* query;
  const T* key;
  const T* value;
  std::int64_t query_stride;
  std::int64_t key_stride;
  std::int64_t value_stride;
  const T* cos;
  const T* sin;
  int half;
};

// One layer's part of the KV cache. Pages of values are [num_blocks, block_size, num_kv_heads,
// head_dim]; for those of keys see key_block.h.
template <class T>
struct Pages {
  T* keys;
  T* values;
  int block_size;
};

// Stores the step's rotated keys and its values, then attends; output [tokens, num_heads *
// head_dim]. Every thread of the team calls it. `next`, 0 at first, is the counter from which the
// team takes its tasks. The team must pass a barrier before it begins another layer.
template <class T>
void attend(AttentionPlan& plan, const Heads<T>& heads, const Pages<T>& pages, T* output,
            std::atomic<int>& next, Team team);

}  // namespace stepwell
