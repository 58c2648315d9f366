// Root mean square normalization, with the sum of the residual stream in the same pass.

#include <cmath>

#include "kernels.h"
#include "threads.h"

namespace {

template <class T>
void norm_row(T* input, const T* update, const T* weight, T* output, std::int64_t width,
              float epsilon) {
  const std::int64_t whole = width / LANES * LANES;
  Vector squares = {};
  for (std::int64_t i = 0; i < whole; i += LANES) {
    Vector value = load(input + i);
    if (update != nullptr) {
      store(input + i, value + load(update + i));
      value = load(input + i);  // As it was rounded: what later layers see is what was normalized.
    }
    squares += value * value;
  }
  float total = sum(squares);
  for (std::int64_t i = whole; i < width; ++i) {
    if (update != nullptr) input[i] = from_float<T>(to_float(input[i]) + to_float(update[i]));
    total += to_float(input[i]) * to_float(input[i]);
  }
  const float scale = 1.0f / std::sqrt(total / float(width) + epsilon);
  for (std::int64_t i = 0; i < whole; i += LANES) {
    store(output + i, load(input + i) * scale * load(weight + i));
  }
  for (std::int64_t i = whole; i < width; ++i) {
    output[i] = from_float<T>(to_float(input[i]) * scale * to_float(weight[i]));
  }
}

}  // namespace

template <class T>
void rms_norm(T* input, std::int64_t group, std::int64_t stride, const T* update, const T* weight,
              T* output, std::int64_t rows, std::int64_t width, float epsilon) {
  split(rows, double(rows) * double(width), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      norm_row(input + row / group * stride + row % group * width,
               update == nullptr ? nullptr : update + row * width, weight, output + row * width,
               width, epsilon);
    }
  });
}

#define INSTANTIATE(T)                                                                         \
  template void rms_norm<T>(T*, std::int64_t, std::int64_t, const T*, const T*, T*,            \
                            std::int64_t, std::int64_t, float);
INSTANTIATE(float)
#ifdef __AVX512BF16__
INSTANTIATE(BFloat16)
#endif
