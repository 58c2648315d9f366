// Attention of a step over one layer's pages: single tokens and chunks alike.
//
// First every token's key is rotated and stored with its value. Then the tasks are computed in
// parallel. A task is some consecutive queries of one request with all query heads that share a key
// head, so that its keys and values are read once for all of them. It goes through its keys in
// blocks and keeps the running sums of softmax_sums.h. Scores and sums are float32; weights are
// rounded to the cache's type before they are multiplied with the values. A single query reads keys
// and values straight from the pages; for a chunk they are packed first.
//
// A row's output is a function of its position alone, bit for bit: blocks and parts begin at
// multiples of their sizes; a row takes the blocks in which it sees a key, adds products in order
// of depth and values in order of position, and merges its parts in order; keys that it does not
// see weigh zero. The other rows of the task, the size of the chunk and the number of threads
// decide only which thread computes it and when.
//
// Keys and values beyond a sequence's end, or before its window, are masked, whatever they are.

#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>

#include "attention_plan.h"
#include "heads.h"
#include "packed_keys.h"
#include "scratch.h"
#include "single_query.h"
#include "softmax_sums.h"
#include "threads.h"
#include "vector_math.h"

namespace stepwell {

namespace {  // Internal, so that functions with one caller are inlined.

// Most query heads of a key head for which one token's keys are read unpacked.
constexpr int MAX_UNPACKED_HEADS = 8;

template <class T>
class Attention {
 public:
  Attention(AttentionPlan& plan, const Heads<T>& heads, const Pages<T>& pages, T* output)
      : layer_(plan.layer),
        layout_(plan.layout),
        heads_(heads),
        pages_(pages),
        output_(output),
        group_(plan.group),
        padded_dim_(plan.padded_dim),
        scale_((plan.layer.softcap > 0 ? plan.layer.softcap : plan.layer.scale) * LOG2_E),
        token_stride_(std::int64_t{plan.layer.num_kv_heads} * plan.layer.head_dim),
        has_panels_(has_panels(pages.block_size)),
        plan_(plan) {}

  void run(std::atomic<int>& next, Team team) {
    if (plan_.stores_keys_first) {
      const Range own = team.part(layout_.num_tokens());
      for (std::int64_t token = own.begin; token < own.end; ++token) {
        for (int head = 0; head < layer_.num_kv_heads; ++head) store_token(token, head);
      }
      team.wait();
    }
    const int count = int(plan_.tasks.size());
    for (int i = next.fetch_add(1); i < count;) {
      // The thread takes its following task before it begins a short one, so that the right keys
      // are prefetched, as long as enough tasks remain for the other threads. Otherwise it guesses.
      const bool is_taken = plan_.tasks[i].count == 1 && i + 2 * team.size < count;
      const int following = is_taken ? next.fetch_add(1) : i + team.size;
      run_task(plan_.tasks[i], following < count ? &plan_.tasks[following] : nullptr);
      i = is_taken ? following : next.fetch_add(1);
    }
    if (plan_.merges.empty()) return;
    team.wait();
    const Range own = team.part(plan_.merges.size());
    for (std::int64_t i = own.begin; i < own.end; ++i) merge_parts(plan_.merges[i]);
  }

 private:
  void store_token(std::int64_t token, int head) const {
    store_in_pages(heads_, layer_, token, head, plan_.slots[token], pages_);
  }

  // The rows of one key head: for each query the query heads of its group, rotated and padded with
  // zeros.
  void rotate_queries(const AttentionTask& task, int kv_head, T* query) const {
    const int dim = layer_.head_dim;
    const std::int64_t begin = layout_.query_starts[task.request] + task.first;
    for (int row = 0; row < task.count * group_; ++row, query += padded_dim_) {
      const std::int64_t token = begin + row / group_;
      const T* head = heads_.query + token * heads_.query_stride;
      heads_.rotate(head + (kv_head * group_ + row % group_) * dim, token, dim, query);
      std::fill(query + dim, query + padded_dim_, T{});
    }
  }

  // The block of the task's keys that begins at position `begin`.
  void locate(const AttentionTask& task, int begin, KeyBlock& block) const {
    locate_block(layout_.blocks(task.request), pages_.block_size, token_stride_, begin,
                 task.key_begin, task.key_end, block);
  }

