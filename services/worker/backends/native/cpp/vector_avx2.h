// A vector in two registers of AVX2, with the operators that the compiler gives a vector in one
// register. Only vector.h includes it.

#pragma once

#include "register.h"

namespace stepwell {

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

// Copied register by register: copied at once, the vector would go through the stack.
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

}  // namespace stepwell
