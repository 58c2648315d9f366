// How a step's attention is cut into tasks.
//
// Where many requests decode, a task takes all key heads, since those of a token lie together. A
// context consists of parts, whose sums are joined in order (Flash-Decoding). Parts begin at multiples
// of PART_KEYS, whether one task goes through all of them or, where there are fewer tasks than threads,
// each is a task: what comes out is the same.

#include <algorithm>

#include "kernels.h"
#include "packed_keys.h"

namespace {

constexpr int TASK_ROWS = 96;     // Most rows of a task: queries times query heads per key head.

// Adds a task to a plan; if it `splits`, one for each part of its context.
void add(AttentionPlan& plan, AttentionTask task, bool splits) {
  const int begin = task.key_begin, end = task.key_end;
  const int first = begin / PART_KEYS, parts = (end - 1) / PART_KEYS + 1 - first;
  if (!splits || parts == 1) {
    plan.tasks.push_back(task);
    return;
  }
  const std::int64_t size = plan.sums_size(task.count * plan.group);
  const std::int64_t partial = plan.partial.size();
  plan.partial.resize(partial + parts * size);
  for (int i = 0; i < parts; ++i) {
    task.key_begin = std::max(begin, (first + i) * PART_KEYS);
    task.key_end = std::min(end, (first + i + 1) * PART_KEYS);
    task.partial = partial + i * size;
    if (i == 0) plan.joins.push_back({task, parts});
    plan.tasks.push_back(task);
  }
}

}  // namespace

// Chunks, which come last in a layout, are begun first: their tasks are the longest.
AttentionPlan::AttentionPlan(const AttentionLayer& layer, const Layout& layout, int block_size,
                             int threads)
    : layer(layer),
      layout(layout),
      group(layer.num_heads / layer.num_kv_heads),
      padded_dim(round_up(layer.head_dim, WIDTH)),
      stores_first(false) {
  const int queries = std::max(TASK_ROWS / group, 1);
  std::int64_t whole = 0;
  for (int r = 0; r < layout.num_requests; ++r) {
    whole += (layout.new_tokens(r) + queries - 1) / queries * layer.num_kv_heads;
  }
  const bool splits = threads > 1 && whole < 2 * threads;
  const int decode_heads = layout.num_requests >= 4 * threads ? layer.num_kv_heads : 1;
  for (int r = layout.num_requests - 1; r >= 0; --r) {
    const int count = layout.new_tokens(r), context = layout.context(r);
    for (int last = count; last > 0; last -= queries) {
      const int first = std::max(last - queries, 0);
      const int begin = layer.window > 0 ? std::max(context + first - layer.window + 1, 0) : 0;
      const int end = context + last;
      const int heads = count == 1 ? decode_heads : 1;
      for (int h = 0; h < layer.num_kv_heads; h += heads) {
        add(*this, {r, h, heads, first, last - first, begin, end, -1}, splits);
      }
      stores_first |= count > 1 || !joins.empty();
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

double attention_work(const AttentionLayer& layer, const Layout& layout) {
  double pairs = 0;
  for (int r = 0; r < layout.num_requests; ++r) {
    pairs += double(layout.new_tokens(r)) * double(layout.seq_lens[r]);
  }
  const double group = double(layer.num_heads) / layer.num_kv_heads;
  return pairs * layer.num_kv_heads * layer.head_dim * std::max(2.0, group / 4);
}

