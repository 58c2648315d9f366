// The inner loop of every multiplication: a few rows of a matrix (a tile of rows) times a packed
// panel of another one, with all totals in registers.
//
// A panel has PANEL_WIDTH columns of a matrix: for each step of depth, the elements of all columns,
// side by side. A step of bfloat16 is two elements deep, as in the instruction for dot products of
// pairs. The layout is from Goto and van de Geijn's matrix multiplication.

#pragma once

#include <algorithm>
#include <array>
#include <type_traits>
#include <utility>

#include "panel_ops.h"
#include "rounding.h"
#include "tiles.h"

#if defined(__AVX2__) && !defined(__AVX512F__)
#include "pair_halves_avx2.h"
#endif

namespace stepwell {

#ifdef __AVX512F__
constexpr int MAX_TILE_ROWS = 12;
#else
constexpr int MAX_TILE_ROWS = 3;
#endif
// Whether products of T are added in the order of the processor's products of tiles, with or
// without tiles, for all numbers of rows.
template <class T>
constexpr bool SUMS_LIKE_TILES = false;
#ifdef STEPWELL_TILES
template <>
inline constexpr bool SUMS_LIKE_TILES<BFloat16> = true;
#endif

// The scope in which a thread computes with elements of T. It sets how floats are rounded, and the
// state of tiles.
template <class T>
using ComputeScope = std::conditional_t<SUMS_LIKE_TILES<T>, TileScope, StandardMode>;

// A sum may be divided only at a multiple of this number of steps of depth.
template <class T>
constexpr int SUM_STEPS = SUMS_LIKE_TILES<T> ? TILE_ROWS : 1;

// Whether a step is multiplied in halves (pair_halves_avx2.h).
#if defined(__AVX2__) && !defined(__AVX512F__)
template <class T>
constexpr bool MULTIPLIES_HALVES = std::is_same_v<T, BFloat16> && !SUMS_LIKE_TILES<T>;
#else
template <class T>
constexpr bool MULTIPLIES_HALVES = false;
#endif

// Adds products to totals [ROWS][VECTORS] in order of depth. `end_step` must be called after each
// step of depth, and `finish` after the last one.
template <class T, int ROWS, int VECTORS>
struct DepthSums {
  using Totals = Vector[ROWS][VECTORS];

  __attribute__((always_inline)) void add(Totals& total, int row, int v, Vector a, Vector b) {
    total[row][v] = PanelOps<T>::multiply_add(total[row][v], a, b);
  }
  void end_step(Totals&) {}
  void finish(Totals&) {}
};

// The order of tiles (tile_model.h): over SUM_STEPS pairs, the products of first elements and of
// second elements are summed separately, each from +0. The two sums are added, and the result is
// added to the total. The last pairs of the depth may be fewer.
template <class T, int ROWS, int VECTORS>
  requires SUMS_LIKE_TILES<T>
struct DepthSums<T, ROWS, VECTORS> {
  using Totals = Vector[ROWS][VECTORS];

  __attribute__((always_inline)) void add(Totals&, int row, int v, Vector a, Vector b) {
    using Ops = PanelOps<T>;
    first[row][v] = fmadd(Ops::first_of(a), Ops::first_of(b), first[row][v]);
    second[row][v] = fmadd(Ops::second_of(a), Ops::second_of(b), second[row][v]);
  }

  __attribute__((always_inline)) void end_step(Totals& total) {
    if (++steps == SUM_STEPS<T>) add_to(total);
  }

  __attribute__((always_inline)) void finish(Totals& total) {
    if (steps > 0) add_to(total);
  }

  __attribute__((always_inline)) void add_to(Totals& total) {
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; ++row) {
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; ++v) {
        total[row][v] = total[row][v] + (first[row][v] + second[row][v]);
        first[row][v] = second[row][v] = Vector{};
      }
    }
    steps = 0;
  }

  Totals first = {};
  Totals second = {};
  int steps = 0;
};

// The memory to prefetch during a multiplication: from `first` on, `step_bytes` in each step of
// depth, at most a cache line for each vector.
struct Prefetch {
  const void* first;
  std::int64_t step_bytes;
};

