// A projection with LoRA adapters (see lora.h).

#pragma once

#include <algorithm>

#include "linear.h"
#include "lora_expand.h"

namespace stepwell {

namespace {  // Internal, so that functions with one caller are inlined.

// A thread multiplies up to this many work items (one or two panels each, see linear.h), before
// adapters add to all these panels together. It limits the memory for the totals of a block's rows.
// Runs have about equal lengths, because each run costs some time for every adapter, however short
// it is.
template <class T>
std::int64_t items_of_run(const Blocks<T>& blocks, std::int64_t items_of_thread) {
  const std::int64_t block_rows = std::min(blocks.rows, most_block_rows(blocks.p, blocks.rows));
  const std::int64_t most =
      std::clamp<std::int64_t>(BLOCK_ROWS / block_rows, 1, PANELS_AT_ONCE) / blocks.at_once;
  const std::int64_t items = std::max(std::min(items_of_thread, blocks.panels), INT64_C(1));
  return divide_up(items, divide_up(items, most));
}

}  // namespace

// Computes `project` with adapters. `delta`: the adapters, with the results of `shrink` in
// `inside`. `ahead`: A matrices to prefetch during the projection, or null. Adapters add to several
// panels together. This is a separate function, so that `project` does not become slower.
template <class T>
[[gnu::noinline]] void project_and_add(const Projection<T>& p, const T* input, Output output,
                                       std::int64_t rows, Team team, const LoraDelta<T>& delta,
                                       LoraReadAhead<T>* ahead = nullptr) {
  const Blocks<T> blocks(p, rows);
  const PanelFunctions<T> functions = panel_functions<T, true>(p, rows);
  const std::int64_t items_of_thread = divide_up(blocks.count * blocks.panels, team.size);
  const std::int64_t most = items_of_run(blocks, items_of_thread);
  alignas(64) float totals[TOTAL_ROWS * PANEL_WIDTH];
  WorkItems items(team, blocks.count * blocks.panels);
  InputRows<T> near{};
  BlockDelta<T> added;
  std::int64_t block = -1, left = items_of_thread;
  Output to = output;
  for (Range taken; (taken = items.next(most, blocks.panels)).begin < taken.end;) {
    if (taken.begin / blocks.panels != block) {
      block = taken.begin / blocks.panels;
      const Range own = blocks.rows_of(block);
      near = blocks.near(input, own);
      to = output.from(own.begin * p.output_width());
      added.begin(delta, own.begin, near.count, p.is_unpacked() || near.count <= MAX_TILE_ROWS);
    }
    const std::int64_t first = taken.begin % blocks.panels * blocks.at_once;
    const std::int64_t count =
        std::min((taken.end - taken.begin) * blocks.at_once, p.num_panels() - first);
    const PanelRun run{first, int(count), totals, near.count * PANEL_WIDTH};
    if (ahead != nullptr) ahead->begin_panels(left);
    left -= taken.end - taken.begin;
    for (int i = 0; i < run.count; i += blocks.at_once) {
      const LoraPanel<T> panel{added, run, i, ahead};
      const auto function = blocks.is_pair(first + i) ? functions.pair : functions.one;
      function(p, near, to, first + i, totals + i * run.stride, &panel);
    }
    added.add_to(run);
    for (int i = 0; i < run.count; ++i) {
      write_rows(p, totals + i * run.stride, near.count, (first + i) * p.panel_output_width(),
                 p.output_width(), to);
    }
  }
}

}  // namespace stepwell
