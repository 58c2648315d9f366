// Multiplication by a panel of a quantized weight: see quantized.h.
//
// For a tile of rows, which is bound by the reading of codes, these are unpacked in registers. Of
// more rows the first tile does the same and writes what it unpacks to memory that stays in a
// cache, for all other tiles of a block: a part of the panel at a time. Whatever the number of
// rows, the products of a group are added up in order of depth, and groups in order.

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

// A part of a panel's depth that is unpacked at once: `count` whole groups from `group` on, or
// `depth` elements of one group after `done` others.
struct Piece {
  int group;
  int count;
  std::int64_t done;
  std::int64_t depth;  // Of each group.
  bool ends_groups;
  bool ends_panel;
};

// Calls work(piece) for pieces of at most `most` elements of each column.
template <class Work>
void for_pieces(const Groups& groups, std::int64_t most, Work&& work) {
  const int at_once = int(std::max<std::int64_t>(most / groups.depth, 1));
  for (int group = 0; group < groups.count; group += at_once) {
    const int count = std::min(at_once, groups.count - group);
    for (std::int64_t done = 0; done < groups.depth; done += most) {
      const std::int64_t depth = std::min(most, groups.depth - done);
      const bool ends = done + depth == groups.depth;
      work(Piece{group, count, done, depth, ends, ends && group + count == groups.count});
    }
  }
}

// Rows of the sums of a group that has been added up in part, and of the totals of all groups
// before, which begin as the bias: [rows, PANEL_WIDTH] both.
struct PanelTotals {
  const float* bias;
  float* sums;
  float* totals;

  PanelTotals from(int row) const {
    return {bias, sums + row * PANEL_WIDTH, totals + row * PANEL_WIDTH};
  }
};

// Calls work(row, v, place) for each vector of ROWS rows of totals and its place in them.
template <int ROWS, class Work>
inline __attribute__((always_inline)) void for_vectors_of_rows(Work&& work) {
#pragma GCC unroll 16
  for (int row = 0; row < ROWS; ++row) {
#pragma GCC unroll 4
    for (int v = 0; v < PANEL_VECTORS; ++v) work(row, v, row * PANEL_WIDTH + v * LANES);
  }
}

// Adds a piece to ROWS rows. multiply(sums, i) adds the products of the piece's group i.
template <int ROWS, class Multiply>
inline __attribute__((always_inline)) void add_piece(const Piece& piece, const Groups& groups,
                                                     const PanelTotals& to, Multiply&& multiply) {
  for (int i = 0; i < piece.count; ++i) {
    Vector sums[ROWS][PANEL_VECTORS] = {};
    if (piece.done > 0) {
      for_vectors_of_rows<ROWS>(
          [&](int row, int v, int place) { sums[row][v] = load(to.sums + place); });
    }
    multiply(sums, i);
    if (!piece.ends_groups) {
      for_vectors_of_rows<ROWS>(
          [&](int row, int v, int place) { store(to.sums + place, sums[row][v]); });
      return;
    }
    const int group = piece.group + i;
    const float* before = group == 0 ? to.bias : to.totals;
    const std::int64_t stride = group == 0 ? 0 : PANEL_WIDTH;
    const Vector scales[] = {load(groups.scales(group)), load(groups.scales(group) + LANES)};
    for_vectors_of_rows<ROWS>([&](int row, int v, int place) {
      const Vector total = load(before + row * stride + v * LANES);
      store(to.totals + place, fmadd(sums[row][v], scales[v], total));
    });
  }
}

// Adds ROWS rows of `a` times a piece's codes; with UNPACKS writes the piece to `unpacked`.
template <class T, WeightFormat FORMAT, int ROWS, bool UNPACKS>
__attribute__((noinline)) void add_codes(const Piece& piece, const Groups& groups,
                                         const PanelTotals& to, const T* a, std::int64_t stride,
                                         T* unpacked) {
  const Unpacker<T, FORMAT> block;
  const int steps = int(piece.depth / PanelOps<T>::DEPTH);
  add_piece<ROWS>(piece, groups, to, [&](Vector(&sums)[ROWS][PANEL_VECTORS], int i) {
    const char* codes = groups.codes(piece.group + i) + code_bytes(FORMAT, piece.done);
    multiply_codes<T, FORMAT, ROWS, UNPACKS>(sums, block, a + i * piece.depth, stride, codes, steps,
                                             unpacked + i * piece.depth * PANEL_WIDTH);
  });
}

// Adds ROWS rows of `a` times an unpacked piece.
template <class T, int ROWS>
__attribute__((noinline)) void add_unpacked(const Piece& piece, const Groups& groups,
                                            const PanelTotals& to, const T* a, std::int64_t stride,
                                            const T* unpacked) {
  const int steps = int(piece.depth / PanelOps<T>::DEPTH);
  add_piece<ROWS>(piece, groups, to, [&](Vector(&sums)[ROWS][PANEL_VECTORS], int i) {
    multiply<T, ROWS>(sums, a + i * piece.depth, stride, unpacked + i * piece.depth * PANEL_WIDTH,
                      steps);
  });
}

// Adds to totals [count, PANEL_WIDTH] what offsets add: of each row and group the sum of the row's
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

// Multiplies rows by one panel and writes the results; see project_panel.
template <class T, class Out, WeightFormat FORMAT>
__attribute__((noinline)) void project_quantized_panel(const Projection<T>& p,
                                                       const InputRows<T>& rows, Out* output,
                                                       std::int64_t panel, float* totals,
                                                       const LoraDelta<T>* delta,
                                                       std::int64_t first_row, LoraReadAhead<T>*) {
  constexpr std::int64_t CHUNK = CHUNK_BYTES / (PANEL_WIDTH * sizeof(T));
  alignas(64) T unpacked[CHUNK * PANEL_WIDTH];
  alignas(64) float sums[BLOCK_ROWS * PANEL_WIDTH];
  const PanelColumns<T> columns(p, panel);
  const Groups groups(p, panel);
  const PanelTotals all{columns.bias, sums, totals};
  const auto finish = [&](int row, int count) {
    float* to = totals + row * PANEL_WIDTH;
    const T* tile = rows.first + row * rows.stride;
    if (p.has_offsets) add_offsets(tile, rows.stride, count, groups, to);
    if (delta != nullptr) return;
    write_rows(p, to, count, columns.first, columns.width, output + row * columns.width);
  };
  if (rows.count <= MAX_TILE_ROWS) {
    const Piece whole{0, groups.count, 0, groups.depth, true, true};
    for_row_tiles(0, rows.count, [&]<int ROWS>(int row) {
      add_codes<T, FORMAT, ROWS, false>(whole, groups, all.from(row),
                                        rows.first + row * rows.stride, rows.stride, unpacked);
      finish(row, ROWS);
    });
  } else {
    for_pieces(groups, CHUNK, [&](const Piece& piece) {
      const T* input = rows.first + piece.group * groups.depth + piece.done;
      add_codes<T, FORMAT, MAX_TILE_ROWS, true>(piece, groups, all, input, rows.stride, unpacked);
      if (piece.ends_panel) finish(0, MAX_TILE_ROWS);
      for_row_tiles(MAX_TILE_ROWS, rows.count, [&]<int ROWS>(int row) {
        add_unpacked<T, ROWS>(piece, groups, all.from(row), input + row * rows.stride, rows.stride,
                              unpacked);
        if (piece.ends_panel) finish(row, ROWS);
      });
    });
  }
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
