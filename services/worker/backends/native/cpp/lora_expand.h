// Adds products with the B matrices of adapters to the totals of a projection. lora.h explains
// adapters and `inside`, and panel.h panels and tiles of rows.

#pragma once

#include <algorithm>
#include <vector>

#include "lora.h"

namespace stepwell {

// Consecutive panels of a projection, and the totals [count, rows, PANEL_WIDTH] of their rows.
struct PanelRun {
  std::int64_t first;
  int count;
  float* totals;
  std::int64_t stride;  // Distance of the totals of adjacent panels.
};

// Rows of one adapter whose products with B are added to totals together.
template <class T>
struct ExpandTile {
  const LoraProjection<T>* adapter;
  const int* at;    // Indexes of the rows in the totals.
  const T* inside;  // The rows in LoraDelta's `inside`, `stride` elements apart.
  std::int64_t stride;
  // Adds the rows times B to the totals of panels.
  void (*add)(const ExpandTile&, const PanelRun&);
};

namespace {  // Internal, so that functions with one caller are inlined.

// Maximum number of panels by which a few rows are multiplied together. Panels of B are short and
// contiguous, so that together they are one stream, and rows are read once for all.
constexpr int PANELS_AT_ONCE = 4;

// The number of panels by which ROWS rows are multiplied together, so that sums fit in registers.
template <int ROWS>
constexpr int panels_of_tile() {
  return std::clamp(2 * MAX_SMALL_TILE_ROWS / ROWS, 1, PANELS_AT_ONCE);
}

// Adds ROWS rows times PANELS panels of B to the totals of the rows, whose panels are
// `totals_stride` apart. The second vector of a panel is multiplied by elements of a row that begin
// `apart` elements after the elements for the first vector. With PREFETCH, prefetches the PANELS
// panels after these.
template <class T, int ROWS, int PANELS, bool PREFETCH>
__attribute__((noinline)) void add_panels(const ExpandTile<T>& tile, const T* rows,
                                          std::int64_t apart, const T* panel, float* totals,
                                          std::int64_t totals_stride) {
  using Ops = PanelOps<T>;
  constexpr std::int64_t STEP = PANEL_WIDTH * Ops::DEPTH;
  const int steps = int(tile.adapter->rank / Ops::DEPTH);
  if (steps < 1) __builtin_unreachable();
  const std::int64_t panel_size = steps * STEP;
  const auto place = [&](int row, int v) {
    return totals + tile.at[row] * PANEL_WIDTH + v / PANEL_VECTORS * totals_stride +
           v % PANEL_VECTORS * LANES;
  };
  Vector total[ROWS][PANELS * PANEL_VECTORS];
#pragma GCC unroll 4
  for (int row = 0; row < ROWS; ++row) {
#pragma GCC unroll 8
    for (int v = 0; v < PANELS * PANEL_VECTORS; ++v) total[row][v] = load(place(row, v));
  }
  DepthSums<T, ROWS, PANELS * PANEL_VECTORS> sums;
  for (int step = 0; step < steps; ++step, rows += Ops::DEPTH, panel += STEP) {
    Vector left[ROWS], right[ROWS];
#pragma GCC unroll 4
    for (int row = 0; row < ROWS; ++row) {
      left[row] = Ops::broadcast(rows + row * tile.stride);
      right[row] = Ops::broadcast(rows + row * tile.stride + apart);
    }
#pragma GCC unroll 4
    for (int i = 0; i < PANELS; ++i) {
      const T *first = panel + i * panel_size, *second = first + LANES * Ops::DEPTH;
      const Vector left_columns = Ops::load(first), right_columns = Ops::load(second);
      if constexpr (PREFETCH) {
        __builtin_prefetch(first + PANELS * panel_size, 0, 2);
        __builtin_prefetch(second + PANELS * panel_size, 0, 2);
      }
#pragma GCC unroll 4
      for (int row = 0; row < ROWS; ++row) {
        sums.add(total, row, 2 * i, left[row], left_columns);
        sums.add(total, row, 2 * i + 1, right[row], right_columns);
      }
    }
    sums.end_step(total);
  }
  sums.finish(total);
#pragma GCC unroll 4
  for (int row = 0; row < ROWS; ++row) {
#pragma GCC unroll 8
    for (int v = 0; v < PANELS * PANEL_VECTORS; ++v) store(place(row, v), total[row][v]);
  }
}

// Calls add_panels for `count` panels, at most PANELS.
template <class T, int ROWS, int PANELS, bool PREFETCH>
inline void add_several(int count, const ExpandTile<T>& tile, const T* rows, std::int64_t apart,
                        const T* panel, float* totals, std::int64_t totals_stride) {
  if constexpr (PANELS > 1) {
    if (count < PANELS) {
      add_several<T, ROWS, PANELS - 1, PREFETCH>(count, tile, rows, apart, panel, totals,
                                                 totals_stride);
      return;
    }
  }
  add_panels<T, ROWS, PANELS, PREFETCH>(tile, rows, apart, panel, totals, totals_stride);
}

// Adds ROWS rows times VECTORS vectors of a panel of B to rows of the totals, which have
// PANEL_WIDTH columns. Prefetches the next panel.
template <class T, int ROWS, int VECTORS>
inline __attribute__((always_inline)) void add_columns(const ExpandTile<T>& tile, const T* rows,
                                                       const T* panel, float* totals) {
  constexpr std::int64_t STEP = PANEL_WIDTH * PanelOps<T>::DEPTH;
  const int steps = int(tile.adapter->rank / PanelOps<T>::DEPTH);
  if (steps < 1) __builtin_unreachable();
  Vector total[ROWS][VECTORS];
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; ++i) {
#pragma GCC unroll 2
    for (int v = 0; v < VECTORS; ++v) {
      total[i][v] = load(totals + tile.at[i] * PANEL_WIDTH + v * LANES);
    }
  }
  multiply<T, ROWS, VECTORS, true>(total, rows, tile.stride, panel, steps,
                                   {panel + steps * STEP, STEP * sizeof(T)});
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; ++i) {
#pragma GCC unroll 2
    for (int v = 0; v < VECTORS; ++v) {
      store(totals + tile.at[i] * PANEL_WIDTH + v * LANES, total[i][v]);
    }
  }
}

