// Multiplication of inputs in 8 bits by a panel of a weight in 8 bits (W8A8).
//
// A row of the input becomes codes, whole numbers from -127 to 127, times a scale, as a head of
// keys does (codes.h): so vLLM quantizes each token's activations dynamically. Sums of products of
// codes are exact in 32 bits, whatever their order, and a sum times the scales of row and column is
// the result. Instructions take unsigned bytes of rows beside signed ones of the weight (quads.h):
// 128 is added to the codes of rows, and sums begin as the negative of what that adds to them.
//
// A panel is the scales of its columns, what their sums begin as, and the codes. A depth that is
// not whole quads is filled up: codes of the weight are zero there.

#pragma once

#include <vector>

#include "codes.h"
#include "projection.h"

namespace stepwell {

namespace {  // Internal, so that functions with one caller are inlined.

constexpr int ADDED_TO_CODES = 128;

// Packs what the sums of a panel begin as, and its codes.
template <class T, class CodeOf>
void pack_coded(const Projection<T>& p, char* panel, CodeOf&& code_of) {
  std::int32_t* begins = reinterpret_cast<std::int32_t*>(panel + SCALES_BYTES);
  pack_codes<ValueByte>(
      WeightFormat::INT8, panel + 2 * SCALES_BYTES, p.coded_depth(),
      [&](int column, std::int64_t d) { return d < p.depth ? code_of(column, d) : 0; });
  for (int column = 0; column < PANEL_WIDTH; ++column) {
    std::uint32_t sum = 0;  // Of a very deep column 128 times the sum does not fit 32 bits.
    for (std::int64_t d = 0; d < p.depth; ++d) sum += code_of(column, d);
    begins[column] = std::int32_t(-ADDED_TO_CODES * sum);
  }
}

// The codes of rows, an odd number of cache lines apart (see without_set_conflicts). They are valid
// until the thread's next call. Each thread makes those of the block that it multiplies: that takes
// about a hundredth of the multiplication's time, and no barrier.
template <class T>
RowCodes codes_of(const InputRows<T>& rows, std::int64_t depth) {
  static thread_local std::vector<ValueByte> codes;
  static thread_local std::vector<float> scales;
  const std::int64_t stride = (divide_up(depth, LINE_BYTES) | 1) * LINE_BYTES;
  if (std::int64_t(codes.size()) < rows.count * stride) codes.resize(rows.count * stride);
  if (std::int64_t(scales.size()) < rows.count) scales.resize(rows.count);
  for (int row = 0; row < rows.count; ++row) {
    scales[row] = write_codes<ADDED_TO_CODES>(rows.first + row * rows.stride, int(depth),
                                              &codes[row * stride].bits);
  }
  return {codes.data(), stride, scales.data()};
}

// See PlainPanel.
template <class T>
struct CodedPanel {
  using Element = ValueByte;
  static constexpr std::int64_t AHEAD = CODES_AHEAD;

  CodedPanel(const Projection<T>& p, const InputRows<T>& input, std::int64_t panel,
             const PanelColumns<T>& columns)
      : depth(p.coded_depth()),
        rows(input.codes.first),
        stride(input.codes.stride),
        row_scales(input.codes.scales),
        scales(reinterpret_cast<const float*>(p.panel_of(panel))),
        begins(scales + PANEL_WIDTH),
        bias(columns.bias),
        packed(reinterpret_cast<const ValueByte*>(begins + PANEL_WIDTH)) {}

  __attribute__((noinline)) void finish(int first, int count, float* totals) const {
    for (int i = 0; i < count; ++i, totals += PANEL_WIDTH) {
#pragma GCC unroll 2
      for (int v = 0; v < PANEL_WIDTH; v += LANES) {
        const Vector scale = load(scales + v) * row_scales[first + i];
        store(totals + v, fmadd(to_floats(load(totals + v)), scale, load(bias + v)));
      }
    }
  }

  std::int64_t depth;
  const ValueByte* rows;
  std::int64_t stride;
  const float* row_scales;
  const float* scales;
  const float* begins;  // Integers.
  const float* bias;
  const ValueByte* packed;
};

}  // namespace

}  // namespace stepwell
