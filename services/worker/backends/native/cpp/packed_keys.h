// Attention of many rows (heads of queries) over a block of keys, whose keys and values are packed
// into panels (panel.h).

#pragma once

#include <cstdint>

#include "key_block.h"
#include "panel.h"
#include "rounding.h"

namespace stepwell {

// Packs keys that are stored like values into panels of PANEL_WIDTH columns, [depth / DEPTH,
// PANEL_WIDTH, DEPTH] each. Zeros follow the `dim` elements of a key.
template <class T>
void pack_token_rows(const TokenRows<T>& keys, int dim, int depth, T* packed) {
  using Ops = PanelOps<T>;
  const int steps = depth / Ops::DEPTH;
  alignas(64) float lines[LANES * LANES], turned[LANES * LANES];
  for (int first = 0; first < keys.count(); first += LANES) {
    T* target = packed + round_down(first, PANEL_WIDTH) * depth + first % PANEL_WIDTH * Ops::DEPTH;
    for (int step = 0; step < steps; step += LANES) {
      const int begin = step * Ops::DEPTH;
      for (int i = 0; i < LANES; ++i) {
        store(lines + i * LANES, Ops::load_part(keys[first + i] + begin, dim - begin));
      }
      T* cell = target + step * PANEL_WIDTH * Ops::DEPTH;
      if (step + LANES <= steps) {
        transpose_words(lines, 64, cell, PANEL_WIDTH * 4);
        continue;
      }
      transpose_words(lines, 64, turned, 64);
      for (int i = 0; i < steps - step; ++i) {
        std::memcpy(cell + i * PANEL_WIDTH * Ops::DEPTH, turned + i * LANES, 64);
      }
    }
  }
}

// Packs `count` panels of keys that are stored in panels, into the same format as pack_token_rows.
template <class T>
void pack_panels(const KeyPanels<T>& panels, int count, int dim, int depth, T* packed) {
  constexpr int SIZE = LANES * PanelOps<T>::DEPTH;
  for (int p = 0; p < count; ++p) {
    T* target = packed + p / PANEL_VECTORS * PANEL_WIDTH * depth + p % PANEL_VECTORS * SIZE;
    for (int d = 0; d < dim; d += PanelOps<T>::DEPTH) {
      std::memcpy(target + d * PANEL_WIDTH, panels.current[p] + d * LANES, SIZE * sizeof(T));
      __builtin_prefetch(panels.next[p] + d * LANES, 0, 2);
    }
    for (int d = dim; d < depth; d += PanelOps<T>::DEPTH) {
      std::memset(target + d * PANEL_WIDTH, 0, SIZE * sizeof(T));
    }
  }
}

// The panels of LANES columns in packed keys. `next` equals `current`, so that nothing new is
// prefetched.
template <class T>
KeyPanels<T> packed_panels(const T* packed, int depth) {
  KeyPanels<T> found{.step = PANEL_WIDTH * PanelOps<T>::DEPTH};
  for (int p = 0; p < BLOCK_PANELS; ++p) {
    found.current[p] = packed + p / PANEL_VECTORS * PANEL_WIDTH * depth +
                       p % PANEL_VECTORS * LANES * PanelOps<T>::DEPTH;
    found.next[p] = found.current[p];
  }
  return found;
}

// scores[row][key] = the product of query[row] and the key. Queries are `stride` elements apart.
template <class T>
void score_rows(const T* query, int stride, const T* packed, int rows, int dim, float* scores) {
  for (int panel = 0; panel < BLOCK_KEYS / PANEL_WIDTH; ++panel) {
    for_row_tiles(0, rows, [&]<int ROWS>(int row) {
      Vector total[ROWS][PANEL_VECTORS] = {};
      multiply<T, ROWS>(total, query + row * stride, stride, packed + panel * PANEL_WIDTH * dim,
                        dim / PanelOps<T>::DEPTH);
#pragma GCC unroll 16
      for (int i = 0; i < ROWS; ++i) {
#pragma GCC unroll 4
        for (int v = 0; v < PANEL_VECTORS; ++v) {
          store(scores + (row + i) * BLOCK_KEYS + panel * PANEL_WIDTH + v * LANES, total[i][v]);
        }
      }
    });
  }
}

// Packs values into panels of PANEL_WIDTH elements of a head, [BLOCK_KEYS / DEPTH, PANEL_WIDTH,
// DEPTH] each. Zeros fill the last panel. Copies of the last value fill the depth up to a multiple
// of SUM_STEPS steps.
template <class T>
void pack_values(const TokenRows<T>& values, int dim, T* packed) {
  using Ops = PanelOps<T>;
  const int end =
      SUMS_LIKE_TILES<T> ? round_up(values.count(), SUM_STEPS<T> * Ops::DEPTH) : values.count();
  for (int key = 0; key < end; key += Ops::DEPTH) {
    const T* lines[Ops::DEPTH];
    for (int i = 0; i < Ops::DEPTH; ++i) lines[i] = values[key + i];
    for (int d = 0; d < dim; d += PANEL_WIDTH) {
      Vector columns[PANEL_VECTORS];
      Ops::interleave(lines, d, dim - d, columns);
      Ops::to_element_order(columns);
      T* cell = packed + (d / PANEL_WIDTH * BLOCK_KEYS + key) * PANEL_WIDTH;
      for (int v = 0; v < PANEL_VECTORS; ++v) {
        std::memcpy(cell + v * LANES * Ops::DEPTH, &columns[v], sizeof(Vector));
      }
    }
  }
}

// total[row] += the sum of weights[row][key] * value[key] over `count` values of VECTORS vectors.
template <class T, int VECTORS>
void add_panel(const T* weights, const T* packed, int count, int rows, float* total, int stride) {
  const int steps = divide_up(count, PanelOps<T>::DEPTH);
  for_row_tiles(0, rows, [&]<int ROWS>(int row) {
    Vector sum[ROWS][VECTORS];
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; ++i) {
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v) sum[i][v] = load(total + (row + i) * stride + v * LANES);
    }
    multiply<T, ROWS, VECTORS>(sum, weights + row * BLOCK_KEYS, BLOCK_KEYS, packed, steps);
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; ++i) {
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v) store(total + (row + i) * stride + v * LANES, sum[i][v]);
    }
  });
}

// Adds weighted values to totals as add_panel does, for all `dim` elements. Totals are `stride`
// elements apart.
template <class T>
void add_rows(const T* weights, const T* packed, int count, int rows, int dim, float* total,
              int stride) {
  for (int d = 0; d < dim; d += PANEL_WIDTH) {
    const bool is_half = dim - d <= LANES;
    const auto add = is_half ? add_panel<T, 1> : add_panel<T, PANEL_VECTORS>;
    add(weights, packed + d * BLOCK_KEYS, count, rows, total + d, stride);
  }
}

}  // namespace stepwell
