// Attention of many rows over a block of keys, which are packed into panels for them.

#pragma once

#include <algorithm>

#include "key_block.h"
#include "tile.h"

inline int round_up(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }

// Keys as panels of WIDTH columns, [dim / DEPTH, WIDTH, DEPTH] each, of keys that lie as values do.
template <class T>
void pack_lines(const Lines<T>& keys, int dim, T* packed) {
  using S = Step<T>;
  const int steps = dim / S::DEPTH;
  alignas(64) float lines[LANES * LANES], turned[LANES * LANES];
  for (int first = 0; first < keys.count(); first += LANES) {
    T* target = packed + first / WIDTH * WIDTH * dim + first % WIDTH * S::DEPTH;
    for (int step = 0; step < steps; step += LANES) {
      const int begin = step * S::DEPTH;
      for (int i = 0; i < LANES; ++i) {
        store(lines + i * LANES, S::panel_part(keys[first + i] + begin, dim - begin));
      }
      T* cell = target + step * WIDTH * S::DEPTH;
      if (step + LANES <= steps) {
        transpose_words(lines, 64, cell, WIDTH * 4);
        continue;
      }
      transpose_words(lines, 64, turned, 64);
      for (int i = 0; i < steps - step; ++i) {
        std::memcpy(cell + i * WIDTH * S::DEPTH, turned + i * LANES, 64);
      }
    }
  }
}

// The same of keys that lie in panels, `count` of them.
template <class T>
void pack_panels(const Panels<T>& panels, int count, int dim, T* packed) {
  constexpr int SIZE = LANES * Step<T>::DEPTH;
  for (int p = 0; p < count; ++p) {
    T* target = packed + p / PANEL_VECTORS * WIDTH * dim + p % PANEL_VECTORS * SIZE;
    for (int d = 0; d < dim; d += Step<T>::DEPTH) {
      std::memcpy(target + d * WIDTH, panels.own[p] + d * LANES, SIZE * sizeof(T));
      __builtin_prefetch(panels.ahead[p] + d * LANES, 0, 2);
    }
  }
}

// The panels of LANES columns that packed keys consist of.
template <class T>
Panels<T> packed_panels(const T* packed, int dim) {
  Panels<T> found{.step = WIDTH * Step<T>::DEPTH};
  for (int p = 0; p < BLOCK_PANELS; ++p) {
    found.own[p] = packed + p / PANEL_VECTORS * WIDTH * dim + p % PANEL_VECTORS * LANES * Step<T>::DEPTH;
    found.ahead[p] = found.own[p];
  }
  return found;
}

// scores[row][key] = query[row] times each key; queries are `stride` apart.
template <class T>
void score_rows(const T* query, int stride, const T* packed, int rows, int dim, float* scores) {
  for (int panel = 0; panel < KEYS / WIDTH; ++panel) {
    over_rows(0, rows, [&]<int ROWS>(int row) {
      Vector total[ROWS][PANEL_VECTORS] = {};
      multiply<T, ROWS>(total, query + row * stride, stride, packed + panel * WIDTH * dim,
                        dim / Step<T>::DEPTH);
#pragma GCC unroll 16
      for (int i = 0; i < ROWS; ++i) {
#pragma GCC unroll 4
        for (int v = 0; v < PANEL_VECTORS; ++v) {
          store(scores + (row + i) * KEYS + panel * WIDTH + v * LANES, total[i][v]);
        }
      }
    });
  }
}

// Values as panels of WIDTH elements of a head, [KEYS / DEPTH, WIDTH, DEPTH] each; zeros from the
// head's end up to a whole panel.
template <class T>
void pack_values(const Lines<T>& values, int dim, T* packed) {
  using S = Step<T>;
  for (int key = 0; key < values.count(); key += S::DEPTH) {
    const T* lines[S::DEPTH];
    for (int i = 0; i < S::DEPTH; ++i) lines[i] = values[key + i];
    for (int d = 0; d < dim; d += WIDTH) {
      Vector columns[PANEL_VECTORS];
      S::columns(lines, d, dim - d, columns);
      S::gather(columns);
      T* cell = packed + (d / WIDTH * KEYS + key) * WIDTH;
      for (int v = 0; v < PANEL_VECTORS; ++v) {
        std::memcpy(cell + v * LANES * S::DEPTH, &columns[v], sizeof(Vector));
      }
    }
  }
}

// total[row] += weights[row] times `count` values, of VECTORS vectors each.
template <class T, int VECTORS>
void add_panel(const T* weights, const T* packed, int count, int rows, float* total, int stride) {
  const int steps = (count + Step<T>::DEPTH - 1) / Step<T>::DEPTH;
  over_rows(0, rows, [&]<int ROWS>(int row) {
    Vector sum[ROWS][VECTORS];
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; ++i) {
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v) sum[i][v] = load(total + (row + i) * stride + v * LANES);
    }
    multiply<T, ROWS, VECTORS>(sum, weights + row * KEYS, KEYS, packed, steps);
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; ++i) {
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v) store(total + (row + i) * stride + v * LANES, sum[i][v]);
    }
  });
}

// The same for all `dim` elements of a value; totals are `stride` apart.
template <class T>
void add_rows(const T* weights, const T* packed, int count, int rows, int dim, float* total,
              int stride) {
  for (int d = 0; d < dim; d += WIDTH) {
    const bool is_half = dim - d <= LANES;
    const auto add = is_half ? add_panel<T, 1> : add_panel<T, PANEL_VECTORS>;
    add(weights, packed + d * KEYS, count, rows, total + d, stride);
  }
}
