// A block of a context's keys and values, and where they lie in the pages.
//
// Blocks begin at multiples of BLOCK_KEYS, counted from the sequence's first token, so that a
// token's keys are taken in the same groups whatever is computed with it. In pages of elements (see
// codes.h for those of codes) values lie token by token, [num_kv_heads, head_dim] each. If the
// pages hold multiples of LANES tokens, keys lie in panels: of LANES consecutive tokens
// [num_kv_heads, head_dim / DEPTH, LANES, DEPTH], so that a vector holds one step of the depth of
// LANES keys. In other pages keys lie as values do.

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

// A block, as offsets of elements from the beginning of the pages. Tokens [first, end) of the block
// are attended to. The offsets of those before are those of the first, the offsets of those behind
// are those of the last.
struct KeyBlock {
  int begin = 0;  // Position of the block's first token.
  int first = 0;
  int end = 0;
  std::int64_t offsets[BLOCK_KEYS] = {};   // Of each token.
  std::int64_t panels[BLOCK_PANELS] = {};  // Of each LANES tokens, if keys lie in panels.

  int num_panels() const { return divide_up(end, LANES); }
};

// Fills `block` with the keys [key_begin, key_end) of the block that begins at position `begin`.
// `table`: the request's pages, of `page_size` tokens each, a token being `token_stride` elements.
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

// The values of one head in a block, or its keys if they lie as values do. While they are read,
// those of `next_block` are prefetched one by one: pages lie anywhere, so that the processor cannot
// predict the addresses, and more requests at once than it keeps in flight would delay everything
// else.
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

  // The rows of the next block from `i` on, if it is longer than this one.
  void prefetch_rest(int i, int dim) const {
    for (; i < next_block.end; ++i) prefetch(i, dim);
  }
};

// One head's keys of a block as panels of LANES columns, `step` elements from one step of depth to
// the next; and the panels to prefetch meanwhile.
template <class T>
struct KeyPanels {
  const T* current[BLOCK_PANELS];
  const T* next[BLOCK_PANELS];
  int step;
};

// The panels in the pages. `first`: the head's first element in the first panel of the pages.
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
