// The products of an attention task with keys and values that are elements of the model's data
// type.
//
// Scores and weighted sums are float32. Weights are rounded to the data type before they are
// multiplied by the values. A single query reads keys and values directly from the pages. For a
// chunk they are packed first, except keys that tiles read from the pages. Pages of values are
// [num_blocks, block_size, num_kv_heads, head_dim]; key_block.h describes pages of keys.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "attention_plan.h"
#include "heads.h"
#include "packed_keys.h"
#include "scratch.h"
#include "single_query.h"
#include "softmax_sums.h"
#include "tiled_keys.h"

namespace stepwell {

// Up to this many query heads per key head, a single query reads values unpacked from the pages. It
// then also reads keys unpacked, unless tiles multiply them.
template <class T>
constexpr int MAX_UNPACKED_HEADS = SUMS_LIKE_TILES<T> ? HEADS_PER_PASS : 8;

// Rows of a task, of one key head, that attend to a block: `count` rows from `first` on.
// `is_single`: whether they belong to one query.
struct SeeingRows {
  int head;
  int first;
  int count;
  bool is_single;
};

template <class T>
class PlainProducts {
 public:
  PlainProducts(const AttentionPlan& plan, const Pages& pages)
      : keys_(static_cast<T*>(pages.keys)),
        values_(static_cast<T*>(pages.values)),
        dim_(plan.layer.head_dim),
        padded_dim_(plan.padded_dim),
        token_stride_(std::int64_t{plan.layer.num_kv_heads} * dim_),
        has_panels_(has_panels(pages.block_size)) {}

  // Number of elements between two tokens in the pages.
  std::int64_t token_stride() const { return token_stride_; }

  // Bytes of scratch memory for a task with `all` rows, `rows` for each key head. `take` allocates
  // them.
  std::int64_t bytes(int all, int rows) const {
    return (all * padded_dim_ + rows * BLOCK_KEYS + BLOCK_KEYS * padded_dim_) * sizeof(T) +
           rows * BLOCK_KEYS * sizeof(float) + 256;
  }
  void take(Scratch& scratch, int all, int rows) {
    query_ = scratch.take<T>(all * padded_dim_);
    weights_ = scratch.take<T>(rows * BLOCK_KEYS);
    packed_ = scratch.take<T>(BLOCK_KEYS * padded_dim_);
    scores_ = scratch.take<float>(rows * BLOCK_KEYS);
  }

  // Stores a token's rotated key and its value, for one key head, in a slot of the pages.
  void store(const T* key, const T* value, int head, std::int64_t slot) const {
    const std::int64_t offset = slot * token_stride_ + head * dim_;
    if (has_panels_) {
      constexpr int DEPTH = PanelOps<T>::DEPTH;
      const int lane = int(slot % LANES);
      T* cell = keys_ + (slot - lane) * token_stride_ + head * dim_ * LANES + lane * DEPTH;
      for (int d = 0; d < dim_; d += DEPTH) {
        std::memcpy(cell + d * LANES, key + d, DEPTH * sizeof(T));
      }
    } else {
      std::memcpy(keys_ + offset, key, dim_ * sizeof(T));
    }
    std::memcpy(values_ + offset, value, dim_ * sizeof(T));
  }

  // Sets a row of the task to a rotated query.
  void set_query(int row, const T* query) {
    T* target = query_ + row * padded_dim_;
    std::memcpy(target, query, dim_ * sizeof(T));
    std::fill(target + dim_, target + padded_dim_, T{});
  }

