// A decoder in one call, from token ids to logits: one team of threads for the whole
// step, which meets at barriers, and no interpreter in between.
//
// The residual stream alternates between two buffers, so that with few rows every thread normalizes
// all of them for itself, into a buffer of its own, while one of them writes the sum; that is
// cheaper than to meet once more.

#include <algorithm>
#include <deque>

#include "kernels.h"

namespace {

constexpr std::int64_t FEW_ROWS = 16;
constexpr std::int64_t STREAMED_ROWS = 64;  // Most with which reading the weights costs more than they.

// Where a step's buffers lie in its scratch.
template <class T>
struct Buffers {
  Buffers(const Decoder<T>& decoder, std::int64_t rows, int threads, T* scratch) {
    std::int64_t fused = 0, heads = 0, inner = 0;
    for (int i = 0; i < decoder.num_layers; ++i) {
      const DecoderLayer<T>& layer = decoder.layers[i];
      fused = std::max(fused, layer.qkv.columns);
      heads = std::max(heads, layer.output.depth);
      inner = std::max(inner, layer.down.depth);
    }
    const std::int64_t hidden = rows * decoder.hidden_size;
    angles = rows * decoder.half;
    auto take = [&](std::int64_t count) {
      T* taken = scratch + size;
      size += (count + 31) / 32 * 32;
      return taken;
    };
    residual = take(hidden);
    other = take(hidden);
    cos_sin = take(2 * angles * decoder.num_rotations);
    update = take(hidden);
    qkv = take(rows * fused);
    attended = take(rows * heads);
    gated = take(rows * inner);
    own_normed = rows <= FEW_ROWS ? (hidden + 31) / 32 * 32 : 0;
    normed = take(rows <= FEW_ROWS ? own_normed * threads : hidden);
  }

  Rotation<T> rotation(int index) const {
    T* cos = cos_sin + 2 * angles * index;
    return {cos, cos + angles};
  }

  std::int64_t size = 0;
  std::int64_t angles;
  T* residual;
  T* other;
  T* cos_sin;  // Of the step's tokens, rotation by rotation.
  T* update;
  T* qkv;
  T* attended;
  T* gated;
  T* normed;
  std::int64_t own_normed;  // How far the threads' own ones lie apart; 0 for one in common.
};

template <class T>
double step_work(const Decoder<T>& decoder, const Layout* layouts, std::int64_t rows,
                 std::int64_t num_wanted) {
  double work = num_wanted > 0 ? projection_work(decoder.head, num_wanted) : 0;
  for (int i = 0; i < decoder.num_layers; ++i) {
    const DecoderLayer<T>& layer = decoder.layers[i];
    work += projection_work(layer.qkv, rows) + projection_work(layer.output, rows) +
            projection_work(layer.gate_up, rows) + projection_work(layer.down, rows) +
            attention_work(layer.attention, layouts[layer.group]);
  }
  return work;
}

bool alike(const AttentionLayer& a, const AttentionLayer& b) {
  return a.num_heads == b.num_heads && a.num_kv_heads == b.num_kv_heads &&
         a.head_dim == b.head_dim && a.scale == b.scale && a.window == b.window &&
         a.softcap == b.softcap;
}

// Each layer's plan; layers of a group that attend alike share one.
class Plans {
 public:
  template <class T>
  Plans(const Decoder<T>& decoder, const Layout* layouts, int threads) {
    for (int i = 0; i < decoder.num_layers; ++i) {
      const DecoderLayer<T>& layer = decoder.layers[i];
      const auto same = [&](const Planned& made) {
        return made.group == layer.group && alike(made.plan.layer, layer.attention);
      };
      auto found = std::find_if(made_.begin(), made_.end(), same);
      if (found == made_.end()) {
        const Layout& layout = layouts[layer.group];
        made_.push_back({layer.group, {layer.attention, layout, layer.pages.block_size, threads}});
        found = made_.end() - 1;
      }
      of_layer_.push_back(&found->plan);
    }
  }

  AttentionPlan& operator[](int layer) const { return *of_layer_[layer]; }

