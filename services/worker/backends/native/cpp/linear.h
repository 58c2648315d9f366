// Multiplication by a packed weight.

#pragma once

#include <cstdint>

#include "threads.h"
#include "vector.h"

namespace stepwell {

// What a projection's columns go through.
enum class Epilogue : int { PLAIN, SILU_GATED, GELU_TANH_GATED };

// [columns, depth] -> panels. A gated weight has its gates first, then as many values; each panel
// gets gates beside the values that they gate.
template <class T>
void pack_weight(const T* weight, T* packed, std::int64_t columns, std::int64_t depth,
                 Epilogue epilogue);

template <class T>
struct Projection {
  const T* packed;
  const T* bias;  // [columns], in the order of the weight; null for none.
  std::int64_t columns;
  std::int64_t depth;
  Epilogue epilogue;
};

// The work of projecting `rows` rows, in the unit of threads.h.
template <class T>
double projection_work(const Projection<T>& projection, std::int64_t rows);

// input [rows, depth] -> output [rows, columns], or [rows, columns / 2] if the projection is gated.
// Every thread of the team calls it and computes a part. `Out` is T, or float for results that are
// not rounded.
template <class T, class Out>
void project(const Projection<T>& projection, const T* input, Out* output, std::int64_t rows,
             Team team);

// Prefetches what this thread will read first of a projection.
template <class T>
void prefetch(const Projection<T>& projection, Team team);

}  // namespace stepwell
