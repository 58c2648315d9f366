// Multiplication by a packed weight.
//
// Panels of the weight lie one after the other, so that a small batch, which is bound by memory,
// reads one sequential stream per thread. Large batches are cut into blocks of rows that stay in
// the second-level cache while all panels are read, and a panel into chunks of depth that stay in a
// cache while the tiles of a block are multiplied by it. Whatever the number of rows, an element's
// products are added in order of depth: totals are float32 between chunks too. The form is that of
// Goto and van de Geijn's matrix multiplication.

#pragma once

#include <algorithm>

#include "lora_expand.h"
#include "projection.h"
#include "quantized_projection.h"
#include "threads.h"

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

// What one of several tiles prefetches while it is multiplied by a chunk of so many elements. Each
// of the last two, a half of the next chunk: memory delivers fewer lines at a time than one tile
// could ask for, and it would wait. Those before, what `ahead` gives, if it is not null.
template <class Element, class T>
Prefetch prefetch_of_tile(const Element* chunk, std::int64_t elements, int rows_left,
                          LoraReadAhead<T>* ahead) {
  constexpr std::int64_t STEP_BYTES = PANEL_WIDTH * PanelOps<Element>::DEPTH * sizeof(Element);
  if (rows_left > 2 * MAX_TILE_ROWS) {
    const std::int64_t taken = elements * sizeof(Element) / sizeof(T);
    return {ahead == nullptr ? nullptr : ahead->take(taken), STEP_BYTES};
  }
  const Element* next = chunk + elements;
  return {rows_left > MAX_TILE_ROWS ? next : next + elements / 2, STEP_BYTES / 2};
}

// What project_panel multiplies: rows, a panel of elements of the same type, and what totals begin
// as. `finish` makes of some rows' totals the products. AHEAD: how many elements ahead of the only
// tile the loop prefetches.
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

// Multiplies rows by one panel and writes the results. `totals` [BLOCK_ROWS, PANEL_WIDTH] is
// scratch memory. `delta`: what adapters add to the rows, or null. `ahead`: see prefetch_of_tile.
// `Panel`: PlainPanel<T> or CodedPanel<T>.
template <class T, class Out, class Panel>
void project_panel(const Projection<T>& p, const InputRows<T>& rows, Out* output,
                   std::int64_t panel, float* totals, const BlockDelta<T>* delta,
                   LoraReadAhead<T>* ahead) {
  using Element = typename Panel::Element;
  const PanelColumns<T> columns(p, panel);
  const Panel factors(p, rows, panel, columns);
  const bool one_pass = rows.count <= MAX_TILE_ROWS;
  constexpr std::int64_t DEPTH = PanelOps<Element>::DEPTH;
  constexpr std::int64_t STEP_BYTES = PANEL_WIDTH * DEPTH * sizeof(Element);
  const std::int64_t steps = factors.depth / DEPTH;
  const std::int64_t chunks =
      one_pass ? 1 : divide_up<std::int64_t>(steps * STEP_BYTES, CHUNK_BYTES);
  for (std::int64_t chunk = 0; chunk < chunks; ++chunk) {
    const Range part{steps * chunk / chunks * DEPTH, steps * (chunk + 1) / chunks * DEPTH};
    const std::int64_t depth = part.end - part.begin;
    const Element* packed = factors.packed + part.begin * PANEL_WIDTH;
    for_row_tiles(0, rows.count, [&]<int ROWS>(int row) {
      float* to = totals + (chunks == 1 && delta == nullptr ? 0 : row * PANEL_WIDTH);
      const Prefetch prefetch =
          one_pass ? Prefetch{packed + Panel::AHEAD, STEP_BYTES}
                   : prefetch_of_tile(packed, PANEL_WIDTH * depth, rows.count - row, ahead);
      const auto add = prefetch.first == nullptr ? add_product<Element, ROWS, false>
                                                 : add_product<Element, ROWS, true>;
      add(chunk == 0 ? factors.begins : to, chunk == 0 ? 0 : PANEL_WIDTH,
          factors.rows + row * factors.stride + part.begin, factors.stride, packed,
          int(depth / DEPTH), prefetch, to);
      if (chunk + 1 < chunks) return;
      factors.finish(row, ROWS, to);
      if (delta != nullptr) return;
      write_rows(p, to, ROWS, columns.first, columns.width, output + row * columns.width);
    });
  }
  if (delta == nullptr) return;
  delta->add_to(totals, panel);
  write_rows(p, totals, rows.count, columns.first, columns.width, output);
}

// The functions that multiply rows by a panel, and MAX_PAIR_ROWS or fewer by a panel and the next
// one; the latter is null where no number of rows is multiplied so.
template <class T, class Out>
struct PanelFunctions {
  decltype(&project_panel<T, Out, PlainPanel<T>>) one;
  decltype(&project_panel<T, Out, PlainPanel<T>>) pair;
};