 private:
  struct Planned {
    int group;
    AttentionPlan plan;
  };
  std::deque<Planned> made_;
  std::vector<AttentionPlan*> of_layer_;
};

std::vector<int> positions_of(const Layout& layout) {
  std::vector<int> positions;
  positions.reserve(layout.num_tokens());
  for (int r = 0; r < layout.num_requests; ++r) {
    for (int i = layout.context(r); i < layout.seq_lens[r]; ++i) positions.push_back(i);
  }
  return positions;
}

// One thread's way through a step.
template <class T>
class Walk {
 public:
  Walk(const Decoder<T>& decoder, const Buffers<T>& buffers, std::int64_t rows, Team team)
      : decoder_(decoder),
        buffers_(buffers),
        residual_(buffers.residual),
        other_(buffers.other),
        normed_(buffers.normed + buffers.own_normed * team.index),
        rows_(rows),
        team_(team) {}

  // `embedded` as for run_decoder; `positions` of the tokens.
  void enter(const std::int64_t* token_ids, const T* embedded, const int* positions) {
    const std::int64_t width = decoder_.hidden_size;
    const Range own = team_.part(rows_);
    for (std::int64_t row = own.begin; row < own.end; ++row) {
      T* place = residual_ + row * width;
      if (embedded == nullptr) {
        embed(decoder_.embedding + token_ids[row] * width, place);
      } else {
        std::memcpy(place, embedded + row * width, width * sizeof(T));
      }
      for (int i = 0; i < decoder_.num_rotations; ++i) take_angles(i, row, positions[row]);
    }
    team_.wait();
  }

  // `then`: what is projected by afterwards, or null.
  void layer(const DecoderLayer<T>& layer, AttentionPlan& plan, std::atomic<int>& next,
             const Projection<T>* then) {
    normalize(layer.input_norm);
    project(layer.qkv, normed_, buffers_.qkv, rows_, team_);
    meet(&layer.output);
    attend_layer(layer, plan, next);
    meet(&layer.output);
    project(layer.output, buffers_.attended, buffers_.update, rows_, team_);
    meet(&layer.gate_up);
    normalize_update(layer.attention_output_norm);
    normalize(layer.mlp_norm);
    project(layer.gate_up, normed_, buffers_.gated, rows_, team_);
    meet(&layer.down);
    project(layer.down, buffers_.gated, buffers_.update, rows_, team_);
    meet(then);
    normalize_update(layer.mlp_output_norm);
  }

  void finish(T* output) {
    const std::int64_t width = decoder_.hidden_size;
    const Range own = team_.part(rows_);
    for (std::int64_t row = own.begin; row < own.end; ++row) {
      norm_row(residual_ + row * width, buffers_.update + row * width, static_cast<T*>(nullptr),
               decoder_.norm, output + row * width, width, decoder_.epsilon);
    }
  }

  // The last update has been taken in by then: its buffer serves for the rows that are wanted.
  void project_wanted(const T* output, Wanted wanted, float* logits) {
    const std::int64_t width = decoder_.hidden_size;
    team_.wait();
    if (wanted.rows != nullptr) {
      const Range own = team_.part(wanted.count);
      for (std::int64_t i = own.begin; i < own.end; ++i) {
        std::memcpy(buffers_.update + i * width, output + wanted.rows[i] * width, width * sizeof(T));
      }
      output = buffers_.update;
      team_.wait();
    }
    project(decoder_.head, output, logits, wanted.count, team_);
  }

 private:
  // Waits for the team, and while it waits and whatever comes before the next projection has its
  // weights brought in: of a small batch they are most of the work, and memory would stand still.
  void meet(const Projection<T>* next) {
    if (next != nullptr && rows_ <= STREAMED_ROWS) fetch_ahead(*next, team_);
    team_.wait();
  }

  void embed(const T* found, T* place) const {
    const float scale = decoder_.embedding_scale;
    const int width = int(decoder_.hidden_size);
    if (scale == 1) {
      std::memcpy(place, found, width * sizeof(T));
      return;
    }
    for (int i = 0; i < width; i += LANES) {
      store_first(place + i, load_first(found + i, width - i) * scale, width - i);
    }
  }

  void take_angles(int index, std::int64_t row, std::int64_t position) const {
    const std::int64_t half = decoder_.half;
    const Rotation<T>& all = decoder_.rotations[index];
    T* cos = buffers_.cos_sin + 2 * buffers_.angles * index + row * half;
    std::memcpy(cos, all.cos + position * half, half * sizeof(T));
    std::memcpy(cos + buffers_.angles, all.sin + position * half, half * sizeof(T));
  }

