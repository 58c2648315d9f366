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
#include <vector>

#include "lora.h"
#include "panel.h"
#include "rounding.h"
#include "threads.h"
#include "vector_math.h"

namespace stepwell {

// What a projection's columns go through.
enum class Epilogue : int { PLAIN, SILU_GATED, GELU_TANH_GATED };

template <class T>
struct Projection {
  const T* packed;
  const T* bias;  // [columns], in the order of the weight; null for none.
  std::int64_t columns;
  std::int64_t depth;
  Epilogue epilogue;
};

namespace {  // Internal, so that functions with one caller are inlined.

constexpr std::int64_t BLOCK_BYTES = 512 * 1024;
constexpr std::int64_t CHUNK_BYTES = 64 * 1024;
constexpr int BLOCK_ROWS = 240;
static_assert(BLOCK_ROWS % MAX_TILE_ROWS == 0);

constexpr std::int64_t LINE_BYTES = 64;

// How many elements ahead of a sequential stream the loop prefetches.
constexpr std::int64_t PREFETCH_AHEAD = 2048;

// What is prefetched before a stream begins: what memory delivers in some microseconds, and a small
// part of a second-level cache.
constexpr std::int64_t PREFETCHED_BYTES = 64 * 1024;

std::int64_t num_panels(std::int64_t columns) { return divide_up(columns, PANEL_WIDTH); }

// The weight's row that becomes column `column` of a panel; `columns` or more for padding.
std::int64_t source_row(std::int64_t panel, int column, std::int64_t columns, Epilogue epilogue) {
  if (epilogue == Epilogue::PLAIN) return panel * PANEL_WIDTH + column;
  const std::int64_t half = columns / 2;
  const std::int64_t index = panel * LANES + column % LANES;
  if (index >= half) return columns;
  return column < LANES ? index : half + index;
}

template <class T>
void pack_panel(const T* weight, T* packed, std::int64_t panel, std::int64_t columns,
                std::int64_t depth, Epilogue epilogue) {
  constexpr int DEPTH = PanelOps<T>::DEPTH;
  const std::int64_t steps = depth / DEPTH;
  T* target = packed + panel * PANEL_WIDTH * depth;
  for (int column = 0; column < PANEL_WIDTH; ++column) {
    const std::int64_t row = source_row(panel, column, columns, epilogue);
    for (std::int64_t step = 0; step < steps; ++step) {
      T* cell = target + (step * PANEL_WIDTH + column) * DEPTH;
      if (row < columns) {
        std::memcpy(cell, weight + row * depth + step * DEPTH, DEPTH * sizeof(T));
      } else {
        std::memset(cell, 0, DEPTH * sizeof(T));
      }
    }
  }
}

template <class T>
Vector bias_of(const T* bias, std::int64_t first, std::int64_t count) {
  return bias == nullptr ? Vector{} : load_partial(bias + first, int(count));
}

// Writes a panel's totals [rows, PANEL_WIDTH], gated if the projection is, to the output's columns
// from `first` on. Masked stores only if fewer columns than a panel's are left.
template <class T, class Out>
__attribute__((noinline)) void write_rows(const Projection<T>& p, const float* total, int rows,
                                          std::int64_t first, std::int64_t width, Out* output) {
  const int count = int(std::min<std::int64_t>(width - first, PANEL_WIDTH));
  const bool gated = p.epilogue != Epilogue::PLAIN;
  const bool whole = count >= (gated ? LANES : PANEL_WIDTH);
  output += first;
  for (int i = 0; i < rows; ++i, total += PANEL_WIDTH, output += width) {
    Vector left = load(total);
    const Vector right = load(total + LANES);
    if (gated) left = (p.epilogue == Epilogue::SILU_GATED ? silu(left) : gelu_tanh(left)) * right;
    if (whole) {
      store(output, left);
      if (!gated) store(output + LANES, right);
    } else {
      store_partial(output, left, count);
      if (!gated) store_partial(output + LANES, right, count - LANES);
    }
  }
}

template <class T>
struct InputRows {
  const T* first;
  std::int64_t stride;
  int count;
};

// Rows whose distance is a multiple of 2 KB share a few sets of the first-level cache: a dozen of
// them, read side by side, evict each other. Of such rows, a tile or more, returns a copy in which
// they are an odd number of cache lines apart; it is valid until the thread's next call. Returns
// others unchanged.
template <class T>
InputRows<T> without_set_conflicts(const InputRows<T>& rows, std::int64_t depth) {
  if (rows.count < MAX_TILE_ROWS || rows.stride * sizeof(T) % 2048 != 0) return rows;
  static thread_local std::vector<T> copy;
  constexpr std::int64_t LINE = LINE_BYTES / sizeof(T);
  const std::int64_t stride = (divide_up(depth, LINE) | 1) * LINE;
  if (std::int64_t(copy.size()) < rows.count * stride) copy.resize(rows.count * stride);
  for (int row = 0; row < rows.count; ++row) {
    std::memcpy(&copy[row * stride], rows.first + row * rows.stride, depth * sizeof(T));
  }
  return {copy.data(), stride, rows.count};
}

// to [ROWS, PANEL_WIDTH] = from, whose rows are `from_stride` elements apart, + rows of `a` times
// the panel. PREFETCH and `ahead` as in `multiply`. A function of its own, so that `multiply` has
// all registers.
template <class T, int ROWS, bool PREFETCH>
__attribute__((noinline)) void add_product(const float* from, std::int64_t from_stride, const T* a,
                                           std::int64_t stride, const T* panel, int steps,
                                           std::int64_t ahead, float* to) {
  if (steps < 1 || ahead == 0) __builtin_unreachable();
  Vector total[ROWS][PANEL_VECTORS];
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; ++i, from += from_stride) {
#pragma GCC unroll 4
    for (int v = 0; v < PANEL_VECTORS; ++v) total[i][v] = load(from + v * LANES);
  }
  multiply<T, ROWS, PANEL_VECTORS, PREFETCH>(total, a, stride, panel, steps, ahead);
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < PANEL_VECTORS; ++v) store(to + i * PANEL_WIDTH + v * LANES, total[i][v]);
  }
}

