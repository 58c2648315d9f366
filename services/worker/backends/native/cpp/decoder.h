// A decoder, from token ids to logits.
//
// A step is one call from Python: one team of threads runs all of it and synchronizes at barriers.

#pragma once

#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include "decoder_thread.h"

namespace stepwell {

namespace {  // Internal, so that functions with one caller are inlined.

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

// The attention plan (its division into tasks) of each layer. Layers of a KV-cache group with equal
// parameters share a plan.
template <class T>
std::vector<std::shared_ptr<AttentionPlan>> layer_plans(const Decoder<T>& decoder,
                                                        const Layout* layouts, int threads) {
  std::vector<std::shared_ptr<AttentionPlan>> plans;
  for (int i = 0; i < decoder.num_layers; ++i) {
    const DecoderLayer<T>& layer = decoder.layers[i];
    const auto is_alike = [&](const DecoderLayer<T>& other) {
      return other.group == layer.group && other.attention == layer.attention;
    };
    const auto first = std::find_if(decoder.layers, decoder.layers + i, is_alike) - decoder.layers;
    plans.push_back(first < i
                        ? plans[first]
                        : std::make_shared<AttentionPlan>(layer.attention, layouts[layer.group],
                                                          layer.pages.block_size, threads));
  }
  return plans;
}

std::vector<int> positions_of(const Layout& layout) {
  std::vector<int> positions;
  positions.reserve(layout.num_tokens());
  for (int r = 0; r < layout.num_requests; ++r) {
    for (int i = layout.context(r); i < layout.seq_lens[r]; ++i) positions.push_back(i);
  }
  return positions;
}

}  // namespace

// Runs a step's tokens through all layers. Writes hidden states [rows, hidden_size] to `output`,
// normalized if there is a norm, and logits [num_wanted, vocabulary] of the rows `wanted`, which
// are ascending, or of all rows if `wanted` is null. A token's input is its row of `embedded`, or
// the embedding of its id if `embedded` is null. `lora`: the adapters of the rows, or null.
template <class T>
void run_decoder(const Decoder<T>& decoder, const Layout* layouts, const std::int64_t* token_ids,
                 const T* embedded, T* output, const std::int64_t* wanted, std::int64_t num_wanted,
                 float* logits, const StepLora<T>* lora) {
  const std::int64_t rows = layouts[0].num_tokens();
  const double work = step_work(decoder, layouts, rows, num_wanted);
  const int threads = threads_for(work, PARALLEL_STEP_WORK);
  static thread_local Scratch scratch;
  const std::int64_t needed = StepBuffers<T>(decoder, rows, threads, lora, nullptr).size;
  scratch.reserve(needed * sizeof(T));
  const StepBuffers<T> buffers(decoder, rows, threads, lora, scratch.take<T>(needed));
  const auto plans = layer_plans(decoder, layouts, threads);
  const std::vector<int> positions = positions_of(layouts[0]);
  std::vector<std::atomic<int>> next(decoder.num_layers);
  in_team<ComputeScope<T>>(threads, [&](Team team) {
    StepThread<T> thread(decoder, buffers, rows, lora, team);
    thread.begin(token_ids, embedded, positions.data());
    const Projection<T>* head = num_wanted > 0 ? &decoder.head : nullptr;
    for (int i = 0; i < decoder.num_layers; ++i) {
      const DecoderLayer<T>& layer = decoder.layers[i];
      thread.run_layer(layer, *plans[i], next[i],
                       i + 1 < decoder.num_layers ? &(&layer)[1].qkv : head);
    }
    thread.run_final_norm(output);
    if (head != nullptr) thread.project_logits(output, wanted, num_wanted, logits);
  });
}

}  // namespace stepwell
