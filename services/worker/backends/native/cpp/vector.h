// Vectors of sixteen floats, so that the same source serves AVX-512 and AVX2; and the two element types
// that weights and caches are held in.
//
// The compiler fuses no multiplication with an addition by itself (-ffp-contract=off): it would decide
// by what stands around an expression, and two copies of one loop could round differently. Where a
// product and a sum are to be rounded once, `fused` says so.

#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

constexpr int LANES = 16;

// What the processor has registers for, in the compiler's vector extension.
#ifdef __AVX512F__
constexpr int REGISTER_BYTES = 64;
#else
constexpr int REGISTER_BYTES = 32;
#endif
typedef float Register __attribute__((vector_size(REGISTER_BYTES)));
typedef std::int32_t IntRegister __attribute__((vector_size(REGISTER_BYTES)));

#ifdef __AVX512F__
typedef Register Vector;

inline Vector splat(float value) { return value - Vector{}; }

inline Vector load(const float* from) {
  Vector value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

inline void store(float* to, Vector value) { std::memcpy(to, &value, sizeof value); }
#else
#include "two_registers.h"
#endif

struct BFloat16 {
  std::uint16_t bits;
};

// a * b + c, rounded once.
#ifdef __AVX512F__
inline Register fused(Register a, Register b, Register c) {
  return (Register)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}
#else
inline Register fused(Register a, Register b, Register c) {
  return (Register)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}

inline Vector fused(Vector a, Vector b, Vector c) {
  return {fused(a.low, b.low, c.low), fused(a.high, b.high, c.high)};
}
#endif

template <class V>
V fused(V a, V b, float c) {
  return fused(a, b, c - V{});
}

template <class V>
V fused(V a, float b, V c) {
  return fused(a, b - V{}, c);
}

template <class V>
V fused(V a, float b, float c) {
  return fused(a, b - V{}, c - V{});
}

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

// Lanes [first, end) of a vector, which may be outside of it, and `other` in all others.
inline Vector only(Vector value, int first, int end, float other) {
#ifdef __AVX512F__
  const __mmask16 kept = __mmask16(first_lanes(end) & ~first_lanes(first));
  return (Vector)_mm512_mask_blend_ps(kept, (__m512)splat(other), (__m512)value);
#else
  const auto part = [=](Register own, int before) {
    const IntRegister lane = IntRegister{0, 1, 2, 3, 4, 5, 6, 7} + before;
    return ((lane >= first) & (lane < end)) ? own : other - Register{};
  };
  return {part(value.low, 0), part(value.high, LANES / 2)};
#endif
}

inline float sum(Vector value) {
#ifdef __AVX512F__
  return _mm512_reduce_add_ps((__m512)value);
#else
  float lanes[LANES], total = 0;
  store(lanes, value);
  for (float lane : lanes) total += lane;
  return total;
#endif
}

inline Register larger(Register a, Register b) { return a > b ? a : b; }

inline float largest(Vector value) {
#ifdef __AVX512F__
  return _mm512_reduce_max_ps((__m512)value);
#else
  float lanes[LANES];
  store(lanes, value);
  float most = lanes[0];
  for (float lane : lanes) most = lane > most ? lane : most;
  return most;
#endif
}

// e^x within 2 units in the last place; next to 0 or 0 below -87, where normal floats end. The exponent
// is split into an integer and a rest within half of it, for which a polynomial of degree six is enough
// (Cody and Waite's reduction).
inline Register exponential(Register x) {
#ifdef __AVX512F__
  const __m512 clamped = _mm512_max_ps(_mm512_set1_ps(-110.0f), (__m512)x);  // NaN stays NaN.
  const Register whole = (Register)_mm512_roundscale_ps(
      _mm512_mul_ps(clamped, _mm512_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT);
  const Register rest = fused(whole, 2.12194440e-4f, fused(whole, -0.693359375f, (Register)clamped));
#else
  const Register magic = 12582912.0f - Register{};  // Adding it rounds to an integer.
  const Register clamped = larger(x < 88.0f ? x : 88.0f - Register{}, -87.0f - Register{});
  const Register shifted = fused(clamped, 1.44269504f, magic);
  const Register whole = shifted - magic;
  const Register rest = fused(whole, 2.12194440e-4f, fused(whole, -0.693359375f, clamped));
#endif
  Register series = fused(rest, 1.3888889e-3f, 8.3333333e-3f);
  series = fused(series, rest, 4.1666667e-2f);
  series = fused(series, rest, 1.6666667e-1f);
  series = fused(series, rest, 0.5f);
  series = fused(series, rest, 1.0f);
  series = fused(series, rest, 1.0f);
#ifdef __AVX512F__
  return (Register)_mm512_scalef_ps((__m512)series, (__m512)whole);
#else
  const IntRegister power = ((IntRegister)shifted - (IntRegister)magic + 127) << 23;
  return x < -87.0f ? Register{} : series * (Register)power;
#endif
}

// 2^x for x up to 0, within 2 units in the last place; next to 0 or 0 below -126. What is left above
// the next lower integer is a polynomial's.
inline Register power_of_two(Register x) {
#ifdef __AVX512F__
  const Register rest = (Register)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF);
#else
  const Register magic = 12582912.0f - Register{};
  const Register clamped = larger(x, -126.0f - Register{});
  const Register shifted = clamped - 0.5f + magic;
  const Register rest = clamped - (shifted - magic);
#endif
  Register series = fused(rest, 1.86713009e-3f, 9.01703028e-3f);
  series = fused(series, rest, 5.57999131e-2f);
  series = fused(series, rest, 0.24016445f);
  series = fused(series, rest, 0.693151312f);
  series = fused(series, rest, 1.0f);
#ifdef __AVX512F__
  return (Register)_mm512_scalef_ps((__m512)series, (__m512)x);
#else
  const IntRegister power = ((IntRegister)shifted - (IntRegister)magic + 127) << 23;
  return x < -126.0f ? Register{} : series * (Register)power;
#endif
}

// By powers of e below 1, which cannot overflow. NaN stays NaN.
inline Register hyperbolic_tangent(Register x) {
  const Register power = exponential((x < 0.0f ? x : -x) * 2.0f);
  const Register size = (1.0f - power) / (1.0f + power);
  return x < 0.0f ? -size : x == x ? size : x;
}

#ifndef __AVX512F__
inline Vector larger(Vector a, Vector b) { return {larger(a.low, b.low), larger(a.high, b.high)}; }

inline Vector exponential(Vector x) { return {exponential(x.low), exponential(x.high)}; }

inline Vector power_of_two(Vector x) { return {power_of_two(x.low), power_of_two(x.high)}; }

inline Vector hyperbolic_tangent(Vector x) {
  return {hyperbolic_tangent(x.low), hyperbolic_tangent(x.high)};
}
#endif

inline Vector silu(Vector x) { return x / (1.0f + exponential(-x)); }

// The approximation of x times the normal distribution function: (1 + tanh(y)) / 2 being the
// logistic function of 2 y.
inline Vector gelu_tanh(Vector x) {
  return x / (1.0f + exponential(x * fused(x * x, -0.0713548163f, -1.5957691216f)));
}
