// Vectors of sixteen floats, the same for AVX-512 and AVX2, and the two element types of weights
// and caches.
//
// The library is compiled with -ffp-contract=off. Otherwise the compiler would choose, depending on
// the surrounding expression, whether a multiplication and an addition are rounded once or twice,
// and two copies of one loop could return different bits. `fmadd` rounds once.

#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace stepwell {

constexpr int LANES = 16;  // Floats in a Vector.

#ifdef __AVX512F__
constexpr int REGISTER_BYTES = 64;
#else
constexpr int REGISTER_BYTES = 32;
#endif

// One vector register of the processor, in the compiler's vector extension.
typedef float Register __attribute__((vector_size(REGISTER_BYTES)));
typedef std::int32_t IntRegister __attribute__((vector_size(REGISTER_BYTES)));
typedef std::int8_t Bytes __attribute__((vector_size(REGISTER_BYTES / 4)));  // One for each float.

#ifdef __AVX512F__
typedef Register Vector;

inline Vector splat(float value) { return value - Vector{}; }

inline Vector load(const float* from) {
  Vector value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

inline void store(float* to, Vector value) { std::memcpy(to, &value, sizeof value); }

// Stores a vector as two halves. In code with multiplications this is faster on a Zen 5: there,
// reading a whole register delays a multiplication, unless the register has just been computed.
inline void store_halves(float* to, Vector value) {
  const __m512d all = (__m512d)value;
  _mm256_storeu_pd(reinterpret_cast<double*>(to), _mm512_castpd512_pd256(all));
  _mm256_storeu_pd(reinterpret_cast<double*>(to + LANES / 2), _mm512_extractf64x4_pd(all, 1));
}

// A bit for each of the first `count` lanes of 32.
inline __mmask32 lane_mask(int count) {
  return count >= 32 ? ~__mmask32{0} : (__mmask32{1} << (count < 0 ? 0 : count)) - 1;
}

// `load_partial` reads the first `count` elements and sets the remaining lanes to 0.
// `store_partial` writes the first `count` lanes. Neither accesses memory beyond them. Counts are
// clamped to 0 and LANES.
inline Vector load_partial(const float* from, int count) {
  return (Vector)_mm512_maskz_loadu_ps(__mmask16(lane_mask(count)), from);
}

inline void store_partial(float* to, Vector value, int count) {
  _mm512_mask_storeu_ps(to, __mmask16(lane_mask(count)), (__m512)value);
}

// a * b + c, rounded once.
inline Register fmadd(Register a, Register b, Register c) {
  return (Register)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}
#else
// Two registers of AVX2, with the operators that the compiler gives a vector in one register.
struct Vector {
  Register low;
  Register high;
};

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

// Copied register by register: a single copy would go through the stack.
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
#endif

struct BFloat16 {
  std::uint16_t bits;
};

template <class V>
V fmadd(V a, V b, float c) {
  return fmadd(a, b, c - V{});
}

template <class V>
V fmadd(V a, float b, V c) {
  return fmadd(a, b - V{}, c);
}

template <class V>
V fmadd(V a, float b, float c) {
  return fmadd(a, b - V{}, c - V{});
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

// Rounds to the nearest, ties to even. NaN stays NaN.
template <>
inline BFloat16 from_float<BFloat16>(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if (value != value) return {static_cast<std::uint16_t>((bits >> 16) | 0x40)};
  return {static_cast<std::uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

// Bits of bfloat16 numbers, one in the lower half of each lane, rounded like `from_float`.
inline IntRegister bfloat16_bits(Register value) {
  typedef std::uint32_t Bits __attribute__((vector_size(REGISTER_BYTES)));
  const Bits bits = (Bits)value, high = bits >> 16;
  const Bits nearest = (bits + 0x7fff + (high & 1)) >> 16;
  return value == value ? (IntRegister)nearest : (IntRegister)(high | 0x40);
}

#ifdef __AVX512F__
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
#else
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
#endif

// Lanes [first, end) of `value`, and `other` in the remaining lanes. The bounds may be outside of
// the vector.
inline Vector keep_lanes(Vector value, int first, int end, float other) {
#ifdef __AVX512F__
  const __mmask16 kept = __mmask16(lane_mask(end) & ~lane_mask(first));
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

#ifndef __AVX512F__
inline Vector larger(Vector a, Vector b) { return {larger(a.low, b.low), larger(a.high, b.high)}; }
#endif

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

}  // namespace stepwell
