// Unpackers for AVX-512 and AVX2: included by quantized.h.

#pragma once

#include <immintrin.h>

#include "quantized.h"

namespace stepwell {

namespace {  // Internal, so that functions with one caller are inlined.

// Conversions are intrinsic functions, because the compiler (GCC 12) would convert vectors of bytes
// one number at a time.
template <>
struct Unpacker<float, WeightFormat::INT8> {
  static constexpr int BYTES = PANEL_WIDTH, STEPS = 1;
  static Register numbers(const char* codes) {
#ifdef __AVX512F__
    const __m128i some = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
    return (Register)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(some));
#else
    const __m128i some = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes));
    return (Register)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(some));
#endif
  }
  void operator()(const char* codes, int, Vector (&columns)[PANEL_VECTORS]) const {
#pragma GCC unroll 2
    for (int v = 0; v < PANEL_VECTORS; ++v) {
      columns[v] = of_registers([=](int i) { return numbers(codes + v * LANES + i); });
    }
  }
};

template <>
struct Unpacker<float, WeightFormat::FP8> {
  static constexpr int BYTES = PANEL_WIDTH, STEPS = 1;
  static Register numbers(const char* codes) {
#ifdef __AVX512F__
    const __m128i some = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
    const __m256i words = _mm256_slli_epi16(_mm256_cvtepu8_epi16(some), 8);
    const __m256i sign = _mm256_and_si256(words, _mm256_set1_epi16(-0x8000));
    const __m256i rest = _mm256_srli_epi16(_mm256_and_si256(words, _mm256_set1_epi16(0x7f00)), 1);
    const __m512 halves = _mm512_cvtph_ps(_mm256_or_si256(sign, rest));
#else
    const __m128i some = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes));
    const __m128i words = _mm_unpacklo_epi8(_mm_setzero_si128(), some);
    const __m128i sign = _mm_and_si128(words, _mm_set1_epi16(-0x8000));
    const __m128i rest = _mm_srli_epi16(_mm_and_si128(words, _mm_set1_epi16(0x7f00)), 1);
    const __m256 halves = _mm256_cvtph_ps(_mm_or_si128(sign, rest));
#endif
    return (Register)halves * OF_FP8_IN_HALVES;
  }
  void operator()(const char* codes, int, Vector (&columns)[PANEL_VECTORS]) const {
#pragma GCC unroll 2
    for (int v = 0; v < PANEL_VECTORS; ++v) {
      columns[v] = of_registers([=](int i) { return numbers(codes + v * LANES + i); });
    }
  }
};

#ifdef __AVX512F__
#ifdef __AVX512VBMI__
// Looks up 64 byte codes at once. The seven low bits of a code select the low and the high byte of
// a bfloat16 number. The eighth bit is the number's sign.
struct ByteTable {
  template <class NumberOf>
  explicit ByteTable(NumberOf&& number_of) {
    std::uint8_t low_bytes[128], high_bytes[128];
    for (int i = 0; i < 128; ++i) {
      const std::uint16_t bits = from_float<BFloat16>(number_of(i)).bits;
      low_bytes[i] = std::uint8_t(bits);
      high_bytes[i] = std::uint8_t(bits >> 8);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      low[i] = _mm512_loadu_si512(low_bytes + 64 * i);
      high[i] = _mm512_loadu_si512(high_bytes + 64 * i);
    }
  }
  __m512i low_of(__m512i codes) const { return _mm512_permutex2var_epi8(low[0], codes, low[1]); }
  __m512i high_of(__m512i codes) const { return _mm512_permutex2var_epi8(high[0], codes, high[1]); }
  static void finish(__m512i low_bytes, __m512i high_bytes, __m512i signs,
                     Vector (&columns)[PANEL_VECTORS]) {
    constexpr int FIRST_OR_BOTH_OTHERS = 0xf8;
    high_bytes =
        _mm512_ternarylogic_epi32(high_bytes, signs, _mm512_set1_epi8(-128), FIRST_OR_BOTH_OTHERS);
    columns[0] = (Vector)_mm512_unpacklo_epi8(low_bytes, high_bytes);
    columns[1] = (Vector)_mm512_unpackhi_epi8(low_bytes, high_bytes);
  }
  __m512i low[2], high[2];
};

