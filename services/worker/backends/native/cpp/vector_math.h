// Exponentials and activations of vectors.

#pragma once

#include "vector.h"

namespace stepwell {

// e^x within 2 units in the last place. The result is 0 or almost 0 below -87, where normal floats
// end. Cody and Waite's reduction: x / ln 2 is split into an integer and a remainder of at most one
// half. A polynomial of degree six approximates the exponential of the remainder.
inline Register exponential(Register x) {
#ifdef __AVX512F__
  const __m512 clamped = _mm512_max_ps(_mm512_set1_ps(-110.0f), (__m512)x);  // NaN stays NaN.
  const Register whole = (Register)_mm512_roundscale_ps(
      _mm512_mul_ps(clamped, _mm512_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT);
  const Register rest =
      fmadd(whole, 2.12194440e-4f, fmadd(whole, -0.693359375f, (Register)clamped));
#else
  const Register magic = 12582912.0f - Register{};  // Adding it rounds to an integer.
  const Register below = x > 88.0f ? 88.0f - Register{} : x;
  const Register clamped = larger(-87.0f - Register{}, below);  // NaN stays NaN.
  const Register shifted = fmadd(clamped, 1.44269504f, magic);
  const Register whole = shifted - magic;
  const Register rest = fmadd(whole, 2.12194440e-4f, fmadd(whole, -0.693359375f, clamped));
#endif
  Register series = fmadd(rest, 1.3888889e-3f, 8.3333333e-3f);
  series = fmadd(series, rest, 4.1666667e-2f);
  series = fmadd(series, rest, 1.6666667e-1f);
  series = fmadd(series, rest, 0.5f);
  series = fmadd(series, rest, 1.0f);
  series = fmadd(series, rest, 1.0f);
#ifdef __AVX512F__
  return (Register)_mm512_scalef_ps((__m512)series, (__m512)whole);
#else
  const IntRegister power = ((IntRegister)shifted - (IntRegister)magic + 127) << 23;
  return x < -87.0f ? Register{} : series * (Register)power;
#endif
}

// 2^x for x up to 0, within 2 units in the last place. The result is 0 or almost 0 below -126. A
// polynomial approximates 2^(x - floor(x)).
inline Register power_of_two(Register x) {
#ifdef __AVX512F__
  const Register rest = (Register)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF);
#else
  const Register magic = 12582912.0f - Register{};
  const Register clamped = larger(-126.0f - Register{}, x);  // NaN stays NaN.
  const Register shifted = clamped - 0.5f + magic;
  const Register rest = clamped - (shifted - magic);
#endif
  Register series = fmadd(rest, 1.86713009e-3f, 9.01703028e-3f);
  series = fmadd(series, rest, 5.57999131e-2f);
  series = fmadd(series, rest, 0.24016445f);
  series = fmadd(series, rest, 0.693151312f);
  series = fmadd(series, rest, 1.0f);
#ifdef __AVX512F__
  return (Register)_mm512_scalef_ps((__m512)series, (__m512)x);
#else
  const IntRegister power = ((IntRegister)shifted - (IntRegister)magic + 127) << 23;
  return x < -126.0f ? Register{} : series * (Register)power;
#endif
}

// Computed from powers of e below 1, which cannot overflow. NaN stays NaN.
inline Register hyperbolic_tangent(Register x) {
  const Register power = exponential((x < 0.0f ? x : -x) * 2.0f);
  const Register size = (1.0f - power) / (1.0f + power);
  return x < 0.0f ? -size : x == x ? size : x;
}

#ifndef __AVX512F__
inline Vector exponential(Vector x) {
  return map_registers([](Register part) { return exponential(part); }, x);
}

inline Vector power_of_two(Vector x) {
  return map_registers([](Register part) { return power_of_two(part); }, x);
}

inline Vector hyperbolic_tangent(Vector x) {
  return map_registers([](Register part) { return hyperbolic_tangent(part); }, x);
}
#endif

inline Vector silu(Vector x) { return x / (1.0f + exponential(-x)); }

// GELU by the approximation with tanh, computed with the logistic function, because (1 + tanh(y)) /
// 2 is the logistic function of 2 y.
inline Vector gelu_tanh(Vector x) {
  return x / (1.0f + exponential(x * fmadd(x * x, -0.0713548163f, -1.5957691216f)));
}

}  // namespace stepwell
