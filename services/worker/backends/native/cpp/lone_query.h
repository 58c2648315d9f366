// Attention of one token's heads over a block of keys, straight from the pages: what is read once
// is not worth packing. Products are added in the order in which packed_keys.h adds them.

#pragma once

#include "key_block.h"
#include "tile.h"

// Most query heads that pass over the keys together; more would not fit into the registers.
constexpr int LONE_HEADS = 4;

// scores[head][key] = query[head] times each key of PANELS panels from `first` on, added up in order of
// depth, as `multiply` does. Queries are `stride` apart.
template <class T, int HEADS, int PANELS>
void score_panels(const T* query, int stride, const Panels<T>& panels, int first, int dim,
                  float* scores) {
  using S = Step<T>;
  Vector total[HEADS][PANELS] = {};
  const T* own[PANELS];
  const T* ahead[PANELS];
  for (int p = 0; p < PANELS; ++p) {
    own[p] = panels.own[first + p];
    ahead[p] = panels.ahead[first + p];
  }
  for (int d = 0; d < dim; d += S::DEPTH) {
    Vector keys[PANELS];
#pragma GCC unroll 4
    for (int p = 0; p < PANELS; ++p) {
      keys[p] = S::panel(own[p]);
      own[p] += panels.step;
      __builtin_prefetch(ahead[p] + d * LANES, 0, 2);
    }
#pragma GCC unroll 4
    for (int g = 0; g < HEADS; ++g) {
      const Vector value = S::broadcast(query + g * stride + d);
#pragma GCC unroll 4
      for (int p = 0; p < PANELS; ++p) {
        total[g][p] = S::multiply_add(total[g][p], value, keys[p]);
      }
    }
  }
  for (int g = 0; g < HEADS; ++g) {
    for (int p = 0; p < PANELS; ++p) store(scores + g * KEYS + (first + p) * LANES, total[g][p]);
  }
}

// The same for the first `count` panels.
template <class T, int HEADS>
void score_heads(const T* query, int stride, const Panels<T>& panels, int count, int dim,
                 float* scores) {
#ifdef __AVX512F__
  constexpr int MOST = 4;  // As many at once as there are registers for.
#else
  constexpr int MOST = HEADS > 2 ? 1 : 4 / HEADS;
#endif
  int first = 0;
  for (; first + MOST <= count; first += MOST) {
    score_panels<T, HEADS, MOST>(query, stride, panels, first, dim, scores);
  }
  if constexpr (MOST > 2) {
    if (first + 2 <= count) {
      score_panels<T, HEADS, 2>(query, stride, panels, first, dim, scores);
      first += 2;
    }
  }
  if (first < count) score_panels<T, HEADS, 1>(query, stride, panels, first, dim, scores);
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