// ROWS rows that are read side by side, `stride` elements apart. Every fourth row has its own
// pointer, which an empty `asm` hides from the optimizer. With one pointer the compiler would keep
// an offset for each row, and load some of the offsets from vector registers in every step.
template <class T, int ROWS>
class RowPointers {
 public:
  __attribute__((always_inline)) RowPointers(const T* a, std::int64_t stride)
      : stride_(stride), triple_(3 * stride) {
    asm("" : "+r"(triple_));
#pragma GCC unroll 4
    for (const T*& fourth : fourths_) {
      fourth = a;
      asm("" : "+r"(fourth));
      a += 4 * stride;
    }
  }

  // Elements of this step in a row.
  __attribute__((always_inline)) Vector at(int row) const {
    return PanelOps<T>::broadcast(address_of(row));
  }

  __attribute__((always_inline)) const T* address_of(int row) const {
    const std::int64_t offset = row % 4 == 3 ? triple_ : row % 4 * stride_;
    return fourths_[row / 4] + offset;
  }

  // Advances to the next step. If a pass of the loop has several steps, each advances separately:
  // with steps at fixed distances the compiler would keep more offsets than there are registers.
  __attribute__((always_inline)) void advance() {
#pragma GCC unroll 4
    for (const T*& fourth : fourths_) {
      fourth += PanelOps<T>::DEPTH;
      asm("" : "+r"(fourth));
    }
  }

 private:
  std::int64_t stride_;
  std::int64_t triple_;
  const T* fourths_[(ROWS + 3) / 4];
};

// total[ROWS][VECTORS] += a step of `rows` times the columns of that step. Advances `rows`.
template <class T, int ROWS, int VECTORS>
inline __attribute__((always_inline)) void add_step(Vector (&total)[ROWS][VECTORS],
                                                    DepthSums<T, ROWS, VECTORS>& sums,
                                                    RowPointers<T, ROWS>& rows,
                                                    const Vector (&columns)[VECTORS]) {
#pragma GCC unroll 16
  for (int row = 0; row < ROWS; ++row) {
    const Vector value = rows.at(row);
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; ++v) sums.add(total, row, v, value, columns[v]);
  }
  sums.end_step(total);
  rows.advance();
}

// total[ROWS][VECTORS] += rows of `a`, `stride` elements apart, times the first VECTORS vectors of
// the columns of a panel of WIDTH. With PREFETCH, prefetches `prefetch`.
//
// The caller must store the totals before it calls another function. Totals that outlive a call
// would be kept on the stack, even inside the loop.
template <class T, int ROWS, int VECTORS = PANEL_VECTORS, bool PREFETCH = false,
          int WIDTH = PANEL_WIDTH>
inline __attribute__((always_inline)) void multiply(Vector (&total)[ROWS][VECTORS], const T* a,
                                                    std::int64_t stride, const T* panel, int steps,
                                                    Prefetch prefetch = {}) {
  using Ops = PanelOps<T>;
  const char* fetched = static_cast<const char*>(prefetch.first);
  const std::int64_t vector_bytes = prefetch.step_bytes / VECTORS;
  RowPointers<T, ROWS> rows(a, stride);
  DepthSums<T, ROWS, VECTORS> sums;
  for (int step = 0; step < steps; ++step) {
    Vector columns[VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) {
      columns[v] = Ops::load(panel + v * LANES * Ops::DEPTH);
      if (PREFETCH) __builtin_prefetch(fetched + v * vector_bytes, 0, 2);
    }
    fetched += prefetch.step_bytes;
    if constexpr (MULTIPLIES_HALVES<T>) {
      add_pairs(total, rows, panel);
      rows.advance();
    } else {
      add_step(total, sums, rows, columns);
    }
    panel += WIDTH * Ops::DEPTH;
  }
  sums.finish(total);
}

// Number of rows in a short tile, which may precede the last tile.
constexpr int SHORT_TILE_ROWS = 2 * MAX_TILE_ROWS / 3;

// Whether the next tile of the remaining `rows` rows is a short one, so that the last tile has at
// least half of MAX_TILE_ROWS. A tile with fewer rows takes as long as one with half, because the
// latency of additions limits its loop.
constexpr bool has_short_tile(int rows) {
  return rows > MAX_TILE_ROWS && rows < MAX_TILE_ROWS + MAX_TILE_ROWS / 2;
}

