// Keys and values in 8 bits, with a scale for each token and key head.
//
// A head is stored as codes, integers from -127 to 127, and a float32 scale: the largest magnitude
// of its elements divided by 127. LANES consecutive tokens of a head form a record: their codes as
// a panel (quads.h), then their scales. In a panel of keys a step of depth is four elements of a
// head, and 128 is added to the codes. In a panel of values a step is four tokens, and there is a
// panel for each LANES elements. If a page has a multiple of LANES tokens, it consists of records,
// [tokens / LANES, num_kv_heads]. Other pages store for each token [num_kv_heads, codes and a
// scale]. These are converted to records before they are read.

#pragma once

#include <cstdint>
#include <cstring>

#include "quads.h"
#include "rounding.h"

namespace stepwell {

// A head whose elements are all below this magnitude is stored as zeros, because 127 divided by a
// very small number is infinite.
constexpr float SMALLEST_SCALED = 1e-30f;

// Sizes of the codes of a head of `dim` elements, padded to whole vectors.
struct CodeSizes {
  int dim;

  explicit CodeSizes(int head_dim) : dim(round_up(head_dim, LANES)) {}

  int token() const { return dim + int(sizeof(float)); }
  int record() const { return LANES * token(); }
  template <class Byte>
  const float* scales(const Byte* record) const {
    return reinterpret_cast<const float*>(record + LANES * dim);
  }
};

// `inverse` scales elements so that the largest becomes `most`; `scale` reverses this. Both are 0
// if the largest is too small.
struct Scaling {
  float scale;
  float inverse;

  Scaling(float largest, float most)
      : scale(largest < SMALLEST_SCALED ? 0.0f : largest / most),
        inverse(largest < SMALLEST_SCALED ? 0.0f : most / largest) {}
};

// The largest magnitude of `dim` elements, or NaN if one of them is infinite or NaN.
template <class T>
float largest_magnitude(const T* head, int dim) {
  Vector most = {}, zeros = {};
  for (int d = 0; d < dim; d += LANES) {
    const Vector value = load_partial(head + d, dim - d);
    most = larger(larger(value, -value), most);
    zeros += value * 0.0f;
  }
  return largest(most) + sum(zeros);
}

// Writes the codes of a head plus ADDED, as bytes, and returns their scale. The scale of a head
// that is not finite is NaN.
template <int ADDED = 0, class T>
float write_codes(const T* head, int dim, std::uint8_t* codes) {
  const Scaling scaling(largest_magnitude(head, dim), 127);
  for (int d = 0; d < dim; d += LANES) {
    for_registers(load_partial(head + d, dim - d) * scaling.inverse, [&](Register part, int lane) {
      store_bytes(codes + d + lane, to_nearest(part) + ADDED);
    });
  }
  return scaling.scale;
}

// Writes a token's codes and scale of one head to lane `lane` of a record of keys.
inline void put_key(const std::uint8_t* from, CodeSizes sizes, int lane, KeyByte* record) {
  for (int d = 0; d < sizes.dim; d += 4) {
    std::uint32_t quad;
    std::memcpy(&quad, from + d, sizeof quad);
    quad ^= 0x80808080;
    std::memcpy(record + d * LANES + 4 * lane, &quad, sizeof quad);
  }
  std::memcpy(record + sizes.dim * LANES + lane * sizeof(float), from + sizes.dim, sizeof(float));
}

// Writes a token's codes and scale of one head to lane `lane` of a record of values.
inline void put_value(const std::uint8_t* from, CodeSizes sizes, int lane, ValueByte* record) {
  for (int d = 0; d < sizes.dim; ++d) {
    const int panel = d / LANES * LANES * LANES;
    record[panel + lane / 4 * 4 * LANES + d % LANES * 4 + lane % 4].bits = from[d];
  }
  std::memcpy(record + sizes.dim * LANES + lane * sizeof(float), from + sizes.dim, sizeof(float));
}

}  // namespace stepwell
