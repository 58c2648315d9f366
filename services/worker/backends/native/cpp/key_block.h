// A block of a context's keys and values, and where they lie in the pages.
//
// Blocks begin at multiples of KEYS, counted from the sequence's first token, so that a token's keys
// are taken in the same groups whatever is computed with it. Values lie token by token, [num_kv_heads,
// head_dim] each. Keys lie in panels where pages hold multiples of LANES tokens: of LANES consecutive
// tokens [num_kv_heads, head_dim / DEPTH, LANES, DEPTH], so that a vector holds one step of the depth
// of as many keys; in other pages they lie as values do.

#pragma once

#include <algorithm>
#include <cstdint>

#include "tile.h"
#include "vector.h"

constexpr int KEYS = 64;  // Keys of a block.
constexpr int BLOCK_PANELS = KEYS / LANES;

inline bool has_panels(int block_size) { return block_size % LANES == 0; }

// Offsets of a token's elements from the pages' begin. Tokens [first, end) of the block are in the
// context; those before repeat the first one, those behind the last, or are 0 where there is none.
struct KeyBlock {
  int begin = 0;  // Position of the block's first token.
  int first = 0;
  int end = 0;
  std::int64_t offsets[KEYS] = {};
  std::int64_t panels[BLOCK_PANELS] = {};  // Of each LANES tokens, where keys lie in panels.

  int num_panels() const { return (end + LANES - 1) / LANES; }
};

// One head's values of a block, or its keys where they lie as values do. Those of the block that is read
// next are fetched meanwhile, one by one: pages lie anywhere, so that the processor cannot foresee where
// that is, and more requests at once than it keeps in flight would make everything else wait.
template <class T>
struct Lines {
  const T* first;
  const KeyBlock& block;
  const KeyBlock& ahead;

  int count() const { return block.end; }
  const T* operator[](int i) const { return first + block.offsets[i]; }

  // The same from element `d` on.
  Lines from(int d) const { return {first + d, block, ahead}; }

  __attribute__((always_inline)) void fetch_ahead(int i, int dim) const {
    const T* line = first + ahead.offsets[i];
    for (int d = 0; d < dim; d += int(64 / sizeof(T))) __builtin_prefetch(line + d, 0, 2);
  }

  // For those from `i` on, which this block is too short to bring in one by one.
  void fetch_rest(int i, int dim) const {
    for (; i < ahead.end; ++i) fetch_ahead(i, dim);
  }
};

// One head's keys of a block as panels of LANES columns, `step` elements from one step of depth to the
// next; and those of the next block, or null.
template <class T>
struct Panels {
  const T* own[BLOCK_PANELS];
  const T* ahead[BLOCK_PANELS];
  int step;
};

// The panels in the pages, from `first`, the head's first element of the first panel.
template <class T>
Panels<T> panels_of(const T* first, const KeyBlock& block, const KeyBlock& ahead) {
  Panels<T> found{.step = LANES * Step<T>::DEPTH};
  for (int g = 0; g < BLOCK_PANELS; ++g) {
    found.own[g] = first + block.panels[g];
    found.ahead[g] = first + ahead.panels[g];
  }
  return found;
}
