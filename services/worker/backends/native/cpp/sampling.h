// Samples a token for each of several rows of logits: temperature, filters and the draw.
// sampling/sampler.py explains all stages of a row.

#pragma once

#include "scratch.h"
#include "threads.h"
#include "token_filters.h"

namespace stepwell {

constexpr std::int64_t UNUSABLE = -1;  // In place of a token: there is none to sample.
constexpr std::int64_t REFUSED = -2;   // In place of a token: the mask allows none.
constexpr std::int64_t NUM_ROW_VALUES = 1 + Filters::COUNT;  // The first is the temperature.

// Rows of a matrix of logits, of which `rows` has the indexes.
struct LogitRows {
  const float* logits;
  std::int64_t stride;
  std::int64_t size;
  const std::int64_t* rows;
  std::int64_t count;

  const float* of(std::int64_t index) const { return logits + rows[index] * stride; }
};

// The allowed tokens of each row (see RowMasks in row_sampler.py). `rows` is null if no row has a
// mask.
struct RowMasks {
  const std::uint32_t* words;
  std::int64_t width;
  const std::int64_t* rows;

  const std::uint32_t* of(std::int64_t index) const {
    return rows == nullptr || rows[index] < 0 ? nullptr : words + rows[index] * width;
  }
};

// The sampling parameters of each row (see RowParameters in row_sampler.py).
struct RowParameters {
  const double* values;  // [NUM_ROW_VALUES, count]
  const std::uint64_t* seeds;
  const std::int64_t* positions;
};

// Copies a row, with minus infinity where a bit of the mask is 0. Without a mask, copies the row
// unchanged. Returns whether the row has a token to sample without its mask.
inline bool copy_row(const float* logits, std::int64_t size, const std::uint32_t* mask,
                     float* copy) {
  constexpr int BITS = 32;
  IntRegister nan = {};
  Register largest = NO_LOGIT - Register{};
  const auto add = [&](const float* from, float* to, std::uint32_t bits) {
    for (int first = 0; first < BITS; first += FLOATS) {
      const Register x = load_register<Register>(from + first);
      nan |= (IntRegister)(x != x);
      largest = larger(x, largest);
      IntRegister place;
      for (int i = 0; i < FLOATS; ++i) place[i] = first + i;
      const IntRegister bit = (IntRegister{} + std::int32_t(bits)) >> place & 1;
      store_register(to + first, bit ? x : NO_LOGIT - Register{});
    }
  };
  std::int64_t id = 0;
  for (; id + BITS <= size; id += BITS) {
    add(logits + id, copy + id, mask == nullptr ? ~0u : mask[id / BITS]);
  }
  if (id < size) {
    float rest[BITS], copied[BITS];
    std::fill(rest, rest + BITS, NO_LOGIT);
    std::copy(logits + id, logits + size, rest);
    add(rest, copied, mask == nullptr ? ~0u : mask[id / BITS]);
    std::copy(copied, copied + (size - id), copy + id);
  }
  float most = NO_LOGIT;
  int any_nan = 0;
  for (int i = 0; i < FLOATS; ++i) {
    most = std::max(most, largest[i]);
    any_nan |= nan[i];
  }
  return !any_nan && most - most == 0;
}

// Samples a token for the row at `index` of `rows`. Returns the token, UNUSABLE, or REFUSED.
inline std::int64_t sample_row(const LogitRows& rows, const RowMasks& masks, std::int64_t index,
                               const RowParameters& parameters) {
  const std::int64_t size = rows.size;
  const std::uint32_t* mask = masks.of(index);
  const std::int64_t num_blocks = LogitRow::blocks_of(size);
  const std::int64_t num_floats = TokenFilters::scratch_floats(size);
  Scratch& scratch = Scratch::own();
  scratch.reserve(num_blocks * (sizeof(float) + 2 * sizeof(double)) +
                  (2 * num_floats + (mask == nullptr ? 0 : size)) * sizeof(float) + 6 * 64);
  const float* logits = rows.of(index);
  if (mask != nullptr) {
    float* copy = scratch.take<float>(size);
    if (!copy_row(logits, size, mask, copy)) return UNUSABLE;
    logits = copy;
  }
  LogitRow row{logits, size, scratch.take<float>(num_blocks), NO_LOGIT};
  if (!find_maxima(row)) return mask == nullptr ? UNUSABLE : REFUSED;
  const double* values = parameters.values + index;
  const float temperature = float(values[0]);
  if (temperature == 0) return first_of_largest(row);
  const Filters filters = Filters::from(values + rows.count, rows.count);
  KeptTokens kept;
  if (filters.any()) {
    float* found = scratch.take<float>(num_floats);
    kept = TokenFilters(row, filters, temperature, found, scratch.take<float>(num_floats)).kept();
  }
  std::uint64_t states[2];
  random_states(parameters.seeds[index], parameters.positions[index], states);
  double* bounds = scratch.take<double>(num_blocks);
  return TokenRace(row, kept, temperature, states, bounds, scratch.take<double>(num_blocks)).run();
}

// The amount of work of sampling a row, for each byte of its logits, in the unit of PARALLEL_WORK.
inline double work_per_byte(const LogitRows& rows, std::int64_t index,
                            const RowParameters& parameters) {
  constexpr double GREEDY = 1, DRAWN = 3, FILTERED = 8;
  const double* values = parameters.values + index;
  if (float(values[0]) == 0) return GREEDY;
  return Filters::from(values + rows.count, rows.count).any() ? FILTERED : DRAWN;
}

// Calls work(index) for each of the rows, in several threads if there is enough work. `per_byte`:
// the work of all rows for each byte of one row.
template <class Work>
inline void for_each_row(const LogitRows& rows, double per_byte, Work&& work) {
  const double all = per_byte * double(rows.size) * sizeof(float);
  in_team(rows.count > 1 ? threads_for(all) : 1, [&](Team team) {
    WorkItems items(team, rows.count);
    for (std::int64_t index; (index = items.next()) >= 0;) work(index);
  });
}

}  // namespace stepwell
