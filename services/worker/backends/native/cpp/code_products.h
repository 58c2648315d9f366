// The products of an attention task with keys and values in 8 bits (see codes.h). All sums over
// codes are exact.
//
// A query is rounded to 15-bit integers times a scale. The weights of a block's values, times the
// values' scales, are rounded to 16-bit integers times a scale. The integers are stored as two rows
// of bytes, the high and the low parts, for the processor's 8-bit dot products. Therefore codes are
// multiplied as the cache stores them, at the speed of pairs of bfloat16.
//
// A row's scales depend only on its query and on the keys of the block that it attends to.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "attention_plan.h"
#include "codes.h"
#include "heads.h"
#include "plain_products.h"
#include "scratch.h"
#include "softmax_sums.h"

namespace stepwell {

// The members are documented in PlainProducts.
template <class T>
class CodeProducts {
 public:
  CodeProducts(const AttentionPlan& plan, const Pages& pages)
      : keys_(static_cast<KeyByte*>(pages.keys)),
        values_(static_cast<ValueByte*>(pages.values)),
        dim_(plan.layer.head_dim),
        padded_dim_(plan.padded_dim),
        sizes_(dim_),
        token_stride_(std::int64_t{plan.layer.num_kv_heads} * sizes_.token()),
        has_records_(has_panels(pages.block_size)) {}

  std::int64_t token_stride() const { return token_stride_; }

  std::int64_t bytes(int all, int rows) const {
    return 2 * all * sizes_.dim + all * sizeof(QueryScale) + rows * sizeof(float) +
           2 * rows * BLOCK_KEYS * (sizeof(float) + 1) + 2 * BLOCK_PANELS * sizes_.record() + 512;
  }
  void take(Scratch& scratch, int all, int rows) {
    query_ = scratch.take<KeyByte>(2 * all * sizes_.dim);
    query_scales_ = scratch.take<QueryScale>(all);
    weight_scales_ = scratch.take<float>(rows);
    scores_ = scratch.take<float>(2 * rows * BLOCK_KEYS);
    weights_ = scratch.take<ValueByte>(2 * rows * BLOCK_KEYS);
    packed_keys_ = scratch.take<KeyByte>(BLOCK_PANELS * sizes_.record());
    packed_values_ = scratch.take<ValueByte>(BLOCK_PANELS * sizes_.record());
  }

  // If a token's value is not finite, the key's scale is set to NaN. The output of every query that
  // attends to the token is then NaN, as without codes.
  void store(const T* key, const T* value, int head, std::int64_t slot) {
    const std::int64_t offset = slot * token_stride_ + head * sizes_.token();
    std::uint8_t* key_codes = codes_.data();
    std::uint8_t* value_codes = key_codes + sizes_.token();
    const float value_scale = write_codes(value, dim_, value_codes);
    float key_scale = write_codes(key, dim_, key_codes);
    if (value_scale != value_scale) key_scale = value_scale;
    std::memcpy(key_codes + sizes_.dim, &key_scale, sizeof key_scale);
    std::memcpy(value_codes + sizes_.dim, &value_scale, sizeof value_scale);
    if (has_records_) {
      const int lane = int(slot % LANES);
      const std::int64_t record = (slot - lane) * token_stride_ + head * sizes_.record();
      put_key(key_codes, sizes_, lane, keys_ + record);
      put_value(value_codes, sizes_, lane, values_ + record);
    } else {
      std::memcpy(keys_ + offset, key_codes, sizes_.token());
      std::memcpy(values_ + offset, value_codes, sizes_.token());
    }
  }

  void set_query(int row, const T* query) {
    const Scaling scaling(largest_magnitude(query, dim_), MOST_OF_QUERY);
    std::uint8_t* high = &query_[2 * row * sizes_.dim].bits;
    std::uint8_t* low = high + sizes_.dim;
    IntRegister high_sum = {}, low_sum = {};
    for (int d = 0; d < sizes_.dim; d += LANES) {
      const Vector scaled = load_partial(query + d, dim_ - d) * scaling.inverse;
      for_registers(scaled, [&](Register part, int lane) {
        const IntRegister number = to_nearest(part);
        const IntRegister upper = (number + 128) >> 8, lower = number - (upper << 8);
        store_bytes(high + d + lane, upper);
        store_bytes(low + d + lane, lower);
        high_sum += upper;
        low_sum += lower;
      });
    }
    query_scales_[row] = {scaling.scale, offset_of(high_sum), offset_of(low_sum)};
  }

