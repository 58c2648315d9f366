// The tokens that min-p, top-k and top-p keep, as defined in sampling/filters.py.
//
// Nothing is sorted. The logits near the limit between kept and dropped tokens are collected from
// the row, and histograms, each over the range of the logits that remain, find the limit among
// them. Sums of masses are exact, so their order does not matter.

#pragma once

#include <bit>
#include <cmath>

#include "token_race.h"

namespace stepwell {

// The fields of Filters in sampling/filters.py.
struct Filters {
  static constexpr int COUNT = 3;

  std::int64_t top_k;  // 0: unused.
  double top_p;
  float min_p;

  // Filters from numbers in the order of the fields, which are `stride` apart.
  static Filters from(const double* values, std::int64_t stride) {
    return {std::int64_t(values[0]), values[stride], float(values[2 * stride])};
  }

  bool any() const { return top_k > 0 || top_p < 1 || min_p > 0; }
};

// A place in the order of tokens: a logit, a sum over all greater logits (see place_of), and the
// number of tokens with this logit.
struct Place {
  float logit;
  double before;
  std::int64_t count;
};

class TokenFilters {
 public:
  static std::int64_t scratch_floats(std::int64_t size) {
    return std::max(size, LogitRow::blocks_of(size)) + FLOATS;
  }

  // `logits` and `weights` are memory for scratch_floats(row.size) numbers each.
  TokenFilters(const LogitRow& row, const Filters& filters, float temperature, float* logits,
               float* weights)
      : row_(row),
        filters_(filters),
        temperature_(temperature),
        logits_(logits),
        weights_(weights) {
    const int bits = std::bit_width(std::uint64_t(row.size - 1));
    rounder_ = std::ldexp(1.5, 52 - std::min(40, 53 - bits));
  }

  KeptTokens kept() {
    std::int64_t limit = row_.size;
    float least = LOWEST;  // Lower bound of the logits of kept tokens.
    if (filters_.min_p > 0) {
      least = logit_below(filters_.min_p);
      collect(least);
      weigh();
      limit = 0;
      for (std::int64_t i = 0; i < count_; ++i) limit += weights_[i] >= filters_.min_p;
    }
    if (filters_.top_k > 0) limit = std::min(limit, filters_.top_k);
    KeptTokens kept;
    if (limit < row_.size) kept = best(limit, least);
    return filters_.top_p < 1 ? nucleus(kept, limit) : kept;
  }

 private:
  static constexpr int BINS = 256;
  static constexpr float LOWEST = std::numeric_limits<float>::lowest();
  static constexpr double LEAST_MASS = 0x1p-42;  // Smaller masses are rounded to 0.

  // The `limit` tokens with the greatest logits, all of which are at least `least`.
  KeptTokens best(std::int64_t limit, float least) {
    if (limit <= row_.num_blocks()) {
      count_ = row_.num_blocks();
      std::copy(row_.maxima, row_.maxima + count_, logits_);
      drop_banned();
      if (limit <= count_) least = std::max(least, place_of(limit, ones).logit);
    }
    collect(least);
    if (count_ < limit) return {NO_LOGIT, last_tied(NO_LOGIT, limit - count_)};
    return first_of(place_of(limit, ones), limit);
  }

  // Of `limit` kept tokens, the first ones that have a fraction `top_p` of their mass.
  KeptTokens nucleus(const KeptTokens& kept, std::int64_t limit) {
    double mass = 0;
    if (limit < row_.size) {
      collect(std::max(kept.above, LOWEST));
      drop_surplus(kept.above, limit);
    } else {
      mass = mass_of_row();
      const double cut = (1 - filters_.top_p) * mass / (4 * double(row_.size));
      collect(logit_below(std::max(cut, LEAST_MASS)));
    }
    weigh();
    if (limit < row_.size) {
      for (std::int64_t i = 0; i < count_; ++i) mass += rounded(weights_[i]);
    }
    const double target = filters_.top_p * mass;
    const auto masses = [&](std::int64_t i) { return rounded(weights_[i]); };
    const Place place = place_of(target, masses);
    const double each = rounded(weights_[0]);
    std::int64_t count = std::int64_t((target - place.before) / each);
    while (place.before + double(count) * each < target) ++count;
    while (count > 1 && place.before + double(count - 1) * each >= target) --count;
    if (count < place.count) return {place.logit, last_tied(place.logit, count)};
    return place.logit == kept.above ? kept : KeptTokens{place.logit};
  }

  static double ones(std::int64_t) { return 1; }

  // The mass of a weight: the weight, rounded so that the sum over a row is exact.
  double rounded(double weight) const { return weight + rounder_ - rounder_; }

