// Attention of a step over one layer's pages, for decodes and chunks.
//
// First every token's key is rotated and stored with its value. Then tasks are computed in
// parallel. A task is several consecutive queries of one request with all query heads that share a
// key head, so that keys and values are read once for all these queries. It processes keys in
// blocks, and updates the running sums of softmax_sums.h. Scores and sums are float32.
// plain_products.h and code_products.h define the layout of keys and values in the cache, and the
// products.
//
// A row is one head of one query. Its output depends only on its position, bit for bit, because
// blocks of keys, and parts of a context (attention_plan.h), begin at multiples of their sizes. A
// row uses the blocks in which it attends to a key. It adds products in order of depth and values
// in order of position, and merges parts in order. Keys that it does not attend to have weight
// zero. The other rows of the task, the size of the chunk and the number of threads only determine
// which thread computes the row, and when.
//
// Keys and values beyond a sequence's end, or before its window, are masked, whatever their values.

#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>

#include "attention_plan.h"
#include "code_products.h"
#include "heads.h"
#include "plain_products.h"
#include "scratch.h"
#include "softmax_sums.h"
#include "threads.h"
#include "vector_math.h"

namespace stepwell {

namespace {  // Internal, so that functions with one caller are inlined.

// `Products`: PlainProducts<T> or CodeProducts<T>.
template <class T, class Products>
class Attention {
 public:
  Attention(AttentionPlan& plan, const Heads<T>& heads, const Pages& pages, T* output)
      : layer_(plan.layer),
        layout_(plan.layout),
        heads_(heads),
        output_(output),
        group_(plan.group),
        padded_dim_(plan.padded_dim),
        block_size_(pages.block_size),
        scale_((plan.layer.softcap > 0 ? plan.layer.softcap : plan.layer.scale) * LOG2_E),
        products_(plan, pages),
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
      // A thread reserves its next task before it begins a task of one query, so that it prefetches
      // the keys of the right task. If too few tasks remain for the other threads, it does not
      // reserve one, and prefetches for the task that it will probably get.
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
  void store_token(std::int64_t token, int head) {
    const int dim = layer_.head_dim;
    const T* key = heads_.key + token * heads_.key_stride + head * dim;
    const T* value = heads_.value + token * heads_.value_stride + head * dim;
    products_.store(heads_.rotated(key, token, dim), value, head, plan_.slots[token]);
  }

  // Sets the rows of one key head, which begin at row `first`: for each query, the rotated query
  // heads that share the key head.
  void set_queries(const AttentionTask& task, int kv_head, int first) {
    const int dim = layer_.head_dim;
    const std::int64_t begin = layout_.query_starts[task.request] + task.first;
    for (int row = 0; row < task.count * group_; ++row) {
      const std::int64_t token = begin + row / group_;
      const T* head = heads_.query + token * heads_.query_stride;
      head += (kv_head * group_ + row % group_) * dim;
      products_.set_query(first + row, heads_.rotated(head, token, dim));
    }
  }

  // Locates the block of the task's keys that begins at position `begin`.
  void locate(const AttentionTask& task, int begin, KeyBlock& block) const {
    locate_block(layout_.blocks(task.request), block_size_, products_.token_stride(), begin,
                 task.key_begin, task.key_end, block);
  }

