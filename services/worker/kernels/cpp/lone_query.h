// Attention of one token's heads over a block of keys, straight from the pages: what is read once
// is not worth packing.

#pragma once

#include "key_block.h"
#include "tile.h"

// Most query heads that pass over the keys together; more would not fit into the registers.
constexpr int LONE_HEADS = 4;

// scores[head][key] = query[head] times each key; queries are `stride` apart and end in zeros.
template <class T, int HEADS>
void score_heads(const T* query, int stride, const Lines<T>& keys, int dim, float* scores) {
  using S = Step<T>;
  constexpr int STEP = LANES * S::DEPTH;
  const int whole = dim / STEP * STEP;
  for (int first = 0; first < keys.count(); first += LANES) {
    Vector products[HEADS][LANES];
    for (int i = 0; i < LANES; ++i) {
      const T* key = keys[first + i];
      keys.fetch_ahead(first + i, dim);
      Vector own[HEADS] = {};
      for (int d = 0; d < whole; d += STEP) {
        const Vector part = S::panel(key + d);
        for (int g = 0; g < HEADS; ++g) {
          own[g] = S::multiply_add(own[g], S::panel(query + g * stride + d), part);
        }
      }
      if (whole < dim) {
        const Vector part = S::panel_part(key + whole, dim - whole);
        for (int g = 0; g < HEADS; ++g) {
          own[g] = S::multiply_add(own[g], S::panel(query + g * stride + whole), part);
        }
      }
      for (int g = 0; g < HEADS; ++g) products[g][i] = own[g];
    }
    for (int g = 0; g < HEADS; ++g) store(scores + g * KEYS + first, sums(products[g]));
  }
  keys.fetch_rest((keys.count() + LANES - 1) / LANES * LANES, dim);
}

// total[head] += weights[head] times the values, of which there are `dim` elements, PANELS * WIDTH
// or fewer. Totals are `stride` apart.
template <class T, int HEADS, int PANELS>
void add_values(const T* weights, const Lines<T>& values, int dim, float* total, int stride) {
  using S = Step<T>;
  Vector sum[HEADS * PANELS][PANEL_VECTORS];
#pragma GCC unroll 8
  for (int n = 0; n < HEADS * PANELS; ++n) {
    const float* place = total + n / PANELS * stride + n % PANELS * WIDTH;
#pragma GCC unroll 4
    for (int v = 0; v < PANEL_VECTORS; ++v) sum[n][v] = load(place + v * LANES);
    S::spread(sum[n]);
  }
  for (int key = 0; key < values.count(); key += S::DEPTH) {
    const T* lines[S::DEPTH];
#pragma GCC unroll 2
    for (int i = 0; i < S::DEPTH; ++i) {
      lines[i] = values[key + i];
      values.fetch_ahead(key + i, dim);
    }
    Vector columns[PANELS][PANEL_VECTORS];
#pragma GCC unroll 2
    for (int p = 0; p < PANELS; ++p) S::columns(lines, p * WIDTH, dim - p * WIDTH, columns[p]);
#pragma GCC unroll 8
    for (int n = 0; n < HEADS * PANELS; ++n) {
      const Vector weight = S::broadcast(weights + n / PANELS * KEYS + key);
#pragma GCC unroll 4
      for (int v = 0; v < PANEL_VECTORS; ++v) {
        sum[n][v] = S::multiply_add(sum[n][v], weight, columns[n % PANELS][v]);
      }
    }
  }
#pragma GCC unroll 8
  for (int n = 0; n < HEADS * PANELS; ++n) {
    S::gather(sum[n]);
    float* place = total + n / PANELS * stride + n % PANELS * WIDTH;
#pragma GCC unroll 4
    for (int v = 0; v < PANEL_VECTORS; ++v) store(place + v * LANES, sum[n][v]);
  }
  values.fetch_rest(values.count(), dim);
}
