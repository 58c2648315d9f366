// What the processor's instructions for products of tiles compute, bit for bit (Intel AMX).
//
// A tile is up to 16 rows of up to 64 bytes. Tile `b` has a row for each two (bfloat16) or four
// (bytes) elements of depth, with the elements of each column side by side, as in a panel. The
// products of bfloat16 ignore MXCSR and compute as in FlushingMode.

#pragma once

#ifndef __aarch64__
#include <immintrin.h>
#endif

#include <cstdint>
#include <cstring>

#include "float_mode.h"

namespace stepwell {

constexpr int TILE_ROWS = 16;
constexpr int TILE_ROW_BYTES = 64;

namespace tile_model {

#ifndef __aarch64__
// Assembly, because the compiler may exchange the operands of its own instructions, which returns
// the bits of another NaN, and may move them out of the scope of a FlushingMode.
inline __m256 fma(__m256 a, __m256 b, __m256 c) {
  asm volatile("vfmadd231ps %2, %1, %0" : "+x"(c) : "x"(a), "x"(b));
  return c;
}

inline __m256 add(__m256 a, __m256 b) {
  asm volatile("vaddps %2, %1, %0" : "=x"(a) : "x"(a), "x"(b));
  return a;
}

// The first and the second element of each pair of bfloat16 numbers.
inline __m256 first_of(__m256i pairs) { return (__m256)_mm256_slli_epi32(pairs, 16); }
inline __m256 second_of(__m256i pairs) {
  return (__m256)_mm256_and_si256(pairs, _mm256_set1_epi32(-0x10000));
}

// c += a * b for ROWS rows of a and c, eight columns, and `pairs` pairs of depth. The products of
// first elements and of second elements are summed separately, each from +0 in order of depth. The
// two sums are added, and the result is added to c.
template <int ROWS>
inline void add_pairs(const char* a, const char* b, int pairs, char* c) {
  __m256 first[ROWS] = {}, second[ROWS] = {};
  for (int pair = 0; pair < pairs; ++pair, a += 4, b += TILE_ROW_BYTES) {
    const __m256i columns = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b));
    const __m256 first_columns = first_of(columns), second_columns = second_of(columns);
#pragma GCC unroll 4
    for (int row = 0; row < ROWS; ++row) {
      std::int32_t bits;
      std::memcpy(&bits, a + row * TILE_ROW_BYTES, sizeof bits);
      const __m256i value = _mm256_set1_epi32(bits);
      first[row] = fma(first_of(value), first_columns, first[row]);
      second[row] = fma(second_of(value), second_columns, second[row]);
    }
  }
#pragma GCC unroll 4
  for (int row = 0; row < ROWS; ++row) {
    float* to = reinterpret_cast<float*>(c + row * TILE_ROW_BYTES);
    _mm256_storeu_ps(to, add(_mm256_loadu_ps(to), add(first[row], second[row])));
  }
}

// TDPBF16PS for `rows` rows, `pairs` pairs of depth, and 16 columns.
inline void multiply_bfloat16(const char* a, const char* b, int rows, int pairs, char* c) {
  const FlushingMode mode;
  for (int column = 0; column < TILE_ROW_BYTES; column += 32) {
    int row = 0;
    const auto at = [&](auto* tile) { return tile + row * TILE_ROW_BYTES; };
    for (; row + 4 <= rows; row += 4) add_pairs<4>(at(a), b + column, pairs, at(c) + column);
    for (; row < rows; ++row) add_pairs<1>(at(a), b + column, pairs, at(c) + column);
  }
}

// The bytes at even and at odd positions, each converted to a word.
template <class Byte>
inline __m256i even_words(__m256i bytes) {
  if (Byte(-1) > 0) return _mm256_and_si256(bytes, _mm256_set1_epi16(255));
  return _mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8);
}

template <class Byte>
inline __m256i odd_words(__m256i bytes) {
  return Byte(-1) > 0 ? _mm256_srli_epi16(bytes, 8) : _mm256_srai_epi16(bytes, 8);
}

// TDPBSSD, TDPBSUD, TDPBUSD or TDPBUUD, depending on the types of the bytes of a and b, for `quads`
// quads of depth and 16 columns. Products are exact, and sums are modulo 2^32.
template <class A, class B>
inline void multiply_bytes(const char* a, const char* b, int rows, int quads, char* c) {
  for (int row = 0; row < rows; ++row, a += TILE_ROW_BYTES, c += TILE_ROW_BYTES) {
    for (int column = 0; column < TILE_ROW_BYTES; column += 32) {
      __m256i* to = reinterpret_cast<__m256i*>(c + column);
      __m256i total = _mm256_loadu_si256(to);
      for (int quad = 0; quad < quads; ++quad) {
        std::int32_t bits;
        std::memcpy(&bits, a + 4 * quad, sizeof bits);
        const __m256i value = _mm256_set1_epi32(bits);
        const __m256i columns = _mm256_loadu_si256(
            reinterpret_cast<const __m256i*>(b + quad * TILE_ROW_BYTES + column));
        const __m256i even = _mm256_madd_epi16(even_words<A>(value), even_words<B>(columns));
        const __m256i odd = _mm256_madd_epi16(odd_words<A>(value), odd_words<B>(columns));
        total = _mm256_add_epi32(total, _mm256_add_epi32(even, odd));
      }
      _mm256_storeu_si256(to, total);
    }
  }
}
#endif

}  // namespace tile_model

}  // namespace stepwell