// Multiplies rows by one panel and writes the results. `totals` [BLOCK_ROWS, PANEL_WIDTH] is
// scratch memory. `delta`: what adapters add, or null; the rows' first one is row `first_row`
// there.
template <class T, class Out>
void project_panel(const Projection<T>& p, const InputRows<T>& rows, Out* output,
                   std::int64_t panel, float* totals, const LoraDelta<T>* delta,
                   std::int64_t first_row) {
  const bool gated = p.epilogue != Epilogue::PLAIN;
  const std::int64_t width = gated ? p.columns / 2 : p.columns;
  const std::int64_t first = panel * (gated ? LANES : PANEL_WIDTH);
  alignas(64) float bias[PANEL_WIDTH];
  store(bias, bias_of(p.bias, first, width - first));
  store(bias + LANES,
        gated ? bias_of(p.bias == nullptr ? nullptr : p.bias + width, first, width - first)
              : bias_of(p.bias, first + LANES, width - first - LANES));
  const bool one_pass = rows.count <= MAX_TILE_ROWS;
  constexpr std::int64_t DEPTH = PanelOps<T>::DEPTH;
  const std::int64_t steps = p.depth / DEPTH;
  const std::int64_t chunks =
      one_pass ? 1 : divide_up<std::int64_t>(PANEL_WIDTH * p.depth * sizeof(T), CHUNK_BYTES);
  for (std::int64_t chunk = 0; chunk < chunks; ++chunk) {
    const Range part{steps * chunk / chunks * DEPTH, steps * (chunk + 1) / chunks * DEPTH};
    const std::int64_t depth = part.end - part.begin;
    const T* packed = p.packed + (panel * p.depth + part.begin) * PANEL_WIDTH;
    for_row_tiles(0, rows.count, [&]<int ROWS>(int row) {
      float* to = totals + (chunks == 1 ? 0 : row * PANEL_WIDTH);
      const bool prefetches = row + ROWS == rows.count;
      const auto add = prefetches ? add_product<T, ROWS, true> : add_product<T, ROWS, false>;
      add(chunk == 0 ? bias : to, chunk == 0 ? 0 : PANEL_WIDTH,
          rows.first + row * rows.stride + part.begin, rows.stride, packed, int(depth / DEPTH),
          one_pass ? PREFETCH_AHEAD : PANEL_WIDTH * depth, to);
      if (chunk + 1 < chunks) return;
      if (delta != nullptr) add_delta(*delta, first_row + row, ROWS, panel, to);
      write_rows(p, to, ROWS, first, width, output + row * width);
    });
  }
}

}  // namespace

