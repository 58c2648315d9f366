// Vectors of sixteen floats, written in the compiler's vector extension, so that the same source
// serves AVX-512 and AVX2; and the two element types that weights and caches are held in.

#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

constexpr int LANES = 16;

typedef float Vector __attribute__((vector_size(64)));
typedef std::int32_t IntVector __attribute__((vector_size(64)));

struct BFloat16 {
  std::uint16_t bits;
};

inline Vector splat(float value) { return value - Vector{}; }

inline Vector load(const float* from) {
  Vector value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

inline void store(float* to, Vector value) { std::memcpy(to, &value, sizeof value); }

inline float to_float(float value) { return value; }

inline float to_float(BFloat16 value) {
  const std::uint32_t bits = std::uint32_t{value.bits} << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return wide;
}

template <class T>
T from_float(float value);

template <>
inline float from_float<float>(float value) {
  return value;
}

// To the nearest, ties to even. NaN stays NaN.
template <>
inline BFloat16 from_float<BFloat16>(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if (value != value) return {static_cast<std::uint16_t>((bits >> 16) | 0x40)};
  return {static_cast<std::uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

#ifdef __AVX512BF16__
inline Vector load(const BFloat16* from) {
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return (Vector)_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16);
}

inline void store(BFloat16* to, Vector value) {
  const __m256bh half = _mm512_cvtneps_pbh((__m512)value);
  std::memcpy(to, &half, sizeof half);
}
#endif

// `load_first` reads the first `count` lanes, which may be any number, and nothing behind them; the
// others are 0. `store_first` writes as many.
#ifdef __AVX512F__
// A bit for each of the first `count` lanes of 32.
inline __mmask32 first_lanes(int count) {
  return count >= 32 ? ~__mmask32{0} : (__mmask32{1} << (count < 0 ? 0 : count)) - 1;
}

inline Vector load_first(const float* from, int count) {
  return (Vector)_mm512_maskz_loadu_ps(__mmask16(first_lanes(count)), from);
}

inline void store_first(float* to, Vector value, int count) {
  _mm512_mask_storeu_ps(to, __mmask16(first_lanes(count)), (__m512)value);
}
#else
inline Vector load_first(const float* from, int count) {
  if (count >= LANES) return load(from);
  Vector value = {};
  if (count > 0) std::memcpy(&value, from, count * sizeof(float));
  return value;
}

inline void store_first(float* to, Vector value, int count) {
  if (count > 0) std::memcpy(to, &value, (count < LANES ? count : LANES) * sizeof(float));
}
#endif

#ifdef __AVX512BF16__
inline Vector load_first(const BFloat16* from, int count) {
  const __m256i half = _mm256_maskz_loadu_epi16(__mmask16(first_lanes(count)), from);
  return (Vector)_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16);
}

inline void store_first(BFloat16* to, Vector value, int count) {
  const __m256i half = (__m256i)_mm512_cvtneps_pbh((__m512)value);
  _mm256_mask_storeu_epi16(to, __mmask16(first_lanes(count)), half);
}
#endif

inline float sum(Vector value) {
#ifdef __AVX512F__
  return _mm512_reduce_add_ps((__m512)value);
#else
  float total = 0;
  for (int lane = 0; lane < LANES; ++lane) total += value[lane];
  return total;
#endif
}

inline Vector larger(Vector a, Vector b) { return a > b ? a : b; }

inline float largest(Vector value) {
#ifdef __AVX512F__
  return _mm512_reduce_max_ps((__m512)value);
#else
  float most = value[0];
  for (int lane = 1; lane < LANES; ++lane) most = value[lane] > most ? value[lane] : most;
  return most;
#endif
}

// e^x within 2 units in the last place; next to 0 or 0 below -87, where normal floats end. The exponent is split into
// an integer and a rest within half of it, for which a polynomial of degree six is enough (Cody and
// Waite's reduction).
inline Vector exponential(Vector x) {
#ifdef __AVX512F__
  const __m512 clamped = _mm512_max_ps(_mm512_set1_ps(-110.0f), (__m512)x);  // NaN stays NaN.
  const Vector whole = (Vector)_mm512_roundscale_ps(
      _mm512_mul_ps(clamped, _mm512_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT);
  const Vector rest = ((Vector)clamped - whole * 0.693359375f) + whole * 2.12194440e-4f;
#else
  const Vector magic = splat(12582912.0f);  // Adding it rounds to an integer.
  const Vector clamped = larger(x < 88.0f ? x : splat(88.0f), splat(-87.0f));
  const Vector shifted = clamped * 1.44269504f + magic;
  const Vector whole = shifted - magic;
  const Vector rest = (clamped - whole * 0.693359375f) + whole * 2.12194440e-4f;
#endif
  Vector series = rest * 1.3888889e-3f + 8.3333333e-3f;
  series = series * rest + 4.1666667e-2f;
  series = series * rest + 1.6666667e-1f;
  series = series * rest + 0.5f;
  series = series * rest + 1.0f;
  series = series * rest + 1.0f;
#ifdef __AVX512F__
  return (Vector)_mm512_scalef_ps((__m512)series, (__m512)whole);
#else
  const IntVector power = ((IntVector)shifted - (IntVector)magic + 127) << 23;
  return x < -87.0f ? Vector{} : series * (Vector)power;
#endif
}

// 2^x for x up to 0, within 2 units in the last place; next to 0 or 0 below -126. What is left above the next lower
// integer is a polynomial's.
inline Vector power_of_two(Vector x) {
#ifdef __AVX512F__
  const Vector rest = (Vector)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF);
#else
  const Vector magic = splat(12582912.0f);
  const Vector clamped = larger(x, splat(-126.0f));
  const Vector shifted = clamped - 0.5f + magic;
  const Vector rest = clamped - (shifted - magic);
#endif
  Vector series = rest * 1.86713009e-3f + 9.01703028e-3f;
  series = series * rest + 5.57999131e-2f;
  series = series * rest + 0.24016445f;
  series = series * rest + 0.693151312f;
  series = series * rest + 1.0f;
#ifdef __AVX512F__
  return (Vector)_mm512_scalef_ps((__m512)series, (__m512)x);
#else
  const IntVector power = ((IntVector)shifted - (IntVector)magic + 127) << 23;
  return x < -126.0f ? Vector{} : series * (Vector)power;
#endif
}

inline Vector hyperbolic_tangent(Vector x) {
  const Vector power = exponential(x * -2.0f);
  return (1.0f - power) / (1.0f + power);
}

inline Vector silu(Vector x) { return x / (1.0f + exponential(-x)); }

// The approximation of x times the normal distribution function: (1 + tanh(y)) / 2 being the
// logistic function of 2 y.
inline Vector gelu_tanh(Vector x) {
  return x / (1.0f + exponential(x * (x * x * -0.0713548163f - 1.5957691216f)));
}

// Sixteen vectors -> one, of which lane i is the sum of vector i.
inline Vector sums(const Vector (&rows)[LANES]) {
#ifdef __AVX512F__
  __m512 pairs[8], quads[4];
  for (int i = 0; i < 8; ++i) {
    const __m512 a = (__m512)rows[2 * i], b = (__m512)rows[2 * i + 1];
    pairs[i] = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  }
  for (int i = 0; i < 4; ++i) {
    const __m512d a = (__m512d)pairs[2 * i], b = (__m512d)pairs[2 * i + 1];
    quads[i] = _mm512_add_ps((__m512)_mm512_unpacklo_pd(a, b), (__m512)_mm512_unpackhi_pd(a, b));
  }
  auto halves = [](__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  };
  return (Vector)halves(halves(quads[0], quads[1]), halves(quads[2], quads[3]));
#else
  Vector result;
  for (int row = 0; row < LANES; ++row) result[row] = sum(rows[row]);
  return result;
#endif
}
