// What the kernels offer. Pointers are to contiguous rows; strides are in elements. Each function is
// there for float and, where the processor multiplies bfloat16, BFloat16.

#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "threads.h"
#include "vector.h"

// How a projection's columns become results.
enum class Epilogue : int { PLAIN, SILU_GATED, GELU_TANH_GATED };

// Columns of a panel; a packed weight has as many outputs as fill its panels.
extern "C" int panel_width();

// [columns, depth] -> panels. Where they are gated, gates come first, then as many values; each
// panel's gates are laid beside their values.
template <class T>
void pack_weight(const T* weight, T* packed, std::int64_t columns, std::int64_t depth,
                 Epilogue epilogue);

template <class T>
struct Projection {
  const T* packed;
  const T* bias;  // [columns], in the order of the weight; null for none
  std::int64_t columns;
  std::int64_t depth;
  Epilogue epilogue;
};

// What a projection of so many rows costs, in the measure of threads.h.
template <class T>
double projection_work(const Projection<T>& projection, std::int64_t rows);

// input [rows, depth] -> output [rows, columns], or [rows, columns / 2] where it is gated. Each
// thread of the team does its part. `Out` is T or, for results that are not rounded, float.
template <class T, class Out>
void project(const Projection<T>& projection, const T* input, Out* output, std::int64_t rows,
             Team team);

// Has the memory bring in what this thread will read first of a projection, without waiting for it.
template <class T>
void fetch_ahead(const Projection<T>& projection, Team team);

// output = norm(input + update) of one row; null: no update. `sum_to`, unless null, gets the sum; it
// may be `input`. `output` may be `input` where there is no update.
template <class T>
void norm_row(const T* input, const T* update, T* sum_to, const float* weight, T* output,
              std::int64_t width, float epsilon);

struct AttentionLayer {
  int num_heads;
  int num_kv_heads;
  int head_dim;
  float scale;
  int window;     // 0 for none
  float softcap;  // 0 for none
};

// Where the tokens of a step belong; see StepLayout.
struct Layout {
  int num_requests;
  const std::int32_t* query_starts;
  const std::int32_t* seq_lens;
  const std::int32_t* rows;
  const std::int32_t* tables;
  std::int64_t table_width;

  std::int64_t num_tokens() const { return query_starts[num_requests]; }
  int new_tokens(int request) const { return query_starts[request + 1] - query_starts[request]; }
  int context(int request) const { return seq_lens[request] - new_tokens(request); }
  const std::int32_t* blocks(int request) const { return tables + rows[request] * table_width; }
};

// Heads of a step's tokens: rows `stride` apart. `cos` and `sin` [tokens, half]; half 0: unrotated.
template <class T>
struct Heads {
  const T* query;
  const T* key;
  const T* value;
  std::int64_t query_stride;
  std::int64_t key_stride;
  std::int64_t value_stride;
  const T* cos;
  const T* sin;
  int half;
};

// Pages of values [num_blocks, block_size, num_kv_heads, head_dim]; for those of keys see key_block.h.
template <class T>
struct Pages {
  T* keys;
  T* values;
  int block_size;
};

// A task of attention: key heads, mostly one, and consecutive queries of a request with all heads
// that share them, over a part of the context or all of it.
struct AttentionTask {
  int request;
  int kv_head;
  int heads;
  int first;  // Of the request's new tokens.
  int count;
  int key_begin;
  int key_end;
  std::int64_t partial;  // Where the sums of its one part go; -1: it is the whole of its context.
};

// The parts of one context, whose sums lie one after the other from `task.partial` on.
struct AttentionJoin {
  AttentionTask task;
  int parts;
};

// Keys of a part of a context.
constexpr int PART_KEYS = 512;

// How a step's attention is cut, for all layers of a group that attend alike.
struct AttentionPlan {
  AttentionPlan(const AttentionLayer& layer, const Layout& layout, int block_size, int threads);

  AttentionLayer layer;
  Layout layout;
  int group;       // Query heads of a key head.
  int padded_dim;  // The head's size in whole panels.
  bool stores_first;  // Whether all keys must be stored before any task begins.
  std::vector<std::int64_t> slots;  // Of each token: its block * block_size + its place there.
  std::vector<AttentionTask> tasks;
  std::vector<AttentionJoin> joins;
  std::vector<float> partial;

  // Floats of the sums of so many rows: weighted values, sums of weights lane by lane, maxima.
  std::int64_t sums_size(int rows) const { return std::int64_t{rows} * (padded_dim + LANES + 1); }
};

double attention_work(const AttentionLayer& layer, const Layout& layout);

// Stores the step's rotated keys and values, then attends; output [tokens, num_heads * head_dim].
// `next`, 0 at first, is what the team takes tasks by. Another layer may begin after a barrier.
template <class T>
void attend(AttentionPlan& plan, const Heads<T>& heads, const Pages<T>& pages, T* output,
            std::atomic<int>& next, Team team);

// One layer of a decoder. Norms that it does not have are null.
template <class T>
struct DecoderLayer {
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
  AttentionLayer attention;
  Pages<T> pages;
  int group;     // Whose layout it goes by.
  int rotation;  // Which rotation.
};

// [positions, half].
template <class T>
struct Rotation {
  const T* cos;
  const T* sin;
};

template <class T>
struct Decoder {
  const T* embedding;  // [vocabulary, hidden_size]
  float embedding_scale;
  const Rotation<T>* rotations;
  int num_rotations;
  int half;  // Pairs that are rotated.
  const DecoderLayer<T>* layers;
  int num_layers;
  const float* norm;
  Projection<T> head;
  std::int64_t hidden_size;
  float epsilon;
};

// Rows of a step, in rising order, whose logits are wanted; all `count` of them where there is no list.
struct Wanted {
  const std::int64_t* rows;
  std::int64_t count;
};

// Elements of scratch that a step of so many rows needs.
template <class T>
std::int64_t decoder_scratch(const Decoder<T>& decoder, std::int64_t rows, int threads);

// Runs a step's tokens through all layers -> normalized hidden states [rows, hidden_size], and logits
// [wanted.count, head.columns]. Each token goes in as its row of `embedded`, or, where that is null, as
// what stands for its id.
template <class T>
void run_decoder(const Decoder<T>& decoder, const Layout* layouts, const std::int64_t* token_ids,
                 const T* embedded, T* output, Wanted wanted, float* logits, T* scratch);
