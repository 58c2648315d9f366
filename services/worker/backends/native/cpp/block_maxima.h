// The largest logit of each block of tokens in the race (see sampling/race.py), in one pass over a
// row. These maxima determine the row's largest logit and its token, and which blocks have no token
// that filters keep.

#pragma once

#include <algorithm>
#include <limits>

#include "exact_math.h"
#include "rounding.h"

namespace stepwell {

constexpr int BLOCK_SIZE = 32;
constexpr int NUM_LANES = 128;
constexpr int SUPERBLOCK_SIZE = BLOCK_SIZE * NUM_LANES;
constexpr float NO_LOGIT = -std::numeric_limits<float>::infinity();

// A row of logits, with the largest logit of each block and of the row.
struct LogitRow {
  const float* logits;
  std::int64_t size;
  float* maxima;  // [num_blocks]; NO_LOGIT for blocks without tokens.
  float largest;

  static std::int64_t blocks_of(std::int64_t size) {
    return divide_up(size, SUPERBLOCK_SIZE) * NUM_LANES;
  }
  std::int64_t num_blocks() const { return blocks_of(size); }
};

// Updates the maxima of consecutive blocks with logits from `from` on. Marks lanes with NaN in
// `nan`.
template <int REGISTERS>
inline void add_to_maxima(Register (&most)[REGISTERS], IntRegister& nan, const float* from) {
#pragma GCC unroll 8
  for (int i = 0; i < REGISTERS; ++i) {
    const Register x = load_register<Register>(from + i * FLOATS);
    nan |= (IntRegister)(x != x);
    most[i] = larger(x, most[i]);
  }
}

// Sets `maxima` and `largest` of a row. Returns whether the row has a token to sample: no logit is
// NaN, and the largest is finite.
inline bool find_maxima(LogitRow& row) {
  constexpr int REGISTERS = 8, WIDTH = REGISTERS * FLOATS;
  const Register none = NO_LOGIT - Register{};
  IntRegister nan = {};
  Register largest = none;
  for (std::int64_t first = 0; first < row.size; first += SUPERBLOCK_SIZE) {
    for (int lane = 0; lane < NUM_LANES; lane += WIDTH) {
      Register most[REGISTERS];
      for (Register& one : most) one = none;
      const std::int64_t end = std::min<std::int64_t>(row.size, first + SUPERBLOCK_SIZE);
      std::int64_t id = first + lane;
      for (; id + WIDTH <= end; id += NUM_LANES) add_to_maxima(most, nan, row.logits + id);
      if (id < end) {
        float rest[WIDTH];
        std::fill(rest, rest + WIDTH, NO_LOGIT);
        std::copy(row.logits + id, row.logits + end, rest);
        add_to_maxima(most, nan, rest);
      }
      float* maxima = row.maxima + first / BLOCK_SIZE + lane;
      for (int i = 0; i < REGISTERS; ++i) {
        store_register(maxima + i * FLOATS, most[i]);
        largest = larger(most[i], largest);
      }
    }
  }
  row.largest = NO_LOGIT;
  int any_nan = 0;
  for (int i = 0; i < FLOATS; ++i) {
    row.largest = std::max(row.largest, largest[i]);
    any_nan |= nan[i];
  }
  return !any_nan && row.largest - row.largest == 0;
}

// The lowest token id with the largest logit.
inline std::int64_t first_of_largest(const LogitRow& row) {
  for (std::int64_t first = 0; first < row.size; first += SUPERBLOCK_SIZE) {
    std::int64_t found = row.size;
    for (int lane = 0; lane < NUM_LANES; ++lane) {
      if (row.maxima[first / BLOCK_SIZE + lane] != row.largest) continue;
      std::int64_t id = first + lane;
      while (row.logits[id] != row.largest) id += NUM_LANES;
      found = std::min(found, id);
    }
    if (found < row.size) return found;
  }
  return 0;
}

}  // namespace stepwell
