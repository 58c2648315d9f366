// Vector for AVX2: see vector.h.

#pragma once

#include <immintrin.h>

#include "vector.h"

namespace stepwell {

// Two registers of AVX2, with the operators that the compiler gives a vector in one register.
struct Vector {
  Register low;
  Register high;
};

// A vector of the results of work(a register of each vector).
template <class Work, class... Vectors>
inline __attribute__((always_inline)) Vector map_registers(Work&& work, Vectors... vectors) {
  return {work(vectors.low...), work(vectors.high...)};
}

template <class Part>
inline Vector of_registers(Part&& part) {
  return {part(0), part(LANES / 2)};
}

template <class Work>
inline void for_registers(Vector value, Work&& work) {
  work(value.low, 0);
  work(value.high, LANES / 2);
}

inline Vector repeat(Register part) { return {part, part}; }

inline Vector splat(float value) { return {value - Register{}, value - Register{}}; }

inline Vector operator-(Vector a) { return {-a.low, -a.high}; }

#define OPERATION(SIGN)                                                                    \
  inline Vector operator SIGN(Vector a, Vector b) {                                        \
    return {a.low SIGN b.low, a.high SIGN b.high};                                         \
  }                                                                                        \
  inline Vector operator SIGN(Vector a, float b) { return {a.low SIGN b, a.high SIGN b}; } \
  inline Vector operator SIGN(float a, Vector b) { return {a SIGN b.low, a SIGN b.high}; }
OPERATION(+)
OPERATION(-)
OPERATION(*)
OPERATION(/)
#undef OPERATION

inline Vector& operator+=(Vector& a, Vector b) { return a = a + b; }

// Copied register by register, because a single copy would go through the stack.
inline Vector load(const float* from) {
  Vector value;
  std::memcpy(&value.low, from, sizeof value.low);
  std::memcpy(&value.high, from + LANES / 2, sizeof value.high);
  return value;
}

inline void store(float* to, Vector value) {
  std::memcpy(to, &value.low, sizeof value.low);
  std::memcpy(to + LANES / 2, &value.high, sizeof value.high);
}

inline void store_halves(float* to, Vector value) { store(to, value); }

inline Vector load_partial(const float* from, int count) {
  if (count >= LANES) return load(from);
  Vector value = {};
  if (count > 0) std::memcpy(&value, from, count * sizeof(float));
  return value;
}

inline void store_partial(float* to, Vector value, int count) {
  if (count > 0) std::memcpy(to, &value, (count < LANES ? count : LANES) * sizeof(float));
}

inline Register fmadd(Register a, Register b, Register c) {
  return (Register)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}

inline Vector fmadd(Vector a, Vector b, Vector c) {
  return {fmadd(a.low, b.low, c.low), fmadd(a.high, b.high, c.high)};
}

inline Vector load(const BFloat16* from) {
  const auto part = [=](int first) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + first));
    return (Register)_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16);
  };
  return {part(0), part(LANES / 2)};
}

inline void store(BFloat16* to, Vector value) {
  // Packs lane by lane: words 0 to 3 of `low`, 0 to 3 of `high`, 4 to 7 of `low`, 4 to 7 of `high`.
  const __m256i packed =
      _mm256_packus_epi32((__m256i)bfloat16_bits(value.low), (__m256i)bfloat16_bits(value.high));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_permute4x64_epi64(packed, 0xd8));
}

inline Vector load_partial(const BFloat16* from, int count) {
  if (count >= LANES) return load(from);
  BFloat16 some[LANES] = {};
  if (count > 0) std::memcpy(some, from, count * sizeof(BFloat16));
  return load(some);
}

inline void store_partial(BFloat16* to, Vector value, int count) {
  BFloat16 all[LANES];
  store(all, value);
  if (count > 0) std::memcpy(to, all, (count < LANES ? count : LANES) * sizeof(BFloat16));
}

// Sixteen pairs of words, in order.
inline Vector word_pairs(Register even, Register odd) {
  const __m256i low = _mm256_unpacklo_epi16((__m256i)even, (__m256i)odd);
  const __m256i high = _mm256_unpackhi_epi16((__m256i)even, (__m256i)odd);
  return {(Register)_mm256_permute2x128_si256(low, high, 0x20),
          (Register)_mm256_permute2x128_si256(low, high, 0x31)};
}

template <int HALF>
inline Vector zip_words(Vector even, Vector odd) {
  return HALF == 0 ? word_pairs(even.low, odd.low) : word_pairs(even.high, odd.high);
}

inline IntRegister to_nearest(Register value) {
  return (IntRegister)_mm256_cvtps_epi32((__m256)value);
}

inline Vector keep_lanes(Vector value, int first, int end, float other) {
  const auto part = [=](Register own, int before) {
    const IntRegister lane = IntRegister{0, 1, 2, 3, 4, 5, 6, 7} + before;
    return ((lane >= first) & (lane < end)) ? own : other - Register{};
  };
  return {part(value.low, 0), part(value.high, LANES / 2)};
}

inline float sum(Vector value) {
  float lanes[LANES], total = 0;
  store(lanes, value);
  for (float lane : lanes) total += lane;
  return total;
}

inline Vector larger(Vector a, Vector b) { return {larger(a.low, b.low), larger(a.high, b.high)}; }

inline float largest(Vector value) {
  float lanes[LANES];
  store(lanes, value);
  float most = lanes[0];
  for (float lane : lanes) most = lane > most ? lane : most;
  return most;
}

}  // namespace stepwell