  // Multiplies rows by a block's keys, and prefetches the next block.
  void score(SeeingRows rows, const KeyBlock& block, const KeyBlock& next_block) {
    rows_ = rows;
    block_ = &block;
    next_block_ = &next_block;
    const T* query = query_ + rows.first * padded_dim_;
    // Tiles read keys from the pages if head_dim is a multiple of a tile's depth. Otherwise keys
    // are packed and padded with zeros.
    if constexpr (SUMS_LIKE_TILES<T>) {
      if (dim_ == padded_dim_ || !reads_pages()) {
        const auto keys = dim_ == padded_dim_ ? panels() : packed_keys();
        return score_in_tiles(query, padded_dim_, rows.count, keys, block.num_panels(), padded_dim_,
                              scores_);
      }
    }
    if (reads_pages()) {
      score_queries(query, padded_dim_, rows.count, panels(), block.num_panels(), dim_, scores_);
    } else {
      packed_keys();
      score_rows(query, padded_dim_, packed_, rows.count, dim_, scores_);
    }
  }

  // The products of row `row` in the last call of `score` with the keys of panel `panel`.
  Vector scores(int row, int panel) const {
    return load(scores_ + row * BLOCK_KEYS + panel * LANES);
  }

  // Sets the weights of a row. No weight is above two to the power of `highest`. Weights outside of
  // [first, last) are set to 0.
  void set_weights(int row, const Vector (&weights)[BLOCK_PANELS], [[maybe_unused]] float highest,
                   [[maybe_unused]] int first, [[maybe_unused]] int last) {
    for (int v = 0; v < BLOCK_PANELS; ++v) {
      stepwell::store(weights_ + row * BLOCK_KEYS + v * LANES, weights[v]);
    }
  }
  void clear_weights(int row) {
    std::memset(weights_ + row * BLOCK_KEYS, 0, BLOCK_KEYS * sizeof(T));
  }

  // Adds the block's weighted values to the sums of the rows.
  void add_values(const SoftmaxSums& sums) {
    const TokenRows<T> values{values_ + rows_.head * dim_, *block_, *next_block_};
    if (reads_pages()) {
      add_weighted_values(weights_, rows_.count, values, dim_, sums.values, padded_dim_);
    } else {
      values.prefetch_rest(0, dim_);
      pack_values(values, dim_, packed_);
      const int count = block_->end;
      if constexpr (SUMS_LIKE_TILES<T>) {
        add_values_in_tiles(weights_, packed_, count, rows_.count, dim_, sums.values, padded_dim_);
      } else {
        add_rows(weights_, packed_, count, rows_.count, dim_, sums.values, padded_dim_);
      }
    }
  }

 private:
  bool reads_pages() const { return rows_.is_single && rows_.count <= MAX_UNPACKED_HEADS<T>; }

  // Returns the head's keys of the block as panels: in the pages, or packed if the pages have no
  // panels.
  KeyPanels<T> panels() {
    if (has_panels_) {
      return panels_in_pages(keys_ + rows_.head * dim_ * LANES, *block_, *next_block_);
    }
    return packed_keys();
  }

  // Packs the head's keys of the block. For tiles, fills the last tile of depth with zeros.
  KeyPanels<T> packed_keys() {
    const int depth = SUMS_LIKE_TILES<T> ? padded_dim_ : dim_;
    if (has_panels_) {
      const T* keys = keys_ + rows_.head * dim_ * LANES;
      pack_panels(panels_in_pages(keys, *block_, *next_block_), block_->num_panels(), dim_, depth,
                  packed_);
    } else {
      const TokenRows<T> keys{keys_ + rows_.head * dim_, *block_, *next_block_};
      keys.prefetch_rest(0, dim_);
      pack_token_rows(keys, dim_, depth, packed_);
    }
    return packed_panels(packed_, depth);
  }

  T* keys_;
  T* values_;
  int dim_;
  int padded_dim_;
  std::int64_t token_stride_;
  bool has_panels_;
  T* query_ = nullptr;
  T* weights_ = nullptr;
  T* packed_ = nullptr;  // A block's packed keys, later its packed values.
  float* scores_ = nullptr;
  SeeingRows rows_ = {};
  const KeyBlock* block_ = nullptr;
  const KeyBlock* next_block_ = nullptr;
};

}  // namespace stepwell
