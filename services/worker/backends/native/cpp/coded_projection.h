// Multiplication of inputs in 8 bits by a panel (a block of columns, see panel.h) of a weight in 8
// bits (W8A8).
//
// A row of the input is quantized to codes, integers from -127 to 127, and a scale, in the same way
// as heads of keys (codes.h). vLLM quantizes each token's activations dynamically in the same way.
// Sums of products of codes are exact in 32 bits, in any order. The result is a sum times the
// scales of row and column. Instructions multiply unsigned bytes of rows by signed bytes of the
// weight (quads.h). Therefore 128 is added to the codes of rows, and sums begin with the negative
// contribution of this 128.
//
// A panel has the scales of its columns, the initial values of their sums, and the codes. If the
// depth is not a multiple of four, the weight is padded with codes of zero.

#pragma once

#include <vector>

#include "codes.h"
#include "projection.h"

namespace stepwell {

namespace {  // Internal, so that functions with one caller are inlined.

constexpr int ADDED_TO_CODES = 128;

// Packs the initial values of a panel's sums, and its codes.
template <class T, class CodeOf>
void pack_coded(const Projection<T>& p, char* panel, CodeOf&& code_of) {
  std::int32_t* begins = reinterpret_cast<std::int32_t*>(panel + SCALES_BYTES);
  pack_codes<ValueByte>(
      WeightFormat::INT8, panel + 2 * SCALES_BYTES, p.coded_depth(),
      [&](int column, std::int64_t d) { return d < p.depth ? code_of(column, d) : 0; });
  for (int column = 0; column < PANEL_WIDTH; ++column) {
    std::uint32_t sum = 0;  // For very deep columns 128 times the sum exceeds 32 bits.
    for (std::int64_t d = 0; d < p.depth; ++d) sum += code_of(column, d);
    begins[column] = std::int32_t(-ADDED_TO_CODES * sum);
  }
}

// Returns the codes of rows, at a distance of an odd number of cache lines (see
// without_set_conflicts), valid until the thread's next call. Each thread computes the codes of the
// block that it multiplies, which takes about a hundredth of the multiplication's time and needs no
// barrier.
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

// The operands of project_panel for W8A8; see PlainPanel.
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