  // The residual stream takes the update in, from the second time on, and is normalized.
  void normalize(const float* weight) {
    const std::int64_t width = decoder_.hidden_size;
    const bool for_myself = buffers_.own_normed > 0;
    const Range own = for_myself ? Range{0, rows_} : team_.part(rows_);
    const bool writes = !for_myself || team_.index == 0;
    for (std::int64_t row = own.begin; row < own.end; ++row) {
      norm_row(residual_ + row * width, has_update_ ? buffers_.update + row * width : nullptr,
               writes ? other_ + row * width : nullptr, weight, normed_ + row * width, width,
               decoder_.epsilon);
    }
    if (has_update_) std::swap(residual_, other_);
    has_update_ = true;
    if (!for_myself) team_.wait();
  }

  void normalize_update(const float* weight) {
    if (weight == nullptr) return;
    normalize_heads(buffers_.update, decoder_.hidden_size, 1, weight, decoder_.hidden_size);
    team_.wait();
  }

  // In place: `count` heads of each row.
  void normalize_heads(T* first, std::int64_t stride, int count, const float* weight,
                       std::int64_t width) const {
    const Range own = team_.part(rows_);
    for (std::int64_t row = own.begin; row < own.end; ++row) {
      for (int head = 0; head < count; ++head) {
        T* place = first + row * stride + head * width;
        norm_row(place, static_cast<const T*>(nullptr), static_cast<T*>(nullptr), weight, place,
                 width, decoder_.epsilon);
      }
    }
  }

  void attend_layer(const DecoderLayer<T>& layer, AttentionPlan& plan, std::atomic<int>& next) {
    const AttentionLayer& shape = layer.attention;
    const Rotation<T> rotation = buffers_.rotation(layer.rotation);
    const std::int64_t stride = layer.qkv.columns;
    T* query = buffers_.qkv;
    T* key = query + std::int64_t{shape.num_heads} * shape.head_dim;
    T* value = key + std::int64_t{shape.num_kv_heads} * shape.head_dim;
    if (layer.query_norm != nullptr) {
      normalize_heads(query, stride, shape.num_heads, layer.query_norm, shape.head_dim);
      normalize_heads(key, stride, shape.num_kv_heads, layer.key_norm, shape.head_dim);
      team_.wait();
    }
    attend(plan,
           Heads<T>{query, key, value, stride, stride, stride, rotation.cos, rotation.sin,
                    decoder_.half},
           layer.pages, buffers_.attended, next, team_);
  }

  const Decoder<T>& decoder_;
  const Buffers<T>& buffers_;
  T* residual_;
  T* other_;
  T* normed_;
  std::int64_t rows_;
  Team team_;
  bool has_update_ = false;
};

}  // namespace

template <class T>
std::int64_t decoder_scratch(const Decoder<T>& decoder, std::int64_t rows, int threads) {
  return Buffers<T>(decoder, rows, threads, nullptr).size;
}

template <class T>
void run_decoder(const Decoder<T>& decoder, const Layout* layouts, const std::int64_t* token_ids,
                 const T* embedded, T* output, Wanted wanted, float* logits, T* scratch) {
  const std::int64_t rows = layouts[0].num_tokens();
  const double work = step_work(decoder, layouts, rows, wanted.count);
  const int threads = threads_for(work, PARALLEL_STEP_WORK);
  const Buffers<T> buffers(decoder, rows, threads, scratch);
  const Plans plans(decoder, layouts, threads);
  const std::vector<int> positions = positions_of(layouts[0]);
  std::vector<std::atomic<int>> next(decoder.num_layers);
  in_team(threads, [&](Team team) {
    Walk<T> walk(decoder, buffers, rows, team);
    walk.enter(token_ids, embedded, positions.data());
    const Projection<T>* head = wanted.count > 0 ? &decoder.head : nullptr;
    for (int i = 0; i < decoder.num_layers; ++i) {
      const DecoderLayer<T>& layer = decoder.layers[i];
      walk.layer(layer, plans[i], next[i], i + 1 < decoder.num_layers ? &(&layer)[1].qkv : head);
    }
    walk.finish(output);
    if (head != nullptr) walk.project_wanted(output, wanted, logits);
  });
}

#define INSTANTIATE(T)                                                                  \
  template std::int64_t decoder_scratch<T>(const Decoder<T>&, std::int64_t, int);       \
  template void run_decoder<T>(const Decoder<T>&, const Layout*, const std::int64_t*,   \
                               const T*, T*, Wanted, float*, T*);
INSTANTIATE(float)
#ifdef __AVX512BF16__
INSTANTIATE(BFloat16)
#endif
