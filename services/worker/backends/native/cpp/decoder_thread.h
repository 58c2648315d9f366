// One thread's part of a step of a decoder.
//
// The residual stream alternates between two buffers. With few rows (tokens), every thread
// normalizes all rows into its own buffer, and only one thread writes the residual stream. This
// takes less time than a barrier after a divided normalization.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstring>
#include <optional>

#include "attention.h"
#include "decoder_weights.h"
#include "lora_linear.h"
#include "lora_shrink.h"
#include "norm.h"

namespace stepwell {

namespace {  // Internal, so that functions with one caller are inlined.

constexpr std::int64_t FEW_ROWS = 16;

// With at most this many rows, reading the weights takes longer than multiplying by them.
constexpr std::int64_t MEMORY_BOUND_ROWS = 64;

constexpr std::int64_t BUFFER_MULTIPLE = 32;  // Elements.

// A step's buffers in its scratch memory.
template <class T>
struct StepBuffers {
  StepBuffers(const Decoder<T>& decoder, std::int64_t rows, int threads, const StepLora<T>* lora,
              T* scratch) {
    std::int64_t qkv_width = 0, heads = 0, inner = 0;
    for (int i = 0; i < decoder.num_layers; ++i) {
      const DecoderLayer<T>& layer = decoder.layers[i];
      qkv_width = std::max(qkv_width, layer.qkv.columns);
      heads = std::max(heads, layer.output.depth);
      inner = std::max(inner, layer.down.depth);
    }
    const std::int64_t hidden = rows * decoder.hidden_size;
    angles = rows * decoder.half;
    auto take = [&](std::int64_t count) {
      T* taken = scratch + size;
      size += round_up(count, BUFFER_MULTIPLE);
      return taken;
    };
    residual = take(hidden);
    next_residual = take(hidden);
    cos_sin = take(2 * angles * decoder.num_rotations);
    update = take(hidden);
    qkv = take(rows * qkv_width);
    attended = take(rows * heads);
    gated = take(rows * inner);
    inside = take(lora == nullptr ? 0 : rows * lora->width);
    normed_stride = rows <= FEW_ROWS ? round_up(hidden, BUFFER_MULTIPLE) : 0;
    normed = take(rows <= FEW_ROWS ? normed_stride * threads : hidden);
  }

  Rotation<T> rotation(int index) const {
    T* cos = cos_sin + 2 * angles * index;
    return {cos, cos + angles};
  }

  std::int64_t size = 0;
  std::int64_t angles;
  T* residual;
  T* next_residual;  // The sum of the residual stream and an update.
  T* cos_sin;        // For each rotation, the cosines and sines of the step's tokens.
  T* update;
  T* qkv;
  T* attended;
  T* gated;
  T* inside;  // See LoraDelta.
  T* normed;
  std::int64_t normed_stride;  // Distance of the threads' `normed`; 0 if they share one.
};

// One thread's part of a step. All threads of the team call the same functions in the same order.
template <class T>
class StepThread {
 public:
  StepThread(const Decoder<T>& decoder, const StepBuffers<T>& buffers, std::int64_t rows,
             const StepLora<T>* lora, Team team)
      : decoder_(decoder),
        buffers_(buffers),
        lora_(lora),
        residual_(buffers.residual),
        next_residual_(buffers.next_residual),
        normed_(buffers.normed + buffers.normed_stride * team.index),
        rows_(rows),
        team_(team) {}

  // Writes the tokens' embeddings to the residual stream, and copies the cosines and sines of their
  // positions. `embedded` is explained at run_decoder.
  void begin(const std::int64_t* token_ids, const T* embedded, const int* positions) {
    const std::int64_t width = decoder_.hidden_size;
    const Range own = team_.part(rows_);
    for (std::int64_t row = own.begin; row < own.end; ++row) {
      T* target = residual_ + row * width;
      if (embedded == nullptr) {
        embed(decoder_.embedding + token_ids[row] * width, target);
      } else {
        std::memcpy(target, embedded + row * width, width * sizeof(T));
      }
      for (int i = 0; i < decoder_.num_rotations; ++i) copy_angles(i, row, positions[row]);
    }
    team_.wait();
  }

