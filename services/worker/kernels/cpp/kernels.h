// What the kernels offer. Pointers are to contiguous rows; strides are in elements. Each function is
// there for float and, where the processor multiplies bfloat16, BFloat16.

#pragma once

#include <cstdint>

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

// input [rows, depth] -> output [rows, columns], or [rows, columns / 2] where it is gated.
template <class T>
void project(const Projection<T>& projection, const T* input, T* output, std::int64_t rows);

// output = norm(input + update); the sum replaces `input` when there is an update (else null).
// `group` rows lie together, and begin `stride` behind those before them; the rest is contiguous.
template <class T>
void rms_norm(T* input, std::int64_t group, std::int64_t stride, const T* update, const T* weight,
              T* output, std::int64_t rows, std::int64_t width, float epsilon);

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
  const std::int32_t* block_tables;
  std::int64_t table_width;
  const std::int64_t* slots;
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

// Pages [num_blocks, block_size, num_kv_heads, head_dim].
template <class T>
struct Pages {
  T* keys;
  T* values;
  int block_size;
};

// Stores the step's rotated keys and values, then attends; output [tokens, num_heads * head_dim].
template <class T>
void attend(const AttentionLayer& layer, const Layout& layout, const Heads<T>& heads,
            const Pages<T>& pages, T* output);
