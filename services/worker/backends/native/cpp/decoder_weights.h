// The structures of a decoder, as declared in native/library.py.

#pragma once

#include <cstdint>

#include "attention_plan.h"
#include "heads.h"
#include "linear.h"
#include "shared_ranks.h"

namespace stepwell {

// The weights of one layer. Python creates this structure from LayerWeights in backends/kernels.py.
// Norms that the layer lacks are null.
template <class T>
struct LayerWeights {
  const float* input_norm;
  Projection<T> qkv;
  const float* query_norm;
  const float* key_norm;
  Projection<T> output;
  const float* attention_output_norm;
  const float* mlp_norm;
  Projection<T> gate_up;
  Projection<T> down;
  const float* mlp_output_norm;
};

template <class T>
struct DecoderLayer : LayerWeights<T> {
  AttentionLayer attention;
  Pages pages;
  int group;     // Index of the layer's KV-cache group in the layouts.
  int rotation;  // Index of the layer's rotary embedding.
};

// Cosines and sines, [positions, half] each.
template <class T>
struct Rotation {
  const T* cos;
  const T* sin;
};

template <class T>
struct Decoder {
  const T* embedding;  // [vocabulary, hidden_size].
  float embedding_scale;
  const Rotation<T>* rotations;
  int num_rotations;
  int half;  // Number of rotated pairs in a head.
  const DecoderLayer<T>* layers;
  int num_layers;
  const float* norm;   // Null in pipeline stages before the last.
  Projection<T> head;  // Has no columns in stages before the last.
  std::int64_t hidden_size;
  float epsilon;
  SharedRanks* ranks;       // Ranks that divide the layers; null for one rank.
  SharedRanks* head_ranks;  // Ranks that divide the head's columns; null if it is whole.
};

}  // namespace stepwell
