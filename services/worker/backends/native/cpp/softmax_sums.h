// The running sums of attention's softmax, to base 2: Milakov and Gimelshein's online softmax, as
// in FlashAttention (Dao et al.).

#pragma once

#include <algorithm>
#include <cmath>

#include "vector.h"

namespace stepwell {

constexpr float LOWEST = -INFINITY;
constexpr float LOG2_E = 1.44269504f;

// The sums of rows (heads of queries) over the keys processed so far. For each row: the weighted
// values, `dim` elements; the sums of weights, lane by lane; and the largest score.
struct SoftmaxSums {
  float* values;
  float* weights;
  float* maxima;
  int dim;

  SoftmaxSums(float* memory, int rows, int dim)
      : values(memory), weights(values + rows * dim), maxima(weights + rows * LANES), dim(dim) {}

  // The sums from row `row` on.
  SoftmaxSums from(int row) const {
    SoftmaxSums rest = *this;
    rest.values += row * dim;
    rest.weights += row * LANES;
    rest.maxima += row;
    return rest;
  }

  void clear(int rows) const {
    std::fill(values, values + rows * dim, 0.0f);
    std::fill(weights, weights + rows * LANES, 0.0f);
    std::fill(maxima, maxima + rows, LOWEST);
  }
};

// Adds `part`, the sums of the same rows over further keys, to `sums`. Sums with a smaller maximum
// are scaled to the larger one. Rows without keys in `part` are unchanged.
inline void merge(const SoftmaxSums& sums, const SoftmaxSums& part, int rows) {
  for (int row = 0; row < rows; ++row) {
    const SoftmaxSums to = sums.from(row), from = part.from(row);
    if (*from.maxima == LOWEST) continue;
    const float maximum = std::max(*to.maxima, *from.maxima);
    const bool is_first = *to.maxima == LOWEST;
    const Vector kept = splat(is_first ? 0.0f : std::exp2(*to.maxima - maximum));
    const Vector added = splat(std::exp2(*from.maxima - maximum));
    const auto add = [&](float* target, const float* more) {
      const Vector value = load(more);
      store(target, is_first ? value : fmadd(load(target), kept, value * added));
    };
    for (int d = 0; d < to.dim; d += LANES) add(to.values + d, from.values + d);
    add(to.weights, from.weights);
    *to.maxima = maximum;
  }
}

}  // namespace stepwell