  // `following`: the projection that is computed after this layer, or null.
  void run_layer(const DecoderLayer<T>& layer, AttentionPlan& plan, std::atomic<int>& next,
                 const Projection<T>* following) {
    normalize(layer.input_norm);
    project_part(layer, LORA_QKV, layer.qkv, normed_, buffers_.qkv);
    prefetch_and_wait(&layer.output);
    attend_layer(layer, plan, next);
    prefetch_and_wait(&layer.output);
    project_part(layer, LORA_OUTPUT, layer.output, buffers_.attended, buffers_.update);
    prefetch_and_wait(&layer.gate_up);
    sum_updates();
    normalize_update(layer.attention_output_norm);
    normalize(layer.mlp_norm);
    project_part(layer, LORA_GATE_UP, layer.gate_up, normed_, buffers_.gated);
    prefetch_and_wait(&layer.down);
    project_part(layer, LORA_DOWN, layer.down, buffers_.gated, buffers_.update);
    prefetch_and_wait(following);
    sum_updates();
    normalize_update(layer.mlp_output_norm);
  }

  // Adds the last layer's output to the residual stream, normalizes the sum if there is a norm, and
  // writes it to `output`.
  void run_final_norm(T* output) {
    const std::int64_t width = decoder_.hidden_size;
    const Range own = team_.part(rows_);
    if (decoder_.norm == nullptr) {
      add_update(own, output);
      return;
    }
    for (std::int64_t row = own.begin; row < own.end; ++row) {
      norm_row(residual_ + row * width, buffers_.update + row * width, static_cast<T*>(nullptr),
               decoder_.norm, output + row * width, width, decoder_.epsilon);
    }
  }

  // Gathers the rows whose logits are wanted, and projects them to the vocabulary. The gathered
  // rows are in the buffer of layer outputs, which is no longer needed.
  void project_logits(const T* output, const std::int64_t* wanted, std::int64_t num_wanted,
                      float* logits) {
    const std::int64_t width = decoder_.hidden_size;
    team_.wait();
    if (wanted != nullptr) {
      const Range own = team_.part(num_wanted);
      for (std::int64_t i = own.begin; i < own.end; ++i) {
        std::memcpy(buffers_.update + i * width, output + wanted[i] * width, width * sizeof(T));
      }
      output = buffers_.update;
      team_.wait();
    }
    SharedRanks* ranks = decoder_.head_ranks;
    if (ranks == nullptr) {
      project(decoder_.head, output, logits, num_wanted, team_);
      return;
    }
    const std::int64_t columns = decoder_.head.columns;
    float* own = logits + num_wanted * columns * (ranks->size - 1);
    project(decoder_.head, output, own, num_wanted, team_);
    team_.wait();
    gather_over(*ranks, reinterpret_cast<const char*>(own), reinterpret_cast<char*>(logits),
                num_wanted, columns * std::int64_t(sizeof(float)), team_);
  }

 private:
  // Computes a projection of a layer, with its LoRA adapters.
  void project_part(const DecoderLayer<T>& layer, LoraPart part, const Projection<T>& p,
                    const T* input, T* output) {
    const LoraDelta<T> delta{lora_, int(&layer - decoder_.layers), part, buffers_.inside};
    if (lora_ == nullptr || delta.is_empty()) {
      project(p, input, output, rows_, team_);
      return;
    }
    shrink(delta, input, p.depth, team_);
    team_.wait();
    if (part == LORA_GATE_UP && delta.layer + 1 < decoder_.num_layers) {
      prefetch_addresses(*lora_, delta.layer + 1);
    }
    std::optional<LoraReadAhead<T>> ahead = read_ahead(delta.layer, part);
    project_and_add(p, input, output, rows_, team_, delta, ahead ? &*ahead : nullptr);
  }

  // The A matrices of LoRA that are read after this projection; none after the last projection.
  std::optional<LoraReadAhead<T>> read_ahead(int layer, LoraPart part) const {
    if (part == LORA_DOWN) ++layer;
    if (layer == decoder_.num_layers) return {};
    const DecoderLayer<T>& own = decoder_.layers[layer];
    const std::int64_t depths[] = {own.qkv.depth, own.output.depth, own.gate_up.depth,
                                   own.down.depth};
    const LoraPart next = LoraPart((part + 1) % NUM_LORA_PARTS);
    return LoraReadAhead<T>({lora_, layer, next, nullptr}, depths[next], team_);
  }

