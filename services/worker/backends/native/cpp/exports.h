// The functions that Python calls. Each function is exported for each element type, as a pointer
// named after the function and the type. The class Functions in library.py declares the arguments.

#pragma once

#include "decoder.h"

namespace stepwell {

// Normalizes rows with `group` parts of `width` elements each. Rows are `stride` elements apart.
// See norm_row.
template <class T>
void norm_rows(T* input, std::int64_t group, std::int64_t stride, const T* update,
               const float* weight, T* output, std::int64_t rows, std::int64_t width,
               float epsilon) {
  in_team<ComputeScope<T>>(threads_for(double(rows) * double(width)), [&](Team team) {
    const Range own = team.part(rows);
    for (std::int64_t row = own.begin; row < own.end; ++row) {
      T* target = input + row / group * stride + row % group * width;
      norm_row<T>(target, update == nullptr ? nullptr : update + row * width, target, weight,
                  output + row * width, width, epsilon);
    }
  });
}

template <class T>
void attend_in_team(const AttentionLayer& layer, const Layout& layout, const Heads<T>& heads,
                    const Pages& pages, T* output) {
  const int threads = threads_for(attention_work(layer, layout));
  AttentionPlan plan(layer, layout, pages.block_size, threads);
  std::atomic<int> next{0};
  in_team<ComputeScope<T>>(threads,
                           [&](Team team) { attend(plan, heads, pages, output, next, team); });
}

// The size of a panel of the weight in bytes.
template <class T>
std::int64_t panel_bytes(const Projection<T>& projection) {
  return projection.panel_bytes();
}

// `lora`: the adapters, without memory for `inside`, or null.
template <class T, class Out>
void project_in_team(const Projection<T>& projection, const T* input, Out* output,
                     std::int64_t rows, const LoraDelta<T>* lora) {
  const int threads = threads_for(projection_work(projection, rows));
  if (lora == nullptr) {
    in_team<ComputeScope<T>>(threads,
                             [&](Team team) { project(projection, input, output, rows, team); });
    return;
  }
  static thread_local Scratch scratch;
  const std::int64_t needed = rows * lora->step->width;
  scratch.reserve(needed * sizeof(T));
  const LoraDelta<T> delta{lora->step, lora->layer, lora->part, scratch.take<T>(needed)};
  in_team<ComputeScope<T>>(threads, [&](Team team) {
    shrink(delta, input, projection.depth, team);
    team.wait();
    project_and_add(projection, input, output, rows, team, delta);
  });
}

#define EXPORT(SUFFIX, T)                                                   \
  extern "C" const auto pack_weight_##SUFFIX = &pack_weight<T>;             \
  extern "C" const auto pack_quantized_##SUFFIX = &pack_quantized<T>;       \
  extern "C" const auto panel_bytes_##SUFFIX = &panel_bytes<T>;             \
  extern "C" const auto project_##SUFFIX = &project_in_team<T, T>;          \
  extern "C" const auto project_full_##SUFFIX = &project_in_team<T, float>; \
  extern "C" const auto rms_norm_##SUFFIX = &norm_rows<T>;                  \
  extern "C" const auto attend_##SUFFIX = &attend_in_team<T>;               \
  extern "C" const auto run_decoder_##SUFFIX = &run_decoder<T>;

}  // namespace stepwell
