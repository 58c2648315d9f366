// Panels (panel.h) of bytes, and sums of products of bytes in 32 bits, which are exact.
//
// A step of such a panel is four elements deep, as in the instructions for 8-bit dot products.
// Totals are Vectors of integers.

#pragma once

#include "panel.h"

// add_quads(total, a, b), for registers: total + the four products of bytes of each lane. `a` has
// unsigned bytes, `b` signed ones.
#ifdef __aarch64__
#include "quads_neon.h"
#else
#include "quads_x86.h"
#endif

namespace stepwell {

// Converts the integers of the lanes to floats.
inline Register to_floats(Register integers) {
  return __builtin_convertvector((IntRegister)integers, Register);
}

#ifndef __AVX512F__
inline Vector add_quads(Vector total, Vector a, Vector b) {
  return map_registers([](Register t, Register x, Register y) { return add_quads(t, x, y); }, total,
                       a, b);
}

inline Vector to_floats(Vector integers) {
  return map_registers([](Register part) { return to_floats(part); }, integers);
}
#endif

// Writes the lowest byte of each lane.
inline void store_bytes(std::uint8_t* to, IntRegister value) {
  const Bytes low = __builtin_convertvector(value, Bytes);
  std::memcpy(to, &low, sizeof low);
}

// An unsigned byte of a panel of keys, by which rows of signed bytes are multiplied.
struct KeyByte {
  std::uint8_t bits;
};

// A signed byte of a panel of values, by which rows of unsigned bytes are multiplied.
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
    return repeat((Register)(IntRegister{} + quad));
  }
  static Vector load(const T* b) { return stepwell::load(reinterpret_cast<const float*>(b)); }
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
