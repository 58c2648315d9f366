// Queries, keys and values of a step's tokens, their rotation, and the pages in which keys and
// values are stored.

#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "vector.h"

namespace stepwell {

// Queries, keys and values of a step's tokens, in rows `stride` elements apart. `cos` and `sin`
// [tokens, half] are for the tokens' positions. If `half` is 0, nothing is rotated.
template <class T>
struct Heads {
  const T* query;
  const T* key;
  const T* value;
  std::int64_t query_stride;
  std::int64_t key_stride;
  std::int64_t value_stride;
  const T* cos;
  const T* sin;
  int half;

  // Rotates the first 2 * `half` elements of a head by the token's angles, and copies the rest.
  void rotate(const T* head, std::int64_t token, int head_dim, T* output) const {
    const T* cosines = cos + token * half;
    const T* sines = sin + token * half;
    int i = 0;
    for (; i + LANES <= half; i += LANES) {
      const Vector a = load(head + i), b = load(head + half + i);
      const Vector c = load(cosines + i), s = load(sines + i);
      store(output + i, fmadd(a, c, -(b * s)));
      store(output + half + i, fmadd(b, c, a * s));
    }
    if (i < half) {
      const int rest = half - i;
      const Vector a = load_partial(head + i, rest), b = load_partial(head + half + i, rest);
      const Vector c = load_partial(cosines + i, rest), s = load_partial(sines + i, rest);
      store_partial(output + i, fmadd(a, c, -(b * s)), rest);
      store_partial(output + half + i, fmadd(b, c, a * s), rest);
    }
    std::memcpy(output + 2 * half, head + 2 * half, (head_dim - 2 * half) * sizeof(T));
  }

  // Returns a rotated head, in thread-local memory that the next call overwrites.
  const T* rotated(const T* head, std::int64_t token, int head_dim) const {
    static thread_local std::vector<T> memory;
    if (int(memory.size()) < head_dim) memory.resize(head_dim);
    rotate(head, token, head_dim, memory.data());
    return memory.data();
  }
};

// The storage of keys and values: elements of the model's data type, or codes as in codes.h.
enum class CacheFormat : int { PLAIN, INT8 };

// One layer's part of the KV cache.
struct Pages {
  void* keys;
  void* values;
  int block_size;
  CacheFormat format;
};

}  // namespace stepwell
