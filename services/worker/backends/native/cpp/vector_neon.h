// Vector for ARM's NEON: see vector.h.

#pragma once

#include <arm_neon.h>

#include "vector.h"

namespace stepwell {

constexpr int VECTOR_REGISTERS = 4;

struct Vector {
  Register parts[VECTOR_REGISTERS];
};

template <class Part>
inline Vector of_registers(Part&& part) {
  return {part(0), part(4), part(8), part(12)};
}

template <class Work>
inline void for_registers(Vector value, Work&& work) {
  work(value.parts[0], 0);
  work(value.parts[1], 4);
  work(value.parts[2], 8);
  work(value.parts[3], 12);
}

// A vector of the results of work(a register of each vector).
template <class Work, class... Vectors>
inline __attribute__((always_inline)) Vector map_registers(Work&& work, Vectors... vectors) {
  return {work(vectors.parts[0]...), work(vectors.parts[1]...), work(vectors.parts[2]...),
          work(vectors.parts[3]...)};
}

inline Vector repeat(Register part) { return {part, part, part, part}; }

inline Register fmadd(Register a, Register b, Register c) {
  return (Register)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}

inline Vector splat(float value) {
  return of_registers([=](int) { return value - Register{}; });
}

inline Vector operator-(Vector a) {
  return map_registers([](Register x) { return -x; }, a);
}

#define OPERATION(SIGN)                                                          \
  inline Vector operator SIGN(Vector a, Vector b) {                              \
    return map_registers([](Register x, Register y) { return x SIGN y; }, a, b); \
  }                                                                              \
  inline Vector operator SIGN(Vector a, float b) {                               \
    return map_registers([=](Register x) { return x SIGN b; }, a);               \
  }                                                                              \
  inline Vector operator SIGN(float a, Vector b) {                               \
    return map_registers([=](Register x) { return a SIGN x; }, b);               \
  }
OPERATION(+)
OPERATION(-)
OPERATION(*)
OPERATION(/)
#undef OPERATION

inline Vector& operator+=(Vector& a, Vector b) { return a = a + b; }

inline Vector fmadd(Vector a, Vector b, Vector c) {
  return map_registers([](Register x, Register y, Register z) { return fmadd(x, y, z); }, a, b, c);
}

inline Vector larger(Vector a, Vector b) {
  return map_registers([](Register x, Register y) { return larger(x, y); }, a, b);
}

// Copied register by register, because a single copy would go through the stack.
inline Vector load(const float* from) {
  return of_registers([=](int lane) {
    Register part;
    std::memcpy(&part, from + lane, sizeof part);
    return part;
  });
}

inline void store(float* to, Vector value) {
  for_registers(value,
                [=](Register part, int lane) { std::memcpy(to + lane, &part, sizeof part); });
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

inline Vector load(const BFloat16* from) {
  return of_registers([=](int first) {
    const uint16x4_t some = vld1_u16(&from[first].bits);
    return (Register)vshll_n_u16(some, 16);
  });
}

inline void store(BFloat16* to, Vector value) {
  for_registers(value, [=](Register part, int lane) {
    vst1_u16(&to[lane].bits, vmovn_u32((uint32x4_t)bfloat16_bits(part)));
  });
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

template <int HALF>
inline Vector zip_words(Vector even, Vector odd) {
  const uint16x8_t a = (uint16x8_t)even.parts[2 * HALF], b = (uint16x8_t)odd.parts[2 * HALF];
  const uint16x8_t c = (uint16x8_t)even.parts[2 * HALF + 1],
                   d = (uint16x8_t)odd.parts[2 * HALF + 1];
  return {(Register)vzip1q_u16(a, b), (Register)vzip2q_u16(a, b), (Register)vzip1q_u16(c, d),
          (Register)vzip2q_u16(c, d)};
}

inline IntRegister to_nearest(Register value) {
  return (IntRegister)vcvtnq_s32_f32((float32x4_t)value);
}

inline Vector keep_lanes(Vector value, int first, int end, float other) {
  return of_registers([&](int before) {
    const IntRegister lane = IntRegister{0, 1, 2, 3} + before;
    const Register own = value.parts[before / 4];
    return ((lane >= first) & (lane < end)) ? own : other - Register{};
  });
}

inline float sum(Vector value) {
  float lanes[LANES], total = 0;
  store(lanes, value);
  for (float lane : lanes) total += lane;
  return total;
}

inline float largest(Vector value) {
  float lanes[LANES];
  store(lanes, value);
  float most = lanes[0];
  for (float lane : lanes) most = lane > most ? lane : most;
  return most;
}

}  // namespace stepwell
