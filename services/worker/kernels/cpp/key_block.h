// A block of a context's keys and values: where they lie in the pages.

#pragma once

#include <cstdint>

#include "vector.h"

constexpr int KEYS = 64;  // Keys of a block.

// Offsets of the first head's elements, from the pages' begin. Those behind `count` repeat the
// last one, or are 0 where there is none.
struct KeyBlock {
  int begin = 0;  // Position of the first.
  int count = 0;
  std::int64_t offsets[KEYS] = {};
};

// One head's keys, or values, of a block. Those of the block that is read next are fetched
// meanwhile, one by one: pages lie anywhere, so that the processor cannot foresee where that is,
// and more requests at once than it keeps in flight would make everything else wait.
template <class T>
struct Lines {
  const T* first;
  const KeyBlock& block;
  const KeyBlock& ahead;

  int count() const { return block.count; }
  const T* operator[](int i) const { return first + block.offsets[i]; }

  // The same from element `d` on.
  Lines from(int d) const { return {first + d, block, ahead}; }

  __attribute__((always_inline)) void fetch_ahead(int i, int dim) const {
    const T* line = first + ahead.offsets[i];
    for (int d = 0; d < dim; d += int(64 / sizeof(T))) __builtin_prefetch(line + d, 0, 2);
  }

  // For the keys from `i` on, which this block is too short to bring in one by one.
  void fetch_rest(int i, int dim) const {
    for (; i < ahead.count; ++i) fetch_ahead(i, dim);
  }
};
