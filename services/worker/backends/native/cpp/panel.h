// The inner loop of every multiplication: a few rows times a packed panel, with all results in
// registers.
//
// A panel has PANEL_WIDTH columns of a matrix: for each step of depth, the columns side by side. A
// step of bfloat16 is two elements deep, as in the instruction for dot products of pairs. The
// layout is from Goto and van de Geijn's matrix multiplication.

#pragma once

#include <type_traits>

#include "rounding.h"
#include "tiles.h"
#include "vector.h"

namespace stepwell {

#ifdef __AVX512F__
constexpr int MAX_TILE_ROWS = 12;
#else
constexpr int MAX_TILE_ROWS = 3;
#endif
constexpr int PANEL_VECTORS = 2;
constexpr int PANEL_WIDTH = PANEL_VECTORS * LANES;

// The layout of an element type in panels. DEPTH: elements in one step of depth. `multiply_add`
// returns total + a * b for one step. `load` and `load_part` read from a panel or a row as it is
// stored. `interleave` builds one step of a panel from DEPTH rows: `count` elements from `from` on.
// Totals over interleaved vectors are in the order of `to_interleaved_order`; `to_element_order`
// reverses it.
template <class T>
struct PanelOps;

template <>
struct PanelOps<float> {
  static constexpr int DEPTH = 1;
  static Vector broadcast(const float* a) { return splat(*a); }
  static Vector load(const float* b) { return stepwell::load(b); }
  static Vector load_part(const float* b, int count) { return load_partial(b, count); }
  static Vector multiply_add(Vector total, Vector a, Vector b) { return fmadd(a, b, total); }
  static void interleave(const float* const (&rows)[1], int from, int count,
                         Vector (&result)[PANEL_VECTORS]) {
    for (int v = 0; v < PANEL_VECTORS; ++v) {
      result[v] = load_partial(rows[0] + from + v * LANES, count - v * LANES);
    }
  }
  static void to_interleaved_order(Vector (&)[PANEL_VECTORS]) {}
  static void to_element_order(Vector (&)[PANEL_VECTORS]) {}
};

// Without an instruction for dot products of pairs, two multiplications and additions have its
// order: the second elements of the pairs first.
template <>
struct PanelOps<BFloat16> {
  static constexpr int DEPTH = 2;
  static Vector broadcast(const BFloat16* a) {
    std::int32_t pair;
    std::memcpy(&pair, a, sizeof pair);
    return to_vector(IntRegister{} + pair);
  }
  static Vector load(const BFloat16* b) {
    return stepwell::load(reinterpret_cast<const float*>(b));
  }
#ifdef __AVX512F__
  static Vector load_part(const BFloat16* b, int count) {
    return (Vector)_mm512_maskz_loadu_epi16(lane_mask(count), b);
  }
  static Vector multiply_add(Vector total, Vector a, Vector b) {
#ifdef __AVX512BF16__
    return (Vector)_mm512_dpbf16_ps((__m512)total, (__m512bh)a, (__m512bh)b);
#else
    return add_pairs(total, a, b);
#endif
  }
  static void interleave(const BFloat16* const (&rows)[2], int from, int count,
                         Vector (&result)[PANEL_VECTORS]) {
    const __m512i even = (__m512i)load_part(rows[0] + from, count);
    const __m512i odd = (__m512i)load_part(rows[1] + from, count);
    result[0] = (Vector)_mm512_unpacklo_epi16(even, odd);
    result[1] = (Vector)_mm512_unpackhi_epi16(even, odd);
  }
  static void to_interleaved_order(Vector (&columns)[PANEL_VECTORS]) {
    const __m512 first = (__m512)columns[0], second = (__m512)columns[1];
    columns[0] = (Vector)_mm512_shuffle_f32x4(first, second, 0x88);
    columns[1] = (Vector)_mm512_shuffle_f32x4(first, second, 0xdd);
  }
  static void to_element_order(Vector (&columns)[PANEL_VECTORS]) {
    const __m512d first = (__m512d)columns[0], second = (__m512d)columns[1];
    const __m512i low = _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0);
    const __m512i high = _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4);
    columns[0] = (Vector)_mm512_permutex2var_pd(first, low, second);
    columns[1] = (Vector)_mm512_permutex2var_pd(first, high, second);
  }
