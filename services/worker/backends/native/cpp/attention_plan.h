// What attention is computed over, and how a step's attention is cut into tasks.

#pragma once

#include <cstdint>
#include <vector>

#include "vector.h"

namespace stepwell {

struct AttentionLayer {
  int num_heads;
  int num_kv_heads;
  int head_dim;
  float scale;
  int window;     // 0 for none.
  float softcap;  // 0 for none.
};

inline bool operator==(const AttentionLayer& a, const AttentionLayer& b) {
  return a.num_heads == b.num_heads && a.num_kv_heads == b.num_kv_heads &&
         a.head_dim == b.head_dim && a.scale == b.scale && a.window == b.window &&
         a.softcap == b.softcap;
}

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
  int context(int request) const { return seq_lens[request] - new_tokens(request); }
  const std::int32_t* blocks(int request) const { return tables + rows[request] * table_width; }
};

// Consecutive queries of a request with all query heads that share a key head, over a part of the
// request's context or all of it. Mostly of one key head; of `heads` from `kv_head` on.
struct AttentionTask {
  int request;
  int kv_head;
  int heads;
  int first;  // Counted from the request's first new token.
  int count;
  int key_begin;
  int key_end;
  std::int64_t partial;  // Where in `partial_sums` its sums go; -1 if it covers its whole context.
};

// The parts of one context, whose sums lie one after the other from `task.partial` on.
struct PartMerge {
  AttentionTask task;
  int parts;
};

// Keys of a part of a context.
constexpr int PART_KEYS = 512;

// How a step's attention is cut, for all layers of a KV-cache group that attend alike.
struct AttentionPlan {
  AttentionPlan(const AttentionLayer& layer, const Layout& layout, int block_size, int threads);

  AttentionLayer layer;
  Layout layout;
  int group;                        // Query heads of a key head.
  int padded_dim;                   // The head's size, rounded up to whole panels.
  bool stores_keys_first;           // Whether all keys must be stored before any task begins.
  std::vector<std::int64_t> slots;  // Of each token: block * block_size + its index in the block.
  std::vector<AttentionTask> tasks;
  std::vector<PartMerge> merges;
  std::vector<float> partial_sums;

  // Floats of the sums of so many rows: weighted values, sums of weights lane by lane, maxima.
  std::int64_t sums_size(int rows) const { return std::int64_t{rows} * (padded_dim + LANES + 1); }
};

// The work of a step's attention, in the unit of threads.h.
double attention_work(const AttentionLayer& layer, const Layout& layout);

}  // namespace stepwell
