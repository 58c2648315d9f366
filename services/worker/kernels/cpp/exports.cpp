// What Python calls, in C's calling convention: a function for each element type, named after it.
// Structures are those of kernels.h, and of native.py field by field.

#include "kernels.h"

#define EXPORT(T, SUFFIX)                                                                       \
  extern "C" void pack_weight_##SUFFIX(const T* weight, T* packed, std::int64_t columns,        \
                                       std::int64_t depth, int epilogue) {                      \
    pack_weight(weight, packed, columns, depth, static_cast<Epilogue>(epilogue));               \
  }                                                                                             \
  extern "C" void project_##SUFFIX(const Projection<T>* projection, const T* input, T* output,  \
                                   std::int64_t rows) {                                         \
    project(*projection, input, output, rows);                                                  \
  }                                                                                             \
  extern "C" void rms_norm_##SUFFIX(T* input, std::int64_t group, std::int64_t stride,          \
                                    const T* update, const T* weight, T* output,                \
                                    std::int64_t rows, std::int64_t width, float epsilon) {     \
    rms_norm(input, group, stride, update, weight, output, rows, width, epsilon);               \
  }                                                                                             \
  extern "C" void attend_##SUFFIX(const AttentionLayer* layer, const Layout* layout,            \
                                  const Heads<T>* heads, const Pages<T>* pages, T* output) {    \
    attend(*layer, *layout, *heads, *pages, output);                                            \
  }

EXPORT(float, float32)
#ifdef __AVX512BF16__
EXPORT(BFloat16, bfloat16)
#endif
