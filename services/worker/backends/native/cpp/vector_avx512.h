// Vector for AVX-512: see vector.h.

#pragma once

#include <immintrin.h>

#include "vector.h"

namespace stepwell {

typedef Register Vector;

template <class Part>
inline Vector of_registers(Part&& part) {
  return part(0);
}

template <class Work>
inline void for_registers(Vector value, Work&& work) {
  work(value, 0);
}

inline Vector repeat(Register part) { return part; }

inline Vector splat(float value) { return value - Vector{}; }

inline Vector load(const float* from) {
  Vector value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

inline void store(float* to, Vector value) { std::memcpy(to, &value, sizeof value); }

// Stores a vector as two halves. In code with multiplications this is faster on a Zen 5: reading a
// whole register there delays a multiplication, unless the register has just been computed.
inline void store_halves(float* to, Vector value) {
  const __m512d all = (__m512d)value;
  _mm256_storeu_pd(reinterpret_cast<double*>(to), _mm512_castpd512_pd256(all));
  _mm256_storeu_pd(reinterpret_cast<double*>(to + LANES / 2), _mm512_extractf64x4_pd(all, 1));
}

// A mask of 32 lanes with a bit for each of the first `count`.
inline __mmask32 lane_mask(int count) {
  return count >= 32 ? ~__mmask32{0} : (__mmask32{1} << (count < 0 ? 0 : count)) - 1;
}

inline Vector load_partial(const float* from, int count) {
  return (Vector)_mm512_maskz_loadu_ps(__mmask16(lane_mask(count)), from);
}

inline void store_partial(float* to, Vector value, int count) {
  _mm512_mask_storeu_ps(to, __mmask16(lane_mask(count)), (__m512)value);
}

inline Register fmadd(Register a, Register b, Register c) {
  return (Register)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}

inline __m256i to_bfloat16(Vector value) {
#ifdef __AVX512BF16__
  return (__m256i)_mm512_cvtneps_pbh((__m512)value);
#else
  return _mm512_cvtepi32_epi16((__m512i)bfloat16_bits(value));
#endif
}

inline Vector load(const BFloat16* from) {
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return (Vector)_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16);
}

inline void store(BFloat16* to, Vector value) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), to_bfloat16(value));
}

inline Vector load_partial(const BFloat16* from, int count) {
  const __m256i half = _mm256_maskz_loadu_epi16(__mmask16(lane_mask(count)), from);
  return (Vector)_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16);
}

inline void store_partial(BFloat16* to, Vector value, int count) {
  _mm256_mask_storeu_epi16(to, __mmask16(lane_mask(count)), to_bfloat16(value));
}

inline Vector keep_lanes(Vector value, int first, int end, float other) {
  const __mmask16 kept = __mmask16(lane_mask(end) & ~lane_mask(first));
  return (Vector)_mm512_mask_blend_ps(kept, (__m512)splat(other), (__m512)value);
}

inline float sum(Vector value) { return _mm512_reduce_add_ps((__m512)value); }

inline float largest(Vector value) { return _mm512_reduce_max_ps((__m512)value); }

inline IntRegister to_nearest(Register value) {
  return (IntRegister)_mm512_cvtps_epi32((__m512)value);
}

}  // namespace stepwell
