// Multiplication by a panel of a quantized weight: see quantized.h.
//
// For a tile of rows, which is bound by the reading of codes, these are unpacked in registers; for
// more rows a part of a panel is unpacked once for all rows of a block, into memory that stays in
// the second-level cache. Whatever the number of rows, the products of a group are added up in
// order of depth, and groups in order.

#pragma once

#include <algorithm>

#include "lora.h"
#include "projection.h"
#include "threads.h"

namespace stepwell {

namespace {  // Internal, so that functions with one caller are inlined.

// The sum of a row's elements.
template <class T>
float sum_of(const T* row, std::int64_t count) {
  Vector total = {};
  std::int64_t i = 0;
  for (; i + LANES <= count; i += LANES) total += load(row + i);
  if (i < count) total += load_partial(row + i, int(count - i));
  return sum(total);
}

// A panel's groups. `record`: the first of them.
struct Groups {
  template <class T>
  Groups(const Projection<T>& p, std::int64_t panel)
      : record(p.panel_of(panel)),
        bytes(p.group_bytes()),
        offset_of_codes(bytes - code_bytes(p.format, p.group)),
        depth(p.group),
        count(int(p.depth / p.group)) {}

  const float* scales(std::int64_t group) const {
    return reinterpret_cast<const float*>(record + group * bytes);
  }
  const float* offsets(std::int64_t group) const { return scales(group) + PANEL_WIDTH; }
  const char* codes(std::int64_t group) const { return record + group * bytes + offset_of_codes; }

  const char* record;
  std::int64_t bytes;
  std::int64_t offset_of_codes;
  std::int64_t depth;
  int count;
};

// to [ROWS, PANEL_WIDTH] = from, whose rows are `from_stride` elements apart, + sums * scales.
template <int ROWS>
inline __attribute__((always_inline)) void add_scaled(const float* from, std::int64_t from_stride,
                                                      const Vector (&sums)[ROWS][PANEL_VECTORS],
                                                      const float* scales, float* to) {
  Vector scale[PANEL_VECTORS];
#pragma GCC unroll 4
  for (int v = 0; v < PANEL_VECTORS; ++v) scale[v] = load(scales + v * LANES);
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < PANEL_VECTORS; ++v) {
      const Vector before = load(from + i * from_stride + v * LANES);
      store(to + i * PANEL_WIDTH + v * LANES, fmadd(sums[i][v], scale[v], before));
    }
  }
}

// to [ROWS, PANEL_WIDTH] = bias [PANEL_WIDTH] + rows of `a` times the panel.
template <class T, WeightFormat FORMAT, int ROWS>
__attribute__((noinline)) void add_codes(const float* bias, const T* a, std::int64_t stride,
                                         const Groups& groups, float* to) {
  const Unpacker<T, FORMAT> block;
  const int steps = int(groups.depth / PanelOps<T>::DEPTH);
  for (int group = 0; group < groups.count; ++group, a += groups.depth) {
    Vector sums[ROWS][PANEL_VECTORS] = {};
    multiply_codes<T, FORMAT, ROWS>(sums, block, a, stride, groups.codes(group), steps);
    add_scaled<ROWS>(group == 0 ? bias : to, group == 0 ? 0 : PANEL_WIDTH, sums,
                     groups.scales(group), to);
  }
}

// to [ROWS, PANEL_WIDTH] = from, whose rows are `from_stride` elements apart, + rows of `a` times
// `count` groups from `first` on, which are unpacked.
template <class T, int ROWS>
__attribute__((noinline)) void add_unpacked(const float* from, std::int64_t from_stride, const T* a,
                                            std::int64_t stride, const T* unpacked,
                                            const Groups& groups, int first, int count, float* to) {
  const int steps = int(groups.depth / PanelOps<T>::DEPTH);
  for (int i = 0; i < count; ++i, a += groups.depth, unpacked += groups.depth * PANEL_WIDTH) {
    Vector sums[ROWS][PANEL_VECTORS] = {};
    multiply<T, ROWS>(sums, a, stride, unpacked, steps);
    add_scaled<ROWS>(i == 0 ? from : to, i == 0 ? from_stride : PANEL_WIDTH, sums,
                     groups.scales(first + i), to);
  }
}

// to [rows, PANEL_WIDTH] = from, whose rows are `from_stride` elements apart, + sums * scales.
inline void add_sums(const float* from, std::int64_t from_stride, const float* sums,
                     const float* scales, int rows, float* to) {
  for (int i = 0; i < rows; ++i, from += from_stride, sums += PANEL_WIDTH, to += PANEL_WIDTH) {
#pragma GCC unroll 4
    for (int v = 0; v < PANEL_WIDTH; v += LANES) {
      store(to + v, fmadd(load(sums + v), load(scales + v), load(from + v)));
    }
  }
}

// Adds to totals [ROWS, PANEL_WIDTH] what offsets add: of each row and group the sum of the row's
// elements times the offsets.
template <class T>
void add_offsets(const T* rows, std::int64_t stride, int count, const Groups& groups,
                 float* totals) {
  for (int i = 0; i < count; ++i, rows += stride, totals += PANEL_WIDTH) {
    for (int group = 0; group < groups.count; ++group) {
      const float row_sum = sum_of(rows + group * groups.depth, groups.depth);
#pragma GCC unroll 4
      for (int v = 0; v < PANEL_WIDTH; v += LANES) {
        store(totals + v, fmadd(load(groups.offsets(group) + v), row_sum, load(totals + v)));
      }
    }
  }
}

