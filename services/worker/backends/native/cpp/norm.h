// Root mean square normalization.

#pragma once

#include <cmath>
#include <cstdint>

#include "rounding.h"
#include "vector.h"

namespace stepwell {

// Normalizes one row: output = norm(input + update). A null update counts as zeros. The sum is
// stored in `sum_to` if this is not null. `sum_to` may be `input`. `output` may be `input` if there
// is no update.
//
// The sum is rounded to T before it is normalized, because later layers read the rounded sum.
// `output` contains the sum until it is normalized.
template <class T>
[[gnu::noinline]] void norm_row(const T* input, const T* update, T* sum_to, const float* weight,
                                T* output, std::int64_t width, float epsilon) {
  const std::int64_t whole = round_down(width, LANES);
  const T* row = input;
  Vector squares = {};
  if (update != nullptr) {
    row = output;
    for (std::int64_t i = 0; i < whole; i += LANES) {
      store(output + i, load(input + i) + load(update + i));
    }
    for (std::int64_t i = whole; i < width; ++i) {
      output[i] = from_float<T>(to_float(input[i]) + to_float(update[i]));
    }
    if (sum_to != nullptr) std::memcpy(sum_to, output, width * sizeof(T));
  }
  for (std::int64_t i = 0; i < whole; i += LANES) {
    const Vector value = load(row + i);
    squares = fmadd(value, value, squares);
  }
  float total = sum(squares);
  for (std::int64_t i = whole; i < width; ++i)
    total = std::fma(to_float(row[i]), to_float(row[i]), total);
  const float scale = 1.0f / std::sqrt(total / float(width) + epsilon);
  for (std::int64_t i = 0; i < whole; i += LANES) {
    store(output + i, load(row + i) * scale * load(weight + i));
  }
  for (std::int64_t i = whole; i < width; ++i) {
    output[i] = from_float<T>(to_float(row[i]) * scale * weight[i]);
  }
}

}  // namespace stepwell
