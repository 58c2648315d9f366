// Multiplication by a packed weight.
//
// The weight is packed into panels, which are blocks of columns (panel.h). They are contiguous, so
// a small batch, which is bound by memory, reads one sequential stream per thread. Large batches
// are cut into blocks of rows that stay in the second-level cache while all panels are read. A
// panel is cut into chunks of depth. A chunk stays in a cache while the block's tiles of rows
// (panel.h) are multiplied by it. For any number of rows, an element's products are added in order
// of depth, and totals are float32, also between chunks. The blocking is from Goto and van de
// Geijn's matrix multiplication.

#pragma once

#include <algorithm>

#include "lora_expand.h"
#include "projection.h"
#include "quantized_projection.h"
#include "threads.h"
#include "tile_products.h"

namespace stepwell {

namespace {  // Internal, so that functions with one caller are inlined.

template <class T>
void pack_panel(const Projection<T>& p, const T* weight, std::int64_t panel) {
  constexpr int DEPTH = PanelOps<T>::DEPTH;
  const std::int64_t steps = p.depth / DEPTH;
  T* target = reinterpret_cast<T*>(p.panel_of(panel));
  for (int column = 0; column < PANEL_WIDTH; ++column) {
    const std::int64_t row = source_row(p, panel, column);
    for (std::int64_t step = 0; step < steps; ++step) {
      T* cell = target + (step * PANEL_WIDTH + column) * DEPTH;
      if (row < p.columns) {
        std::memcpy(cell, weight + row * p.depth + step * DEPTH, DEPTH * sizeof(T));
      } else {
        std::memset(cell, 0, DEPTH * sizeof(T));
      }
    }
  }
}

// The memory that a tile of rows prefetches while it is multiplied by a chunk. Each of the last two
// tiles prefetches half of the next chunk. If a single tile prefetched a whole chunk, it would
// request more cache lines at a time than memory delivers, and stall.
template <class Element>
Prefetch prefetch_of_tile(const Element* chunk, std::int64_t elements, int rows_left) {
  constexpr std::int64_t STEP_BYTES = PANEL_WIDTH * PanelOps<Element>::DEPTH * sizeof(Element);
  if (rows_left > 2 * MAX_TILE_ROWS) return {};
  const Element* next = chunk + elements;
  return {rows_left > MAX_TILE_ROWS ? next : next + elements / 2, STEP_BYTES / 2};
}

// The operands of project_panel: rows, a panel of elements of the same type, and initial totals.
// `finish` converts totals of rows to products. AHEAD: prefetch distance in elements, for a batch
// of a single tile.
template <class T>
struct PlainPanel {
  using Element = T;
  static constexpr std::int64_t AHEAD = PREFETCH_AHEAD;

  PlainPanel(const Projection<T>& p, const InputRows<T>& input, std::int64_t panel,
             const PanelColumns<T>& columns)
      : depth(p.depth),
        rows(input.first),
        stride(input.stride),
        begins(columns.bias),
        packed(reinterpret_cast<const T*>(p.panel_of(panel))) {}

  void finish(int, int, float*) const {}

