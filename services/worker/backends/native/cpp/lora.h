// What adapters add to projections: B (A x) for a token's row x of the input, with A and B of the
// adapter of its request (Hu et al., LoRA).
//
// The rows of a step are grouped by adapter once. Before a projection the rows of each adapter are
// multiplied by its A, into `inside`, where they lie in the order of the groups, and in the
// projection each panel's totals get the product of `inside` and B, before they are gated and
// rounded, so that it does not matter how the weight is stored. Rows of one adapter are multiplied
// together wherever they are in the step, since most of the work is to read A and B. Tiles of rows
// add up the products of an element in order of depth, so that a row's result does not depend on
// the rows beside it. Grouping follows punica (Chen et al.).

#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "panel.h"
#include "rounding.h"
#include "threads.h"

namespace stepwell {

// A and B of one adapter for one projection, as native/lora.py packs them.
template <class T>
struct LoraProjection {
  const T* a;  // Panels of LANES rows of A, laid out as those of a weight. Null: nothing is added.
  const T* b;  // Panels as the projection's own, `rank` deep.
  // For each vector of a panel's columns where its `rank` elements of a row of `inside` begin, or
  // -1 if B is zero there.
  const int* begins;
  std::int64_t width;  // Rows of A: a multiple of LANES.
  std::int64_t rank;
};

// The projections of a layer that adapters add to.
enum LoraPart : int { LORA_QKV, LORA_OUTPUT, LORA_GATE_UP, LORA_DOWN, NUM_LORA_PARTS };

template <class T>
struct LoraLayer {
  LoraProjection<T> parts[NUM_LORA_PARTS];
};

// The adapters of a step's rows.
template <class T>
struct StepLora {
  const LoraLayer<T>* const* adapters;  // The layers of each.
  const int* rows;                      // Those of the first adapter, then of the next, rising.
  const int* starts;                    // [num_adapters + 1], in `rows`.
  std::int64_t width;                   // Most rows of an A.
  int num_adapters;
};

// The adapters of a step in one projection. `inside` [starts[num_adapters], width]: a row for each
// of `rows`.
template <class T>
struct LoraDelta {
  const StepLora<T>* step;
  int layer;
  LoraPart part;
  T* inside;

  const LoraProjection<T>& of(int adapter) const {
    return step->adapters[adapter][layer].parts[part];
  }

  bool is_empty() const {
    for (int i = 0; i < step->num_adapters; ++i) {
      if (of(i).a != nullptr) return false;
    }
    return true;
  }
};

// What a thread will read of the A's of a projection, those of its part of the adapters. It is
// prefetched while another projection multiplies: with many rows that one is bound by arithmetic,
// and reading A's by memory.
template <class T>
class LoraReadAhead {
 public:
  LoraReadAhead(const LoraDelta<T>& delta, std::int64_t depth, Team team)
      : delta_(delta), depth_(depth), adapters_(team.part(delta.step->num_adapters)) {}

  // Where the next elements begin, `count` of them or fewer; null if none are left.
  const T* take(std::int64_t count) {
    for (; adapters_.begin < adapters_.end; ++adapters_.begin, taken_ = 0) {
      const LoraProjection<T>& p = delta_.of(int(adapters_.begin));
      if (p.a == nullptr || taken_ >= p.width * depth_) continue;
      const T* first = p.a + taken_;
      taken_ += count;
      return first;
    }
    return nullptr;
  }

