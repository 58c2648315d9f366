// Products of rows and the A matrices of their adapters. lora.h explains adapters and `inside`, and
// panel.h panels and tiles of rows.

#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "lora.h"
#include "panel.h"
#include "rounding.h"
#include "threads.h"

namespace stepwell {

namespace {  // Internal, so that functions with one caller are inlined.

// Prefetch distance in the stream of A, in elements. A is short, and the next adapter's A begins at
// an unrelated address.
constexpr std::int64_t A_PREFETCH_AHEAD = 1024;

// Multiplies rows by a panel of A, and writes rounded products to rows of `to`, `to_stride`
// elements apart.
template <class T, int ROWS>
__attribute__((noinline)) void multiply_inside(const T* rows, std::int64_t stride, const T* panel,
                                               int steps, T* to, std::int64_t to_stride) {
  if (steps < 1) __builtin_unreachable();
  Vector total[ROWS][1] = {};
  constexpr std::int64_t STEP_BYTES = LANES * PanelOps<T>::DEPTH * sizeof(T);
  multiply<T, ROWS, 1, true, LANES>(total, rows, stride, panel, steps,
                                    {panel + A_PREFETCH_AHEAD, STEP_BYTES});
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; ++i) store(to + i * to_stride, total[i][0]);
}

// The number of small tiles that are multiplied together, and the maximum number of panels by which
// one tile is multiplied together, so that its rows are read once for all these panels.
#ifdef __AVX512F__
constexpr int TILES_AT_ONCE = 4;
#else
constexpr int TILES_AT_ONCE = 2;
#endif
constexpr int tiles_at_once(int panels) { return divide_up(TILES_AT_ONCE, panels); }

// Rows of an adapter, `stride` elements apart, consecutive panels of its A, and the target of the
// rounded products.
template <class T>
struct ShrinkTile {
  const T* rows;
  std::int64_t stride;
  const T* panels;
  T* to;
};

// Multiplies ROWS rows of each tile by its PANELS panels. Rows of products are `to_stride` elements
// apart.
template <class T, int ROWS, int PANELS, int TILES>
__attribute__((noinline)) void multiply_tiles(const ShrinkTile<T>* tiles, int steps,
                                              std::int64_t to_stride) {
  using Ops = PanelOps<T>;
  if (steps < 1) __builtin_unreachable();
  const std::int64_t panel_size = std::int64_t{steps} * LANES * Ops::DEPTH;
  Vector total[TILES * ROWS][PANELS] = {};
  DepthSums<T, TILES * ROWS, PANELS> sums;
  const T *rows[TILES], *panels[TILES];
  std::int64_t strides[TILES];
#pragma GCC unroll 4
  for (int i = 0; i < TILES; ++i) {
    rows[i] = tiles[i].rows;
    strides[i] = tiles[i].stride;
    panels[i] = tiles[i].panels;
  }
  for (int step = 0; step < steps; ++step) {
#pragma GCC unroll 4
    for (int i = 0; i < TILES; ++i) {
      Vector values[ROWS];
#pragma GCC unroll 4
      for (int row = 0; row < ROWS; ++row) {
        values[row] = Ops::broadcast(rows[i] + row * strides[i]);
      }
#pragma GCC unroll 4
      for (int panel = 0; panel < PANELS; ++panel) {
        const Vector columns = Ops::load(panels[i] + panel * panel_size);
        __builtin_prefetch(panels[i] + panel * panel_size + A_PREFETCH_AHEAD);
#pragma GCC unroll 4
        for (int row = 0; row < ROWS; ++row) {
          sums.add(total, i * ROWS + row, panel, values[row], columns);
        }
      }
      rows[i] += Ops::DEPTH;
      panels[i] += LANES * Ops::DEPTH;
    }
    sums.end_step(total);
  }
  sums.finish(total);
#pragma GCC unroll 4
  for (int i = 0; i < TILES; ++i) {
#pragma GCC unroll 4
    for (int row = 0; row < ROWS; ++row) {
#pragma GCC unroll 4
      for (int panel = 0; panel < PANELS; ++panel) {
        store(tiles[i].to + row * to_stride + panel * LANES, total[i * ROWS + row][panel]);
      }
    }
  }
}

// Collects small tiles with equal numbers of rows and panels, and multiplies several together.
// Other tiles are multiplied one by one.
template <class T>
class ShrinkTiles {
 public:
  ShrinkTiles(std::int64_t depth, std::int64_t to_stride)
      : depth_(depth), steps_(int(depth / PanelOps<T>::DEPTH)), to_stride_(to_stride) {}

  // Adds a tile of `rows` rows and `panels` panels.
  void add(int rows, int panels, const ShrinkTile<T>& tile) {
    if (rows > MAX_SMALL_TILE_ROWS) {
      multiply_large(rows, panels, tile);
      return;
    }
    for (int done = 0; done < panels; done += TILES_AT_ONCE) {
      ShrinkTile<T> part = tile;
      part.panels += done * LANES * depth_;
      part.to += done * LANES;
      add_small(rows, std::min(panels - done, TILES_AT_ONCE), part);
    }
  }

  // Multiplies the remaining tiles.
  void multiply() {
    if (count_ > 0) multiply<MAX_SMALL_TILE_ROWS, TILES_AT_ONCE>();
    count_ = 0;
  }

