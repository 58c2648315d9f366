// Panels of bytes, and sums of products of bytes in 32 bits, which are exact.
//
// A step of such a panel is four elements deep, as in the instructions for 8-bit dot products.
// Totals are Vectors of integers.

#pragma once

#include "panel.h"

namespace stepwell {

// Calls work(a register, its first lane) for each register of a vector.
template <class Work>
inline void for_registers(Vector value, Work&& work) {
#ifdef __AVX512F__
  work(value, 0);
#else
  work(value.low, 0);
  work(value.high, LANES / 2);
#endif
}

// total + the four products of bytes of each lane. `a` has unsigned bytes, `b` signed ones.
inline Register add_quads(Register total, Register a, Register b) {
  // Written in assembly: with the integer vectors of intrinsic functions, the compiler (GCC 12)
  // keeps copies on the stack in loops over float vectors.
#if defined(__AVX512VNNI__)
  asm("vpdpbusd %2, %1, %0" : "+v"(total) : "v"(a), "v"(b));
  return total;
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
  asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(total) : "x"(a), "x"(b));
  return total;
#else
  typedef std::int16_t Words __attribute__((vector_size(REGISTER_BYTES)));
  typedef std::uint16_t UnsignedWords __attribute__((vector_size(REGISTER_BYTES)));
  const auto pairs = [](Words x, Words y) {
#ifdef __AVX512F__
    return (IntRegister)_mm512_madd_epi16((__m512i)x, (__m512i)y);
#else
    return (IntRegister)_mm256_madd_epi16((__m256i)x, (__m256i)y);
#endif
  };
  const Words even = (Words)a & 255, odd = (Words)((UnsignedWords)a >> 8);
  const Words signed_even = (Words)((UnsignedWords)b << 8) >> 8, signed_odd = (Words)b >> 8;
  return (Register)((IntRegister)total + pairs(even, signed_even) + pairs(odd, signed_odd));
#endif
}

// Converts the integers of the lanes to floats.
inline Register to_floats(Register integers) {
  return __builtin_convertvector((IntRegister)integers, Register);
}

#ifndef __AVX512F__
inline Vector add_quads(Vector total, Vector a, Vector b) {
  return {add_quads(total.low, a.low, b.low), add_quads(total.high, a.high, b.high)};
}

inline Vector to_floats(Vector integers) {
  return {to_floats(integers.low), to_floats(integers.high)};
}
#endif

// The nearest integers, ties to even.
inline IntRegister to_nearest(Register value) {
#ifdef __AVX512F__
  return (IntRegister)_mm512_cvtps_epi32((__m512)value);
#else
  return (IntRegister)_mm256_cvtps_epi32((__m256)value);
#endif
}

// Writes the lowest byte of each lane.
inline void store_bytes(std::uint8_t* to, IntRegister value) {
  const Bytes low = __builtin_convertvector(value, Bytes);
  std::memcpy(to, &low, sizeof low);
}

// Elements of panels of keys, unsigned. The rows that they are multiplied by are signed.
struct KeyByte {
  std::uint8_t bits;
};

// Elements of panels of values, signed. The rows that they are multiplied by are unsigned.
struct ValueByte {
  std::uint8_t bits;
};

// PanelOps for elements of one byte.
template <class T>
struct QuadOps {
  static constexpr int DEPTH = 4;
  static Vector broadcast(const T* a) {
    std::int32_t quad;
    std::memcpy(&quad, a, sizeof quad);
    return to_vector(IntRegister{} + quad);
  }
  static Vector load(const T* b) { return stepwell::load(reinterpret_cast<const float*>(b)); }

 private:
  static Vector to_vector(IntRegister part) {
#ifdef __AVX512F__
    return (Vector)part;
#else
    return {(Register)part, (Register)part};
#endif
  }
};

template <>
struct PanelOps<KeyByte> : QuadOps<KeyByte> {
  static Vector multiply_add(Vector total, Vector a, Vector b) { return add_quads(total, b, a); }
};

template <>
struct PanelOps<ValueByte> : QuadOps<ValueByte> {
  static Vector multiply_add(Vector total, Vector a, Vector b) { return add_quads(total, a, b); }
};

}  // namespace stepwell
