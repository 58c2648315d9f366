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
  multiply<T, ROWS, 1, true, LANES>(
      total, rows, stride, panel, steps,
      {panel + A_PREFETCH_AHEAD, LANES * PanelOps<T>::DEPTH * sizeof(T)});
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; ++i) store(to + i * to_stride, total[i][0]);
}

// Adds rows times VECTORS vectors of columns of a panel of B to the rows `at` of the totals, which
// have PANEL_WIDTH columns. Prefetches the next panel.
template <class T, int ROWS, int VECTORS>
__attribute__((noinline)) void add_expanded(float* totals, const int* at, const T* rows,
                                            std::int64_t stride, const T* panel, int steps) {
  if (steps < 1) __builtin_unreachable();
  Vector total[ROWS][VECTORS];
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; ++i) {
#pragma GCC unroll 2
    for (int v = 0; v < VECTORS; ++v) total[i][v] = load(totals + at[i] * PANEL_WIDTH + v * LANES);
  }
  constexpr std::int64_t STEP = PANEL_WIDTH * PanelOps<T>::DEPTH;
  multiply<T, ROWS, VECTORS, true>(total, rows, stride, panel, steps,
                                   {panel + steps * STEP, STEP * sizeof(T)});
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; ++i) {
#pragma GCC unroll 2
    for (int v = 0; v < VECTORS; ++v) store(totals + at[i] * PANEL_WIDTH + v * LANES, total[i][v]);
  }
}

// A tile of rows of one adapter: in place if they follow each other, else copied.
template <class T>
const T* tile_of(const T* input, std::int64_t depth, const int* at, int count,
                 std::vector<T>& copy) {
  if (at[count - 1] - at[0] == count - 1) return input + at[0] * depth;
  if (std::int64_t(copy.size()) < count * depth) copy.resize(count * depth);
  for (int i = 0; i < count; ++i) {
    std::memcpy(&copy[i * depth], input + at[i] * depth, depth * sizeof(T));
  }
  return copy.data();
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
  static thread_local std::vector<T> copy;
  const StepLora<T>& step = *delta.step;
  const int steps = int(depth / PanelOps<T>::DEPTH);
  const int tile_rows = lora_tile_rows(step.starts[step.num_adapters], team);
  const auto tiles_of = [&](int adapter) {
    return divide_up(step.starts[adapter + 1] - step.starts[adapter], tile_rows);
  };
  std::int64_t num_tiles = 0;
  for (int i = 0; i < step.num_adapters; ++i) num_tiles += tiles_of(i);
  WorkItems items(team, num_tiles);
  for (std::int64_t item; (item = items.next()) >= 0;) {
    int adapter = 0;
    for (; tiles_of(adapter) <= item; ++adapter) item -= tiles_of(adapter);
    const LoraProjection<T>& p = delta.of(adapter);
    if (p.a == nullptr) continue;
    const int begin = step.starts[adapter] + int(item) * tile_rows;
    const int count = std::min(step.starts[adapter + 1] - begin, tile_rows);
    const T* rows = tile_of(input, depth, step.rows + begin, count, copy);
    T* inside = delta.inside + begin * step.width;
    for (std::int64_t first = 0; first < p.width; first += LANES) {
      for_row_tiles(0, count, [&]<int ROWS>(int row) {
        multiply_inside<T, ROWS>(rows + row * depth, depth, p.a + first * depth, steps,
                                 inside + row * step.width + first, step.width);
      });
    }
  }
}

// Adds to the totals [count, PANEL_WIDTH] of a projection's panel what the adapters of the rows
// from `row` on add to it.
template <class T>
[[gnu::noinline]] void add_delta(const LoraDelta<T>& delta, std::int64_t row, int count,
                                 std::int64_t panel, float* totals) {
  const StepLora<T>& step = *delta.step;
  totals -= row * PANEL_WIDTH;
  for (int adapter = 0; adapter < step.num_adapters; ++adapter) {
    const LoraProjection<T>& p = delta.of(adapter);
    if (p.a == nullptr) continue;
    const int* begin = step.rows + step.starts[adapter];
    const int* end = step.rows + step.starts[adapter + 1];
    if (*begin < row) begin = std::lower_bound(begin, end, int(row));
    if (begin < end && end[-1] >= row + count) end = std::lower_bound(begin, end, int(row) + count);
    const int steps = int(p.rank / PanelOps<T>::DEPTH);
    const T* b = p.b + panel * PANEL_WIDTH * p.rank;
    const int left = p.begins[panel * PANEL_VECTORS], right = p.begins[panel * PANEL_VECTORS + 1];
    const T* inside = delta.inside + (begin - step.rows) * step.width;
    for_row_tiles(0, int(end - begin), [&]<int ROWS>(int i) {
      const T* tile = inside + i * step.width;
      const int* at = begin + i;
      if (left == right) {
        if (left >= 0) add_expanded<T, ROWS, 2>(totals, at, tile + left, step.width, b, steps);
        return;
      }
      if (left >= 0) add_expanded<T, ROWS, 1>(totals, at, tile + left, step.width, b, steps);
      if (right >= 0) {
        add_expanded<T, ROWS, 1>(totals + LANES, at, tile + right, step.width,
                                 b + LANES * PanelOps<T>::DEPTH, steps);
      }
    });
  }
}

}  // namespace stepwell
