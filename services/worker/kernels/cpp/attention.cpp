// Attention over pages: single tokens and chunks alike.
//
// First every token's key is rotated and stored with its value. Then tasks are attended to in
// parallel, a task being one key head and some consecutive queries of one request, with all query
// heads that share it: its keys and values are read once for all of them. Where many requests decode,
// a task takes all key heads, since those of a token lie together. A task walks its keys in
// blocks, with the running maximum and sum of Milakov and Gimelshein's online softmax, as in
// FlashAttention (Dao et al.); scores and sums are float32, weights are rounded to the cache's type
// where they meet the values. A lone token with few query heads takes its scores as dot products,
// straight from the pages; more rows are worth packing the keys for. Where there are fewer tasks than
// threads, long contexts are cut, and the parts joined by their maxima and sums (Flash-Decoding).
//
// Nothing beyond a sequence's end is read, so what lies there does not matter.

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "kernels.h"
#include "threads.h"
#include "tile.h"

namespace {

constexpr int KEYS = 64;          // Keys of a block.
constexpr int TASK_ROWS = 96;     // Most rows of a task: queries times query heads per key head.
constexpr int DOT_HEADS = 4;      // Most query heads whose scores are dot products.
constexpr int SPLIT_KEYS = 512;   // Fewest keys of a part, where a context is cut.
constexpr float LOWEST = -INFINITY;

// Rotates a head by one token's angles, `half` pairs of them.
template <class T>
void rotate(const T* head, const T* cos, const T* sin, int half, int head_dim, T* output) {
  int i = 0;
  for (; i + LANES <= half; i += LANES) {
    const Vector a = load(head + i), b = load(head + half + i), c = load(cos + i), s = load(sin + i);
    store(output + i, a * c - b * s);
    store(output + half + i, b * c + a * s);
  }
  for (; i < half; ++i) {
    const float a = to_float(head[i]), b = to_float(head[half + i]);
    const float c = to_float(cos[i]), s = to_float(sin[i]);
    output[i] = from_float<T>(a * c - b * s);
    output[half + i] = from_float<T>(b * c + a * s);
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

int round_up(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }

std::int64_t num_tokens(const Layout& layout) { return layout.query_starts[layout.num_requests]; }

int new_tokens(const Layout& layout, int request) {
  return layout.query_starts[request + 1] - layout.query_starts[request];
}

// Adds a task to a plan, in parts of whole blocks of keys.
void add(AttentionPlan& plan, AttentionTask task, int parts, int& num_partial) {
  if (parts == 1) {
    plan.tasks.push_back(task);
    return;
  }
  const int begin = task.key_begin, end = task.key_end, blocks = (end - begin + KEYS - 1) / KEYS;
  for (int i = 0; i < parts; ++i) {
    task.key_begin = begin + blocks * i / parts * KEYS;
    task.key_end = std::min(begin + blocks * (i + 1) / parts * KEYS, end);
    task.part = num_partial++;
    if (i == 0) plan.joins.push_back({task, parts});
    plan.tasks.push_back(task);
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
        token_stride_(std::int64_t{plan.layer.num_kv_heads} * plan.layer.head_dim),
        plan_(plan) {}

  void run(std::atomic<int>& next, Team team) {
    if (plan_.stores_first) {
      const Range own = team.part(num_tokens(layout_));
      for (std::int64_t token = own.begin; token < own.end; ++token) {
        for (int head = 0; head < layer_.num_kv_heads; ++head) store_token(token, head);
      }
      team.wait();
    }
    const int count = int(plan_.tasks.size());
    for (int i = next.fetch_add(1); i < count; i = next.fetch_add(1)) {
      if (i + team.size < count) fetch_first(plan_.tasks[i + team.size]);
      attend(plan_.tasks[i]);
    }
    if (plan_.joins.empty()) return;
    team.wait();
    const Range own = team.part(plan_.joins.size());
    for (std::int64_t i = own.begin; i < own.end; ++i) merge(plan_.joins[i]);
  }

 private:
  void store_token(std::int64_t token, int head) const {
    const int dim = layer_.head_dim;
    const std::int64_t place = layout_.slots[token] * token_stride_ + head * dim;
    const T* key = heads_.key + token * heads_.key_stride + head * dim;
    rotate(key, heads_.cos + token * heads_.half, heads_.sin + token * heads_.half, heads_.half, dim,
           pages_.keys + place);
    const T* value = heads_.value + token * heads_.value_stride + head * dim;
    std::memcpy(pages_.values + place, value, dim * sizeof(T));
  }

  // Begins to bring in what a task reads first. Pages lie anywhere, so that the processor cannot
  // foresee what is read next.
  void fetch_first(const AttentionTask& task) const {
    std::int64_t offsets[KEYS];
    const int count = std::min(KEYS, task.key_end - task.key_begin);
    find(task, task.key_begin, count, offsets);
    fetch(pages_.keys, task, offsets, count);
  }

  void fetch(const T* pages, const AttentionTask& task, const std::int64_t* offsets,
             int count) const {
    const int width = task.heads * layer_.head_dim;
    for (int i = 0; i < count; ++i) {
      for (int d = 0; d < width; d += int(64 / sizeof(T))) {
        __builtin_prefetch(pages + offsets[i] + d, 0, 2);
      }
    }
  }

  // Where the keys of the task's first head lie, from position `begin` on.
  void find(const AttentionTask& task, int begin, int count, std::int64_t* offsets) const {
    const std::int32_t* table = layout_.block_tables + task.request * layout_.table_width;
    const std::int64_t head = std::int64_t{task.kv_head} * layer_.head_dim;
    int block = begin / pages_.block_size, in_block = begin % pages_.block_size;
    for (int i = 0; i < count; ++i) {
      offsets[i] = (std::int64_t{table[block]} * pages_.block_size + in_block) * token_stride_ + head;
      if (++in_block == pages_.block_size) {
        in_block = 0;
        ++block;
      }
    }
  }

  void attend(const AttentionTask& task) {
    const int rows = task.count * group_, dim = layer_.head_dim, all = task.heads * rows;
    Scratch& room = scratch();
    room.reserve((all * dim + rows * KEYS + KEYS * padded_dim_) * sizeof(T) +
                 (rows * KEYS + all * (padded_dim_ + 2)) * sizeof(float) + 1024);
    T* query = room.take<T>(all * dim);
    T* weights = room.take<T>(rows * KEYS);
    T* packed = room.take<T>(KEYS * padded_dim_);
    float* scores = room.take<float>(rows * KEYS);
    float* total = room.take<float>(all * padded_dim_);
    float* maxima = room.take<float>(all);
    float* sums_of_weights = room.take<float>(all);

    for (int h = 0; h < task.heads; ++h) {
      if (!plan_.stores_first) store_token(layout_.query_starts[task.request], task.kv_head + h);
      take_queries(task, task.kv_head + h, query + h * rows * dim);
    }
    std::fill(total, total + all * padded_dim_, 0.0f);
    std::fill(maxima, maxima + all, LOWEST);
    std::fill(sums_of_weights, sums_of_weights + all, 0.0f);
    const bool dots = task.count == 1 && group_ <= DOT_HEADS && dim % (LANES * Step<T>::DEPTH) == 0;
    std::int64_t found[2][KEYS];
    std::int64_t *offsets = found[0], *following = found[1];
    int count = std::min(KEYS, task.key_end - task.key_begin);
    find(task, task.key_begin, count, offsets);
    for (int begin = task.key_begin; begin < task.key_end; begin += KEYS) {
      const int next = std::clamp(task.key_end - begin - KEYS, 0, KEYS);
      fetch(pages_.values, task, offsets, count);
      find(task, begin + KEYS, next, following);
      fetch(pages_.keys, task, following, next);
      for (int h = 0; h < task.heads; ++h) {
        const T* own = query + h * rows * dim;
        const T *keys = pages_.keys + h * dim, *values = pages_.values + h * dim;
        float* sums = total + h * rows * padded_dim_;
        if (dots) {
          score_by_dots(own, keys, offsets, count, scores);
        } else {
          pack_keys(keys, offsets, count, packed);
          score_by_panels(own, packed, rows, scores);
        }
        weigh(task, begin, count, rows, scores, weights, sums, maxima + h * rows,
              sums_of_weights + h * rows);
        pack_values(values, offsets, count, packed);
        add_values(weights, packed, count, rows, sums);
      }
      std::swap(offsets, following);
      count = next;
    }
    for (int h = 0; h < task.heads; ++h) {
      finish(task, task.kv_head + h, rows, total + h * rows * padded_dim_, maxima + h * rows,
             sums_of_weights + h * rows);
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
        rotate(head + g * dim, heads_.cos + token * heads_.half, heads_.sin + token * heads_.half,
               heads_.half, dim, query + (i * group_ + g) * dim);
      }
    }
  }

  void score_by_dots(const T* query, const T* keys, const std::int64_t* offsets, int count,
                     float* scores) const {
    switch (group_) {
      case 1: return dots<1>(query, keys, offsets, count, scores);
      case 2: return dots<2>(query, keys, offsets, count, scores);
      case 3: return dots<3>(query, keys, offsets, count, scores);
      default: return dots<4>(query, keys, offsets, count, scores);
    }
  }

  template <int HEADS>
  void dots(const T* query, const T* keys, const std::int64_t* offsets, int count,
            float* scores) const {
    using S = Step<T>;
    const int dim = layer_.head_dim;
    constexpr int STRIDE = LANES * S::DEPTH;
    for (int first = 0; first < count; first += LANES) {
      Vector products[HEADS][LANES];
      for (int i = 0; i < LANES; ++i) {
        Vector own[HEADS] = {};
        const T* key = keys + offsets[std::min(first + i, count - 1)];
        for (int d = 0; d < dim; d += STRIDE) {
          const Vector part = S::panel(key + d);
          for (int g = 0; g < HEADS; ++g) {
            own[g] = S::multiply_add(own[g], S::panel(query + g * dim + d), part);
          }
        }
        for (int g = 0; g < HEADS; ++g) products[g][i] = own[g];
      }
      for (int g = 0; g < HEADS; ++g) store(scores + g * KEYS + first, sums(products[g]));
    }
  }

  // Keys as panels of WIDTH columns, [steps, WIDTH, DEPTH] each; columns behind `count` repeat.
  void pack_keys(const T* keys, const std::int64_t* offsets, int count, T* packed) const {
    constexpr int DEPTH = Step<T>::DEPTH;
    const int dim = layer_.head_dim, steps = dim / DEPTH;
    alignas(64) T lines[LANES * LANES * DEPTH];
    for (int first = 0; first < round_up(count, LANES); first += LANES) {
      T* target = packed + first / WIDTH * WIDTH * dim + first % WIDTH * DEPTH;
      for (int step = 0; step < steps; step += LANES) {
        const int width = std::min(LANES, steps - step);
        for (int i = 0; i < LANES; ++i) {
          std::memcpy(lines + i * LANES * DEPTH,
                      keys + offsets[std::min(first + i, count - 1)] + step * DEPTH,
                      width * DEPTH * sizeof(T));
        }
        T* cell = target + step * WIDTH * DEPTH;
        if (width == LANES) {
          transpose_words(lines, 64, cell, WIDTH * 4);
        } else {
          for (int i = 0; i < LANES; ++i) {
            for (int s = 0; s < width; ++s) {
              std::memcpy(cell + (s * WIDTH + i) * DEPTH, lines + (i * LANES + s) * DEPTH, 4);
            }
          }
        }
      }
    }
  }

  void score_by_panels(const T* query, const T* packed, int rows, float* scores) const {
    const int dim = layer_.head_dim;
    for (int panel = 0; panel < KEYS / WIDTH; ++panel) {
      over_rows(0, rows, [&]<int ROWS>(int row) {
        Vector total[ROWS][PANEL_VECTORS] = {};
        multiply<T, ROWS>(total, query + row * dim, dim, packed + panel * WIDTH * dim,
                          dim / Step<T>::DEPTH);
        for (int i = 0; i < ROWS; ++i) {
          for (int v = 0; v < PANEL_VECTORS; ++v) {
            store(scores + (row + i) * KEYS + panel * WIDTH + v * LANES, total[i][v]);
          }
        }
      });
    }
  }

  // Scores of a block -> weights, and what came before scaled to the new maximum.
  void weigh(const AttentionTask& task, int begin, int count, int rows, float* scores, T* weights,
             float* total, float* maxima, float* sums_of_weights) const {
    const int context = layout_.seq_lens[task.request] - new_tokens(layout_, task.request) + task.first;
    for (int row = 0; row < rows; ++row) {
      const int position = context + row / group_;
      const int last = std::min(count, position + 1 - begin);
      const int first = layer_.window > 0 ? std::max(position + 1 - layer_.window - begin, 0) : 0;
      float* line = scores + row * KEYS;
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
        const Vector weight = exponential(values[v] - maximum);
        added += weight;
        store(weights + row * KEYS + v * LANES, weight);
      }
      if (maximum > maxima[row]) {
        const float factor = std::exp(maxima[row] - maximum);
        for (int d = 0; d < padded_dim_; d += LANES) {
          float* place = total + row * padded_dim_ + d;
          store(place, load(place) * factor);
        }
        sums_of_weights[row] *= factor;
        maxima[row] = maximum;
      }
      sums_of_weights[row] += sum(added);
    }
  }

  Vector scaled(Vector scores) const {
    if (layer_.softcap > 0) {
      return hyperbolic_tangent(scores * (layer_.scale / layer_.softcap)) * layer_.softcap;
    }
    return scores * layer_.scale;
  }

  // Values as panels of WIDTH elements of a head, [KEYS / DEPTH, WIDTH, DEPTH] each; keys behind
  // `count` are zero.
  void pack_values(const T* values, const std::int64_t* offsets, int count, T* packed) const {
    constexpr int DEPTH = Step<T>::DEPTH;
    const int dim = layer_.head_dim;
    static const T zeros[2 * WIDTH] = {};
    for (int key = 0; key < round_up(count, DEPTH); key += DEPTH) {
      for (int d = 0; d < padded_dim_; d += LANES) {
        const int width = std::min(LANES, dim - d);
        T* cell = packed + (d / WIDTH * KEYS + key) * WIDTH + d % WIDTH * DEPTH;
        const T* lines[DEPTH];
        for (int i = 0; i < DEPTH; ++i) {
          const bool there = key + i < count && width > 0;
          lines[i] = there ? values + offsets[key + i] + d : zeros;
        }
        interleave(lines, width < 0 ? 0 : width, cell);
      }
    }
  }

  static void interleave(const float* const (&lines)[1], int width, float* cell) {
    store(cell, width == LANES ? load(lines[0]) : load_part(lines[0], width));
  }

#ifdef __AVX512BF16__
  static void interleave(const BFloat16* const (&lines)[2], int width, BFloat16* cell) {
    alignas(32) BFloat16 parts[2][LANES] = {};
    const BFloat16* from[2] = {lines[0], lines[1]};
    if (width != LANES) {
      for (int i = 0; i < 2; ++i) {
        std::memcpy(parts[i], lines[i], width * sizeof(BFloat16));
        from[i] = parts[i];
      }
    }
    const __m256i even = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from[0]));
    const __m256i odd = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from[1]));
    const __m512i low = _mm512_cvtepu16_epi32(even);
    const __m512i high = _mm512_slli_epi32(_mm512_cvtepu16_epi32(odd), 16);
    _mm512_storeu_si512(cell, _mm512_or_si512(low, high));
  }
