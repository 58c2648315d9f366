// Attention of the query heads of one token over a block of keys, which are read directly from the
// pages, because packing pays only for keys that are read more than once. Products are added in the
// order of packed_keys.h.

#pragma once

#include <algorithm>

#include "key_block.h"
#include "panel.h"

namespace stepwell {

// Maximum number of query heads in one pass over the keys, limited by registers.
constexpr int HEADS_PER_PASS = 4;

// scores[head][key] = the product of query[head] and the key, for the keys of PANELS panels (LANES
// keys each) from panel `first` on. Products are added in order of depth, as in `multiply`. Queries
// are `stride` elements apart.
template <class T, int HEADS, int PANELS>
void score_panels(const T* query, int stride, const KeyPanels<T>& panels, int first, int dim,
                  float* scores) {
  using Ops = PanelOps<T>;
  Vector total[HEADS][PANELS] = {};
  DepthSums<T, HEADS, PANELS> sums;
  const T* current[PANELS];
  const T* next[PANELS];
  for (int p = 0; p < PANELS; ++p) {
    current[p] = panels.current[first + p];
    next[p] = panels.next[first + p];
  }
  for (int d = 0; d < dim; d += Ops::DEPTH) {
    Vector keys[PANELS];
#pragma GCC unroll 4
    for (int p = 0; p < PANELS; ++p) {
      keys[p] = Ops::load(current[p]);
      current[p] += panels.step;
      __builtin_prefetch(next[p] + d * LANES, 0, 2);
    }
#pragma GCC unroll 8
    for (int g = 0; g < HEADS; ++g) {
      const Vector value = Ops::broadcast(query + g * stride + d);
#pragma GCC unroll 4
      for (int p = 0; p < PANELS; ++p) sums.add(total, g, p, value, keys[p]);
    }
    sums.end_step(total);
  }
  sums.finish(total);
  for (int g = 0; g < HEADS; ++g) {
    for (int p = 0; p < PANELS; ++p)
      store(scores + g * BLOCK_KEYS + (first + p) * LANES, total[g][p]);
  }
}

// Computes score_panels for panels [0, count).
template <class T, int HEADS>
void score_heads(const T* query, int stride, const KeyPanels<T>& panels, int count, int dim,
                 float* scores) {
#ifdef __AVX512F__
  constexpr int PANELS = 4;  // Panels at once; more do not fit into registers.
#else
  constexpr int PANELS = HEADS > 2 ? 1 : 4 / HEADS;
#endif
  int first = 0;
  for (; first + PANELS <= count; first += PANELS) {
    score_panels<T, HEADS, PANELS>(query, stride, panels, first, dim, scores);
  }
  if constexpr (PANELS > 2) {
    if (first + 2 <= count) {
      score_panels<T, HEADS, 2>(query, stride, panels, first, dim, scores);
      first += 2;
    }
  }
  if (first < count) score_panels<T, HEADS, 1>(query, stride, panels, first, dim, scores);
}

// total[head] += the sum of weights[head][key] * value[key], for `dim` elements of the values,
// PANELS * PANEL_WIDTH or fewer. Totals are `stride` elements apart.
template <class T, int HEADS, int PANELS>
void add_values(const T* weights, const TokenRows<T>& values, int dim, float* total, int stride) {
  using Ops = PanelOps<T>;
  Vector sum[HEADS * PANELS][PANEL_VECTORS];
#pragma GCC unroll 8
  for (int n = 0; n < HEADS * PANELS; ++n) {
    const float* source = total + n / PANELS * stride + n % PANELS * PANEL_WIDTH;
#pragma GCC unroll 4
    for (int v = 0; v < PANEL_VECTORS; ++v) sum[n][v] = load(source + v * LANES);
    Ops::to_interleaved_order(sum[n]);
  }
  DepthSums<T, HEADS * PANELS, PANEL_VECTORS> sums;
  for (int key = 0; key < values.count(); key += Ops::DEPTH) {
    const T* lines[Ops::DEPTH];
#pragma GCC unroll 2
    for (int i = 0; i < Ops::DEPTH; ++i) {
      lines[i] = values[key + i];
      values.prefetch(key + i, dim);
    }
    Vector columns[PANELS][PANEL_VECTORS];
#pragma GCC unroll 2
    for (int p = 0; p < PANELS; ++p)
      Ops::interleave(lines, p * PANEL_WIDTH, dim - p * PANEL_WIDTH, columns[p]);
#pragma GCC unroll 8
    for (int n = 0; n < HEADS * PANELS; ++n) {
      const Vector weight = Ops::broadcast(weights + n / PANELS * BLOCK_KEYS + key);
#pragma GCC unroll 4
      for (int v = 0; v < PANEL_VECTORS; ++v) sums.add(sum, n, v, weight, columns[n % PANELS][v]);
    }
    sums.end_step(sum);
  }
  sums.finish(sum);
#pragma GCC unroll 8
  for (int n = 0; n < HEADS * PANELS; ++n) {
    Ops::to_element_order(sum[n]);
    float* target = total + n / PANELS * stride + n % PANELS * PANEL_WIDTH;
#pragma GCC unroll 4
    for (int v = 0; v < PANEL_VECTORS; ++v) store(target + v * LANES, sum[n][v]);
  }
  values.prefetch_rest(values.count(), dim);
}

// Calls work.template operator()<HEADS>(first head) for `heads` heads, at most HEADS_PER_PASS at a
// time.
template <class Work>
inline void for_head_passes(int heads, Work&& work) {
  int head = 0;
  for (; head + HEADS_PER_PASS <= heads; head += HEADS_PER_PASS) {
    work.template operator()<HEADS_PER_PASS>(head);
  }
  switch (heads - head) {
    case 1:
      return work.template operator()<1>(head);
    case 2:
      return work.template operator()<2>(head);
    case 3:
      return work.template operator()<3>(head);
  }
}

// Computes the scores of all `heads` queries, for panels [0, count).
template <class T>
void score_queries(const T* query, int stride, int heads, const KeyPanels<T>& panels, int count,
                   int dim, float* scores) {
  for_head_passes(heads, [&]<int HEADS>(int head) {
    score_heads<T, HEADS>(query + head * stride, stride, panels, count, dim,
                          scores + head * BLOCK_KEYS);
  });
}

// Adds the weighted values, of `dim` elements, to the totals of all `heads` queries.
template <class T>
void add_weighted_values(const T* weights, int heads, const TokenRows<T>& values, int dim,
                         float* total, int stride) {
  for_head_passes(heads, [&]<int HEADS>(int head) {
    const T* own = weights + head * BLOCK_KEYS;
    float* target = total + head * stride;
    // Panels at once; more do not fit into registers.
    constexpr int PANELS = SUMS_LIKE_TILES<T> && HEADS > 2 ? 1 : 2;
    int d = 0;
    for (; d + (PANELS - 1) * PANEL_WIDTH < dim; d += PANELS * PANEL_WIDTH) {
      const int count = std::min(dim - d, PANELS * PANEL_WIDTH);
      add_values<T, HEADS, PANELS>(own, values.from(d), count, target + d, stride);
    }
    if (d < dim) add_values<T, HEADS, 1>(own, values.from(d), dim - d, target + d, stride);
  });
}

}  // namespace stepwell
