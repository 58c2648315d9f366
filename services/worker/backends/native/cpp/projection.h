// The common parts of multiplications by packed weights: the weight, rows of its input, and the
// conversion of totals (sums of products) to outputs.

#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "panel.h"
#include "prefetch_list.h"
#include "quads.h"
#include "quantized.h"
#include "rounding.h"
#include "vector_math.h"

namespace stepwell {

// The activation function that is applied to the gates of a projection.
enum class Epilogue : int { PLAIN, SILU_GATED, GELU_TANH_GATED };

// A packed weight. The content of `packed` depends on `format`. PLAIN: elements of T. Quantized:
// records as in quantized.h, with groups of `group` depths, a divisor of the depth. W8A8: panels as
// in coded_projection.h, with one group.
template <class T>
struct Projection {
  char* packed;
  const T* bias;  // [columns], ordered like the weight's; null for none.
  std::int64_t columns;
  std::int64_t depth;
  Epilogue epilogue;
  WeightFormat format;
  int has_offsets;
  std::int64_t group;

  bool is_gated() const { return epilogue != Epilogue::PLAIN; }

  // Whether the weight is quantized, and is unpacked to elements of T before multiplication.
  bool is_unpacked() const { return format != WeightFormat::PLAIN && format != WeightFormat::W8A8; }

  std::int64_t num_panels() const { return divide_up(columns, PANEL_WIDTH); }

  // The number of output columns of the projection, and of one panel.
  std::int64_t output_width() const { return is_gated() ? columns / 2 : columns; }
  int panel_output_width() const { return is_gated() ? LANES : PANEL_WIDTH; }

  std::int64_t group_bytes() const {
    if (format == WeightFormat::W8A8) return 2 * SCALES_BYTES + code_bytes(format, coded_depth());
    return (has_offsets ? 2 : 1) * SCALES_BYTES + code_bytes(format, group);
  }

  // The depth of W8A8, rounded up to a multiple of four.
  std::int64_t coded_depth() const { return round_up(depth, PanelOps<ValueByte>::DEPTH); }

  // The bytes of an element of the input rows.
  std::int64_t element_bytes() const { return format == WeightFormat::W8A8 ? 1 : sizeof(T); }

  std::int64_t panel_bytes() const {
    if (format == WeightFormat::PLAIN) return PANEL_WIDTH * depth * sizeof(T);
    return depth / group * group_bytes();
  }

  char* panel_of(std::int64_t panel) const { return packed + panel * panel_bytes(); }
};

// The results of a projection: elements of its type, or unrounded floats. The functions that
// multiply are compiled once for both.
struct Output {
  template <class Element>
  Output(Element* elements)
      : first(reinterpret_cast<char*>(elements)), element_bytes(sizeof(Element)) {}

  // The results from element number `index` on.
  Output from(std::int64_t index) const {
    Output rest = *this;
    rest.first += index * element_bytes;
    return rest;
  }