  void score(SeeingRows rows, const KeyBlock& block, const KeyBlock& next_block) {
    rows_ = rows;
    num_panels_ = block.num_panels();
    const std::int64_t first = std::int64_t{rows.head} * sizes_.record();
    if (has_records_) {
      key_panels_ = panels_in_pages(keys_ + first, block, next_block);
      value_panels_ = panels_in_pages(values_ + first, block, next_block);
    } else {
      pack(block);
    }
    seen_last_ = 0;
    for_row_tiles<TILE_ROWS>(0, rows.count, [&]<int ROWS>(int row) {
      const KeyByte* query = query_ + 2 * (rows.first + row) * sizes_.dim;
      for_vectors(num_panels_, [&]<int PANELS>(int panel) {
        score_panels<KeyByte, 2 * ROWS, PANELS>(query, sizes_.dim, key_panels_, panel, sizes_.dim,
                                                scores_ + 2 * row * BLOCK_KEYS);
      });
    });
    for (int p = 0; p < num_panels_; ++p) prefetch_scales(key_panels_.next[p]);
  }

  Vector scores(int row, int panel) const {
    const QueryScale& scale = query_scales_[rows_.first + row];
    const float* high = scores_ + 2 * row * BLOCK_KEYS + panel * LANES;
    const Vector upper = to_floats(load(high)) - scale.high_offset;
    const Vector lower = to_floats(load(high + BLOCK_KEYS)) - scale.low_offset;
    const Vector keys = load(sizes_.scales(key_panels_.current[panel]));
    return fmadd(upper, 256.0f, lower) * (keys * scale.scale);
  }

  void set_weights(int row, const Vector (&weights)[BLOCK_PANELS], float highest, int first,
                   int last) {
    if (first != seen_first_ || last != seen_last_) see_values(first, last);
    // The smallest power of two that is not below any weight.
    const int power = highest > LOWEST_POWER ? int(std::ceil(highest)) : LOWEST_POWER;
    weight_scales_[row] = value_step_ * two_to_the(power);
    const float inverse = two_to_the(-power);
    std::uint8_t* high = &weights_[2 * row * BLOCK_KEYS].bits;
    for (int v = 0; v < BLOCK_PANELS; ++v) {
      for_registers(weights[v] * value_steps_[v] * inverse, [&](Register part, int lane) {
        const IntRegister number = to_nearest(part);
        store_bytes(high + v * LANES + lane, number >> 8);
        store_bytes(high + BLOCK_KEYS + v * LANES + lane, number);
      });
    }
  }
  void clear_weights(int row) {
    std::memset(weights_ + 2 * row * BLOCK_KEYS, 0, 2 * BLOCK_KEYS);
    weight_scales_[row] = 0;
  }

  void add_values(const SoftmaxSums& sums) {
    for_row_tiles<TILE_ROWS>(0, rows_.count, [&]<int ROWS>(int row) {
      for_vectors(sizes_.dim / LANES, [&]<int VECTORS>(int vector) {
        const auto add = row == 0 ? &CodeProducts::add_elements<ROWS, VECTORS, true>
                                  : &CodeProducts::add_elements<ROWS, VECTORS, false>;
        (this->*add)(row, vector * LANES, sums.values + row * padded_dim_);
      });
    });
    for (int p = 0; p < num_panels_; ++p) prefetch_scales(value_panels_.next[p]);
  }

 private:
  // Rows of a tile, each of which is two rows of bytes, and the number of vectors that are
  // multiplied at once. Registers limit both.
#ifdef __AVX512F__
  static constexpr int TILE_ROWS = 3, TILE_VECTORS = 4;
#else
  static constexpr int TILE_ROWS = 1, TILE_VECTORS = 2;
#endif
  // Integers of queries and of weights are at most this large. Each is stored as two bytes, a high
  // and a low part: signed bytes for queries, unsigned bytes for weights.
  static constexpr float MOST_OF_QUERY = 127 * 256;
  static constexpr float MOST_OF_WEIGHTS = 65535;
  // Weights below 2 to this power are negligible, because the largest weight is 1.
  static constexpr int LOWEST_POWER = -100;

  // The scale of a query, and two offsets: what the 128 that is added to codes contributes to the
  // products of the query's high parts and of its low parts.
  struct QueryScale {
    float scale;
    float high_offset;
    float low_offset;
  };

  static float two_to_the(int power) {
    const std::int32_t bits = (power + 127) << 23;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  }

  // Finds the largest scale of the values [first, last) of the block, and the factors that convert
  // weights to integers. A factor is the scale of a value divided by the largest scale.
  void see_values(int first, int last) {
    seen_first_ = first;
    seen_last_ = last;
    Vector most = {};
    for (int v = 0; v < BLOCK_PANELS; ++v) {
      const int from = first - v * LANES, end = last - v * LANES;
      Vector& scales = value_steps_[v];
      scales = load(sizes_.scales(value_panels_.current[v]));
      if (from > 0 || end < LANES) scales = keep_lanes(scales, from, end, 0);
      most = larger(scales, most);
    }
    const Scaling scaling(largest(most), MOST_OF_WEIGHTS);
    value_step_ = scaling.scale;
    for (Vector& scales : value_steps_) scales = scales * scaling.inverse;
  }

