// Multiplication by a packed weight.
//
// Panels of the weight lie one after the other, so that a small batch, which is bound by memory,
// reads one sequential stream per thread. Large batches are cut into blocks of rows that stay in the
// second-level cache while the panels pass by. The activation of a gated pair is applied while both
// are in registers.

#include <sys/mman.h>

#include <algorithm>

#include "kernels.h"
#include "threads.h"
#include "tile.h"

namespace {

constexpr std::int64_t BLOCK_BYTES = 256 * 1024;

// Elements that are fetched ahead of a sequential stream.
constexpr std::int64_t AHEAD = 2048;

std::int64_t num_panels(std::int64_t columns) { return (columns + WIDTH - 1) / WIDTH; }

// The weight's row that column `column` of a panel stands for; `columns` or more for padding.
std::int64_t source_row(std::int64_t panel, int column, std::int64_t columns, Epilogue epilogue) {
  if (epilogue == Epilogue::PLAIN) return panel * WIDTH + column;
  const std::int64_t half = columns / 2;
  const std::int64_t index = panel * LANES + column % LANES;
  if (index >= half) return columns;
  return column < LANES ? index : half + index;
}

template <class T>
void pack_panel(const T* weight, T* packed, std::int64_t panel, std::int64_t columns,
                std::int64_t depth, Epilogue epilogue) {
  constexpr int DEPTH = Step<T>::DEPTH;
  const std::int64_t steps = depth / DEPTH;
  T* target = packed + panel * WIDTH * depth;
  for (int column = 0; column < WIDTH; ++column) {
    const std::int64_t row = source_row(panel, column, columns, epilogue);
    for (std::int64_t step = 0; step < steps; ++step) {
      T* cell = target + (step * WIDTH + column) * DEPTH;
      if (row < columns) {
        std::memcpy(cell, weight + row * depth + step * DEPTH, DEPTH * sizeof(T));
      } else {
        std::memset(cell, 0, DEPTH * sizeof(T));
      }
    }
  }
}

// A weight that is read as a stream meets a page's end every few hundred nanoseconds: fewer, larger
// pages are looked up faster. Only advice; before the memory is first written.
void advise_large_pages(void* begin, std::int64_t bytes) {
#ifdef MADV_HUGEPAGE
  constexpr std::uintptr_t PAGE = 4096;
  const std::uintptr_t first = (reinterpret_cast<std::uintptr_t>(begin) + PAGE - 1) / PAGE * PAGE;
  const std::uintptr_t last = (reinterpret_cast<std::uintptr_t>(begin) + bytes) / PAGE * PAGE;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

template <class T>
Vector bias_of(const T* bias, std::int64_t first, std::int64_t count) {
  return bias == nullptr ? Vector{} : load_first(bias + first, int(count));
}

// Rows of a panel's totals [rows, WIDTH] -> the output's columns from `first` on.
template <class T>
__attribute__((noinline)) void put_rows(const Projection<T>& p, const float* total, int rows,
                                        std::int64_t first, std::int64_t width, T* output) {
  const int count = int(std::min<std::int64_t>(width - first, WIDTH));
  for (int i = 0; i < rows; ++i, total += WIDTH, output += width) {
    const Vector left = load(total), right = load(total + LANES);
    if (p.epilogue == Epilogue::PLAIN) {
      store_first(output + first, left, count);
      store_first(output + first + LANES, right, count - LANES);
    } else {
      const Vector open = p.epilogue == Epilogue::SILU_GATED ? silu(left) : gelu_tanh(left);
      store_first(output + first, open * right, count);
    }
  }
}

template <class T>
void project_panel(const Projection<T>& p, const T* input, T* output, std::int64_t panel,
                   int row_begin, int row_end) {
  const T* packed = p.packed + panel * WIDTH * p.depth;
  const int steps = int(p.depth / Step<T>::DEPTH);
  const bool gated = p.epilogue != Epilogue::PLAIN;
  const std::int64_t width = gated ? p.columns / 2 : p.columns;
  const std::int64_t first = panel * (gated ? LANES : WIDTH);
  const Vector biases[2] = {
      bias_of(p.bias, first, width - first),
      gated ? bias_of(p.bias == nullptr ? nullptr : p.bias + width, first, width - first)
            : bias_of(p.bias, first + LANES, width - first - LANES)};
  over_rows(row_begin, row_end, [&]<int ROWS>(int row) {
    Vector total[ROWS][PANEL_VECTORS];
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; ++i) {
#pragma GCC unroll 4
      for (int v = 0; v < PANEL_VECTORS; ++v) total[i][v] = biases[v];
    }
    const bool last = row + ROWS == row_end;
    multiply<T, ROWS>(total, input + row * p.depth, p.depth, packed, steps,
                      last ? (row == row_begin ? AHEAD : WIDTH * p.depth) : 0);
    alignas(64) float results[ROWS * WIDTH];
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; ++i) {
#pragma GCC unroll 4
      for (int v = 0; v < PANEL_VECTORS; ++v) store(results + i * WIDTH + v * LANES, total[i][v]);
    }
    put_rows(p, results, ROWS, first, width, output + row * width);
  });
}

}  // namespace

int panel_width() { return WIDTH; }

template <class T>
void pack_weight(const T* weight, T* packed, std::int64_t columns, std::int64_t depth,
                 Epilogue epilogue) {
  advise_large_pages(packed, num_panels(columns) * WIDTH * depth * sizeof(T));
  in_team(threads_for(double(columns) * double(depth)), [&](Team team) {
    const Range own = team.part(num_panels(columns));
    for (std::int64_t panel = own.begin; panel < own.end; ++panel) {
      pack_panel(weight, packed, panel, columns, depth, epilogue);
    }
  });
}

template <class T>
double projection_work(const Projection<T>& p, std::int64_t rows) {
  return double(p.columns) * double(p.depth) * std::max(double(sizeof(T)), double(rows) / 8);
}

template <class T>
void project(const Projection<T>& p, const T* input, T* output, std::int64_t rows, Team team) {
  std::int64_t block = std::max<std::int64_t>(BLOCK_BYTES / (p.depth * sizeof(T)), MOST_ROWS);
  block = block / MOST_ROWS * MOST_ROWS;
  const Range own = team.part(num_panels(p.columns));
  for (std::int64_t row = 0; row < rows; row += block) {
    const std::int64_t last = std::min(row + block, rows);
    for (std::int64_t panel = own.begin; panel < own.end; ++panel) {
      project_panel(p, input, output, panel, int(row), int(last));
    }
  }
}

#define INSTANTIATE(T)                                                                    \
  template void pack_weight<T>(const T*, T*, std::int64_t, std::int64_t, Epilogue);       \
  template double projection_work<T>(const Projection<T>&, std::int64_t);                 \
  template void project<T>(const Projection<T>&, const T*, T*, std::int64_t, Team);
INSTANTIATE(float)
#ifdef __AVX512BF16__
INSTANTIATE(BFloat16)
#endif
