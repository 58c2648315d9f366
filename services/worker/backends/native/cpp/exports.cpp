// The functions that Python calls, with C linkage: one for each element type, named after it.
// library.py declares the same structures field by field, and compares their sizes.

#include <atomic>
#include <cstdint>
#include <string_view>

#include "attention.h"
#include "decoder.h"
#include "linear.h"
#include "norm.h"
#include "panel.h"

namespace stepwell {
namespace {

template <class T>
void norm_rows(T* input, std::int64_t group, std::int64_t stride, const T* update,
               const float* weight, T* output, std::int64_t rows, std::int64_t width,
               float epsilon) {
  in_team(threads_for(double(rows) * double(width)), [&](Team team) {
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
                    const Pages<T>& pages, T* output) {
  const int threads = threads_for(attention_work(layer, layout));
  AttentionPlan plan(layer, layout, pages.block_size, threads);
  std::atomic<int> next{0};
  in_team(threads, [&](Team team) { attend(plan, heads, pages, output, next, team); });
}

template <class T, class Out>
void project_in_team(const Projection<T>& projection, const T* input, Out* output,
                     std::int64_t rows) {
  in_team(threads_for(projection_work(projection, rows)),
          [&](Team team) { project(projection, input, output, rows, team); });
}

}  // namespace

// Columns of a panel. A packed weight has as many columns as fill its panels.
extern "C" int panel_width() { return PANEL_WIDTH; }

// The bytes of a structure, or 0 for an unknown name. They are the same for every element type.
extern "C" std::int64_t structure_size(const char* name) {
  const std::string_view wanted = name;
  if (wanted == "Projection") return sizeof(Projection<float>);
  if (wanted == "AttentionLayer") return sizeof(AttentionLayer);
  if (wanted == "Layout") return sizeof(Layout);
  if (wanted == "Heads") return sizeof(Heads<float>);
  if (wanted == "Pages") return sizeof(Pages<float>);
  if (wanted == "LayerWeights") return sizeof(LayerWeights<float>);
  if (wanted == "DecoderLayer") return sizeof(DecoderLayer<float>);
  if (wanted == "Rotation") return sizeof(Rotation<float>);
  if (wanted == "Decoder") return sizeof(Decoder<float>);
  return 0;
}

#define EXPORT(T, SUFFIX)                                                                        \
  extern "C" void pack_weight_##SUFFIX(const T* weight, T* packed, std::int64_t columns,         \
                                       std::int64_t depth, int epilogue) {                       \
    pack_weight(weight, packed, columns, depth, static_cast<Epilogue>(epilogue));                \
  }                                                                                              \
  extern "C" void project_##SUFFIX(const Projection<T>* projection, const T* input, T* output,   \
                                   std::int64_t rows) {                                          \
    project_in_team(*projection, input, output, rows);                                           \
  }                                                                                              \
  extern "C" void project_full_##SUFFIX(const Projection<T>* projection, const T* input,         \
                                        float* output, std::int64_t rows) {                      \
    project_in_team(*projection, input, output, rows);                                           \
  }                                                                                              \
  extern "C" void rms_norm_##SUFFIX(T* input, std::int64_t group, std::int64_t stride,           \
                                    const T* update, const float* weight, T* output,             \
                                    std::int64_t rows, std::int64_t width, float epsilon) {      \
    norm_rows(input, group, stride, update, weight, output, rows, width, epsilon);               \
  }                                                                                              \
  extern "C" void attend_##SUFFIX(const AttentionLayer* layer, const Layout* layout,             \
                                  const Heads<T>* heads, const Pages<T>* pages, T* output) {     \
    attend_in_team(*layer, *layout, *heads, *pages, output);                                     \
  }                                                                                              \
  extern "C" std::int64_t decoder_scratch_##SUFFIX(const Decoder<T>* decoder, std::int64_t rows, \
                                                   int threads) {                                \
    return decoder_scratch(*decoder, rows, threads);                                             \
  }                                                                                              \
  extern "C" void run_decoder_##SUFFIX(const Decoder<T>* decoder, const Layout* layouts,         \
                                       const std::int64_t* token_ids, const T* embedded,         \
                                       T* output, const std::int64_t* wanted,                    \
                                       std::int64_t num_wanted, float* logits, T* scratch) {     \
    const Wanted rows{wanted, num_wanted};                                                       \
    run_decoder(*decoder, layouts, token_ids, embedded, output, rows, logits, scratch);          \
  }

EXPORT(float, float32)
#ifdef __AVX512BF16__
EXPORT(BFloat16, bfloat16)
#endif

}  // namespace stepwell