  // The contribution of the 128 that is added to codes. `sums` has sums of a query's parts by lane.
  static float offset_of(IntRegister sums) {
    int sum = 0;
    for (int i = 0; i < int(sizeof sums / sizeof sums[0]); ++i) sum += sums[i];
    return 128.0f * float(sum);
  }

  // Builds records from the tokens of a block.
  void pack(const KeyBlock& block) {
    const int head = rows_.head * sizes_.token();
    key_panels_.step = LANES * PanelOps<KeyByte>::DEPTH;
    for (int p = 0; p < BLOCK_PANELS; ++p) {
      KeyByte* keys = packed_keys_ + p * sizes_.record();
      ValueByte* values = packed_values_ + p * sizes_.record();
      for (int lane = 0; p < num_panels_ && lane < LANES; ++lane) {
        const std::int64_t offset = block.offsets[p * LANES + lane] + head;
        put_key(&keys_[offset].bits, sizes_, lane, keys);
        put_value(&values_[offset].bits, sizes_, lane, values);
      }
      key_panels_.current[p] = key_panels_.next[p] = keys;
      value_panels_.current[p] = value_panels_.next[p] = values;
    }
  }

  // Calls work.template operator()<VECTORS>(first) for vectors that cover [0, count).
  template <int VECTORS = TILE_VECTORS, class Work>
  static void for_vectors(int count, Work&& work, int first = 0) {
    for (; first + VECTORS <= count; first += VECTORS) work.template operator()<VECTORS>(first);
    if constexpr (VECTORS > 1) for_vectors<VECTORS / 2>(count, work, first);
  }

  template <class Byte>
  void prefetch_scales(const Byte* record) const {
    __builtin_prefetch(sizes_.scales(record), 0, 2);
  }

  // Adds VECTORS vectors of weighted values, from element `d` on, to the sums of ROWS rows, and
  // prefetches the same elements of the next block.
  template <int ROWS, int VECTORS, bool PREFETCH>
  void add_elements(int row, int d, float* sums) const {
    using Ops = PanelOps<ValueByte>;
    constexpr int PANEL = LANES * LANES, STEPS = LANES / Ops::DEPTH;
    Vector total[2 * ROWS][VECTORS] = {};
    const ValueByte* weights = weights_ + 2 * row * BLOCK_KEYS;
    // One loop, so that the totals stay in registers.
    for (int step = 0; step < num_panels_ * STEPS; ++step, weights += Ops::DEPTH) {
      const int offset = d * LANES + step % STEPS * LANES * Ops::DEPTH;
      const ValueByte* values = value_panels_.current[step / STEPS] + offset;
      const ValueByte* next = value_panels_.next[step / STEPS] + offset;
      Vector columns[VECTORS];
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v) {
        columns[v] = Ops::load(values + v * PANEL);
        if (PREFETCH) __builtin_prefetch(next + v * PANEL, 0, 2);
      }
#pragma GCC unroll 8
      for (int i = 0; i < 2 * ROWS; ++i) {
        const Vector weight = Ops::broadcast(weights + i * BLOCK_KEYS);
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) {
          total[i][v] = Ops::multiply_add(total[i][v], weight, columns[v]);
        }
      }
    }
#pragma GCC unroll 4
    for (int i = 0; i < ROWS; ++i) {
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v) {
        const Vector high = to_floats(total[2 * i][v]), low = to_floats(total[2 * i + 1][v]);
        float* target = sums + i * padded_dim_ + d + v * LANES;
        stepwell::store(target,
                        fmadd(fmadd(high, 256.0f, low), weight_scales_[row + i], load(target)));
      }
    }
  }

  KeyByte* keys_;
  ValueByte* values_;
  int dim_;
  int padded_dim_;
  CodeSizes sizes_;
  std::int64_t token_stride_;
  bool has_records_;
  std::vector<std::uint8_t> codes_ = std::vector<std::uint8_t>(2 * sizes_.token());
  KeyByte* query_ = nullptr;  // For each row the high parts, then the low parts.
  QueryScale* query_scales_ = nullptr;
  float* weight_scales_ = nullptr;
  float* scores_ =
      nullptr;  // Integers: for each row the scores of the high parts, then of the low parts.
  ValueByte* weights_ = nullptr;  // For each row the high parts, then the low parts.
  KeyByte* packed_keys_ = nullptr;
  ValueByte* packed_values_ = nullptr;
  SeeingRows rows_ = {};
  int num_panels_ = 0;
  KeyPanels<KeyByte> key_panels_;
  KeyPanels<ValueByte> value_panels_;
  int seen_first_ = 0;  // Arguments of the last see_values for this block; last 0: no call yet.
  int seen_last_ = 0;
  float value_step_ = 0;
  Vector value_steps_[BLOCK_PANELS];
};

}  // namespace stepwell