  // `following`: probably the thread's next task, whose first block is prefetched; may be null.
  void run_task(const AttentionTask& task, const AttentionTask* following) {
    const int rows = task.count * group_, all = task.heads * rows;
    const std::int64_t size = plan_.sums_size(all);
    Scratch& scratch = Scratch::own();
    scratch.reserve((all * padded_dim_ + rows * BLOCK_KEYS + BLOCK_KEYS * padded_dim_) * sizeof(T) +
                    (rows * BLOCK_KEYS + 2 * size) * sizeof(float) + 1024);
    T* query = scratch.take<T>(all * padded_dim_);
    T* weights = scratch.take<T>(rows * BLOCK_KEYS);
    T* packed = scratch.take<T>(BLOCK_KEYS * padded_dim_);
    float* scores = scratch.take<float>(rows * BLOCK_KEYS);
    const bool is_part = task.partial >= 0;
    const SoftmaxSums sums(
        is_part ? plan_.partial_sums.data() + task.partial : scratch.take<float>(size), all,
        padded_dim_);
    const SoftmaxSums part_sums(scratch.take<float>(size), all, padded_dim_);

    for (int h = 0; h < task.heads; ++h) {
      if (!plan_.stores_keys_first)
        store_token(layout_.query_starts[task.request], task.kv_head + h);
      rotate_queries(task, task.kv_head + h, query + h * rows * padded_dim_);
    }
    sums.clear(all);
    if (located_ != &task) locate(task, first_block(task), block_);
    for (int begin = first_block(task); begin < task.key_end;) {
      const bool is_first = begin <= task.key_begin;
      const int end = std::min(round_down(begin, PART_KEYS) + PART_KEYS, task.key_end);
      const SoftmaxSums& own = is_first ? sums : part_sums;
      if (!is_first) own.clear(all);
      for (; begin < end; begin += BLOCK_KEYS) {
        locate_next_block(task, begin + BLOCK_KEYS, following);
        attend_block(task, query, weights, packed, scores, own);
        std::swap(block_, next_block_);
      }
      if (!is_first) merge(sums, own, all);
    }
    located_ = following;
    if (is_part) return;
    for (int h = 0; h < task.heads; ++h)
      write_rows(task, task.kv_head + h, rows, sums.from(h * rows));
  }

  static int first_block(const AttentionTask& task) {
    return round_down(task.key_begin, BLOCK_KEYS);
  }

  // Adds the block's keys that the task's rows see to their sums.
  void attend_block(const AttentionTask& task, const T* query, T* weights, T* packed, float* scores,
                    const SoftmaxSums& sums) const {
    const int rows = task.count * group_, dim = layer_.head_dim;
    const bool is_single = task.count == 1 && group_ <= MAX_UNPACKED_HEADS;
    const Range seeing = rows_that_see(task, rows);
    const int first = int(seeing.begin), count = int(seeing.end - seeing.begin);
    for (int h = 0; h < task.heads; ++h) {
      const int head = task.kv_head + h;
      const T* own = query + h * rows * padded_dim_;
      const TokenRows<T> values{pages_.values + head * dim, block_, next_block_};
      const SoftmaxSums to = sums.from(h * rows + first);
      if (is_single) {
        score_queries(own, padded_dim_, group_, panels_of(head, packed), block_.num_panels(), dim,
                      scores);
      } else {
        pack_keys(head, packed);
        score_rows(own + first * padded_dim_, padded_dim_, packed, count, dim, scores);
      }
      softmax_block(task, seeing, scores, weights, to);
      if (is_single) {
        add_weighted_values(weights, group_, values, dim, to.values, padded_dim_);
      } else {
        values.prefetch_rest(0, dim);
        pack_values(values, dim, packed);
        add_rows(weights, packed, block_.end, count, dim, to.values, padded_dim_);
      }
    }
  }

  // Packs one head's keys of the block.
  void pack_keys(int head, T* packed) const {
    const int dim = layer_.head_dim;
    if (has_panels_) {
      const T* keys = pages_.keys + head * dim * LANES;
      pack_panels(panels_in_pages(keys, block_, next_block_), block_.num_panels(), dim, packed);
    } else {
      const TokenRows<T> keys{pages_.keys + head * dim, block_, next_block_};
      keys.prefetch_rest(0, dim);
      pack_token_rows(keys, dim, packed);
    }
  }

  // The rows whose queries see a key of the block.
  Range rows_that_see(const AttentionTask& task, int rows) const {
    const int position = layout_.context(task.request) + task.first;
    const int first = (block_.begin - position) * group_;
    const int end = block_.begin + block_.end + layer_.window - 1 - position;
    return {std::max(first, 0), layer_.window > 0 ? std::min(end * group_, rows) : rows};
  }

  // The block that begins at `begin`, or, if the task ends before, the first of the following task.
  void locate_next_block(const AttentionTask& task, int begin, const AttentionTask* following) {
    if (begin < task.key_end) {
      locate(task, begin, next_block_);
    } else if (following != nullptr) {
      locate(*following, first_block(*following), next_block_);
    } else {
      next_block_ = KeyBlock{};
    }
  }

  // A head's keys of the block as panels: those in the pages, or, if the pages have none, packed
  // ones.
  KeyPanels<T> panels_of(int head, T* packed) const {
    const int dim = layer_.head_dim;
    if (has_panels_) return panels_in_pages(pages_.keys + head * dim * LANES, block_, next_block_);
    pack_keys(head, packed);
    return packed_panels(packed, dim);
  }