// [columns, depth] -> panels. A gated weight has its gates first, then as many values; each panel
// gets gates beside the values that they gate.
template <class T>
void pack_weight(const T* weight, T* packed, std::int64_t columns, std::int64_t depth,
                 Epilogue epilogue) {
  in_team(threads_for(double(columns) * double(depth)), [&](Team team) {
    const Range own = team.part(num_panels(columns));
    for (std::int64_t panel = own.begin; panel < own.end; ++panel) {
      pack_panel(weight, packed, panel, columns, depth, epilogue);
    }
  });
}

// The work of projecting `rows` rows, in the unit of threads.h.
template <class T>
double projection_work(const Projection<T>& p, std::int64_t rows) {
  return double(p.columns) * double(p.depth) * std::max(double(sizeof(T)), double(rows) / 8);
}

// input [rows, depth] -> output [rows, columns], or [rows, columns / 2] if the projection is gated.
// Every thread of the team calls it and computes a part. `Out` is T, or float for results that are
// not rounded. `delta`: what adapters add, whose `inside` is computed; null for nothing.
template <class T, class Out>
[[gnu::noinline]] void project(const Projection<T>& p, const T* input, Out* output,
                               std::int64_t rows, Team team, const LoraDelta<T>* delta = nullptr) {
  const std::int64_t most_rows = std::clamp<std::int64_t>(
      round_down(BLOCK_BYTES / (p.depth * sizeof(T)), MAX_TILE_ROWS), MAX_TILE_ROWS, BLOCK_ROWS);
  const std::int64_t groups = divide_up(rows, MAX_TILE_ROWS);
  const std::int64_t blocks = divide_up(rows, most_rows);
  const std::int64_t panels = num_panels(p.columns);
  const std::int64_t width = p.epilogue == Epilogue::PLAIN ? p.columns : p.columns / 2;
  alignas(64) float totals[BLOCK_ROWS * PANEL_WIDTH];
  WorkItems items(team, blocks * panels);
  InputRows<T> near{};
  std::int64_t block = -1, first = 0;
  for (std::int64_t item; (item = items.next()) >= 0;) {
    if (item / panels != block) {
      block = item / panels;
      first = groups * block / blocks * MAX_TILE_ROWS;
      const std::int64_t end = std::min(rows, groups * (block + 1) / blocks * MAX_TILE_ROWS);
      near =
          without_set_conflicts<T>({input + first * p.depth, p.depth, int(end - first)}, p.depth);
    }
    project_panel(p, near, output + first * width, item % panels, totals, delta, first);
  }
}

// Prefetches what this thread will read first of a projection.
template <class T>
void prefetch(const Projection<T>& p, Team team) {
  const Range own = team.part(num_panels(p.columns));
  const std::int64_t panel = PANEL_WIDTH * p.depth * sizeof(T);
  const char* first = reinterpret_cast<const char*>(p.packed) + own.begin * panel;
  const std::int64_t count = std::min((own.end - own.begin) * panel, PREFETCHED_BYTES);
  for (std::int64_t i = 0; i < count; i += 64) __builtin_prefetch(first + i, 0, 2);
}

}  // namespace stepwell
