// What adapters add to projections: B (A x) for a token's row x of the input, with A and B of the
// adapter of its request (Hu et al., LoRA).
//
// The rows of a step are grouped by adapter once. Before a projection the rows of each adapter are
// multiplied by its A, into `inside`, and in the projection each panel's totals get the product of
// `inside` and B, before they are gated and rounded, so that it does not matter how the weight is
// stored. Tiles of rows add up the products of an element in order of depth, so that a row's result
// does not depend on the rows beside it. Grouping follows punica (Chen et al.).

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
  const int* adapter_of;                // [rows], -1 for none.
  const int* rows;                      // Those of the first adapter, then of the next, rising.
  const int* starts;                    // [num_adapters + 1], in `rows`.
  std::int64_t num_rows;                // Of the step.
  std::int64_t width;                   // Most rows of an A.
  int num_adapters;
};

// The adapters of a step in one projection. `inside` [num_rows, width].
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

namespace {  // Internal, so that functions with one caller are inlined.

// Some rows times a panel of A, rounded, to the rows `at` of `to`, `to_stride` elements apart.
template <class T, int ROWS>
__attribute__((noinline)) void multiply_inside(const T* rows, std::int64_t stride, const T* panel,
                                               int steps, const int* at, T* to,
                                               std::int64_t to_stride) {
  if (steps < 1) __builtin_unreachable();
  Vector total[ROWS][1] = {};
  multiply<T, ROWS, 1, false, LANES>(total, rows, stride, panel, steps);
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; ++i) store(to + at[i] * to_stride, total[i][0]);
}

// totals [ROWS, PANEL_WIDTH] += rows times VECTORS vectors of columns of a panel of B.
template <class T, int ROWS, int VECTORS>
__attribute__((noinline)) void add_expanded(float* totals, const T* rows, std::int64_t stride,
                                            const T* panel, int steps) {
  if (steps < 1) __builtin_unreachable();
  Vector total[ROWS][VECTORS];
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; ++i) {
#pragma GCC unroll 2
    for (int v = 0; v < VECTORS; ++v) total[i][v] = load(totals + i * PANEL_WIDTH + v * LANES);
  }
  multiply<T, ROWS, VECTORS>(total, rows, stride, panel, steps);
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; ++i) {
#pragma GCC unroll 2
    for (int v = 0; v < VECTORS; ++v) store(totals + i * PANEL_WIDTH + v * LANES, total[i][v]);
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

// input [rows, depth] times A of each row's adapter, into `inside`. Every thread of the team calls
// it and computes a part.
template <class T>
[[gnu::noinline]] void shrink(const LoraDelta<T>& delta, const T* input, std::int64_t depth,
                              Team team) {
  static thread_local std::vector<T> copy;
  const StepLora<T>& step = *delta.step;
  const int steps = int(depth / PanelOps<T>::DEPTH);
  std::int64_t num_tiles = 0;
  for (int i = 0; i < step.num_adapters; ++i) {
    num_tiles += divide_up(step.starts[i + 1] - step.starts[i], MAX_TILE_ROWS);
  }
  WorkItems items(team, num_tiles);
  for (std::int64_t item; (item = items.next()) >= 0;) {
    int adapter = 0;
    for (int tiles; (tiles = divide_up(step.starts[adapter + 1] - step.starts[adapter],
                                       MAX_TILE_ROWS)) <= item;
         ++adapter) {
      item -= tiles;
    }
    const LoraProjection<T>& p = delta.of(adapter);
    if (p.a == nullptr) continue;
    const int begin = step.starts[adapter] + int(item) * MAX_TILE_ROWS;
    const int count = std::min(step.starts[adapter + 1] - begin, MAX_TILE_ROWS);
    const int* at = step.rows + begin;
    const T* rows = tile_of(input, depth, at, count, copy);
    for (std::int64_t first = 0; first < p.width; first += LANES) {
      for_row_tiles(0, count, [&]<int ROWS>(int row) {
        multiply_inside<T, ROWS>(rows + row * depth, depth, p.a + first * depth, steps, at + row,
                                 delta.inside + first, step.width);
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
  const int* adapter_of = step.adapter_of + row;
  for (int begin = 0, end; begin < count; begin = end) {
    const int adapter = adapter_of[begin];
    for (end = begin + 1; end < count && adapter_of[end] == adapter;) ++end;
    if (adapter < 0) continue;
    const LoraProjection<T>& p = delta.of(adapter);
    if (p.a == nullptr) continue;
    const int steps = int(p.rank / PanelOps<T>::DEPTH);
    const T* b = p.b + panel * PANEL_WIDTH * p.rank;
    const T* rows = delta.inside + row * step.width;
    const int left = p.begins[panel * PANEL_VECTORS], right = p.begins[panel * PANEL_VECTORS + 1];
    for_row_tiles(begin, end, [&]<int ROWS>(int i) {
      const T* tile = rows + i * step.width;
      float* to = totals + i * PANEL_WIDTH;
      if (left == right) {
        if (left >= 0) add_expanded<T, ROWS, 2>(to, tile + left, step.width, b, steps);
        return;
      }
      if (left >= 0) add_expanded<T, ROWS, 1>(to, tile + left, step.width, b, steps);
      if (right >= 0) {
        add_expanded<T, ROWS, 1>(to + LANES, tile + right, step.width,
                                 b + LANES * PanelOps<T>::DEPTH, steps);
      }
    });
  }
}

}  // namespace stepwell