// totals [rows, PANEL_WIDTH] = bias + rows times the panel, of which several groups, or a part of
// one, are unpacked for all rows.
template <class T, WeightFormat FORMAT>
void multiply_block(const InputRows<T>& rows, const float* bias, const Groups& groups,
                    float* totals) {
  constexpr std::int64_t CHUNK = QUANTIZED_CHUNK_BYTES / (PANEL_WIDTH * sizeof(T));
  alignas(64) T unpacked[CHUNK * PANEL_WIDTH];
  if (groups.depth <= CHUNK) {
    const int most = int(CHUNK / groups.depth);
    for (int first = 0; first < groups.count; first += most) {
      const int count = std::min(most, groups.count - first);
      for (int i = 0; i < count; ++i) {
        unpack<T, FORMAT>(groups.codes(first + i), groups.depth,
                          unpacked + i * groups.depth * PANEL_WIDTH);
      }
      for_row_tiles(0, rows.count, [&]<int ROWS>(int row) {
        float* to = totals + row * PANEL_WIDTH;
        add_unpacked<T, ROWS>(first == 0 ? bias : to, first == 0 ? 0 : PANEL_WIDTH,
                              rows.first + row * rows.stride + first * groups.depth, rows.stride,
                              unpacked, groups, first, count, to);
      });
    }
    return;
  }
  constexpr float NOTHING[PANEL_WIDTH] = {};
  alignas(64) float sums[BLOCK_ROWS * PANEL_WIDTH];
  for (int group = 0; group < groups.count; ++group) {
    for (std::int64_t done = 0; done < groups.depth; done += CHUNK) {
      const std::int64_t depth = std::min(CHUNK, groups.depth - done);
      unpack<T, FORMAT>(groups.codes(group) + code_bytes(FORMAT, done), depth, unpacked);
      for_row_tiles(0, rows.count, [&]<int ROWS>(int row) {
        float* sum = sums + row * PANEL_WIDTH;
        add_product<T, ROWS, false>(done == 0 ? NOTHING : sum, done == 0 ? 0 : PANEL_WIDTH,
                                    rows.first + row * rows.stride + group * groups.depth + done,
                                    rows.stride, unpacked, int(depth / PanelOps<T>::DEPTH), 1, sum);
      });
    }
    add_sums(group == 0 ? bias : totals, group == 0 ? 0 : PANEL_WIDTH, sums, groups.scales(group),
             rows.count, totals);
  }
}

// Multiplies rows by one panel and writes the results; see project_panel.
template <class T, class Out, WeightFormat FORMAT>
__attribute__((noinline)) void project_quantized_panel(const Projection<T>& p,
                                                       const InputRows<T>& rows, Out* output,
                                                       std::int64_t panel, float* totals,
                                                       const LoraDelta<T>* delta,
                                                       std::int64_t first_row, LoraReadAhead<T>*) {
  const PanelColumns<T> columns(p, panel);
  const Groups groups(p, panel);
  const bool in_registers = rows.count <= MAX_TILE_ROWS;
  if (!in_registers) multiply_block<T, FORMAT>(rows, columns.bias, groups, totals);
  for_row_tiles(0, rows.count, [&]<int ROWS>(int row) {
    const T* tile = rows.first + row * rows.stride;
    float* to = totals + row * PANEL_WIDTH;
    if (in_registers) add_codes<T, FORMAT, ROWS>(columns.bias, tile, rows.stride, groups, to);
    if (p.has_offsets) add_offsets(tile, rows.stride, ROWS, groups, to);
    if (delta != nullptr) return;
    write_rows(p, to, ROWS, columns.first, columns.width, output + row * columns.width);
  });
  if (delta == nullptr) return;
  add_delta(*delta, first_row, rows.count, panel, totals);
  write_rows(p, totals, rows.count, columns.first, columns.width, output);
}

}  // namespace

// A quantized weight as it is packed: codes [columns, depth], scales and, unless null, offsets
// [columns, depth / group].
struct QuantizedWeight {
  const std::int8_t* codes;
  const float* scales;
  const float* offsets;
};

// Packs a quantized weight; a gated one as pack_weight does.
template <class T>
void pack_quantized(const Projection<T>& p, const QuantizedWeight& weight) {
  const std::int64_t groups = p.depth / p.group;
  in_team(threads_for(double(p.columns) * double(p.depth)), [&](Team team) {
    const Range own = team.part(p.num_panels());
    for (std::int64_t panel = own.begin; panel < own.end; ++panel) {
      std::int64_t row_of[PANEL_WIDTH];
      for (int i = 0; i < PANEL_WIDTH; ++i) row_of[i] = source_row(p, panel, i);
      char* record = p.panel_of(panel);
      for (std::int64_t group = 0; group < groups; ++group, record += p.group_bytes()) {
        float* scales = reinterpret_cast<float*>(record);
        for (int i = 0; i < PANEL_WIDTH; ++i) {
          const std::int64_t row = row_of[i], index = row * groups + group;
          const bool is_real = row < p.columns;
          scales[i] = is_real ? weight.scales[index] : 0;
          if (p.has_offsets) scales[PANEL_WIDTH + i] = is_real ? weight.offsets[index] : 0;
        }
        char* codes = record + p.group_bytes() - code_bytes(p.format, p.group);
        pack_codes<T>(p.format, codes, p.group, [&](int column, std::int64_t depth) {
          const std::int64_t row = row_of[column];
          return row < p.columns ? weight.codes[row * p.depth + group * p.group + depth] : 0;
        });
      }
    }
  });
}

}  // namespace stepwell
