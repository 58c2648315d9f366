// Attention over pages: single tokens and chunks alike.
//
// First every token's key is rotated and stored with its value. Then tasks are attended to in
// parallel, a task being one key head and some consecutive queries of one request, with all query
// heads that share it: its keys and values are read once for all of them. A task walks its keys in
// blocks, with the running maximum and sum of Milakov and Gimelshein's online softmax, as in
// FlashAttention (Dao et al.), to base 2; scores and sums are float32, weights are rounded to the
// cache's type where they meet the values. Rows that see nothing of a block pass it by. A lone token
// reads keys and values straight from the pages; chunks are worth packing them for.
//
// Nothing beyond a sequence's end is read, so what lies there does not matter.

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
    store(output + i, a * c - b * s);
    store(output + half + i, b * c + a * s);
  }
  if (i < half) {
    const int rest = half - i;
    const Vector a = load_first(head + i, rest), b = load_first(head + half + i, rest);
    const Vector c = load_first(cos + i, rest), s = load_first(sin + i, rest);
    store_first(output + i, a * c - b * s, rest);
    store_first(output + half + i, b * c + a * s, rest);
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
    for (std::int64_t i = own.begin; i < own.end; ++i) merge(plan_.joins[i]);
  }

 private:
  void store_token(std::int64_t token, int head) const {
    const int dim = layer_.head_dim;
    const std::int64_t place = plan_.slots[token] * token_stride_ + head * dim;
    const T* key = heads_.key + token * heads_.key_stride + head * dim;
    rotate(key, heads_.cos + token * heads_.half, heads_.sin + token * heads_.half, heads_.half, dim,
           pages_.keys + place);
    const T* value = heads_.value + token * heads_.value_stride + head * dim;
    std::memcpy(pages_.values + place, value, dim * sizeof(T));
  }

  // The block of keys of the task's first head from position `begin` on.
  void find(const AttentionTask& task, int begin, KeyBlock& found) const {
    const std::int32_t* table = layout_.blocks(task.request);
    const std::int64_t head = std::int64_t{task.kv_head} * layer_.head_dim;
    found.begin = begin;
    found.count = std::min(KEYS, task.key_end - begin);
    int page = begin / pages_.block_size, in_page = begin % pages_.block_size;
    std::int64_t offset = 0;
    for (int i = 0; i < KEYS; ++i) {
      if (i < found.count) {
        offset = (std::int64_t{table[page]} * pages_.block_size + in_page) * token_stride_ + head;
        if (++in_page == pages_.block_size) {
          in_page = 0;
          ++page;
        }
      }
      found.offsets[i] = offset;
    }
  }

  // What the thread's next task, which `then` may be, reads first is fetched meanwhile.
  void attend(const AttentionTask& task, const AttentionTask* then) {
    const int rows = task.count * group_, all = task.heads * rows;
    Scratch& room = scratch();
    room.reserve((all * padded_dim_ + rows * KEYS + KEYS * padded_dim_) * sizeof(T) +
                 (rows * KEYS + all * (padded_dim_ + 1 + LANES)) * sizeof(float) + 1024);
    T* query = room.take<T>(all * padded_dim_);
    T* weights = room.take<T>(rows * KEYS);
    T* packed = room.take<T>(KEYS * padded_dim_);
    float* scores = room.take<float>(rows * KEYS);
    float* total = room.take<float>(all * padded_dim_);
    float* maxima = room.take<float>(all);
    float* sums_of_weights = room.take<float>(all * LANES);

    for (int h = 0; h < task.heads; ++h) {
      if (!plan_.stores_first) store_token(layout_.query_starts[task.request], task.kv_head + h);
      take_queries(task, task.kv_head + h, query + h * rows * padded_dim_);
    }
    std::fill(total, total + all * padded_dim_, 0.0f);
    std::fill(maxima, maxima + all, LOWEST);
    std::fill(sums_of_weights, sums_of_weights + all * LANES, 0.0f);
    const bool alone = task.count == 1 && group_ <= MOST_LONE_HEADS;
    if (found_ != &task) find(task, task.key_begin, block_);
    for (int begin = task.key_begin; begin < task.key_end; begin += KEYS) {
      find_next(task, begin + KEYS, then);
      const Range seeing = rows_that_see(task, rows);
      const int first = int(seeing.begin), count = int(seeing.end - seeing.begin);
      for (int h = 0; h < task.heads; ++h) {
        const T* own = query + h * rows * padded_dim_;
        const Lines<T> keys{pages_.keys + h * layer_.head_dim, block_, ahead_};
        const Lines<T> values{pages_.values + h * layer_.head_dim, block_, ahead_};
        float* sums = total + (h * rows + first) * padded_dim_;
        if (alone) {
          score_alone(own, keys, scores);
        } else {
          keys.fetch_rest(0, layer_.head_dim);
          pack_keys(keys, layer_.head_dim, packed);
          score_rows(own + first * padded_dim_, padded_dim_, packed, count, layer_.head_dim, scores);
        }
        weigh(task, seeing, scores, weights, sums, maxima + h * rows + first,
              sums_of_weights + (h * rows + first) * LANES);
        if (alone) {
          add_alone(weights, values, sums);
        } else {
          values.fetch_rest(0, layer_.head_dim);
          pack_values(values, layer_.head_dim, packed);
          add_rows(weights, packed, block_.count, count, layer_.head_dim, sums, padded_dim_);
        }
      }
      std::swap(block_, ahead_);
    }
    found_ = then;
    for (int h = 0; h < task.heads; ++h) {
      finish(task, task.kv_head + h, rows, total + h * rows * padded_dim_, maxima + h * rows,
             sums_of_weights + h * rows * LANES);
    }
  }

  // Rows whose queries see a key of the block.
  Range rows_that_see(const AttentionTask& task, int rows) const {
    const int position = layout_.context(task.request) + task.first;
    const int first = (block_.begin - position) * group_;
    const int end = block_.begin + block_.count + layer_.window - 1 - position;
    return {std::max(first, 0), layer_.window > 0 ? std::min(end * group_, rows) : rows};
  }

  void find_next(const AttentionTask& task, int begin, const AttentionTask* then) {
    if (begin < task.key_end) {
      find(task, begin, ahead_);
    } else if (then != nullptr) {
      find(*then, then->key_begin, ahead_);
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

  void score_alone(const T* query, const Lines<T>& keys, float* scores) const {
    for_heads([&]<int HEADS>(int g) {
      score_heads<T, HEADS>(query + g * padded_dim_, padded_dim_, keys, layer_.head_dim,
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
  void weigh(const AttentionTask& task, Range seeing, const float* scores, T* weights, float* total,
             float* maxima, float* sums_of_weights) const {
    const int begin = block_.begin, count = block_.count;
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
          const IntVector lane = IntVector{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + v * LANES;
          values[v] = ((lane >= first) & (lane < last)) ? values[v] : splat(LOWEST);
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
      float* sums = sums_of_weights + row * LANES;
      if (maximum > maxima[row]) {
        const float factor = std::exp2(maxima[row] - maximum);
        for (int d = 0; d < padded_dim_; d += LANES) {
          float* place = total + row * padded_dim_ + d;
          store(place, load(place) * factor);
        }
        store(sums, load(sums) * factor);
        maxima[row] = maximum;
      }
      store(sums, load(sums) + added);
    }
  }

  Vector scaled(Vector scores) const {
    if (layer_.softcap > 0) {
      return hyperbolic_tangent(scores * (layer_.scale / layer_.softcap)) * scale_;
    }
    return scores * scale_;
  }

  void finish(const AttentionTask& task, int kv_head, int rows, const float* total, const float* maxima,
              float* sums_of_weights) {
    for (int row = 0; row < rows; ++row) sums_of_weights[row] = sum(load(sums_of_weights + row * LANES));
    if (task.part < 0) {
      put_rows(task, kv_head, rows, total, sums_of_weights);
      return;
    }
    float* part = plan_.partial.data() + task.part * plan_.partial_size;
    std::copy(total, total + rows * padded_dim_, part);
    std::copy(maxima, maxima + rows, part + rows * padded_dim_);
    std::copy(sums_of_weights, sums_of_weights + rows, part + rows * (padded_dim_ + 1));
  }

  // Brings the parts of one context to their common maximum and adds them up, in the first.
  void merge(const AttentionJoin& join) {
    const int rows = join.task.count * group_;
    float* total = plan_.partial.data() + join.task.part * plan_.partial_size;
    float* maxima = total + rows * padded_dim_;
    float* sums_of_weights = maxima + rows;
    for (int i = 1; i < join.parts; ++i) {
      const float* other = total + i * plan_.partial_size;
      const float* other_maxima = other + rows * padded_dim_;
      const float* other_sums = other_maxima + rows;
      for (int row = 0; row < rows; ++row) {
        const float maximum = std::max(maxima[row], other_maxima[row]);
        if (maximum == LOWEST) continue;
        const float own = std::exp2(maxima[row] - maximum);
        const float added = std::exp2(other_maxima[row] - maximum);
        for (int d = 0; d < padded_dim_; d += LANES) {
          float* place = total + row * padded_dim_ + d;
          store(place, load(place) * own + load(other + row * padded_dim_ + d) * added);
        }
        sums_of_weights[row] = sums_of_weights[row] * own + other_sums[row] * added;
        maxima[row] = maximum;
      }
    }
    put_rows(join.task, join.task.kv_head, rows, total, sums_of_weights);
  }

  void put_rows(const AttentionTask& task, int kv_head, int rows, const float* total,
                const float* sums_of_weights) const {
    const int dim = layer_.head_dim;
    const std::int64_t begin = layout_.query_starts[task.request] + task.first;
    for (int row = 0; row < rows; ++row) {
      const std::int64_t token = begin + row / group_;
      const std::int64_t head = std::int64_t{kv_head} * group_ + row % group_;
      T* target = output_ + (token * layer_.num_heads + head) * dim;
      const float scale = 1.0f / sums_of_weights[row];
      for (int d = 0; d < dim; d += LANES) {
        const Vector value = load(total + row * padded_dim_ + d) * scale;
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