 private:
  LoraDelta<T> delta_;
  std::int64_t depth_;
  Range adapters_;
  std::int64_t taken_ = 0;  // Elements of the first adapter that is left.
};

namespace {  // Internal, so that functions with one caller are inlined.

// How many elements ahead of the stream of A the loop prefetches: A is short, and the next one,
// that of another adapter, begins where no stream leads to.
constexpr std::int64_t A_PREFETCH_AHEAD = 1024;

// Some rows times a panel of A, rounded, to rows of `to`, which are `to_stride` elements apart.
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

// Tiles of at most so many rows are multiplied TILES_AT_ONCE at a time: those of one tile alone
// would wait for each addition before the next.
#ifdef __AVX512F__
constexpr int MAX_SMALL_TILE_ROWS = 4;
constexpr int TILES_AT_ONCE = 4;
#else
constexpr int MAX_SMALL_TILE_ROWS = 2;
constexpr int TILES_AT_ONCE = 2;
#endif

// Rows of an adapter, a panel of its A, and where the rounded products go.
template <class T>
struct ShrinkTile {
  const T* rows;
  const T* panel;
  T* to;
};

// ROWS rows of each tile times its panel. Rows of a tile are `stride` elements apart, those of its
// products `to_stride`.
template <class T, int ROWS>
__attribute__((noinline)) void multiply_tiles(const ShrinkTile<T> (&tiles)[TILES_AT_ONCE],
                                              std::int64_t stride, int steps,
                                              std::int64_t to_stride) {
  using Ops = PanelOps<T>;
  if (steps < 1) __builtin_unreachable();
  Vector total[TILES_AT_ONCE][ROWS] = {};
  const T *rows[TILES_AT_ONCE], *panels[TILES_AT_ONCE];
#pragma GCC unroll 4
  for (int i = 0; i < TILES_AT_ONCE; ++i) {
    rows[i] = tiles[i].rows;
    panels[i] = tiles[i].panel;
  }
  for (int step = 0; step < steps; ++step) {
#pragma GCC unroll 4
    for (int i = 0; i < TILES_AT_ONCE; ++i) {
      const Vector columns = Ops::load(panels[i]);
      __builtin_prefetch(panels[i] + A_PREFETCH_AHEAD, 0, 2);
#pragma GCC unroll 4
      for (int row = 0; row < ROWS; ++row) {
        const Vector value = Ops::broadcast(rows[i] + row * stride);
        total[i][row] = Ops::multiply_add(total[i][row], value, columns);
      }
      rows[i] += Ops::DEPTH;
      panels[i] += LANES * Ops::DEPTH;
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < TILES_AT_ONCE; ++i) {
#pragma GCC unroll 4
    for (int row = 0; row < ROWS; ++row) store(tiles[i].to + row * to_stride, total[i][row]);
  }
}

// Collects small tiles of as many rows, and multiplies TILES_AT_ONCE of them together; others one
// by one.
template <class T>
class ShrinkTiles {
 public:
  ShrinkTiles(std::int64_t depth, std::int64_t to_stride)
      : depth_(depth), steps_(int(depth / PanelOps<T>::DEPTH)), to_stride_(to_stride) {}

  // Takes a tile of `rows` rows.
  void add(int rows, const ShrinkTile<T>& tile) {
    if (count_ == TILES_AT_ONCE || rows != rows_) multiply();
    rows_ = rows;
    tiles_[count_++] = tile;
    if (rows > MAX_SMALL_TILE_ROWS) multiply();
  }

  // Multiplies those that are left.
  void multiply() {
    for_row_tiles(0, count_ > 0 ? rows_ : 0, [&]<int ROWS>(int row) { multiply<ROWS>(row); });
    count_ = 0;
  }

 private:
  template <int ROWS>
  void multiply(int row) {
    if constexpr (ROWS <= MAX_SMALL_TILE_ROWS) {
      if (count_ > 1) {
        for (; count_ < TILES_AT_ONCE; ++count_) tiles_[count_] = tiles_[0];
        return multiply_tiles<T, ROWS>(tiles_, depth_, steps_, to_stride_);
      }
    }
    const ShrinkTile<T>& tile = tiles_[0];
    multiply_inside<T, ROWS>(tile.rows + row * depth_, depth_, tile.panel, steps_,
                             tile.to + row * to_stride_, to_stride_);
  }

  std::int64_t depth_;
  int steps_;
  std::int64_t to_stride_;
  ShrinkTile<T> tiles_[TILES_AT_ONCE];
  int rows_ = 0;
  int count_ = 0;
};

// A tile of rows of one adapter: in place if they follow each other, else copied.
template <class T>
const T* tile_of(const T* input, std::int64_t depth, const int* at, int count, T* copy) {
  if (at[count - 1] - at[0] == count - 1) return input + at[0] * depth;
  for (int i = 0; i < count; ++i) {
    std::memcpy(copy + i * depth, input + at[i] * depth, depth * sizeof(T));
  }
  return copy;
}

}  // namespace

// Rows of a tile: as many as registers hold, and fewer if there are few, so that every thread gets
// two tiles.
inline int lora_tile_rows(int num_rows, Team team) {
  return std::clamp(divide_up(num_rows, 2 * team.size), 1, MAX_TILE_ROWS);
}

// input [rows, depth] times A of each row's adapter, into `inside`. Every thread of the team calls
// it and computes a part.
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
      const T* rows = tile_of(input, depth, step.rows + begin, count, &copies[i * copied]);
      T* inside = delta.inside + begin * step.width;
      for (std::int64_t first = 0; first < p.width; first += LANES) {
        tiles.add(count, {rows, p.a + first * depth, inside + first});
      }
    }
    tiles.multiply();
  }
}

}  // namespace stepwell