// The number of panels, up to `most`, whose vectors use the same elements of `inside` as the two
// vectors of the first panel. It is 0 if B is zero in a vector of the first panel. `begins`: as in
// LoraProjection, from the first panel on.
inline int num_alike(const int* begins, int most) {
  if (begins[0] < 0 || begins[1] < 0) return 0;
  int count = 1;
  while (count < most && begins[2 * count] == begins[0] && begins[2 * count + 1] == begins[1]) {
    ++count;
  }
  return count;
}

// Implements ExpandTile::add. The two vectors of a panel may belong to two factors, such as gates
// and values, each with its own elements of `inside`.
template <class T, int ROWS, bool PREFETCH>
void add_tile(const ExpandTile<T>& tile, const PanelRun& run) {
  const LoraProjection<T>& p = *tile.adapter;
  for (int i = 0; i < run.count;) {
    const std::int64_t panel = run.first + i;
    const int* begins = p.begins + panel * PANEL_VECTORS;
    const T* b = p.b + panel * PANEL_WIDTH * p.rank;
    const T *left = tile.inside + begins[0], *right = tile.inside + begins[1];
    float* totals = run.totals + i * run.stride;
    if constexpr (ROWS <= MAX_SMALL_TILE_ROWS) {
      constexpr int PANELS = panels_of_tile<ROWS>();
      if (const int count = num_alike(begins, std::min(run.count - i, PANELS))) {
        add_several<T, ROWS, PANELS, PREFETCH>(count, tile, left, right - left, b, totals,
                                               run.stride);
        i += count;
        continue;
      }
    }
    ++i;
    if (begins[0] == begins[1]) {
      if (begins[0] >= 0) add_columns<T, ROWS, 2>(tile, left, b, totals);
      continue;
    }
    if (begins[0] >= 0) add_columns<T, ROWS, 1>(tile, left, b, totals);
    if (begins[1] >= 0) {
      add_columns<T, ROWS, 1>(tile, right, b + LANES * PanelOps<T>::DEPTH, totals + LANES);
    }
  }
}

template <class T, bool PREFETCH>
constexpr auto ADD_TILE = functions_by_rows([]<int ROWS>() { return add_tile<T, ROWS, PREFETCH>; });

}  // namespace

