// Vectors of sixteen floats, the same for AVX-512, AVX2 and NEON, and the two element types of
// weights and KV caches.
//
// The library is compiled with -ffp-contract=off. Otherwise the compiler would choose, depending on
// the surrounding expression, whether a multiplication and an addition are rounded once or twice,
// and two copies of one loop could return different bits. `fmadd` rounds once.
//
// vector_avx512.h, vector_avx2.h and vector_neon.h define Vector. With AVX-512 it is a Register.
// Otherwise it is a structure of registers, and has the operators of a Register. Functions of all
// three headers:
// - of_registers(part): a vector of the registers part(i), where i is the register's first lane.
// - for_registers(vector, work): calls work(register, its first lane) for each register.
// - repeat(register), splat(float): vectors of equal registers, and of equal lanes.
// - load, store: of LANES elements. store_halves may be faster in code with multiplications.
// - load_partial, store_partial: of the first `count` elements. They access no other memory. Other
//   lanes are set to 0. Counts are clamped to 0 and LANES.
// - fmadd(a, b, c): a * b + c, rounded once.
// - keep_lanes(value, first, end, other): lanes [first, end) of `value`, and `other` in the
//   remaining lanes. The bounds may be outside of the vector.
// - sum, largest: over the lanes. larger: lane by lane.
// - to_nearest(register): the nearest integers, ties to even.
// Functions of the headers in which a vector is a structure:
// - map_registers(work, vectors...): a vector of the results of work(a register of each vector).
// - zip_words<HALF>(even, odd): a half of the sequence of word 0 of `even`, word 0 of `odd`, word 1
//   of `even`, and so on.

#pragma once

#include <cstdint>
#include <cstring>

namespace stepwell {

constexpr int LANES = 16;  // Floats in a Vector.

#if defined(__AVX512F__)
constexpr int REGISTER_BYTES = 64;
#elif defined(__AVX2__)
constexpr int REGISTER_BYTES = 32;
#else
constexpr int REGISTER_BYTES = 16;
#endif

// One vector register of the processor, in the compiler's vector extension.
typedef float Register __attribute__((vector_size(REGISTER_BYTES)));
typedef std::int32_t IntRegister __attribute__((vector_size(REGISTER_BYTES)));
typedef std::int8_t Bytes __attribute__((vector_size(REGISTER_BYTES / 4)));  // One for each float.

struct BFloat16 {
  std::uint16_t bits;
};

// bfloat16 numbers, rounded like `from_float`, each in the lower half of a lane.
inline IntRegister bfloat16_bits(Register value) {
  typedef std::uint32_t Bits __attribute__((vector_size(REGISTER_BYTES)));
  const Bits bits = (Bits)value, high = bits >> 16;
  const Bits nearest = (bits + 0x7fff + (high & 1)) >> 16;
  return value == value ? (IntRegister)nearest : (IntRegister)(high | 0x40);
}

inline Register larger(Register a, Register b) { return a > b ? a : b; }

}  // namespace stepwell

#if defined(__AVX512F__)
#include "vector_avx512.h"
#elif defined(__AVX2__)
#include "vector_avx2.h"
#elif defined(__ARM_NEON)
#include "vector_neon.h"
#else
#error "the kernels need AVX2 or NEON"
#endif

namespace stepwell {

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

}  // namespace stepwell