  // Prefetches the first weights of the next projection, then waits for the team. With few rows,
  // reading weights takes most of the time, and memory would be idle during the wait.
  void prefetch_and_wait(const Projection<T>* next) {
    if (next != nullptr && rows_ <= MEMORY_BOUND_ROWS) prefetch(*next, rows_, team_);
    team_.wait();
  }

  // Sums the outputs of a part of the layer over the ranks that divide the layer.
  void sum_updates() {
    if (decoder_.ranks == nullptr) return;
    sum_over(*decoder_.ranks, buffers_.update, rows_ * decoder_.hidden_size, team_);
    team_.wait();
  }

  // Writes the residual stream after the last layer, for a range of rows.
  void add_update(Range own, T* output) const {
    const std::int64_t width = decoder_.hidden_size;
    for (std::int64_t row = own.begin; row < own.end; ++row) {
      const T* residual = residual_ + row * width;
      const T* update = buffers_.update + row * width;
      for (std::int64_t i = 0; i < width; ++i) {
        output[row * width + i] = from_float<T>(to_float(residual[i]) + to_float(update[i]));
      }
    }
  }

  void embed(const T* embedding, T* target) const {
    const float scale = decoder_.embedding_scale;
    const int width = int(decoder_.hidden_size);
    if (scale == 1) {
      std::memcpy(target, embedding, width * sizeof(T));
      return;
    }
    for (int i = 0; i < width; i += LANES) {
      store_partial(target + i, load_partial(embedding + i, width - i) * scale, width - i);
    }
  }

  void copy_angles(int index, std::int64_t row, std::int64_t position) const {
    const std::int64_t half = decoder_.half;
    const Rotation<T>& all = decoder_.rotations[index];
    T* cos = buffers_.cos_sin + 2 * buffers_.angles * index + row * half;
    std::memcpy(cos, all.cos + position * half, half * sizeof(T));
    std::memcpy(cos + buffers_.angles, all.sin + position * half, half * sizeof(T));
  }

  // Adds the output of attention or MLP to the residual stream, except in the first call, and
  // normalizes the sum.
  void normalize(const float* weight) {
    const std::int64_t width = decoder_.hidden_size;
    const bool is_private = buffers_.normed_stride > 0;
    const Range own = is_private ? Range{0, rows_} : team_.part(rows_);
    const bool writes = !is_private || team_.index == 0;
    for (std::int64_t row = own.begin; row < own.end; ++row) {
      norm_row(residual_ + row * width, has_update_ ? buffers_.update + row * width : nullptr,
               writes ? next_residual_ + row * width : nullptr, weight, normed_ + row * width,
               width, decoder_.epsilon);
    }
    if (has_update_) std::swap(residual_, next_residual_);
    has_update_ = true;
    if (!is_private) team_.wait();
  }

  // Normalizes the output of attention or MLP in place, if the layer has output norms.
  void normalize_update(const float* weight) {
    if (weight == nullptr) return;
    normalize_heads(buffers_.update, decoder_.hidden_size, 1, weight, decoder_.hidden_size);
    team_.wait();
  }

  // Normalizes `count` heads of each row in place.
  void normalize_heads(T* first, std::int64_t stride, int count, const float* weight,
                       std::int64_t width) const {
    const Range own = team_.part(rows_);
    for (std::int64_t row = own.begin; row < own.end; ++row) {
      for (int head = 0; head < count; ++head) {
        T* target = first + row * stride + head * width;
        norm_row(target, static_cast<const T*>(nullptr), static_cast<T*>(nullptr), weight, target,
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
  const StepBuffers<T>& buffers_;
  const StepLora<T>* lora_;
  T* residual_;
  T* next_residual_;
  T* normed_;
  std::int64_t rows_;
  Team team_;
  bool has_update_ = false;
};

}  // namespace

}  // namespace stepwell