  // A logit below all logits with at least this weight.
  float logit_below(double weight) const {
    const double at_least = row_.largest + temperature_ * (std::log(weight) - 1e-3);
    return std::max(LOWEST, std::nextafter(float(at_least), NO_LOGIT));
  }

  Register weights_at(const float* logits) const {
    return exact_exponential((load_register<Register>(logits) - row_.largest) / temperature_);
  }

  double mass_of_row() const {
    DoubleRegister mass = {};
    const auto add = [&](const float* logits) {
      const Register weights = weights_at(logits);
      HalfRegister halves[2];
      std::memcpy(halves, &weights, sizeof weights);
      for (HalfRegister half : halves) mass += widen(half) + rounder_ - rounder_;
    };
    std::int64_t id = 0;
    for (; id + FLOATS <= row_.size; id += FLOATS) add(row_.logits + id);
    if (id < row_.size) {
      float rest[FLOATS];
      std::fill(rest, rest + FLOATS, NO_LOGIT);
      std::copy(row_.logits + id, row_.logits + row_.size, rest);
      add(rest);
    }
    double total = 0;
    for (int i = 0; i < DOUBLES; ++i) total += mass[i];
    return total;
  }

  // Collects the logits that are at least `least`, which is finite.
  void collect(float least) {
    count_ = 0;
    std::int64_t id = 0;
#ifdef __AVX512F__
    for (; id + FLOATS <= row_.size; id += FLOATS) {
      const __m512 x = _mm512_loadu_ps(row_.logits + id);
      const __mmask16 taken = _mm512_cmp_ps_mask(x, _mm512_set1_ps(least), _CMP_GE_OQ);
      if (!taken) continue;
      _mm512_storeu_ps(logits_ + count_, _mm512_maskz_compress_ps(taken, x));
      count_ += __builtin_popcount(taken);
    }
#endif
    for (; id < row_.size; ++id) {
      logits_[count_] = row_.logits[id];
      count_ += row_.logits[id] >= least;
    }
  }

  void drop_banned() { count_ = std::remove(logits_, logits_ + count_, NO_LOGIT) - logits_; }

  // Drops the first collected logits that equal `tied`, until `limit` logits are left.
  void drop_surplus(float tied, std::int64_t limit) {
    std::int64_t left = 0, surplus = count_ - limit;
    for (std::int64_t i = 0; i < count_; ++i) {
      const bool is_dropped = surplus > 0 && logits_[i] == tied;
      surplus -= is_dropped;
      if (!is_dropped) logits_[left++] = logits_[i];
    }
    count_ = left;
  }

  void weigh() {
    for (std::int64_t i = 0; i < count_; i += FLOATS) {
      store_register(weights_ + i, weights_at(logits_ + i));
    }
  }

  // The place at which the sum of `value` over the collected logits, greatest first, reaches a
  // target. Keeps only the collected logits at this place.
  template <class Value>
  Place place_of(double target, Value&& value) {
    double before = 0;
    while (true) {
      const auto [least, most] = std::minmax_element(logits_, logits_ + count_);
      const double lowest = *least, scale = (BINS - 1) / (*most - lowest);
      if (*least == *most) return {*least, before, count_};
      double sums[BINS] = {};
      const auto bin_of = [&](float logit) { return int((logit - lowest) * scale); };
      for (std::int64_t i = 0; i < count_; ++i) sums[bin_of(logits_[i])] += value(i);
      int bin = BINS - 1;
      while (bin > 0 && before + sums[bin] < target) before += sums[bin--];
      std::int64_t left = 0;
      for (std::int64_t i = 0; i < count_; ++i) {
        if (bin_of(logits_[i]) != bin) continue;
        logits_[left] = logits_[i];
        weights_[left++] = weights_[i];
      }
      count_ = left;
    }
  }

  // The first `limit` tokens, the last of which has the logit of this place.
  KeptTokens first_of(const Place& place, std::int64_t limit) const {
    const std::int64_t count = limit - std::int64_t(place.before);
    if (count == place.count) return {place.logit};
    return {place.logit, last_tied(place.logit, count)};
  }

  // The id of the last of the first `count` tokens with this logit.
  std::int64_t last_tied(float logit, std::int64_t count) const {
    std::int64_t id = 0;
    for (; id < row_.size; ++id) {
      if (row_.logits[id] == logit && --count == 0) break;
    }
    return id;
  }

  const LogitRow& row_;
  const Filters filters_;
  const float temperature_;
  float* logits_;
  float* weights_;
  double rounder_;
  std::int64_t count_ = 0;  // Number of collected logits.
};

}  // namespace stepwell