 private:
  void add_small(int rows, int panels, const ShrinkTile<T>& tile) {
    if (rows != rows_ || panels != panels_) multiply();
    rows_ = rows;
    panels_ = panels;
    tiles_[count_++] = tile;
    if (count_ == tiles_at_once(panels)) multiply();
  }

  void multiply_large(int rows, int panels, const ShrinkTile<T>& tile) {
    for (int panel = 0; panel < panels; ++panel) {
      for_row_tiles(0, rows, [&]<int ROWS>(int row) {
        multiply_inside<T, ROWS>(tile.rows + row * tile.stride, tile.stride,
                                 tile.panels + panel * LANES * depth_, steps_,
                                 tile.to + row * to_stride_ + panel * LANES, to_stride_);
      });
    }
  }

  template <int ROWS, int PANELS>
  void multiply() {
    if constexpr (ROWS > 1) {
      if (rows_ < ROWS) return multiply<ROWS - 1, PANELS>();
    }
    if constexpr (PANELS > 1) {
      if (panels_ < PANELS) return multiply<ROWS, PANELS - 1>();
    }
    if (count_ == 1) return multiply_tiles<T, ROWS, PANELS, 1>(tiles_, steps_, to_stride_);
    constexpr int TILES = tiles_at_once(PANELS);
    for (; count_ < TILES; ++count_) tiles_[count_] = tiles_[0];
    multiply_tiles<T, ROWS, PANELS, TILES>(tiles_, steps_, to_stride_);
  }

  std::int64_t depth_;
  int steps_;
  std::int64_t to_stride_;
  ShrinkTile<T> tiles_[TILES_AT_ONCE];
  int rows_ = 0;
  int panels_ = 0;
  int count_ = 0;
};

// Whether rows are at equal distances.
inline bool is_even(const int* at, int count) {
  for (int i = 2; i < count; ++i) {
    if (at[i] - at[i - 1] != at[1] - at[0]) return false;
  }
  return true;
}

// Sets the rows of a tile to the input's rows with the indexes `at`. Consecutive rows, and a few
// rows at equal distances, are used in place. Other rows are copied.
template <class T>
void place_rows(const int* at, int count, const T* input, std::int64_t depth, T* copy,
                ShrinkTile<T>& tile) {
  const int distance = count > 1 ? at[1] - at[0] : 1;
  tile.rows = input + at[0] * depth;
  tile.stride = distance * depth;
  if (is_even(at, count) && (distance == 1 || count <= MAX_SMALL_TILE_ROWS)) return;
  for (int i = 0; i < count; ++i) {
    std::memcpy(copy + i * depth, input + at[i] * depth, depth * sizeof(T));
  }
  tile.rows = copy;
  tile.stride = depth;
}

}  // namespace

// The number of rows in a tile: as many as registers allow. If there are few rows, tiles are
// smaller, so that there are two tiles for every thread.
inline int lora_tile_rows(int num_rows, Team team) {
  return std::clamp(divide_up(num_rows, 2 * team.size), 1, MAX_TILE_ROWS);
}

// Multiplies input [rows, depth] by A of each row's adapter, into `inside`. Every thread of the
// team must call this function, and computes a part.
template <class T>
[[gnu::noinline]] void shrink(const LoraDelta<T>& delta, const T* input, std::int64_t depth,
                              Team team) {
  static thread_local std::vector<T> copies;
  const StepLora<T>& step = *delta.step;
  const int tile_rows = lora_tile_rows(step.starts[step.num_adapters], team);
  const auto tiles_of = [&](int adapter) {
    return divide_up(step.starts[adapter + 1] - step.starts[adapter], tile_rows);
  };
  std::int64_t num_tiles = 0;
  for (int i = 0; i < step.num_adapters; ++i) num_tiles += tiles_of(i);
  const std::int64_t at_once =
      std::clamp<std::int64_t>(num_tiles / (2 * team.size), 1, TILES_AT_ONCE);
  const std::int64_t copied = tile_rows * depth;
  if (std::int64_t(copies.size()) < at_once * copied) copies.resize(at_once * copied);
  WorkItems items(team, divide_up(num_tiles, at_once));
  for (std::int64_t item; (item = items.next()) >= 0;) {
    ShrinkTiles<T> tiles(depth, step.width);
    int adapter = 0;
    std::int64_t tile = item * at_once;
    const std::int64_t taken = std::min(at_once, num_tiles - tile);
    for (int i = 0; i < taken; ++i, ++tile) {
      for (; tiles_of(adapter) <= tile; ++adapter) tile -= tiles_of(adapter);
      const LoraProjection<T>& p = delta.of(adapter);
      const int begin = step.starts[adapter] + int(tile) * tile_rows;
      const int count = std::min(step.starts[adapter + 1] - begin, tile_rows);
      if (p.a == nullptr) continue;
      ShrinkTile<T> added{nullptr, 0, p.a, delta.inside + begin * step.width};
      place_rows(step.rows + begin, count, input, depth, &copies[i * copied], added);
      tiles.add(count, int(p.width / LANES), added);
    }
    tiles.multiply();
  }
}

}  // namespace stepwell
