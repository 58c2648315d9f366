// Queries, keys and values of a step's tokens, their rotation, and the pages that keys and values
// are stored in.

#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "attention_plan.h"
#include "key_block.h"

namespace stepwell {

// Queries, keys and values of a step's tokens, in rows `stride` elements apart, and the cosines and
// sines of the tokens' angles, [tokens, half]. half 0: nothing is rotated.
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

  // Rotates the first 2 * `half` elements of a head by the token's angles, and copies the others.
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
};

// One layer's part of the KV cache. Pages of values are [num_blocks, block_size, num_kv_heads,
// head_dim]; for those of keys see key_block.h.
template <class T>
struct Pages {
  T* keys;
  T* values;
  int block_size;
};

// Stores a token's rotated key and its value, of one key head, in a slot of the pages.
template <class T>
void store_in_pages(const Heads<T>& heads, const AttentionLayer& layer, std::int64_t token,
                    int head, std::int64_t slot, const Pages<T>& pages) {
  const int dim = layer.head_dim;
  const std::int64_t token_stride = std::int64_t{layer.num_kv_heads} * dim;
  const std::int64_t offset = slot * token_stride + head * dim;
  const T* key = heads.key + token * heads.key_stride + head * dim;
  if (has_panels(pages.block_size)) {
    static thread_local std::vector<T> rotated;
    if (int(rotated.size()) < dim) rotated.resize(dim);
    heads.rotate(key, token, dim, rotated.data());
    constexpr int DEPTH = PanelOps<T>::DEPTH;
    const int lane = int(slot % LANES);
    T* cell = pages.keys + (slot - lane) * token_stride + head * dim * LANES + lane * DEPTH;
    for (int d = 0; d < dim; d += DEPTH) {
      std::memcpy(cell + d * LANES, rotated.data() + d, DEPTH * sizeof(T));
    }
  } else {
    heads.rotate(key, token, dim, pages.keys + offset);
  }
  const T* value = heads.value + token * heads.value_stride + head * dim;
  std::memcpy(pages.values + offset, value, dim * sizeof(T));
}

}  // namespace stepwell