// Looks up magnitudes. The table has no entry for 128, the magnitude of -128, and returns the bytes
// of 0. The low byte of 128 is zero too. Its high byte is the difference magnitude - `less`. For
// smaller magnitudes this difference is at most the high byte in the table.
template <>
struct Unpacker<BFloat16, WeightFormat::INT8> {
  static constexpr int BYTES = 64, STEPS = 1;
  void operator()(const char* codes, int, Vector (&columns)[PANEL_VECTORS]) const {
    const __m512i some = _mm512_loadu_si512(codes), magnitude = _mm512_abs_epi8(some);
    const __m512i less = _mm512_set1_epi8(char(128 - (from_float<BFloat16>(128).bits >> 8)));
    const __m512i high_bytes =
        _mm512_max_epu8(table.high_of(magnitude), _mm512_subs_epu8(magnitude, less));
    ByteTable::finish(table.low_of(magnitude), high_bytes, some, columns);
  }
  ByteTable table{[](int magnitude) { return float(magnitude); }};
};

template <>
struct Unpacker<BFloat16, WeightFormat::FP8> {
  static constexpr int BYTES = 64, STEPS = 1;
  void operator()(const char* codes, int, Vector (&columns)[PANEL_VECTORS]) const {
    const __m512i some = _mm512_loadu_si512(codes);
    ByteTable::finish(table.low_of(some), table.high_of(some), some, columns);
  }
  ByteTable table{[](int code) { return _cvtsh_ss(std::uint16_t(code << 7)) * OF_FP8_IN_HALVES; }};
};
#else
template <>
struct Unpacker<BFloat16, WeightFormat::INT8> {
  static constexpr int BYTES = 64, STEPS = 1;
  // Converts integers in words at even and at odd positions to floats. The lower half of such a
  // float is zero, so its upper half is the bfloat16 number.
  static Vector wide(__m512i words) {
    const auto bits = [](__m512i number) {
      return _mm512_castps_si512(_mm512_cvtepi32_ps(number));
    };
    const __m512i even = bits(_mm512_srai_epi32(_mm512_slli_epi32(words, 16), 16));
    const __m512i odd = bits(_mm512_srai_epi32(words, 16));
    return (Vector)_mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(even, 16), odd);
  }
  void operator()(const char* codes, int, Vector (&columns)[PANEL_VECTORS]) const {
    const __m512i some = _mm512_loadu_si512(codes), zero = _mm512_setzero_si512();
    columns[0] = wide(_mm512_srai_epi16(_mm512_unpacklo_epi8(zero, some), 8));
    columns[1] = wide(_mm512_srai_epi16(_mm512_unpackhi_epi8(zero, some), 8));
  }
};

template <>
struct Unpacker<BFloat16, WeightFormat::FP8> {
  static constexpr int BYTES = 64, STEPS = 1;
  static Vector wide(__m512i words) {
    const __m512i sign = _mm512_and_si512(words, _mm512_set1_epi16(-0x8000));
    const __m512i rest = _mm512_srli_epi16(_mm512_and_si512(words, _mm512_set1_epi16(0x7f00)), 1);
    const __m512i halves = _mm512_or_si512(sign, rest);
    const auto numbers = [](__m256i some) {
      return to_bfloat16((Vector)_mm512_cvtph_ps(some) * OF_FP8_IN_HALVES);
    };
    const __m256i low = numbers(_mm512_castsi512_si256(halves));
    const __m256i high = numbers(_mm512_extracti64x4_epi64(halves, 1));
    return (Vector)_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
  }
  void operator()(const char* codes, int, Vector (&columns)[PANEL_VECTORS]) const {
    const __m512i some = _mm512_loadu_si512(codes), zero = _mm512_setzero_si512();
    columns[0] = wide(_mm512_unpacklo_epi8(zero, some));
    columns[1] = wide(_mm512_unpackhi_epi8(zero, some));
  }
};
#endif

// The instruction looks up the low five bits of a word. The table has each code twice, so that the
// other codes of the word need not be masked out.
template <>
struct Unpacker<BFloat16, WeightFormat::INT4> {
  static constexpr int BYTES = 64, STEPS = BLOCK_DEPTH / 2;
  Unpacker() {
    BFloat16 numbers[32];
    for (int i = 0; i < 32; ++i) numbers[i] = from_float<BFloat16>(float(i % 16 - 8));
    table = _mm512_loadu_si512(numbers);
  }
  void operator()(const char* codes, int step, Vector (&columns)[PANEL_VECTORS]) const {
    const __m512i words = _mm512_loadu_si512(codes);
#pragma GCC unroll 2
    for (int v = 0; v < PANEL_VECTORS; ++v) {
      const int shift = 4 * (step * PANEL_VECTORS + v);
      columns[v] = (Vector)_mm512_permutexvar_epi16(_mm512_srli_epi16(words, shift), table);
    }
  }
  __m512i table;
};
#else
// Reads the codes of the sixteen words of a register, which place_of_byte distributes.
struct WordsOfBytes {
  // The codes of register `i` of vector `v`, in the upper bytes of words.
  static __m256i upper(const char* codes, int v, int i) {
    const auto eight = [=](int lane) {
      return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + lane * 16 + v * 8));
    };
    const __m128i zero = _mm_setzero_si128();
    const __m128i low = _mm_unpacklo_epi8(zero, eight(2 * i));
    return _mm256_set_m128i(_mm_unpacklo_epi8(zero, eight(2 * i + 1)), low);
  }
};