// What adapters add to a block of rows. Which rows are multiplied together is determined once for
// all panels: with a few rows for each adapter, this takes as long as multiplying them.
template <class T>
class BlockDelta {
 public:
  // The block has `count` rows from `row` on. With `prefetches`, each panel of B prefetches the
  // following panels, because nothing else prefetches them.
  void begin(const LoraDelta<T>& delta, std::int64_t row, int count, bool prefetches) {
    const StepLora<T>& step = *delta.step;
    row_ = row;
    tiles_.clear();
    tiles_.reserve(step.num_adapters);
    adapters_.clear();
    adapters_.reserve(step.num_adapters);
    for (int adapter = 0; adapter < step.num_adapters; ++adapter) {
      const LoraProjection<T>& p = delta.of(adapter);
      if (p.a == nullptr) continue;
      const int* last = step.rows + step.starts[adapter + 1];
      const int* begin = std::lower_bound(step.rows + step.starts[adapter], last, int(row));
      const int* end = std::lower_bound(begin, last, int(row) + count);
      if (begin == end) continue;
      adapters_.push_back(&p);
      const T* inside = delta.inside + (begin - step.rows) * step.width;
      for_tiles(0, int(end - begin), [&](int i, int rows) {
        const auto add = (prefetches ? ADD_TILE<T, true> : ADD_TILE<T, false>)[rows];
        tiles_.push_back({&p, begin + i, inside + i * step.width, step.width, add});
      });
    }
  }

  // Adds the deltas to the block's totals of panels.
  void add_to(PanelRun run) const {
    run.totals -= row_ * PANEL_WIDTH;
    for (const ExpandTile<T>& tile : tiles_) tile.add(tile, run);
  }

  // Adds panels of B to the prefetch list, for part number `part` of `parts` parts of the adapters.
  void add_part(const PanelRun& run, int part, int parts, PrefetchList& list) const {
    const int count = int(adapters_.size());
    for (int i = count * part / parts; i < count * (part + 1) / parts; ++i) {
      const LoraProjection<T>& p = *adapters_[i];
      list.add(p.b + run.first * PANEL_WIDTH * p.rank,
               run.count * PANEL_WIDTH * p.rank * sizeof(T));
    }
  }

 private:
  std::vector<ExpandTile<T>> tiles_;
  std::vector<const LoraProjection<T>*> adapters_;  // The adapters of the block's rows.
  std::int64_t row_ = 0;
};

// A panel to which adapters add: panel number `index` of `run`.
template <class T>
struct LoraPanel {
  const BlockDelta<T>& delta;
  const PanelRun& run;
  int index;
  LoraReadAhead<T>* next;  // The A matrices that are read next, or null.
};

// Divides the prefetches for adapters among the tiles of rows of a panel. Only tiles that prefetch
// no weights prefetch for adapters. If there are only two tiles, both do. A single tile does not,
// because it prefetches weights in every step.
template <class T>
class LoraTiles {
 public:
  // Each of `chunks` chunks of depth is multiplied by all tiles.
  LoraTiles(const LoraPanel<T>* panel, int rows, int chunks)
      : panel_(panel),
        is_spare_(rows > 2 * MAX_TILE_ROWS),
        count_(rows > MAX_TILE_ROWS
                   ? chunks * divide_up(is_spare_ ? rows - 2 * MAX_TILE_ROWS : rows, MAX_TILE_ROWS)
                   : 0) {}

  // Adds the prefetches of the next tile of a chunk of `bytes` bytes to an empty list, including
  // `weights`, half of a chunk. Adds nothing if the tile prefetches nothing for adapters.
  void next(const Prefetch& weights, std::int64_t bytes, PrefetchList& list) {
    if (count_ == 0 || is_spare_ != (weights.first == nullptr)) return;
    const PanelRun& run = panel_->run;
    panel_->delta.add_part(run, panel_->index * count_ + done_++, run.count * count_, list);
    if (!is_spare_) {
      list.add(weights.first, bytes / 2);
    } else if (panel_->next != nullptr) {
      panel_->next->add_part(count_, std::max<std::int64_t>(bytes - list.bytes(), 0), list);
    }
  }

 private:
  const LoraPanel<T>* panel_;
  bool is_spare_;
  int count_;
  int done_ = 0;
};

}  // namespace stepwell