  char* first;
  std::int64_t element_bytes;
};

namespace {  // Internal, so that functions with one caller are inlined.

constexpr std::int64_t BLOCK_BYTES = 512 * 1024;
constexpr std::int64_t CHUNK_BYTES = 64 * 1024;

// Like BLOCK_BYTES, for weights that are unpacked once for each block of rows. With AVX2, tiles
// have few rows, and the tile that unpacks takes much longer than others, so blocks have BLOCK_ROWS
// rows.
#ifdef __AVX512F__
constexpr std::int64_t UNPACKED_BLOCK_BYTES = 640 * 1024;
#else
constexpr std::int64_t UNPACKED_BLOCK_BYTES = std::numeric_limits<std::int64_t>::max();
#endif

constexpr int BLOCK_ROWS = 264;
static_assert(BLOCK_ROWS % MAX_TILE_ROWS == 0);

// Number of rows of totals: the rows of a block, rounded up to whole tiles.
constexpr int TOTAL_ROWS = BLOCK_ROWS + TILE_ROWS;

// Prefetch distance in a sequential stream, in elements.
constexpr std::int64_t PREFETCH_AHEAD = 2048;

// Bytes that are prefetched before a sequential stream begins. Memory delivers them in a few
// microseconds, and they use a small part of a second-level cache.
constexpr std::int64_t PREFETCHED_BYTES = 64 * 1024;

// The weight's row for a column of a panel. For a padding column, at least the weight's number of
// rows.
template <class T>
std::int64_t source_row(const Projection<T>& p, std::int64_t panel, int column) {
  if (!p.is_gated()) return panel * PANEL_WIDTH + column;
  const std::int64_t half = p.columns / 2;
  const std::int64_t index = panel * LANES + column % LANES;
  if (index >= half) return p.columns;
  return column < LANES ? index : half + index;
}

template <class T>
Vector bias_of(const T* bias, std::int64_t first, std::int64_t count) {
  return bias == nullptr ? Vector{} : load_partial(bias + first, int(count));
}

template <class T, class Element>
__attribute__((noinline)) void write_elements(const Projection<T>& p, const float* total, int rows,
                                              std::int64_t first, std::int64_t width,
                                              Element* output) {
  const int count = int(std::min<std::int64_t>(width - first, PANEL_WIDTH));
  const bool gated = p.is_gated();
  const bool whole = count >= (gated ? LANES : PANEL_WIDTH);
  output += first;
  for (int i = 0; i < rows; ++i, total += PANEL_WIDTH, output += width) {
    Vector left = load(total);
    const Vector right = load(total + LANES);
    if (gated) left = (p.epilogue == Epilogue::SILU_GATED ? silu(left) : gelu_tanh(left)) * right;
    if (whole) {
      store(output, left);
      if (!gated) store(output + LANES, right);
    } else {
      store_partial(output, left, count);
      if (!gated) store_partial(output + LANES, right, count - LANES);
    }
  }
}

// Writes a panel's totals [rows, PANEL_WIDTH], gated if the projection is gated, to the output's
// columns from `first` on. Masked stores are used only for the last, incomplete panel.
template <class T>
void write_rows(const Projection<T>& p, const float* total, int rows, std::int64_t first,
                std::int64_t width, Output output) {
  if (output.element_bytes == sizeof(T)) {
    write_elements(p, total, rows, first, width, reinterpret_cast<T*>(output.first));
  } else {
    write_elements(p, total, rows, first, width, reinterpret_cast<float*>(output.first));
  }
}

// Rows in 8 bits, `stride` bytes apart: codes, to which 128 is added, and a scale for each row.
struct RowCodes {
  const ValueByte* first;
  std::int64_t stride;
  const float* scales;
};

// Rows of the input. `codes` is for multiplication by a W8A8 weight, and `tiles` for multiplication
// with tiles (see rows_in_tiles).
template <class T>
struct InputRows {
  const T* first;
  std::int64_t stride;
  int count;
  RowCodes codes = {};
  const char* tiles = nullptr;
};

// Returns rows that do not evict each other from the first-level cache. If the distance of rows is
// a multiple of 2 KB, they share a few sets of the cache, and a dozen of them, read side by side,
// do. If such rows fill a tile, they are copied to a distance of an odd number of cache lines. The
// copy is valid until the thread's next call. Other rows are returned unchanged.
template <class T>
InputRows<T> without_set_conflicts(const InputRows<T>& rows, std::int64_t depth) {
  if (rows.count < MAX_TILE_ROWS || rows.stride * sizeof(T) % 2048 != 0) return rows;
  static thread_local std::vector<T> copy;
  constexpr std::int64_t LINE = LINE_BYTES / sizeof(T);
  const std::int64_t stride = (divide_up(depth, LINE) | 1) * LINE;
  if (std::int64_t(copy.size()) < rows.count * stride) copy.resize(rows.count * stride);
  for (int row = 0; row < rows.count; ++row) {
    std::memcpy(&copy[row * stride], rows.first + row * rows.stride, depth * sizeof(T));
  }
  return {copy.data(), stride, rows.count};
}

// Loads and stores totals of rows that are `stride` elements apart.
template <int ROWS>
inline __attribute__((always_inline)) void load_totals(Vector (&total)[ROWS][PANEL_VECTORS],
                                                       const float* from, std::int64_t stride) {
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; ++i, from += stride) {
#pragma GCC unroll 4
    for (int v = 0; v < PANEL_VECTORS; ++v) total[i][v] = load(from + v * LANES);
  }
}

template <int ROWS>
inline __attribute__((always_inline)) void store_totals(const Vector (&total)[ROWS][PANEL_VECTORS],
                                                        float* to) {
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < PANEL_VECTORS; ++v) store(to + i * PANEL_WIDTH + v * LANES, total[i][v]);
  }
}