#endif

  void add_values(const T* weights, const T* packed, int count, int rows, float* total) const {
    const int steps = round_up(count, Step<T>::DEPTH) / Step<T>::DEPTH;
    for (int d = 0; d < padded_dim_; d += WIDTH) {
      over_rows(0, rows, [&]<int ROWS>(int row) {
        Vector sum[ROWS][PANEL_VECTORS];
        for (int i = 0; i < ROWS; ++i) {
          for (int v = 0; v < PANEL_VECTORS; ++v) {
            sum[i][v] = load(total + (row + i) * padded_dim_ + d + v * LANES);
          }
        }
        multiply<T, ROWS>(sum, weights + row * KEYS, KEYS, packed + d * KEYS, steps);
        for (int i = 0; i < ROWS; ++i) {
          for (int v = 0; v < PANEL_VECTORS; ++v) {
            store(total + (row + i) * padded_dim_ + d + v * LANES, sum[i][v]);
          }
        }
      });
    }
  }

  void finish(const AttentionTask& task, int kv_head, int rows, const float* total, const float* maxima,
              const float* sums_of_weights) {
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
        const float own = std::exp(maxima[row] - maximum);
        const float added = std::exp(other_maxima[row] - maximum);
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
        if (d + LANES <= dim) {
          store(target + d, value);
        } else {
          store_part(target + d, value, dim - d);
        }
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
  std::int64_t token_stride_;
  AttentionPlan& plan_;
};

}  // namespace

