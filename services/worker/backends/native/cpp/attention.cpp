// Attention over pages: single tokens and chunks alike.
//
// First every token's key is rotated and stored with its value. Then tasks are attended to in
// parallel, a task being one key head and some consecutive queries of one request, with all query
// heads that share it: its keys and values are read once for all of them. A task walks its keys in
// blocks, with the running maximum and sum of Milakov and Gimelshein's online softmax, as in
// FlashAttention (Dao et al.), to base 2; scores and sums are float32, weights are rounded to the
// cache's type where they meet the values. A lone token reads keys and values straight from the pages;
// chunks are worth packing them for.
//
// What a row computes is a function of its position alone, bit for bit: blocks and parts begin at
// multiples of their sizes, a row takes the blocks in which it sees a key, adds products in order of
// depth and values in order of position, and joins its parts in order. Keys that it does not see weigh
// zero. Other rows of the task, the size of the chunk and the number of threads decide only who computes
// it when.
//
// Nothing beyond a sequence's end, or before its window, counts, so what lies there does not matter.

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "kernels.h"
#include "lone_query.h"
#include "packed_keys.h"
#include "threads.h"

namespace {

constexpr int MOST_LONE_HEADS = 8;  // Of a key head; more are worth packing the keys for.
constexpr float LOWEST = -INFINITY;
constexpr float LOG2_E = 1.44269504f;

// Rotates a head by one token's angles, `half` pairs of them.
template <class T>
void rotate(const T* head, const T* cos, const T* sin, int half, int head_dim, T* output) {
  int i = 0;
  for (; i + LANES <= half; i += LANES) {
    const Vector a = load(head + i), b = load(head + half + i), c = load(cos + i), s = load(sin + i);
    store(output + i, fused(a, c, -(b * s)));
    store(output + half + i, fused(b, c, a * s));
  }
  if (i < half) {
    const int rest = half - i;
    const Vector a = load_first(head + i, rest), b = load_first(head + half + i, rest);
    const Vector c = load_first(cos + i, rest), s = load_first(sin + i, rest);
    store_first(output + i, fused(a, c, -(b * s)), rest);
    store_first(output + half + i, fused(b, c, a * s), rest);
  }
  std::memcpy(output + 2 * half, head + 2 * half, (head_dim - 2 * half) * sizeof(T));
}

// What a thread works in, kept between calls.
class Scratch {
 public:
  template <class T>
  T* take(std::int64_t count) {
    const std::int64_t bytes = (count * std::int64_t(sizeof(T)) + 63) / 64 * 64;
    char* taken = base_ + used_;
    used_ += bytes;
    return reinterpret_cast<T*>(taken);
  }

  void reserve(std::int64_t bytes) {
    used_ = 0;
    if (std::int64_t(room_.size()) < bytes + 64) room_.resize(bytes + 64);
    base_ = room_.data() + (64 - reinterpret_cast<std::uintptr_t>(room_.data()) % 64) % 64;
  }

 private:
  std::vector<char> room_;
  char* base_ = nullptr;
  std::int64_t used_ = 0;
};

Scratch& scratch() {
  static thread_local Scratch own;
  return own;
}

// The sums of some rows over a part of their keys, or over several: weighted values, `dim` elements of
// each, sums of weights lane by lane, and maxima.
struct Sums {
  float* values;
  float* weights;
  float* maxima;
  int dim;

  Sums(float* place, int rows, int dim)
      : values(place), weights(values + rows * dim), maxima(weights + rows * LANES), dim(dim) {}

  // The same from row `row` on.
  Sums from(int row) const {
    Sums rest = *this;
    rest.values += row * dim;
    rest.weights += row * LANES;
    rest.maxima += row;
    return rest;
  }

