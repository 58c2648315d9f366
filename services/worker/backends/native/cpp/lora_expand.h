// Products with the B's of adapters, which are added to the totals of a projection: see lora.h.

#pragma once

#include <algorithm>
#include <vector>

#include "lora.h"

namespace stepwell {

// Some rows of one adapter that are added to totals together.
template <class T>
struct ExpandTile {
  const LoraProjection<T>* adapter;
  const int* at;    // The rows of the totals.
  const T* inside;  // Their rows of LoraDelta's `inside`, `stride` elements apart.
  std::int64_t stride;
  // Adds them to the totals of a panel.
  void (*add)(const ExpandTile&, std::int64_t panel, float* totals);
};

namespace {  // Internal, so that functions with one caller are inlined.

// Adds ROWS rows times VECTORS vectors of columns of a panel of B to rows of the totals, which have
// PANEL_WIDTH columns. Prefetches the next panel. With APART, the elements of a row that the second
// vector is multiplied by begin `apart` elements behind those for the first.
template <class T, int ROWS, int VECTORS, bool APART = false>
inline __attribute__((always_inline)) void add_expanded(float* totals, const ExpandTile<T>& tile,
                                                        const T* rows, const T* panel,
                                                        std::int64_t apart = 0) {
  using Ops = PanelOps<T>;
  constexpr std::int64_t STEP = PANEL_WIDTH * Ops::DEPTH;
  const int steps = int(tile.adapter->rank / Ops::DEPTH);
  if (steps < 1) __builtin_unreachable();
  const T* next = panel + steps * STEP;
  Vector total[ROWS][VECTORS];
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; ++i) {
#pragma GCC unroll 2
    for (int v = 0; v < VECTORS; ++v) {
      total[i][v] = load(totals + tile.at[i] * PANEL_WIDTH + v * LANES);
    }
  }
  if constexpr (APART) {
    for (int step = 0; step < steps; ++step) {
      const Vector left = Ops::load(panel), right = Ops::load(panel + LANES * Ops::DEPTH);
#pragma GCC unroll 4
      for (int i = 0; i < ROWS; ++i) {
        const T* row = rows + i * tile.stride;
        total[i][0] = Ops::multiply_add(total[i][0], Ops::broadcast(row), left);
        total[i][1] = Ops::multiply_add(total[i][1], Ops::broadcast(row + apart), right);
      }
      __builtin_prefetch(next, 0, 2);
      __builtin_prefetch(next + STEP / 2, 0, 2);
      rows += Ops::DEPTH;
      panel += STEP;
      next += STEP;
    }
  } else {
    multiply<T, ROWS, VECTORS, true>(total, rows, tile.stride, panel, steps,
                                     {next, STEP * sizeof(T)});
  }
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; ++i) {
#pragma GCC unroll 2
    for (int v = 0; v < VECTORS; ++v) {
      store(totals + tile.at[i] * PANEL_WIDTH + v * LANES, total[i][v]);
    }
  }
}

// See ExpandTile::add. The vectors of a panel may belong to two factors, as those of gates and
// values do, each with its own elements of `inside`.
template <class T, int ROWS>
void add_tile(const ExpandTile<T>& tile, std::int64_t panel, float* totals) {
  const LoraProjection<T>& p = *tile.adapter;
  const T* b = p.b + panel * PANEL_WIDTH * p.rank;
  const int left = p.begins[panel * PANEL_VECTORS], right = p.begins[panel * PANEL_VECTORS + 1];
  if (left == right) {
    if (left >= 0) add_expanded<T, ROWS, 2>(totals, tile, tile.inside + left, b);
    return;
  }
  if constexpr (ROWS <= MAX_SMALL_TILE_ROWS) {
    if (left >= 0 && right >= 0) {
      add_expanded<T, ROWS, 2, true>(totals, tile, tile.inside + left, b, right - left);
      return;
    }
  }
  if (left >= 0) add_expanded<T, ROWS, 1>(totals, tile, tile.inside + left, b);
  if (right >= 0) {
    add_expanded<T, ROWS, 1>(totals + LANES, tile, tile.inside + right,
                             b + LANES * PanelOps<T>::DEPTH);
  }
}

}  // namespace

// What adapters add to a block of rows. Which rows are multiplied together is found once for all
// panels: of a few rows for each adapter, finding them takes as long as multiplying them.
template <class T>
class BlockDelta {
 public:
  // The block has `count` rows from `row` on.
  void begin(const LoraDelta<T>& delta, std::int64_t row, int count) {
    const StepLora<T>& step = *delta.step;
    row_ = row;
    tiles_.clear();
    tiles_.reserve(step.num_adapters);
    for (int adapter = 0; adapter < step.num_adapters; ++adapter) {
      const LoraProjection<T>& p = delta.of(adapter);
      if (p.a == nullptr) continue;
      const int* last = step.rows + step.starts[adapter + 1];
      const int* begin = std::lower_bound(step.rows + step.starts[adapter], last, int(row));
      const int* end = std::lower_bound(begin, last, int(row) + count);
      const T* inside = delta.inside + (begin - step.rows) * step.width;
      for_row_tiles(0, int(end - begin), [&]<int ROWS>(int i) {
        tiles_.push_back({&p, begin + i, inside + i * step.width, step.width, add_tile<T, ROWS>});
      });
    }
  }

  // Adds to the block's totals [count, PANEL_WIDTH] of a panel.
  void add_to(float* totals, std::int64_t panel) const {
    for (const ExpandTile<T>& tile : tiles_) tile.add(tile, panel, totals - row_ * PANEL_WIDTH);
  }

 private:
  std::vector<ExpandTile<T>> tiles_;
  std::int64_t row_ = 0;
};

}  // namespace stepwell
