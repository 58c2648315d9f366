// Multiplication by a panel of a quantized weight (quantized.h).
//
// A single tile of rows is bound by reading codes, so codes are unpacked in registers. With a few
// rows, codes of two panels are unpacked side by side. With several tiles, the first tile unpacks a
// part of the panel at a time, and writes it to memory that stays in a cache, where the other tiles
// of the block read it. For any number of rows, the products of a group are added in order of
// depth, and groups in order.

#pragma once

#include <algorithm>

#include "coded_projection.h"
#include "lora_expand.h"
#include "projection.h"
#include "quantized_groups.h"
#include "threads.h"

namespace stepwell {

namespace {  // Internal, so that functions with one caller are inlined.

// Maximum number of rows that are multiplied by two panels side by side. With so few rows, one
// panel has fewer sums than the processor can add while one addition is in flight. With AVX2, which
// has fewer registers, two panels are never faster.
#ifdef __AVX512F__
constexpr int MAX_PAIR_ROWS = 4;
#else
constexpr int MAX_PAIR_ROWS = 0;
#endif

template <class T>
float sum_of(const T* row, std::int64_t count) {
  Vector total = {};
  std::int64_t i = 0;
  for (; i + LANES <= count; i += LANES) total += load(row + i);
  if (i < count) total += load_partial(row + i, int(count - i));
  return sum(total);
}

// The prefetches of a tile of rows while it is multiplied by an unpacked piece. Each of the last
// two tiles prefetches half of the codes after the piece, and a single tile prefetches all of them
// (as in prefetch_of_tile). Without these prefetches, the tile that unpacks would wait for codes of
// 8 bits, but not for codes of 4 bits.
template <class T, WeightFormat FORMAT>
Prefetch prefetch_of_codes(const Piece& piece, const Groups& groups, int rows_left, int all_rows) {
  if (FORMAT == WeightFormat::INT4 || rows_left > 2 * MAX_TILE_ROWS) return {};
  const bool is_last = rows_left <= MAX_TILE_ROWS, is_only = is_last && rows_left == all_rows;
  const std::int64_t bytes = code_bytes(FORMAT, PanelOps<T>::DEPTH) / (is_only ? 1 : 2);
  const std::int64_t steps = piece.count * piece.depth / PanelOps<T>::DEPTH;
  const char* next =
      groups.codes(piece.group + piece.count - 1) + code_bytes(FORMAT, piece.done + piece.depth);
  return {is_last && !is_only ? next + steps * bytes : next, bytes};
}

// Adds the offsets' contribution to totals [count, PANEL_WIDTH]: for each row and group the sum of
// the row's elements times the offsets.
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

// Sets the totals [rows, PANEL_WIDTH] of a panel to its bias.
template <class T>
void begin_totals(const PanelColumns<T>& columns, int rows, float* totals) {
  for (int row = 0; row < rows; ++row, totals += PANEL_WIDTH) {
    std::memcpy(totals, columns.bias, sizeof columns.bias);
  }
}

// Multiplies rows by one panel and writes the results; see project_panel.
template <class T, WeightFormat FORMAT>
__attribute__((noinline)) void project_quantized_panel(const Projection<T>& p,
                                                       const InputRows<T>& rows, Output output,
                                                       std::int64_t panel, float* totals,
                                                       const LoraPanel<T>* lora) {
  constexpr std::int64_t CHUNK = CHUNK_BYTES / (PANEL_WIDTH * sizeof(T));
  alignas(64) T unpacked[CHUNK * PANEL_WIDTH];
  alignas(64) float sums[BLOCK_ROWS * PANEL_WIDTH];
  const PanelColumns<T> columns(p, panel);
  const Groups groups(p, panel);
  const PanelTotals all{totals, sums};
  // If every tile uses only one piece of the panel, tiles share the memory of their totals.
  const bool is_kept = rows.count <= MAX_TILE_ROWS || p.depth > CHUNK || lora != nullptr;
  const auto totals_of = [&](int row) { return all.from(is_kept ? row : 0); };
  const auto finish = [&](int row, int count) {
    float* to = totals_of(row).totals;
    const T* tile = rows.first + row * rows.stride;
    if (p.has_offsets) add_offsets(tile, rows.stride, count, groups, to);
    if (lora != nullptr) return;
    write_rows(p, to, count, columns.first, columns.width, output.from(row * columns.width));
  };
  if (rows.count <= MAX_TILE_ROWS) {
    begin_totals(columns, rows.count, totals);
    ADD_CODES<T, FORMAT>[rows.count](groups, totals, rows.first, rows.stride);
    finish(0, rows.count);
  } else {
    const bool is_short = has_short_tile(rows.count);
    const int first = is_short ? SHORT_TILE_ROWS : MAX_TILE_ROWS;
    using Unpacking = UnpackingColumns<T, FORMAT>;
    const auto add_first = is_short ? add_groups<T, SHORT_TILE_ROWS, false, Unpacking>
                                    : add_groups<T, MAX_TILE_ROWS, false, Unpacking>;
    for_pieces(groups, CHUNK, [&](const Piece& piece) {
      const T* input = rows.first + piece.group * groups.depth + piece.done;
      const char* codes = groups.codes(piece.group) + code_bytes(FORMAT, piece.done);
      add_first(PieceGroups(p, piece, groups, columns.bias, all), input, rows.stride,
                Unpacking(codes, groups.offset_of_codes, unpacked), {});
      if (piece.ends_panel) finish(0, first);
      for_tiles(first, rows.count, [&](int row, int tile_rows) {
        const Prefetch prefetch =
            prefetch_of_codes<T, FORMAT>(piece, groups, rows.count - row, rows.count - first);
        const auto add =
            (prefetch.first == nullptr ? ADD_GROUPS<T, false> : ADD_GROUPS<T, true>)[tile_rows];
        add(PieceGroups(p, piece, groups, columns.bias, totals_of(row)), input + row * rows.stride,
            rows.stride, UnpackedColumns<T>(unpacked), prefetch);
        if (piece.ends_panel) finish(row, tile_rows);
      });
    });
  }
}

// Multiplies up to MAX_PAIR_ROWS rows by two adjacent panels, and writes the results.
template <class T, WeightFormat FORMAT>
__attribute__((noinline)) void project_quantized_pair(const Projection<T>& p,
                                                      const InputRows<T>& rows, Output output,
                                                      std::int64_t first, float* totals,
                                                      const LoraPanel<T>* lora) {
  const PanelColumns<T> columns[] = {{p, first}, {p, first + 1}};
  const std::int64_t size = rows.count * PANEL_WIDTH;
  for (int i = 0; i < 2; ++i) begin_totals(columns[i], rows.count, totals + i * size);
  for_row_tiles<MAX_PAIR_ROWS>(0, rows.count, [&]<int ROWS>(int) {
    add_codes<T, FORMAT, ROWS, 2>(Groups(p, first), totals, rows.first, rows.stride);
  });
  for (int i = 0; i < 2; ++i, totals += size) {
    const std::int64_t panel = first + i;
    if (p.has_offsets) {
      add_offsets(rows.first, rows.stride, rows.count, Groups(p, panel), totals);
    }
    if (lora != nullptr) continue;
    write_rows(p, totals, rows.count, columns[i].first, columns[i].width, output);
  }
}

}  // namespace

// A quantized weight to pack: codes [columns, depth], scales, and offsets or null, [columns, depth
// / group].
struct QuantizedWeight {
  const std::int8_t* codes;
  const float* scales;
  const float* offsets;
};

// Packs a quantized weight; gated weights as in pack_weight.
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
        const auto code_of = [&](int column, std::int64_t depth) {
          const std::int64_t row = row_of[column];
          return row < p.columns ? weight.codes[row * p.depth + group * p.group + depth] : 0;
        };
        if (p.format == WeightFormat::W8A8) {
          pack_coded(p, record, code_of);
        } else {
          pack_codes<T>(p.format, codes, p.group, code_of);
        }
      }
    }
  });
}

}  // namespace stepwell
