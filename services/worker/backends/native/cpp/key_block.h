// A block of a context's keys and values, and its location in the pages.
//
// Blocks begin at multiples of BLOCK_KEYS, counted from the sequence's first token, so a token's
// keys are always processed in the same groups. Pages of codes (8 bits) are described in codes.h.
// In other pages, values are stored token by token, [num_kv_heads, head_dim] each. If a page has a
// multiple of LANES tokens, keys are stored in panels: for LANES consecutive tokens [num_kv_heads,
// head_dim / DEPTH, LANES, DEPTH], so that a vector has the same DEPTH elements of LANES keys.
// Otherwise keys are stored like values.

#pragma once

#include <algorithm>
#include <cstdint>

#include "panel.h"
#include "rounding.h"
#include "vector.h"

namespace stepwell {

constexpr int BLOCK_KEYS = 64;
constexpr int BLOCK_PANELS = BLOCK_KEYS / LANES;

inline bool has_panels(int block_size) { return block_size % LANES == 0; }

// A block, as offsets of elements from the beginning of the pages. Only tokens [first, end) of the
// block are used. Tokens before them have the offset of token `first`, and tokens after them the
// offset of the last used token.
struct KeyBlock {
  int begin = 0;  // Position of the block's first token.
  int first = 0;
  int end = 0;
  std::int64_t offsets[BLOCK_KEYS] = {};   // By token.
  std::int64_t panels[BLOCK_PANELS] = {};  // By LANES tokens, if keys are stored in panels.

  int num_panels() const { return divide_up(end, LANES); }
};

// Fills `block` with the keys [key_begin, key_end) of the block that begins at position `begin`.
// `table`: the request's pages, with `page_size` tokens each and `token_stride` elements per token.
inline void locate_block(const std::int32_t* table, int page_size, std::int64_t token_stride,
                         int begin, int key_begin, int key_end, KeyBlock& block) {
  block.begin = begin;
  block.first = std::max(key_begin - begin, 0);
  block.end = std::min(BLOCK_KEYS, key_end - begin);
  const int position = begin + block.first;
  int page = position / page_size, in_page = position % page_size;
  std::int64_t offset = 0;
  for (int i = block.first; i < BLOCK_KEYS; ++i) {
    if (i < block.end) {
      const std::int64_t slot = std::int64_t{table[page]} * page_size + in_page;
      offset = slot * token_stride;
      if (i == block.first || i % LANES == 0) {
        block.panels[i / LANES] = (slot - slot % LANES) * token_stride;
      }
      if (++in_page == page_size) {
        in_page = 0;
        ++page;
      }
    } else if (i % LANES == 0) {
      block.panels[i / LANES] = block.panels[i / LANES - 1];
    }
    block.offsets[i] = offset;
  }
  std::fill(block.offsets, block.offsets + block.first, block.offsets[block.first]);
  const int panel = block.first / LANES;
  std::fill(block.panels, block.panels + panel, block.panels[panel]);
}

// The values of one head in a block, or the head's keys if they are stored like values. While their
// rows are read, the rows of `next_block` are prefetched one by one, because pages are anywhere in
// memory, so that the processor cannot predict addresses. Prefetching all rows at once would delay
// other reads.
template <class T>
struct TokenRows {
  const T* first;
  const KeyBlock& block;
  const KeyBlock& next_block;

  int count() const { return block.end; }
  const T* operator[](int i) const { return first + block.offsets[i]; }

  // The same rows from element `d` on.
  TokenRows from(int d) const { return {first + d, block, next_block}; }

  // Row `i` of the next block.
  __attribute__((always_inline)) void prefetch(int i, int dim) const {
    const T* line = first + next_block.offsets[i];
    for (int d = 0; d < dim; d += int(64 / sizeof(T))) __builtin_prefetch(line + d, 0, 2);
  }

  // Prefetches the rows of the next block from `i` on, if the next block is longer than this one.
  void prefetch_rest(int i, int dim) const {
    for (; i < next_block.end; ++i) prefetch(i, dim);
  }
};

// One head's keys of a block as panels of LANES columns. `step`: distance in elements of two steps
// of depth. `next`: the panels that are prefetched while `current` is read.
template <class T>
struct KeyPanels {
  const T* current[BLOCK_PANELS];
  const T* next[BLOCK_PANELS];
  int step;
};

// Finds the panels in the pages. `first`: the head's first element in the first panel of the pages.
template <class T>
KeyPanels<T> panels_in_pages(const T* first, const KeyBlock& block, const KeyBlock& next_block) {
  KeyPanels<T> found{.step = LANES * PanelOps<T>::DEPTH};
  for (int g = 0; g < BLOCK_PANELS; ++g) {
    found.current[g] = first + block.panels[g];
    found.next[g] = first + next_block.panels[g];
  }
  return found;
}

}  // namespace stepwell
