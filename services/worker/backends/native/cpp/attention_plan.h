// The inputs of attention, and the division of a step's attention into tasks.
//
// If many requests decode, a task has all key heads of a request, because the keys of a token are
// adjacent in memory. The keys that a query attends to are its context. A context consists of parts
// of PART_KEYS keys, whose sums are merged in order (Flash-Decoding). If there are fewer than two
// tasks for each thread, each part is a task. Otherwise one task computes all parts of a context.
// The output is the same in both cases.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "panel.h"
#include "rounding.h"

namespace stepwell {

struct AttentionLayer {
  int num_heads;
  int num_kv_heads;
  int head_dim;
  float scale;
  int window;     // 0 for none.
  float softcap;  // 0 for none.

  bool operator==(const AttentionLayer&) const = default;
};

// The requests of a step and their block tables; see StepLayout in backends/attention.py.
struct Layout {
  int num_requests;
  const std::int32_t* query_starts;
  const std::int32_t* seq_lens;
  const std::int32_t* rows;
  const std::int32_t* tables;
  std::int64_t table_width;

  std::int64_t num_tokens() const { return query_starts[num_requests]; }
  int new_tokens(int request) const { return query_starts[request + 1] - query_starts[request]; }
  // The number of tokens before the step.
  int context(int request) const { return seq_lens[request] - new_tokens(request); }
  const std::int32_t* blocks(int request) const { return tables + rows[request] * table_width; }
};

// Consecutive queries of a request with all query heads that share a key head, over the request's
// context or one part of it. A task has `heads` key heads from `kv_head` on, mostly one.
struct AttentionTask {
  int request;
  int kv_head;
  int heads;
  int first;  // The first query, counted from the request's first new token.
  int count;
  int key_begin;
  int key_end;
  std::int64_t partial;  // Index of the task's sums in `partial_sums`; -1 for a whole context.
};

// The parts of one context. Their sums are stored one after the other, from `task.partial` on.
struct PartMerge {
  AttentionTask task;
  int parts;
};

// Number of keys in a part of a context.
constexpr int PART_KEYS = 512;

// The tasks of a step, for all layers of a KV-cache group with equal attention parameters.
struct AttentionPlan {
  AttentionPlan(const AttentionLayer& layer, const Layout& layout, int block_size, int threads);

  AttentionLayer layer;
  Layout layout;
  int group;                        // Query heads per key head.
  int padded_dim;                   // The head's size, rounded up to whole panels.
  bool stores_keys_first;           // Whether all keys must be stored before any task begins.
  std::vector<std::int64_t> slots;  // By token: block * block_size + index in the block.
  std::vector<AttentionTask> tasks;
  std::vector<PartMerge> merges;
  std::vector<float> partial_sums;

  // Number of floats for the sums of `rows` rows: weighted values, sums of weights by lane, maxima.
  std::int64_t sums_size(int rows) const { return std::int64_t{rows} * (padded_dim + LANES + 1); }
};

constexpr int TASK_ROWS = 96;  // Maximum rows of a task: queries times query heads per key head.

// Adds a task to a plan, or, if `is_split`, a task for each part of its context.
inline void add_task(AttentionPlan& plan, AttentionTask task, bool is_split) {
  const int begin = task.key_begin, end = task.key_end;
  const int first = begin / PART_KEYS, parts = divide_up(end, PART_KEYS) - first;
  if (!is_split || parts == 1) {
    plan.tasks.push_back(task);
    return;
  }
  const std::int64_t size = plan.sums_size(task.count * plan.group);
  const std::int64_t partial = plan.partial_sums.size();
  plan.partial_sums.resize(partial + parts * size);
  for (int i = 0; i < parts; ++i) {
    task.key_begin = std::max(begin, (first + i) * PART_KEYS);
    task.key_end = std::min(end, (first + i + 1) * PART_KEYS);
    task.partial = partial + i * size;
    if (i == 0) plan.merges.push_back({task, parts});
    plan.tasks.push_back(task);
  }
}

// Creates a plan. Chunks are last in a layout, but their tasks are first, because they take
// longest.
inline AttentionPlan::AttentionPlan(const AttentionLayer& layer, const Layout& layout,
                                    int block_size, int threads)
    : layer(layer),
      layout(layout),
      group(layer.num_heads / layer.num_kv_heads),
      padded_dim(round_up(layer.head_dim, PANEL_WIDTH)),
      stores_keys_first(false) {
  const int queries = std::max(TASK_ROWS / group, 1);
  std::int64_t num_tasks = 0;  // Number of tasks if no context is split.
  for (int r = 0; r < layout.num_requests; ++r) {
    num_tasks += divide_up(layout.new_tokens(r), queries) * layer.num_kv_heads;
  }
  const bool is_split = threads > 1 && num_tasks < 2 * threads;
  const int decode_heads = layout.num_requests >= 4 * threads ? layer.num_kv_heads : 1;
  for (int r = layout.num_requests - 1; r >= 0; --r) {
    const int count = layout.new_tokens(r), context = layout.context(r);
    for (int last = count; last > 0; last -= queries) {
      const int first = std::max(last - queries, 0);
      const int begin = layer.window > 0 ? std::max(context + first - layer.window + 1, 0) : 0;
      const int end = context + last;
      const int heads = count == 1 ? decode_heads : 1;
      for (int h = 0; h < layer.num_kv_heads; h += heads) {
        add_task(*this, {r, h, heads, first, last - first, begin, end, -1}, is_split);
      }
      stores_keys_first |= count > 1 || !merges.empty();
    }
  }
  slots.reserve(layout.num_tokens());
  for (int r = 0; r < layout.num_requests; ++r) {
    for (int position = layout.context(r); position < layout.seq_lens[r]; ++position) {
      const std::int64_t block = layout.blocks(r)[position / block_size];
      slots.push_back(block * block_size + position % block_size);
    }
  }
}

// The amount of work of a step's attention, in the unit of PARALLEL_WORK.
inline double attention_work(const AttentionLayer& layer, const Layout& layout) {
  double pairs = 0;
  for (int r = 0; r < layout.num_requests; ++r) {
    pairs += double(layout.new_tokens(r)) * double(layout.seq_lens[r]);
  }
  const double group = double(layer.num_heads) / layer.num_kv_heads;
  return pairs * layer.num_kv_heads * layer.head_dim * std::max(2.0, group / 4);
}

}  // namespace stepwell
