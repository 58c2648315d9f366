// Root mean square normalization.

#pragma once

#include <cstdint>

namespace stepwell {

// Of one row: output = norm(input + update); a null update counts as zeros. The sum is stored in
// `sum_to` unless that is null; it may be `input`. `output` may be `input` if there is no update.
template <class T>
void norm_row(const T* input, const T* update, T* sum_to, const float* weight, T* output,
              std::int64_t width, float epsilon);

}  // namespace stepwell
