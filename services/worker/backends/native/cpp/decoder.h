// A decoder, from token ids to logits.

#pragma once

#include <cstdint>

#include "attention.h"
#include "linear.h"

namespace stepwell {

// The weights of one layer; see LayerWeights in backends/decoder.py, from which Python's side of
// this structure is made. Norms that the layer does not have are null.
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
  Pages<T> pages;
  int group;     // Index of its layout.
  int rotation;  // Index of its rotation.
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
  int half;  // Pairs of a head that are rotated.
  const DecoderLayer<T>* layers;
  int num_layers;
  const float* norm;
  Projection<T> head;
  std::int64_t hidden_size;
  float epsilon;
};

// The rows of a step whose logits are computed, rising; null `rows`: all `count` of them.
struct Wanted {
  const std::int64_t* rows;
  std::int64_t count;
};

// Elements of scratch memory that a step of so many rows needs.
template <class T>
std::int64_t decoder_scratch(const Decoder<T>& decoder, std::int64_t rows, int threads);

// Runs a step's tokens through all layers. Gives normalized hidden states [rows, hidden_size] in
// `output`, and logits [wanted.count, head.columns]. A token's input is its row of `embedded`, or,
// if that is null, the embedding of its id.
template <class T>
void run_decoder(const Decoder<T>& decoder, const Layout* layouts, const std::int64_t* token_ids,
                 const T* embedded, T* output, Wanted wanted, float* logits, T* scratch);

}  // namespace stepwell
