// All layers of a decoder in one call: one team of threads for the whole step, which meets at
// barriers, and no interpreter in between.
//
// The residual stream alternates between two buffers, so that with few rows every thread normalizes
// all of them for itself, into a buffer of its own, while one of them writes the sum; that is
// cheaper than to meet once more.

#include <algorithm>
#include <deque>

#include "kernels.h"

namespace {

constexpr std::int64_t FEW_ROWS = 16;

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
    auto take = [&](std::int64_t count) {
      T* taken = scratch + size;
      size += (count + 31) / 32 * 32;
      return taken;
    };
    residual = take(hidden);
    update = take(hidden);
    qkv = take(rows * fused);
    attended = take(rows * heads);
    gated = take(rows * inner);
    own_normed = rows <= FEW_ROWS ? (hidden + 31) / 32 * 32 : 0;
    normed = take(rows <= FEW_ROWS ? own_normed * threads : hidden);
  }

  std::int64_t size = 0;
  T* residual;
  T* update;
  T* qkv;
  T* attended;
  T* gated;
  T* normed;
  std::int64_t own_normed;  // How far the threads' own ones lie apart; 0 for one in common.
};

template <class T>
double step_work(const Decoder<T>& decoder, const Layout* layouts, std::int64_t rows) {
  double work = 0;
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
        made_.push_back({layer.group, {layer.attention, layouts[layer.group], threads}});
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

// One thread's way through a step.
template <class T>
class Walk {
 public:
  Walk(const Decoder<T>& decoder, const Buffers<T>& buffers, T* hidden, std::int64_t rows, Team team)
      : decoder_(decoder),
        buffers_(buffers),
        residual_(hidden),
        other_(buffers.residual),
        normed_(buffers.normed + buffers.own_normed * team.index),
        rows_(rows),
        team_(team) {}

  void layer(const DecoderLayer<T>& layer, AttentionPlan& plan, const Rotation<T>& rotation,
             std::atomic<int>& next) {
    normalize(layer.input_norm);
    project(layer.qkv, normed_, buffers_.qkv, rows_, team_);
    team_.wait();
    attend_layer(layer, plan, rotation, next);
    team_.wait();
    project(layer.output, buffers_.attended, buffers_.update, rows_, team_);
    team_.wait();
    normalize_update(layer.attention_output_norm);
    normalize(layer.mlp_norm);
    project(layer.gate_up, normed_, buffers_.gated, rows_, team_);
    team_.wait();
    project(layer.down, buffers_.gated, buffers_.update, rows_, team_);
    team_.wait();
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

 private:
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

  void attend_layer(const DecoderLayer<T>& layer, AttentionPlan& plan, const Rotation<T>& rotation,
                    std::atomic<int>& next) {
    const AttentionLayer& shape = layer.attention;
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
void run_decoder(const Decoder<T>& decoder, const Layout* layouts, const Rotation<T>* rotations,
                 T* hidden, T* output, T* scratch, std::int64_t rows) {
  const int threads = threads_for(step_work(decoder, layouts, rows), PARALLEL_STEP_WORK);
  const Buffers<T> buffers(decoder, rows, threads, scratch);
  const Plans plans(decoder, layouts, threads);
  std::vector<std::atomic<int>> next(decoder.num_layers);
  in_team(threads, [&](Team team) {
    Walk<T> walk(decoder, buffers, hidden, rows, team);
    for (int i = 0; i < decoder.num_layers; ++i) {
      const DecoderLayer<T>& layer = decoder.layers[i];
      walk.layer(layer, plans[i], rotations[layer.rotation], next[i]);
    }
    walk.finish(output);
  });
}

#define INSTANTIATE(T)                                                                       \
  template std::int64_t decoder_scratch<T>(const Decoder<T>&, std::int64_t, int);            \
  template void run_decoder<T>(const Decoder<T>&, const Layout*, const Rotation<T>*, T*, T*, \
                               T*, std::int64_t);
INSTANTIATE(float)
#ifdef __AVX512BF16__
INSTANTIATE(BFloat16)
#endif