  std::int64_t depth;
  const T* rows;
  std::int64_t stride;
  const float* begins;
  const T* packed;
};

// Multiplies rows by one panel and writes the results. `totals` [rows, PANEL_WIDTH] is scratch
// memory. `Panel` is PlainPanel<T> or CodedPanel<T>. With LORA, leaves the products in `totals`, to
// which adapters add, and prefetches for `lora`. Without LORA, `lora` is null.
template <class T, class Panel, bool LORA>
void project_panel(const Projection<T>& p, const InputRows<T>& rows, Output output,
                   std::int64_t panel, float* totals, const LoraPanel<T>* lora) {
  using Element = typename Panel::Element;
  const PanelColumns<T> columns(p, panel);
  const Panel factors(p, rows, panel, columns);
  const bool one_pass = rows.count <= MAX_TILE_ROWS;
  constexpr std::int64_t DEPTH = PanelOps<Element>::DEPTH;
  constexpr std::int64_t STEP_BYTES = PANEL_WIDTH * DEPTH * sizeof(Element);
  constexpr std::int64_t SUMMED = SUM_STEPS<Element>;
  const std::int64_t steps = factors.depth / DEPTH;
  const std::int64_t chunks =
      one_pass ? 1 : divide_up<std::int64_t>(steps * STEP_BYTES, CHUNK_BYTES);
  LoraTiles<T> lora_tiles(lora, rows.count, int(chunks));
  for (std::int64_t chunk = 0; chunk < chunks; ++chunk) {
    const auto begin_of = [=](std::int64_t chunk) {
      return std::min(divide_up(steps, SUMMED) * chunk / chunks * SUMMED, steps);
    };
    const Range part{begin_of(chunk) * DEPTH, begin_of(chunk + 1) * DEPTH};
    const std::int64_t depth = part.end - part.begin;
    const Element* packed = factors.packed + part.begin * PANEL_WIDTH;
    for_tiles(0, rows.count, [&](int row, int tile_rows) {
      float* to = totals + (chunks == 1 && !LORA ? 0 : row * PANEL_WIDTH);
      const Prefetch prefetch =
          one_pass ? Prefetch{packed + Panel::AHEAD, STEP_BYTES}
                   : prefetch_of_tile(packed, PANEL_WIDTH * depth, rows.count - row);
      const auto multiply = [&](auto add, const auto& prefetched) {
        add(chunk == 0 ? factors.begins : to, chunk == 0 ? 0 : PANEL_WIDTH,
            factors.rows + row * factors.stride + part.begin, factors.stride, packed,
            int(depth / DEPTH), prefetched, to);
      };
      PrefetchList list;
      if constexpr (LORA) {
        lora_tiles.next(prefetch, PANEL_WIDTH * depth * sizeof(Element), list);
      }
      if (!list.is_empty()) {
        multiply(ADD_PRODUCT_OF_LIST<Element>[tile_rows], list);
      } else {
        multiply((prefetch.first == nullptr ? ADD_PRODUCT<Element, false>
                                            : ADD_PRODUCT<Element, true>)[tile_rows],
                 prefetch);
      }
      if (chunk + 1 < chunks) return;
      factors.finish(row, tile_rows, to);
      if (LORA) return;
      write_rows(p, to, tile_rows, columns.first, columns.width, output.from(row * columns.width));
    });
  }
}

// The functions that multiply rows by one panel, and up to MAX_PAIR_ROWS rows by two adjacent
// panels. `pair` is null if only one panel is multiplied at a time.
template <class T>
struct PanelFunctions {
  using Function = decltype(&project_panel<T, PlainPanel<T>, false>);

  Function one;
  Function pair;
};

template <class T, WeightFormat FORMAT>
PanelFunctions<T> quantized_functions() {
  if constexpr (MAX_PAIR_ROWS > 0) {
    return {project_quantized_panel<T, FORMAT>, project_quantized_pair<T, FORMAT>};
  } else {
    return {project_quantized_panel<T, FORMAT>, nullptr};
  }
}

// The functions that multiply with tiles. For LORA see project_panel.
template <class T, bool LORA>
PanelFunctions<T> tile_functions(WeightFormat format) {
  switch (format) {
    case WeightFormat::INT8:
      return {project_quantized_in_tiles<T, WeightFormat::INT8>, nullptr};
    case WeightFormat::INT4:
      return {project_quantized_in_tiles<T, WeightFormat::INT4>, nullptr};
    case WeightFormat::FP8:
      return {project_quantized_in_tiles<T, WeightFormat::FP8>, nullptr};
    case WeightFormat::W8A8:
      return {project_panel_in_tiles<T, CodedPanel<T>, LORA>, nullptr};
    default:
      return {project_panel_in_tiles<T, PlainPanel<T>, LORA>, nullptr};
  }
}

// For LORA see project_panel.
template <class T, bool LORA>
PanelFunctions<T> panel_functions(const Projection<T>& p, std::int64_t rows) {
  if constexpr (SUMS_LIKE_TILES<T>) {
    if (uses_tiles(p, rows)) return tile_functions<T, LORA>(p.format);
  }
  switch (p.format) {
    case WeightFormat::INT8:
      return quantized_functions<T, WeightFormat::INT8>();
    case WeightFormat::INT4:
      return quantized_functions<T, WeightFormat::INT4>();
    case WeightFormat::FP8:
      return quantized_functions<T, WeightFormat::FP8>();
    case WeightFormat::W8A8:
      return {project_panel<T, CodedPanel<T>, LORA>, nullptr};
    default:
      return {project_panel<T, PlainPanel<T>, LORA>, nullptr};
  }
}

// The number of panels that are read side by side.
template <class T>
int panels_at_once(const Projection<T>& p, std::int64_t rows) {
  return p.is_unpacked() && rows <= MAX_PAIR_ROWS && !uses_tiles(p, rows) ? 2 : 1;
}

// All blocks of rows except the last have a multiple of this number of rows.
template <class T>
int row_multiple(const Projection<T>& p, std::int64_t rows) {
  return uses_tiles(p, rows) ? PAIR_ROWS : MAX_TILE_ROWS;
}

template <class T>
std::int64_t most_block_rows(const Projection<T>& p, std::int64_t rows) {
  const std::int64_t multiple = row_multiple(p, rows);
  const std::int64_t bytes = uses_tiles(p, rows) ? TILE_BLOCK_BYTES
                             : p.is_unpacked()   ? UNPACKED_BLOCK_BYTES
                                                 : BLOCK_BYTES;
  const std::int64_t fitting = bytes / (p.depth * p.element_bytes());
  const std::int64_t most = round_down<std::int64_t>(BLOCK_ROWS, multiple);
  return std::clamp(round_down(fitting, multiple), multiple, most);
}

// The blocks of rows, which are projected one after the other, and the panels by which each block
// is multiplied. A work item is one panel, or two panels that are read side by side.
template <class T>
struct Blocks {
  Blocks(const Projection<T>& projection, std::int64_t num_rows)
      : p(projection),
        rows(num_rows),
        multiple(row_multiple(p, rows)),
        groups(divide_up(rows, multiple)),
        count(divide_up(rows, most_block_rows(p, rows))),
        at_once(panels_at_once(p, rows)),
        panels(divide_up<std::int64_t>(p.num_panels(), at_once)) {}