#else
  static Vector load_part(const BFloat16* b, int count) {
    BFloat16 some[2 * LANES] = {};
    if (count > 0) std::memcpy(some, b, (count < 2 * LANES ? count : 2 * LANES) * sizeof(BFloat16));
    return load(some);
  }
  static Vector multiply_add(Vector total, Vector a, Vector b) {
    return {add_pairs(total.low, a.low, b.low), add_pairs(total.high, a.high, b.high)};
  }
  static void interleave(const BFloat16* const (&rows)[2], int from, int count,
                         Vector (&result)[PANEL_VECTORS]) {
    const Vector even = load_part(rows[0] + from, count), odd = load_part(rows[1] + from, count);
    result[0] = pairs(even.low, odd.low);
    result[1] = pairs(even.high, odd.high);
  }
  static void to_interleaved_order(Vector (&)[PANEL_VECTORS]) {}
  static void to_element_order(Vector (&)[PANEL_VECTORS]) {}
  static Vector first_of(Vector pairs) { return {first_of(pairs.low), first_of(pairs.high)}; }
  static Vector second_of(Vector pairs) { return {second_of(pairs.low), second_of(pairs.high)}; }
#endif

  // The first and the second elements of pairs, as floats.
  static Register first_of(Register pairs) { return (Register)((IntRegister)pairs << 16); }
  static Register second_of(Register pairs) { return (Register)((IntRegister)pairs & -0x10000); }

 private:
  static Register add_pairs(Register total, Register a, Register b) {
    return fmadd(first_of(a), first_of(b), fmadd(second_of(a), second_of(b), total));
  }
#ifdef __AVX512F__
  static Vector to_vector(IntRegister part) { return (Vector)part; }
#else
  static Vector to_vector(IntRegister part) { return {(Register)part, (Register)part}; }
  // Sixteen pairs of words, in order.
  static Vector pairs(Register even, Register odd) {
    const __m256i low = _mm256_unpacklo_epi16((__m256i)even, (__m256i)odd);
    const __m256i high = _mm256_unpackhi_epi16((__m256i)even, (__m256i)odd);
    return {(Register)_mm256_permute2x128_si256(low, high, 0x20),
            (Register)_mm256_permute2x128_si256(low, high, 0x31)};
  }
#endif
};

// Whether products of T are added in the order of the processor's products of tiles. It is one
// order for all numbers of rows, and for all ways to multiply.
template <class T>
constexpr bool SUMS_LIKE_TILES = false;
#ifdef STEPWELL_TILES
template <>
inline constexpr bool SUMS_LIKE_TILES<BFloat16> = true;
#endif

// The rounding and the state of a thread that computes with elements of T.
template <class T>
using ComputeScope = std::conditional_t<SUMS_LIKE_TILES<T>, TileScope, StandardMode>;

// Steps of depth that belong together in a sum. A sum may be interrupted only at a multiple of
// them.
template <class T>
constexpr int SUM_STEPS = SUMS_LIKE_TILES<T> ? TILE_ROWS : 1;

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

// The order of tiles (tile_model.h): the first and the second elements of SUM_STEPS pairs are
// summed apart, each from +0, then added, then added to the total. The last pairs may be fewer.
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
    const std::int64_t offset = row % 4 == 3 ? triple_ : row % 4 * stride_;
    return PanelOps<T>::broadcast(fourths_[row / 4] + offset);
  }

  // Advances to the next step. If a pass has several steps, each advances separately: with steps at
  // fixed distances the compiler would keep more offsets than there are registers.
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

// total[ROWS][VECTORS] += a step of `rows`, which advance, times the columns of that step.
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
    add_step(total, sums, rows, columns);
    panel += WIDTH * Ops::DEPTH;
  }
  sums.finish(total);
}

// Rows of a tile that precedes a tile of few rows.
constexpr int SHORT_TILE_ROWS = 2 * MAX_TILE_ROWS / 3;

// Whether the first tile of `rows` rows is a short one. With few rows the latency of additions
// limits the loop, so a tile of fewer rows than half of MAX_TILE_ROWS takes as long as a tile of
// half of MAX_TILE_ROWS.
constexpr bool has_short_tile(int rows) {
  return rows > MAX_TILE_ROWS && rows < MAX_TILE_ROWS + MAX_TILE_ROWS / 2;
}

// Calls work.template operator()<ROWS>(first row) for tiles that cover [begin, end): tiles of
// MAX_TILE_ROWS rows, then perhaps a short one, then one of the remaining rows.
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
