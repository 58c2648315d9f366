// Rotary embedding of one head.

#pragma once

#include <cstring>

#include "vector.h"

namespace stepwell {

// Rotates the first 2 * `half` elements of a head by one token's angles, and copies the others.
template <class T>
void rotate(const T* head, const T* cos, const T* sin, int half, int head_dim, T* output) {
  int i = 0;
  for (; i + LANES <= half; i += LANES) {
    const Vector a = load(head + i), b = load(head + half + i), c = load(cos + i),
                 s = load(sin + i);
    store(output + i, fmadd(a, c, -(b * s)));
    store(output + half + i, fmadd(b, c, a * s));
  }
  if (i < half) {
    const int rest = half - i;
    const Vector a = load_partial(head + i, rest), b = load_partial(head + half + i, rest);
    const Vector c = load_partial(cos + i, rest), s = load_partial(sin + i, rest);
    store_partial(output + i, fmadd(a, c, -(b * s)), rest);
    store_partial(output + half + i, fmadd(b, c, a * s), rest);
  }
  std::memcpy(output + 2 * half, head + 2 * half, (head_dim - 2 * half) * sizeof(T));
}

}  // namespace stepwell