  Range rows_of(std::int64_t block) const {
    return {groups * block / count * multiple,
            std::min(rows, groups * (block + 1) / count * multiple)};
  }

  // Whether the panel that begins an item is read together with the next one.
  bool is_pair(std::int64_t panel) const { return at_once == 2 && panel + 1 < p.num_panels(); }

  // Rows of the input in the form in which panels are multiplied by them.
  InputRows<T> near(const T* input, Range range) const {
    InputRows<T> own{input + range.begin * p.depth, p.depth, int(range.end - range.begin)};
    if (p.format == WeightFormat::W8A8) own.codes = codes_of(own, p.depth);
    if (uses_tiles(p, rows)) {
      const RowCodes& codes = own.codes;
      own.tiles = p.format == WeightFormat::W8A8
                      ? rows_in_tiles(codes.first, codes.stride, own.count, p.coded_depth())
                      : rows_in_tiles(own.first, own.stride, own.count, p.depth);
      return own;
    }
    return p.format == WeightFormat::W8A8 ? own : without_set_conflicts(own, p.depth);
  }

  const Projection<T>& p;
  std::int64_t rows;
  std::int64_t multiple;
  std::int64_t groups;
  std::int64_t count;
  int at_once;
  std::int64_t panels;
};

}  // namespace

// Packs an unquantized (PLAIN) weight [columns, depth]. In a gated weight the first half of the
// columns are gates and the second half values. Each panel has gates next to their values.
template <class T>
void pack_weight(const Projection<T>& p, const T* weight) {
  in_team(threads_for(double(p.columns) * double(p.depth)), [&](Team team) {
    const Range own = team.part(p.num_panels());
    for (std::int64_t panel = own.begin; panel < own.end; ++panel) pack_panel(p, weight, panel);
  });
}

// The amount of work of projecting `rows` rows, in the unit of PARALLEL_WORK.
template <class T>
double projection_work(const Projection<T>& p, std::int64_t rows) {
  return double(p.columns) * double(p.depth) * std::max(double(sizeof(T)), double(rows) / 8);
}

// Maps input [rows, depth] to output [rows, columns], or [rows, columns / 2] if the projection is
// gated. Every thread of the team must call this function, and computes a part.
template <class T>
[[gnu::noinline]] void project(const Projection<T>& p, const T* input, Output output,
                               std::int64_t rows, Team team) {
  const Blocks<T> blocks(p, rows);
  const PanelFunctions<T> functions = panel_functions<T, false>(p, rows);
  alignas(64) float totals[TOTAL_ROWS * PANEL_WIDTH];
  WorkItems items(team, blocks.count * blocks.panels);
  InputRows<T> near{};
  std::int64_t block = -1;
  Output to = output;
  for (std::int64_t item; (item = items.next()) >= 0;) {
    if (item / blocks.panels != block) {
      block = item / blocks.panels;
      const Range own = blocks.rows_of(block);
      near = blocks.near(input, own);
      to = output.from(own.begin * p.output_width());
    }
    const std::int64_t panel = item % blocks.panels * blocks.at_once;
    (blocks.is_pair(panel) ? functions.pair : functions.one)(p, near, to, panel, totals, nullptr);
  }
}

// Prefetches the panels that this thread reads first when it projects `rows` rows.
template <class T>
void prefetch(const Projection<T>& p, std::int64_t rows, Team team) {
  const int at_once = panels_at_once(p, rows);
  const Range own = team.part(divide_up<std::int64_t>(p.num_panels(), at_once));
  const std::int64_t end = std::min(own.end * at_once, p.num_panels());
  for (std::int64_t panel = own.begin * at_once, i = 0; i < at_once && panel < end; ++i, ++panel) {
    const char* first = p.panel_of(panel);
    const std::int64_t count =
        std::min((end - panel) * p.panel_bytes(), PREFETCHED_BYTES / at_once);
    for (std::int64_t at = 0; at < count; at += LINE_BYTES) __builtin_prefetch(first + at, 0, 2);
  }
}

}  // namespace stepwell
