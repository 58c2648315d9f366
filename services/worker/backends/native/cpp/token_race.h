// Draws the token that Race in sampling/race.py draws. That file explains blocks, lanes, bounds and
// speeds.

#pragma once

#include "block_maxima.h"

namespace stepwell {

// The tokens that filters keep: tokens with a logit above `above`, and tokens with the logit
// `above` and an id up to `last_tied`.
struct KeptTokens {
  float above = NO_LOGIT;
  std::int64_t last_tied = std::numeric_limits<std::int64_t>::max();

  bool has(float logit, std::int64_t id) const {
    return logit > above || (logit == above && id <= last_tied);
  }
};

class TokenRace {
 public:
  // `bounds` and `smallest` are memory for one number for each block.
  TokenRace(const LogitRow& row, const KeptTokens& kept, float temperature,
            const std::uint64_t (&states)[2], double* bounds, double* smallest)
      : row_(row),
        kept_(kept),
        temperature_(temperature),
        states_{states[0], states[1]},
        bounds_(bounds),
        smallest_(smallest) {}

  std::int64_t run() {
    find_bounds();
    const std::int64_t num_blocks = row_.num_blocks();
    const std::int64_t first = std::max_element(bounds_, bounds_ + num_blocks) - bounds_;
    add_block(first);
    bounds_[first] = NO_LOGIT;
    for (std::int64_t block = 0; block < num_blocks; ++block) {
      if (bounds_[block] >= speed_ - BOUND_ERROR) add_block(block);
    }
    return token_id_;
  }

 private:
  static constexpr float LEAST_WEIGHT = -1e6f;
  static constexpr double BOUND_ERROR = 1e-9;  // Upper limit of a bound's rounding error.

  DoubleRegister weights(HalfRegister logits) const {
    const HalfRegister weight = (logits - row_.largest) / temperature_;
    return widen(weight > LEAST_WEIGHT ? weight : LEAST_WEIGHT - HalfRegister{});
  }

  // Computes the smallest exponential of each block, and an upper bound of its tokens' speeds.
  // Blocks without kept tokens are skipped.
  void find_bounds() {
    for (std::int64_t block = 0; block < row_.num_blocks(); block += DOUBLES) {
      const HalfRegister maxima = load_register<HalfRegister>(row_.maxima + block);
      DoubleRegister bounds = NO_LOGIT - DoubleRegister{};
      if (any(maxima >= kept_.above)) {
        const DoubleRegister smallest =
            random_exponentials(random_words(states_[0], consecutive(block))) / double(BLOCK_SIZE);
        store_register(smallest_ + block, smallest);
        bounds = weights(maxima) - exact_logarithm(smallest);
      }
      store_register(bounds_ + block, bounds);
    }
  }

  template <class Mask>
  static bool any(Mask mask) {
    int found = 0;
    for (int i = 0; i < DOUBLES; ++i) found |= mask[i];
    return found;
  }

  // Updates the fastest token with the tokens of a block.
  void add_block(std::int64_t block) {
    const std::int64_t first = block / NUM_LANES * SUPERBLOCK_SIZE + block % NUM_LANES;
    const std::uint64_t offset = random_words(states_[0], consecutive(block))[0] & (BLOCK_SIZE - 1);
    float logits[BLOCK_SIZE];
    for (int i = 0; i < BLOCK_SIZE; ++i) {
      const std::int64_t id = first + i * NUM_LANES;
      const bool is_kept = id < row_.size && kept_.has(row_.logits[id], id);
      logits[i] = is_kept ? row_.logits[id] : NO_LOGIT;
    }
    for (int i = 0; i < BLOCK_SIZE; i += DOUBLES) {
      const WordRegister offsets = consecutive(i);
      const DoubleRegister further =
          random_exponentials(random_words(states_[1], offsets * NUM_LANES + first));
      const DoubleRegister times =
          (offsets == offset ? DoubleRegister{} : further) + smallest_[block];
      const DoubleRegister speeds =
          weights(load_register<HalfRegister>(logits + i)) - exact_logarithm(times);
      for (int lane = 0; lane < DOUBLES; ++lane) {
        const std::int64_t id = first + (i + lane) * NUM_LANES;
        if (id >= row_.size || speeds[lane] < speed_) continue;
        if (speeds[lane] > speed_ || id < token_id_) speed_ = speeds[lane], token_id_ = id;
      }
    }
  }

  const LogitRow& row_;
  const KeptTokens kept_;
  const float temperature_;
  const std::uint64_t states_[2];
  double* bounds_;
  double* smallest_;
  double speed_ = NO_LOGIT;
  std::int64_t token_id_ = 0;
};

}  // namespace stepwell