// Calls work.template operator()<ROWS>(first row) for tiles that cover [begin, end): tiles of
// MAX_TILE_ROWS rows, then perhaps a short tile, then a tile of the remaining rows.
template <int ROWS = MAX_TILE_ROWS, class Work>
inline void for_row_tiles(int begin, int end, Work&& work) {
  while (begin + ROWS <= end) {
    if constexpr (ROWS == MAX_TILE_ROWS) {
      if (has_short_tile(end - begin)) {
        work.template operator()<SHORT_TILE_ROWS>(begin);
        begin += SHORT_TILE_ROWS;
        continue;
      }
    }
    work.template operator()<ROWS>(begin);
    begin += ROWS;
  }
  if constexpr (ROWS > 1) {
    if (begin < end) for_row_tiles<ROWS - 1>(begin, end, work);
  }
}

// Like for_row_tiles, but calls work(first row, number of rows), which is compiled only once.
template <class Work>
inline void for_tiles(int begin, int end, Work&& work) {
  while (begin < end) {
    const int left = end - begin;
    const int rows = has_short_tile(left) ? SHORT_TILE_ROWS : std::min(left, MAX_TILE_ROWS);
    work(begin, rows);
    begin += rows;
  }
}

// Functions for tiles, as an array that is indexed by the number of rows, from 1 to MAX_TILE_ROWS:
// the results of get.template operator()<ROWS>().
template <class Get>
constexpr auto functions_by_rows(Get get) {
  using Function = decltype(get.template operator()<1>());
  return [&]<int... ROWS>(std::integer_sequence<int, ROWS...>) {
    return std::array<Function, MAX_TILE_ROWS + 1>{nullptr, get.template operator()<ROWS + 1>()...};
  }(std::make_integer_sequence<int, MAX_TILE_ROWS>());
}

// Transposes a matrix of 16 x 16 words of 32 bits. Rows of `from` are `stride` bytes apart, rows of
// `to` are `to_stride` bytes apart.
inline void transpose_words(const void* from, std::int64_t stride, void* to,
                            std::int64_t to_stride) {
  const char* source = static_cast<const char*>(from);
  char* target = static_cast<char*>(to);
#ifdef __AVX512F__
  __m512i a[16], b[16];
  for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512(source + i * stride);
  for (int i = 0; i < 8; ++i) {
    b[2 * i] = _mm512_unpacklo_epi32(a[2 * i], a[2 * i + 1]);
    b[2 * i + 1] = _mm512_unpackhi_epi32(a[2 * i], a[2 * i + 1]);
  }
  for (int i = 0; i < 4; ++i) {
    a[4 * i] = _mm512_unpacklo_epi64(b[4 * i], b[4 * i + 2]);
    a[4 * i + 1] = _mm512_unpackhi_epi64(b[4 * i], b[4 * i + 2]);
    a[4 * i + 2] = _mm512_unpacklo_epi64(b[4 * i + 1], b[4 * i + 3]);
    a[4 * i + 3] = _mm512_unpackhi_epi64(b[4 * i + 1], b[4 * i + 3]);
  }
  // Lane L (of 128 bits) of a[4 i + j] has column 4 L + j of rows 4 i to 4 i + 3.
  for (int j = 0; j < 4; ++j) {
    const __m512i even01 = _mm512_shuffle_i32x4(a[j], a[4 + j], 0x88);
    const __m512i odd01 = _mm512_shuffle_i32x4(a[j], a[4 + j], 0xdd);
    const __m512i even23 = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0x88);
    const __m512i odd23 = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0xdd);
    b[j] = _mm512_shuffle_i32x4(even01, even23, 0x88);
    b[8 + j] = _mm512_shuffle_i32x4(even01, even23, 0xdd);
    b[4 + j] = _mm512_shuffle_i32x4(odd01, odd23, 0x88);
    b[12 + j] = _mm512_shuffle_i32x4(odd01, odd23, 0xdd);
  }
  for (int i = 0; i < 16; ++i) _mm512_storeu_si512(target + i * to_stride, b[i]);
#else
  for (int row = 0; row < 16; ++row) {
    for (int column = 0; column < 16; ++column) {
      std::memcpy(target + column * to_stride + row * 4, source + row * stride + column * 4, 4);
    }
  }
#endif
}

}  // namespace stepwell