template <class T, class Out, WeightFormat FORMAT>
PanelFunctions<T, Out> quantized_functions() {
  if constexpr (MAX_PAIR_ROWS > 0) {
    return {project_quantized_panel<T, Out, FORMAT>, project_quantized_pair<T, Out, FORMAT>};
  } else {
    return {project_quantized_panel<T, Out, FORMAT>, nullptr};
  }
}

template <class T, class Out>
PanelFunctions<T, Out> panel_functions(WeightFormat format) {
  switch (format) {
    case WeightFormat::INT8:
      return quantized_functions<T, Out, WeightFormat::INT8>();
    case WeightFormat::INT4:
      return quantized_functions<T, Out, WeightFormat::INT4>();
    case WeightFormat::FP8:
      return quantized_functions<T, Out, WeightFormat::FP8>();
    case WeightFormat::W8A8:
      return {project_panel<T, Out, CodedPanel<T>>, nullptr};
    default:
      return {project_panel<T, Out, PlainPanel<T>>, nullptr};
  }
}

// How many panels are read side by side.
template <class T>
int panels_at_once(const Projection<T>& p, std::int64_t rows) {
  return p.is_unpacked() && rows <= MAX_PAIR_ROWS ? 2 : 1;
}

}  // namespace

// Packs a weight [columns, depth], which is PLAIN. A gated one has its gates first, then as many
// values; each panel gets gates beside the values that they gate.
template <class T>
void pack_weight(const Projection<T>& p, const T* weight) {
  in_team(threads_for(double(p.columns) * double(p.depth)), [&](Team team) {
    const Range own = team.part(p.num_panels());
    for (std::int64_t panel = own.begin; panel < own.end; ++panel) pack_panel(p, weight, panel);
  });
}

// The work of projecting `rows` rows, in the unit of threads.h.
template <class T>
double projection_work(const Projection<T>& p, std::int64_t rows) {
  return double(p.columns) * double(p.depth) * std::max(double(sizeof(T)), double(rows) / 8);
}

// The most rows of a block.
template <class T>
std::int64_t most_block_rows(const Projection<T>& p) {
  const std::int64_t bytes = p.is_unpacked() ? UNPACKED_BLOCK_BYTES : BLOCK_BYTES;
  const std::int64_t fitting = bytes / (p.depth * p.element_bytes());
  return std::clamp<std::int64_t>(round_down(fitting, MAX_TILE_ROWS), MAX_TILE_ROWS, BLOCK_ROWS);
}

// input [rows, depth] -> output [rows, columns], or [rows, columns / 2] if the projection is gated.
// Every thread of the team calls it and computes a part. `Out` is T, or float for results that are
// not rounded. `delta`: what adapters add, whose `inside` is computed; null for nothing. `ahead`:
// what to prefetch meanwhile, or null.
template <class T, class Out>
[[gnu::noinline]] void project(const Projection<T>& p, const T* input, Out* output,
                               std::int64_t rows, Team team, const LoraDelta<T>* delta = nullptr,
                               LoraReadAhead<T>* ahead = nullptr) {
  const std::int64_t most_rows = most_block_rows(p);
  const std::int64_t groups = divide_up(rows, MAX_TILE_ROWS);
  const std::int64_t blocks = divide_up(rows, most_rows);
  const int at_once = panels_at_once(p, rows);
  const std::int64_t panels = divide_up<std::int64_t>(p.num_panels(), at_once);
  const std::int64_t width = p.is_gated() ? p.columns / 2 : p.columns;
  alignas(64) float totals[BLOCK_ROWS * PANEL_WIDTH];
  const PanelFunctions<T, Out> functions = panel_functions<T, Out>(p.format);
  WorkItems items(team, blocks * panels);
  InputRows<T> near{};
  BlockDelta<T> added;
  std::int64_t block = -1, first = 0;
  for (std::int64_t item; (item = items.next()) >= 0;) {
    if (item / panels != block) {
      block = item / panels;
      first = groups * block / blocks * MAX_TILE_ROWS;
      const std::int64_t end = std::min(rows, groups * (block + 1) / blocks * MAX_TILE_ROWS);
      near = {input + first * p.depth, p.depth, int(end - first)};
      if (p.format == WeightFormat::W8A8) {
        near.codes = codes_of(near, p.depth);
      } else {
        near = without_set_conflicts(near, p.depth);
      }
      if (delta != nullptr) added.begin(*delta, first, near.count);
    }
    const std::int64_t panel = item % panels * at_once;
    const bool is_pair = at_once == 2 && panel + 1 < p.num_panels();
    (is_pair ? functions.pair : functions.one)(p, near, output + first * width, panel, totals,
                                               delta == nullptr ? nullptr : &added, ahead);
  }
}

// Prefetches what this thread will read first when it projects so many rows.
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