// Writes `from` plus rows of `a` times the panel to `to` [ROWS, PANEL_WIDTH]. Rows of `from` are
// `from_stride` elements apart. PREFETCH and `prefetch` are those of `multiply`. This is a separate
// function, so that `multiply` has all registers. It is aligned to a cache line, so that changes of
// other code do not move its loop.
template <class T, int ROWS, bool PREFETCH>
__attribute__((noinline, aligned(64))) void add_product(const float* from, std::int64_t from_stride,
                                                        const T* a, std::int64_t stride,
                                                        const T* panel, int steps,
                                                        Prefetch prefetch, float* to) {
  if (steps < 1) __builtin_unreachable();
  Vector total[ROWS][PANEL_VECTORS];
  load_totals(total, from, from_stride);
  multiply<T, ROWS, PANEL_VECTORS, PREFETCH>(total, a, stride, panel, steps, prefetch);
  store_totals(total, to);
}

template <class T, bool PREFETCH>
constexpr auto ADD_PRODUCT =
    functions_by_rows([]<int ROWS>() { return add_product<T, ROWS, PREFETCH>; });

// Like add_product, but prefetches a list of pieces, which is not empty.
template <class T, int ROWS>
__attribute__((noinline)) void add_product_of_list(const float* from, std::int64_t from_stride,
                                                   const T* a, std::int64_t stride, const T* panel,
                                                   int steps, const PrefetchList& list, float* to) {
  constexpr std::int64_t DEPTH = PanelOps<T>::DEPTH;
  Vector total[ROWS][PANEL_VECTORS];
  load_totals(total, from, from_stride);
  for (int piece = 0, done = 0; piece < list.count(); ++piece) {
    const int end =
        piece + 1 < list.count() ? round_down(list.end_of(piece, steps), SUM_STEPS<T>) : steps;
    if (end == done) continue;
    multiply<T, ROWS, PANEL_VECTORS, true>(total, a + done * DEPTH, stride,
                                           panel + done * DEPTH * PANEL_WIDTH, end - done,
                                           list.over(piece, end - done));
    done = end;
  }
  store_totals(total, to);
}

template <class T>
constexpr auto ADD_PRODUCT_OF_LIST =
    functions_by_rows([]<int ROWS>() { return add_product_of_list<T, ROWS>; });

// The output columns of a panel's totals, from `first` on. The output has `width` columns. `bias`
// has a number for each column of the panel.
template <class T>
struct PanelColumns {
  PanelColumns(const Projection<T>& p, std::int64_t panel)
      : first(panel * p.panel_output_width()), width(p.output_width()) {
    store(bias, bias_of(p.bias, first, width - first));
    store(bias + LANES,
          p.is_gated() ? bias_of(p.bias == nullptr ? nullptr : p.bias + width, first, width - first)
                       : bias_of(p.bias, first + LANES, width - first - LANES));
  }

  std::int64_t first;
  std::int64_t width;
  alignas(64) float bias[PANEL_WIDTH];
};

}  // namespace

}  // namespace stepwell