  void clear(int rows) const {
    std::fill(values, values + rows * dim, 0.0f);
    std::fill(weights, weights + rows * LANES, 0.0f);
    std::fill(maxima, maxima + rows, LOWEST);
  }
};

// Adds the sums of rows over a further part, brought to their common maximum. Rows that saw nothing in
// it stay as they are.
void join(const Sums& sums, const Sums& part, int rows) {
  for (int row = 0; row < rows; ++row) {
    const Sums to = sums.from(row), from = part.from(row);
    if (*from.maxima == LOWEST) continue;
    const float maximum = std::max(*to.maxima, *from.maxima);
    const bool is_first = *to.maxima == LOWEST;
    const Vector kept = splat(is_first ? 0.0f : std::exp2(*to.maxima - maximum));
    const Vector added = splat(std::exp2(*from.maxima - maximum));
    const auto add = [&](float* place, const float* more) {
      const Vector value = load(more);
      store(place, is_first ? value : fused(load(place), kept, value * added));
    };
    for (int d = 0; d < to.dim; d += LANES) add(to.values + d, from.values + d);
    add(to.weights, from.weights);
    *to.maxima = maximum;
  }
}

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
    if (plan_.stores_first) {
      const Range own = team.part(layout_.num_tokens());
      for (std::int64_t token = own.begin; token < own.end; ++token) {
        for (int head = 0; head < layer_.num_kv_heads; ++head) store_token(token, head);
      }
      team.wait();
    }
    const int count = int(plan_.tasks.size());
    for (int i = next.fetch_add(1); i < count;) {
      // A short task's successor is taken early, if there are others for who is done first.
      const bool early = plan_.tasks[i].count == 1 && i + 2 * team.size < count;
      const int then = early ? next.fetch_add(1) : i + team.size;
      attend(plan_.tasks[i], then < count ? &plan_.tasks[then] : nullptr);
      i = early ? then : next.fetch_add(1);
    }
    if (plan_.joins.empty()) return;
    team.wait();
    const Range own = team.part(plan_.joins.size());
    for (std::int64_t i = own.begin; i < own.end; ++i) join_parts(plan_.joins[i]);
  }

 private:
  void store_token(std::int64_t token, int head) const {
    const int dim = layer_.head_dim;
    const std::int64_t slot = plan_.slots[token];
    const std::int64_t place = slot * token_stride_ + head * dim;
    const T* key = heads_.key + token * heads_.key_stride + head * dim;
    const T* cos = heads_.cos + token * heads_.half;
    const T* sin = heads_.sin + token * heads_.half;
    if (has_panels_) {
      static thread_local std::vector<T> rotated;
      if (int(rotated.size()) < dim) rotated.resize(dim);
      rotate(key, cos, sin, heads_.half, dim, rotated.data());
      constexpr int DEPTH = Step<T>::DEPTH;
      const int lane = int(slot % LANES);
      T* cell = pages_.keys + (slot - lane) * token_stride_ + head * dim * LANES + lane * DEPTH;
      for (int d = 0; d < dim; d += DEPTH) {
        std::memcpy(cell + d * LANES, rotated.data() + d, DEPTH * sizeof(T));
      }
    } else {
      rotate(key, cos, sin, heads_.half, dim, pages_.keys + place);
    }
    const T* value = heads_.value + token * heads_.value_stride + head * dim;
    std::memcpy(pages_.values + place, value, dim * sizeof(T));
  }

  // The block of the task's keys that begins at position `begin`.
  void find(const AttentionTask& task, int begin, KeyBlock& found) const {
    const std::int32_t* table = layout_.blocks(task.request);
    found.begin = begin;
    found.first = std::max(task.key_begin - begin, 0);
    found.end = std::min(KEYS, task.key_end - begin);
    const int position = begin + found.first;
    int page = position / pages_.block_size, in_page = position % pages_.block_size;
    std::int64_t offset = 0;
    for (int i = found.first; i < KEYS; ++i) {
      if (i < found.end) {
        const std::int64_t slot = std::int64_t{table[page]} * pages_.block_size + in_page;
        offset = slot * token_stride_;
        if (i == found.first || i % LANES == 0) {
          found.panels[i / LANES] = (slot - slot % LANES) * token_stride_;
        }
        if (++in_page == pages_.block_size) {
          in_page = 0;
          ++page;
        }
      } else if (i % LANES == 0) {
        found.panels[i / LANES] = found.panels[i / LANES - 1];
      }
      found.offsets[i] = offset;
    }
    std::fill(found.offsets, found.offsets + found.first, found.offsets[found.first]);
    const int panel = found.first / LANES;
    std::fill(found.panels, found.panels + panel, found.panels[panel]);
  }

  // What the thread's next task, which `then` may be, reads first is fetched meanwhile.
  void attend(const AttentionTask& task, const AttentionTask* then) {
    const int rows = task.count * group_, all = task.heads * rows;
    const std::int64_t size = plan_.sums_size(all);
    Scratch& room = scratch();
    room.reserve((all * padded_dim_ + rows * KEYS + KEYS * padded_dim_) * sizeof(T) +
                 (rows * KEYS + 2 * size) * sizeof(float) + 1024);
    T* query = room.take<T>(all * padded_dim_);
    T* weights = room.take<T>(rows * KEYS);
    T* packed = room.take<T>(KEYS * padded_dim_);
    float* scores = room.take<float>(rows * KEYS);
    const bool is_part = task.partial >= 0;
    const Sums sums(is_part ? plan_.partial.data() + task.partial : room.take<float>(size), all,
                    padded_dim_);
    const Sums further(room.take<float>(size), all, padded_dim_);

    for (int h = 0; h < task.heads; ++h) {
      if (!plan_.stores_first) store_token(layout_.query_starts[task.request], task.kv_head + h);
      take_queries(task, task.kv_head + h, query + h * rows * padded_dim_);
    }
    sums.clear(all);
    if (found_ != &task) find(task, first_block(task), block_);
    for (int begin = first_block(task); begin < task.key_end;) {
      const bool is_first = begin <= task.key_begin;
      const int end = std::min(begin / PART_KEYS * PART_KEYS + PART_KEYS, task.key_end);
      const Sums& own = is_first ? sums : further;
      if (!is_first) own.clear(all);
      for (; begin < end; begin += KEYS) {
        find_next(task, begin + KEYS, then);
        take_block(task, query, weights, packed, scores, own);
        std::swap(block_, ahead_);
      }
      if (!is_first) join(sums, own, all);
    }
    found_ = then;
    if (is_part) return;
    for (int h = 0; h < task.heads; ++h) put_rows(task, task.kv_head + h, rows, sums.from(h * rows));
  }

  static int first_block(const AttentionTask& task) { return task.key_begin / KEYS * KEYS; }

  // Adds what a task's rows see of the block to their sums.
  void take_block(const AttentionTask& task, const T* query, T* weights, T* packed, float* scores,
                  const Sums& sums) const {
    const int rows = task.count * group_, dim = layer_.head_dim;
    const bool alone = task.count == 1 && group_ <= MOST_LONE_HEADS;
    const Range seeing = rows_that_see(task, rows);
    const int first = int(seeing.begin), count = int(seeing.end - seeing.begin);
    for (int h = 0; h < task.heads; ++h) {
      const int head = task.kv_head + h;
      const T* own = query + h * rows * padded_dim_;
      const Lines<T> values{pages_.values + head * dim, block_, ahead_};
      const Sums to = sums.from(h * rows + first);
      if (alone) {
        score_alone(own, head, packed, scores);
      } else {
        pack_keys(head, packed);
        score_rows(own + first * padded_dim_, padded_dim_, packed, count, dim, scores);
      }
      weigh(task, seeing, scores, weights, to);
      if (alone) {
        add_alone(weights, values, to.values);
      } else {
        values.fetch_rest(0, dim);
        pack_values(values, dim, packed);
        add_rows(weights, packed, block_.end, count, dim, to.values, padded_dim_);
      }
    }
  }

  // A head's keys of the block, packed.
  void pack_keys(int head, T* packed) const {
    const int dim = layer_.head_dim;
    if (has_panels_) {
      const T* keys = pages_.keys + head * dim * LANES;
      pack_panels(panels_of(keys, block_, ahead_), block_.num_panels(), dim, packed);
    } else {
      const Lines<T> keys{pages_.keys + head * dim, block_, ahead_};
      keys.fetch_rest(0, dim);
      pack_lines(keys, dim, packed);
    }
  }

  // Rows whose queries see a key of the block.
  Range rows_that_see(const AttentionTask& task, int rows) const {
    const int position = layout_.context(task.request) + task.first;
    const int first = (block_.begin - position) * group_;
    const int end = block_.begin + block_.end + layer_.window - 1 - position;
    return {std::max(first, 0), layer_.window > 0 ? std::min(end * group_, rows) : rows};
  }

  void find_next(const AttentionTask& task, int begin, const AttentionTask* then) {
    if (begin < task.key_end) {
      find(task, begin, ahead_);
    } else if (then != nullptr) {
      find(*then, first_block(*then), ahead_);
    } else {
      ahead_ = KeyBlock{};
    }
  }

  // A head's rows: for each query the heads of its group, rotated.
  void take_queries(const AttentionTask& task, int kv_head, T* query) const {
    const int dim = layer_.head_dim;
    const std::int64_t begin = layout_.query_starts[task.request] + task.first;
    for (int i = 0; i < task.count; ++i) {
      const std::int64_t token = begin + i;
      const T* head = heads_.query + token * heads_.query_stride + kv_head * group_ * dim;
      for (int g = 0; g < group_; ++g) {
        T* row = query + (i * group_ + g) * padded_dim_;
        rotate(head + g * dim, heads_.cos + token * heads_.half, heads_.sin + token * heads_.half,
               heads_.half, dim, row);
        std::fill(row + dim, row + padded_dim_, T{});
      }
    }
  }

  void score_alone(const T* query, int head, T* packed, float* scores) const {
    const int dim = layer_.head_dim;
    if (!has_panels_) pack_keys(head, packed);
    const Panels<T> panels = has_panels_
                                 ? panels_of(pages_.keys + head * dim * LANES, block_, ahead_)
                                 : packed_panels(packed, dim);
    for_heads([&]<int HEADS>(int g) {
      score_heads<T, HEADS>(query + g * padded_dim_, padded_dim_, panels, block_.num_panels(), dim,
                            scores + g * KEYS);
    });
  }

  void add_alone(const T* weights, const Lines<T>& values, float* total) const {
    for_heads([&]<int HEADS>(int g) {
      const int dim = layer_.head_dim;
      int d = 0;
      for (; d + WIDTH < dim; d += 2 * WIDTH) {
        add_values<T, HEADS, 2>(weights + g * KEYS, values.from(d), std::min(dim - d, 2 * WIDTH),
                                total + g * padded_dim_ + d, padded_dim_);
      }
      if (d < dim) {
        add_values<T, HEADS, 1>(weights + g * KEYS, values.from(d), dim - d,
                                total + g * padded_dim_ + d, padded_dim_);
      }
    });
  }

  // Calls work.template operator()<HEADS>(first head) for all heads of the group.
  template <class Work>
  void for_heads(Work&& work) const {
    int g = 0;
    for (; g + LONE_HEADS <= group_; g += LONE_HEADS) work.template operator()<LONE_HEADS>(g);
    switch (group_ - g) {
      case 1: return work.template operator()<1>(g);
      case 2: return work.template operator()<2>(g);
      case 3: return work.template operator()<3>(g);
    }
  }

  // Scores of a block -> weights, and what came before scaled to the new maximum. Sums of weights
  // are kept lane by lane. All but `seeing` begins with the first row that sees the block.
  void weigh(const AttentionTask& task, Range seeing, const float* scores, T* weights,
             const Sums& sums) const {
    const int begin = block_.begin, count = block_.end;
    float* maxima = sums.maxima;
    const int context = layout_.context(task.request) + task.first;
    for (int row = 0; row < int(seeing.end - seeing.begin); ++row) {
      const int position = context + int(seeing.begin + row) / group_;
      const int last = std::min(count, position + 1 - begin);
      const int first = layer_.window > 0 ? std::max(position + 1 - layer_.window - begin, 0) : 0;
      const float* line = scores + row * KEYS;
      Vector values[KEYS / LANES];
      Vector most = splat(LOWEST);
      for (int v = 0; v < KEYS / LANES; ++v) {
        values[v] = scaled(load(line + v * LANES));
        if (v * LANES < first || (v + 1) * LANES > last) {
          values[v] = only(values[v], first - v * LANES, last - v * LANES, LOWEST);
        }
        most = larger(values[v], most);
      }
      const float maximum = std::max(maxima[row], largest(most));
      if (maximum == LOWEST) {
        std::memset(weights + row * KEYS, 0, KEYS * sizeof(T));
        continue;
      }
      Vector added = {};
      for (int v = 0; v < KEYS / LANES; ++v) {
        const Vector weight = power_of_two(values[v] - maximum);
        added += weight;
        store(weights + row * KEYS + v * LANES, weight);
      }
      float* all = sums.weights + row * LANES;
      if (maximum > maxima[row]) {
        const float factor = std::exp2(maxima[row] - maximum);
        for (int d = 0; d < padded_dim_; d += LANES) {
          float* place = sums.values + row * padded_dim_ + d;
          store(place, load(place) * factor);
        }
        store(all, load(all) * factor);
        maxima[row] = maximum;
      }
      store(all, load(all) + added);
    }
  }

  Vector scaled(Vector scores) const {
    if (layer_.softcap > 0) {
      return hyperbolic_tangent(scores * (layer_.scale / layer_.softcap)) * scale_;
    }
    return scores * scale_;
  }

  // Joins the parts of one context, in the first one's place.
  void join_parts(const AttentionJoin& parts) {
    const int rows = parts.task.count * group_;
    float* place = plan_.partial.data() + parts.task.partial;
    const Sums sums(place, rows, padded_dim_);
    for (int i = 1; i < parts.parts; ++i) {
      join(sums, Sums(place + i * plan_.sums_size(rows), rows, padded_dim_), rows);
    }
    put_rows(parts.task, parts.task.kv_head, rows, sums);
  }

  void put_rows(const AttentionTask& task, int kv_head, int rows, const Sums& sums) const {
    const int dim = layer_.head_dim;
    const std::int64_t begin = layout_.query_starts[task.request] + task.first;
    for (int row = 0; row < rows; ++row) {
      const std::int64_t token = begin + row / group_;
      const std::int64_t head = std::int64_t{kv_head} * group_ + row % group_;
      T* target = output_ + (token * layer_.num_heads + head) * dim;
      const float scale = 1.0f / sum(load(sums.weights + row * LANES));
      for (int d = 0; d < dim; d += LANES) {
        const Vector value = load(sums.values + row * padded_dim_ + d) * scale;
        store_first(target + d, value, dim - d);
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
  float scale_;  // Of scores, or of their capped ratio, to base 2.
  std::int64_t token_stride_;
  bool has_panels_;
  AttentionPlan& plan_;
  KeyBlock block_;
  KeyBlock ahead_;
  const AttentionTask* found_ = nullptr;  // Whose first block is in `block_`, between tasks.
};

}  // namespace

template <class T>
void attend(AttentionPlan& plan, const Heads<T>& heads, const Pages<T>& pages, T* output,
            std::atomic<int>& next, Team team) {
  Attention<T>(plan, heads, pages, output).run(next, team);
}

#define INSTANTIATE(T)                                                                        \
  template void attend<T>(AttentionPlan&, const Heads<T>&, const Pages<T>&, T*,               \
                          std::atomic<int>&, Team);
INSTANTIATE(float)
#ifdef __AVX512BF16__
INSTANTIATE(BFloat16)
#endif