// Chunks, which come last in a layout, are begun first: their tasks are the longest.
AttentionPlan::AttentionPlan(const AttentionLayer& layer, const Layout& layout, int threads)
    : layer(layer),
      layout(layout),
      group(layer.num_heads / layer.num_kv_heads),
      padded_dim(round_up(layer.head_dim, WIDTH)),
      stores_first(false) {
  const int queries = std::max(TASK_ROWS / group, 1);
  std::int64_t whole = 0;
  for (int r = 0; r < layout.num_requests; ++r) {
    whole += (new_tokens(layout, r) + queries - 1) / queries * layer.num_kv_heads;
  }
  const int most_parts = whole >= 2 * threads ? 1 : int((3 * threads + whole - 1) / whole);
  const int decode_heads = layout.num_requests >= 4 * threads ? layer.num_kv_heads : 1;
  int num_partial = 0;
  for (int r = layout.num_requests - 1; r >= 0; --r) {
    const int count = new_tokens(layout, r), context = layout.seq_lens[r] - count;
    for (int last = count; last > 0; last -= queries) {
      const int first = std::max(last - queries, 0);
      const int begin = layer.window > 0 ? std::max(context + first - layer.window + 1, 0) : 0;
      const int end = context + last;
      const int parts = threads == 1 ? 1 : std::clamp((end - begin) / SPLIT_KEYS, 1, most_parts);
      stores_first |= count > 1 || parts > 1;
      const int heads = count == 1 ? decode_heads : 1;
      for (int h = 0; h < layer.num_kv_heads; h += heads) {
        add(*this, {r, h, heads, first, last - first, begin, end, -1}, parts, num_partial);
      }
    }
  }
  partial_size = std::int64_t{TASK_ROWS + group} * (padded_dim + 2);
  partial.resize(num_partial * partial_size);
}

double attention_work(const AttentionLayer& layer, const Layout& layout) {
  double pairs = 0;
  for (int r = 0; r < layout.num_requests; ++r) {
    pairs += double(new_tokens(layout, r)) * double(layout.seq_lens[r]);
  }
  const double group = double(layer.num_heads) / layer.num_kv_heads;
  return pairs * layer.num_kv_heads * layer.head_dim * std::max(2.0, group / 4);
}

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
