#include "norm.h"

#include <cmath>

#include "rounding.h"
#include "vector.h"

namespace stepwell {

// The sum is rounded to T before it is normalized, because later layers read the rounded sum. Until
// it is normalized it lies in `output`.
template <class T>
void norm_row(const T* input, const T* update, T* sum_to, const float* weight, T* output,
              std::int64_t width, float epsilon) {
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

#define INSTANTIATE(T) \
  template void norm_row<T>(const T*, const T*, T*, const float*, T*, std::int64_t, float);
INSTANTIATE(float)
#ifdef __AVX512BF16__
INSTANTIATE(BFloat16)
#endif

}  // namespace stepwell
