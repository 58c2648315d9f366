// Pieces of memory that are prefetched one after the other while a tile of rows is multiplied by a
// panel (panel.h).
//
// The pieces are spread over the steps of the multiplication, because memory delivers a limited
// number of bytes in each step, and the processor drops prefetches beyond those that it keeps in
// flight.

#pragma once

#include <algorithm>

#include "panel.h"
#include "rounding.h"

namespace stepwell {

constexpr std::int64_t LINE_BYTES = 64;

class PrefetchList {
 public:
  bool is_empty() const { return count_ == 0; }
  int count() const { return count_; }
  std::int64_t bytes() const { return count_ == 0 ? 0 : ends_[count_ - 1]; }

  // Adds a piece, unless the list is full.
  void add(const void* first, std::int64_t bytes) {
    if (count_ == MOST_PIECES || bytes <= 0) return;
    pieces_[count_] = first;
    ends_[count_] = this->bytes() + bytes;
    ++count_;
  }

  // The number of the `steps` steps of depth after which a piece has been prefetched.
  int end_of(int piece, int steps) const { return int(steps * ends_[piece] / bytes()); }

  // The prefetches of a piece in `steps` steps. A step has PANEL_VECTORS prefetches, each of at
  // most a cache line.
  Prefetch over(int piece, int steps) const {
    const std::int64_t bytes = ends_[piece] - (piece > 0 ? ends_[piece - 1] : 0);
    const std::int64_t of_step = round_up(divide_up(bytes, steps), PANEL_VECTORS);
    return {pieces_[piece], std::min<std::int64_t>(of_step, PANEL_VECTORS * LINE_BYTES)};
  }

 private:
  static constexpr int MOST_PIECES = 24;

  const void* pieces_[MOST_PIECES];
  std::int64_t ends_[MOST_PIECES];  // Bytes up to the end of each piece.
  int count_ = 0;
};

}  // namespace stepwell