template <>
struct Unpacker<BFloat16, WeightFormat::INT8> {
  static constexpr int BYTES = 64, STEPS = 1;
  // Converts the codes to floats. The lower half of such a float is zero, so its upper half is the
  // bfloat16 number.
  static Register numbers(__m256i upper) {
    const auto bits = [](__m256i number) {
      return _mm256_castps_si256(_mm256_cvtepi32_ps(_mm256_srai_epi32(number, 24)));
    };
    const __m256i even = bits(_mm256_slli_epi32(upper, 16)), odd = bits(upper);
    return (Register)_mm256_blend_epi16(_mm256_srli_epi32(even, 16), odd, 0xaa);
  }
  void operator()(const char* codes, int, Vector (&columns)[PANEL_VECTORS]) const {
#pragma GCC unroll 2
    for (int v = 0; v < PANEL_VECTORS; ++v) {
      columns[v] = {numbers(WordsOfBytes::upper(codes, v, 0)),
                    numbers(WordsOfBytes::upper(codes, v, 1))};
    }
  }
};

template <>
struct Unpacker<BFloat16, WeightFormat::FP8> {
  static constexpr int BYTES = 64, STEPS = 1;
  static Register numbers(__m256i upper) {
    const __m256i sign = _mm256_and_si256(upper, _mm256_set1_epi16(-0x8000));
    const __m256i rest = _mm256_srli_epi16(_mm256_and_si256(upper, _mm256_set1_epi16(0x7f00)), 1);
    const __m256i halves = _mm256_or_si256(sign, rest);
    const auto upper_halves = [](__m128i some) {
      return _mm256_srli_epi32((__m256i)((Register)_mm256_cvtph_ps(some) * OF_FP8_IN_HALVES), 16);
    };
    const __m256i packed = _mm256_packus_epi32(upper_halves(_mm256_castsi256_si128(halves)),
                                               upper_halves(_mm256_extracti128_si256(halves, 1)));
    return (Register)_mm256_permute4x64_epi64(packed, 0xd8);
  }
  void operator()(const char* codes, int, Vector (&columns)[PANEL_VECTORS]) const {
#pragma GCC unroll 2
    for (int v = 0; v < PANEL_VECTORS; ++v) {
      columns[v] = {numbers(WordsOfBytes::upper(codes, v, 0)),
                    numbers(WordsOfBytes::upper(codes, v, 1))};
    }
  }
};

// Looks up the low and the high bytes of numbers. For an index with its highest bit set, the
// instruction returns 0.
template <>
struct Unpacker<BFloat16, WeightFormat::INT4> {
  static constexpr int BYTES = 64, STEPS = BLOCK_DEPTH / 2;
  Unpacker() {
    for (int i = 0; i < 32; ++i) {
      const std::uint16_t bits = from_float<BFloat16>(float(i % 16 - 8)).bits;
      low_bytes[i] = std::uint8_t(bits);
      high_bytes[i] = std::uint8_t(bits >> 8);
    }
  }
  Register numbers(const char* words, int shift) const {
    const __m256i some = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(words));
    const __m256i code = _mm256_and_si256(_mm256_srli_epi16(some, shift), _mm256_set1_epi16(15));
    const auto look_up = [](const std::uint8_t* table, __m256i index) {
      return _mm256_shuffle_epi8(_mm256_load_si256(reinterpret_cast<const __m256i*>(table)), index);
    };
    const __m256i low = _mm256_or_si256(code, _mm256_set1_epi16(-0x8000));
    const __m256i high = _mm256_or_si256(_mm256_slli_epi16(code, 8), _mm256_set1_epi16(0x80));
    return (Register)_mm256_or_si256(look_up(low_bytes, low), look_up(high_bytes, high));
  }
  void operator()(const char* codes, int step, Vector (&columns)[PANEL_VECTORS]) const {
#pragma GCC unroll 2
    for (int v = 0; v < PANEL_VECTORS; ++v) {
      const int shift = 4 * (step * PANEL_VECTORS + v);
      columns[v] = of_registers([&](int i) { return numbers(codes + 4 * i, shift); });
    }
  }
  alignas(32) std::uint8_t low_bytes[32], high_bytes[32];
};
#endif

}  // namespace

}  // namespace stepwell
