// A vector that fills two registers, with the operations that the compiler has for one. To be included
// by vector.h.

#pragma once

struct Vector {
  Register low;
  Register high;
};

inline Vector splat(float value) { return {value - Register{}, value - Register{}}; }

inline Vector operator-(Vector a) { return {-a.low, -a.high}; }

#define OPERATION(SIGN)                                                                        \
  inline Vector operator SIGN(Vector a, Vector b) { return {a.low SIGN b.low, a.high SIGN b.high}; } \
  inline Vector operator SIGN(Vector a, float b) { return {a.low SIGN b, a.high SIGN b}; }     \
  inline Vector operator SIGN(float a, Vector b) { return {a SIGN b.low, a SIGN b.high}; }
OPERATION(+)
OPERATION(-)
OPERATION(*)
OPERATION(/)
#undef OPERATION

inline Vector& operator+=(Vector& a, Vector b) { return a = a + b; }

// A register at a time: as a whole it would go through the stack.
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