  // `following`: the thread's probable next task, whose first block is prefetched; may be null.
  void run_task(const AttentionTask& task, const AttentionTask* following) {
    const int rows = task.count * group_, all = task.heads * rows;
    const std::int64_t size = plan_.sums_size(all);
    Scratch& scratch = Scratch::own();
    scratch.reserve(products_.bytes(all, rows) + 2 * size * sizeof(float) + 256);
    products_.take(scratch, all, rows);
    const bool is_part = task.partial >= 0;
    const SoftmaxSums sums(
        is_part ? plan_.partial_sums.data() + task.partial : scratch.take<float>(size), all,
        padded_dim_);
    const SoftmaxSums part_sums(scratch.take<float>(size), all, padded_dim_);

    for (int h = 0; h < task.heads; ++h) {
      if (!plan_.stores_keys_first)
        store_token(layout_.query_starts[task.request], task.kv_head + h);
      set_queries(task, task.kv_head + h, h * rows);
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
        attend_block(task, own);
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

  // Adds the block's keys to the sums of the task's rows that attend to them.
  void attend_block(const AttentionTask& task, const SoftmaxSums& sums) {
    const int rows = task.count * group_;
    const Range seeing = rows_that_see(task, rows);
    const int first = int(seeing.begin), count = int(seeing.end - seeing.begin);
    for (int h = 0; h < task.heads; ++h) {
      const SoftmaxSums to = sums.from(h * rows + first);
      products_.score({task.kv_head + h, h * rows + first, count, task.count == 1}, block_,
                      next_block_);
      softmax_block(task, seeing, to);
      products_.add_values(to);
    }
  }

  // The rows whose queries attend to a key of the block.
  Range rows_that_see(const AttentionTask& task, int rows) const {
    const int position = layout_.context(task.request) + task.first;
    const int first = (block_.begin - position) * group_;
    const int end = block_.begin + block_.end + layer_.window - 1 - position;
    return {std::max(first, 0), layer_.window > 0 ? std::min(end * group_, rows) : rows};
  }

  // Locates the task's next block, which begins at `begin`. After the task's last block, locates
  // the first block of the following task.
  void locate_next_block(const AttentionTask& task, int begin, const AttentionTask* following) {
    if (begin < task.key_end) {
      locate(task, begin, next_block_);
    } else if (following != nullptr) {
      locate(*following, first_block(*following), next_block_);
    } else {
      next_block_ = KeyBlock{};
    }
  }

  // Converts the scores of a block to weights, adds the weights to the rows' sums of weights, and
  // scales their earlier sums to the new maximum. `seeing`: the task's rows that attend to the
  // block, whose sums are `sums`.
  void softmax_block(const AttentionTask& task, Range seeing, const SoftmaxSums& sums) {
    const int begin = block_.begin, count = block_.end;
    float* maxima = sums.maxima;
    const int context = layout_.context(task.request) + task.first;
    for (int row = 0; row < int(seeing.end - seeing.begin); ++row) {
      const int position = context + int(seeing.begin + row) / group_;
      const int last = std::min(count, position + 1 - begin);
      const int first = layer_.window > 0 ? std::max(position + 1 - layer_.window - begin, 0) : 0;
      Vector values[BLOCK_KEYS / LANES];
      Vector highest = splat(LOWEST);
      for (int v = 0; v < BLOCK_KEYS / LANES; ++v) {
        values[v] = scaled_scores(products_.scores(row, v));
        if (v * LANES < first || (v + 1) * LANES > last) {
          values[v] = keep_lanes(values[v], first - v * LANES, last - v * LANES, LOWEST);
        }
        highest = larger(values[v], highest);
      }
      const float in_block = largest(highest), maximum = std::max(maxima[row], in_block);
      if (maximum == LOWEST) {
        products_.clear_weights(row);
        continue;
      }
      Vector added = {};
      for (Vector& value : values) {
        value = power_of_two(value - maximum);
        added += value;
      }
      products_.set_weights(row, values, in_block - maximum, first, last);
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

  // Returns scores scaled for powers of two, and capped if the layer has a softcap.
  Vector scaled_scores(Vector scores) const {
    if (layer_.softcap > 0) {
      return hyperbolic_tangent(scores * (layer_.scale / layer_.softcap)) * scale_;
    }
    return scores * scale_;
  }

  // Merges the sums of all parts of one context into the sums of the first part, and writes the
  // rows' outputs.
  void merge_parts(const PartMerge& parts) {
    const int rows = parts.task.count * group_;
    float* memory = plan_.partial_sums.data() + parts.task.partial;
    const SoftmaxSums sums(memory, rows, padded_dim_);
    for (int i = 1; i < parts.parts; ++i) {
      merge(sums, SoftmaxSums(memory + i * plan_.sums_size(rows), rows, padded_dim_), rows);
    }
    write_rows(parts.task, parts.task.kv_head, rows, sums);
  }

  // Writes the output of one key head's rows: weighted values divided by sums of weights.
  void write_rows(const AttentionTask& task, int kv_head, int rows, const SoftmaxSums& sums) const {
    const int dim = layer_.head_dim;
    const std::int64_t begin = layout_.query_starts[task.request] + task.first;
    for (int row = 0; row < rows; ++row) {
      const std::int64_t token = begin + row / group_;
      const std::int64_t head = std::int64_t{kv_head} * group_ + row % group_;
      T* target = output_ + (token * layer_.num_heads + head) * dim;
      const float scale = 1.0f / sum(load(sums.weights + row * LANES));
      for (int d = 0; d < dim; d += LANES) {
        Vector value = load(sums.values + row * padded_dim_ + d) * scale;
        // Converts -0 to +0. Otherwise the sign of a zero would depend on how many products with
        // weights of zero are added, because numbers below 2^-126 become zeros.
        if constexpr (SUMS_LIKE_TILES<T>) value = value + 0.0f;
        store_partial(target + d, value, dim - d);
      }
    }
  }

  const AttentionLayer& layer_;
  const Layout& layout_;
  const Heads<T>& heads_;
  T* output_;
  int group_;
  int padded_dim_;
  int block_size_;
  float scale_;  // Converts (capped) scores to exponents of two.
  Products products_;
  AttentionPlan& plan_;
  KeyBlock block_;
  KeyBlock next_block_;
  const AttentionTask* located_ = nullptr;  // The task whose first block is in `block_`.
};

}  // namespace

// Stores the step's rotated keys and its values, then computes attention. `output`: [tokens,
// num_heads * head_dim]. Every thread of the team must call this function. `next` is the team's
// counter of tasks, initially 0. The team must pass a barrier before it begins another layer.
template <class T>
[[gnu::noinline]] void attend(AttentionPlan& plan, const Heads<T>& heads, const Pages& pages,
                              T* output, std::atomic<int>& next, Team team) {
  if (pages.format == CacheFormat::INT8) {
    Attention<T, CodeProducts<T>>(plan, heads, pages, output).run(next, team);
  } else {
    Attention<T, PlainProducts<T>>(plan, heads, pages, output).run(next, team);
  }
}

}  // namespace stepwell