  // Turns the scores of a block into weights, adds the weights to their sums, and scales the
  // earlier sums to the new maximum. `seeing`: the task's rows that see the block, to which the
  // other arguments belong.
  void softmax_block(const AttentionTask& task, Range seeing, const float* scores, T* weights,
                     const SoftmaxSums& sums) const {
    const int begin = block_.begin, count = block_.end;
    float* maxima = sums.maxima;
    const int context = layout_.context(task.request) + task.first;
    for (int row = 0; row < int(seeing.end - seeing.begin); ++row) {
      const int position = context + int(seeing.begin + row) / group_;
      const int last = std::min(count, position + 1 - begin);
      const int first = layer_.window > 0 ? std::max(position + 1 - layer_.window - begin, 0) : 0;
      const float* line = scores + row * BLOCK_KEYS;
      Vector values[BLOCK_KEYS / LANES];
      Vector highest = splat(LOWEST);
      for (int v = 0; v < BLOCK_KEYS / LANES; ++v) {
        values[v] = scaled_scores(load(line + v * LANES));
        if (v * LANES < first || (v + 1) * LANES > last) {
          values[v] = keep_lanes(values[v], first - v * LANES, last - v * LANES, LOWEST);
        }
        highest = larger(values[v], highest);
      }
      const float maximum = std::max(maxima[row], largest(highest));
      if (maximum == LOWEST) {
        std::memset(weights + row * BLOCK_KEYS, 0, BLOCK_KEYS * sizeof(T));
        continue;
      }
      Vector added = {};
      for (int v = 0; v < BLOCK_KEYS / LANES; ++v) {
        const Vector weight = power_of_two(values[v] - maximum);
        added += weight;
        store(weights + row * BLOCK_KEYS + v * LANES, weight);
      }
      float* weight_sums = sums.weights + row * LANES;
      if (maximum > maxima[row]) {
        const float factor = std::exp2(maxima[row] - maximum);
        for (int d = 0; d < padded_dim_; d += LANES) {
          float* target = sums.values + row * padded_dim_ + d;
          store(target, load(target) * factor);
        }
        store(weight_sums, load(weight_sums) * factor);
        maxima[row] = maximum;
      }
      store(weight_sums, load(weight_sums) + added);
    }
  }

  // Scaled to base 2, and capped if the layer caps its scores.
  Vector scaled_scores(Vector scores) const {
    if (layer_.softcap > 0) {
      return hyperbolic_tangent(scores * (layer_.scale / layer_.softcap)) * scale_;
    }
    return scores * scale_;
  }

  // Merges the sums of the parts of one context into those of the first, and writes the rows.
  void merge_parts(const PartMerge& parts) {
    const int rows = parts.task.count * group_;
    float* memory = plan_.partial_sums.data() + parts.task.partial;
    const SoftmaxSums sums(memory, rows, padded_dim_);
    for (int i = 1; i < parts.parts; ++i) {
      merge(sums, SoftmaxSums(memory + i * plan_.sums_size(rows), rows, padded_dim_), rows);
    }
    write_rows(parts.task, parts.task.kv_head, rows, sums);
  }

  // Writes the output of one key head's rows: their weighted values over their sums of weights.
  void write_rows(const AttentionTask& task, int kv_head, int rows, const SoftmaxSums& sums) const {
    const int dim = layer_.head_dim;
    const std::int64_t begin = layout_.query_starts[task.request] + task.first;
    for (int row = 0; row < rows; ++row) {
      const std::int64_t token = begin + row / group_;
      const std::int64_t head = std::int64_t{kv_head} * group_ + row % group_;
      T* target = output_ + (token * layer_.num_heads + head) * dim;
      const float scale = 1.0f / sum(load(sums.weights + row * LANES));
      for (int d = 0; d < dim; d += LANES) {
        const Vector value = load(sums.values + row * padded_dim_ + d) * scale;
        store_partial(target + d, value, dim - d);
      }
    }
  }

  const AttentionLayer& layer_;
  const Layout& layout_;
  const Heads<T>& heads_;
  const Pages<T>& pages_;
  T* output_;
  int group_;
  int padded_dim_;
  float scale_;  // Of scores, or of capped scores, to base 2.
  std::int64_t token_stride_;
  bool has_panels_;
  AttentionPlan& plan_;
  KeyBlock block_;
  KeyBlock next_block_;
  const AttentionTask* located_ = nullptr;  // The task whose first block is in `block_` already.
};

}  // namespace

// Stores the step's rotated keys and its values, then attends; output [tokens, num_heads *
// head_dim]. Every thread of the team calls it. `next`, 0 at first, is the counter from which the
// team takes its tasks. The team must pass a barrier before it begins another layer.
template <class T>
[[gnu::noinline]] void attend(AttentionPlan& plan, const Heads<T>& heads, const Pages<T>& pages,
                              T* output, std::atomic<int>& next, Team team) {
  Attention<T>(plan, heads, pages, output).run(next, team);
}

}  // namespace stepwell
