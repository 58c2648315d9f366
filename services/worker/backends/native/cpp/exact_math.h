// Exponentials, logarithms and random words, with the arithmetic of sampling/exact_math.py and
// sampling/race.py: operations that IEEE 754 rounds correctly, in a fixed order and never fused.
// Therefore these functions and NumPy's versions return the same bits on every processor.

#pragma once

#include "vector.h"

namespace stepwell {

typedef double DoubleRegister __attribute__((vector_size(REGISTER_BYTES)));
typedef std::uint64_t WordRegister __attribute__((vector_size(REGISTER_BYTES)));
typedef float HalfRegister __attribute__((vector_size(REGISTER_BYTES / 2)));

constexpr int FLOATS = REGISTER_BYTES / 4;   // In a Register.
constexpr int DOUBLES = REGISTER_BYTES / 8;  // In a DoubleRegister.

template <class R, class T>
inline R load_register(const T* from) {
  R value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

template <class R, class T>
inline void store_register(T* to, R value) {
  std::memcpy(to, &value, sizeof value);
}

inline DoubleRegister widen(HalfRegister value) {
  return __builtin_convertvector(value, DoubleRegister);
}

// The sequence first, first + 1, ...
inline WordRegister consecutive(std::uint64_t first) {
  WordRegister value;
  for (int i = 0; i < DOUBLES; ++i) value[i] = first + i;
  return value;
}

// The function `exponential` of sampling/exact_math.py.
inline Register exact_exponential(Register x) {
  const Register magic = 12582912.0f - Register{};  // Adding it rounds to an integer.
  const Register clamped = x > -87.0f ? x : -87.0f - Register{};
  const Register shifted = clamped * 1.44269504f + magic;
  const Register whole = shifted - magic;
  const Register rest = clamped - whole * 0.693359375f - whole * -2.12194440e-4f;
  Register series = rest * (1.0f / 720.0f) + 1.0f / 120.0f;
  series = series * rest + 1.0f / 24.0f;
  series = series * rest + 1.0f / 6.0f;
  series = series * rest + 0.5f;
  series = series * rest + 1.0f;
  series = series * rest + 1.0f;
  const IntRegister power = ((IntRegister)shifted - (IntRegister)magic + 127) << 23;
  return x < -87.0f ? Register{} : series * (Register)power;
}

// The function `logarithm` of sampling/exact_math.py.
inline DoubleRegister exact_logarithm(DoubleRegister x) {
  constexpr std::uint64_t ONE = 0x3ff0000000000000, ROOT_OF_HALF = 0x3fe6a09e667f3bcd;
  constexpr std::uint64_t TWO_TO_52 = 0x4330000000000000;
  const WordRegister bits = (WordRegister)x;
  const WordRegister biased = (bits + (ONE - ROOT_OF_HALF)) >> 52;
  const DoubleRegister exponent = (DoubleRegister)(biased | TWO_TO_52) - (0x1p52 + 1023.0);
  const DoubleRegister mantissa = (DoubleRegister)(bits - ((biased - 1023) << 52));
  const DoubleRegister over = mantissa - 1.0;
  const DoubleRegister ratio = over / (over + 2.0);
  const DoubleRegister square = ratio * ratio;
  DoubleRegister series = square * (2.0 / 21.0);
  for (int odd = 19; odd > 1; odd -= 2) series = (series + 2.0 / odd) * square;
  const DoubleRegister of_mantissa = ratio * 2.0 + ratio * series;
  return exponent * 0x1.62e42feep-1 + (exponent * 0x1.a39ef35793c76p-33 + of_mantissa);
}

// The functions `words` and `exponentials` of sampling/race.py.
inline WordRegister random_words(std::uint64_t state, WordRegister indexes) {
  WordRegister mixed = indexes * std::uint64_t{0x9e3779b97f4a7c15} + state;
  mixed = (mixed ^ mixed >> 30) * std::uint64_t{0xbf58476d1ce4e5b9};
  mixed = (mixed ^ mixed >> 27) * std::uint64_t{0x94d049bb133111eb};
  return mixed ^ mixed >> 31;
}

inline DoubleRegister random_exponentials(WordRegister words) {
  constexpr std::uint64_t ONE = 0x3ff0000000000000;
  const DoubleRegister number = (DoubleRegister)(words >> 12 | ONE) - 1.0 + 0x1p-53;
  return -exact_logarithm(number);
}

// The function `random_states` of sampling/philox.py: two words of a seed at a position, in stream
// 0.
inline void random_states(std::uint64_t seed, std::uint64_t position, std::uint64_t (&states)[2]) {
  constexpr std::uint64_t LOW = 0xffffffff;
  std::uint64_t c0 = position & LOW, c1 = position >> 32, c2 = 0, c3 = 0;
  std::uint64_t k0 = seed & LOW, k1 = seed >> 32;
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t even = 0xd2511f53 * c0, odd = 0xcd9e8d57 * c2;
    c0 = (odd >> 32) ^ c1 ^ k0;
    c1 = odd & LOW;
    c2 = (even >> 32) ^ c3 ^ k1;
    c3 = even & LOW;
    k0 = (k0 + 0x9e3779b9) & LOW;
    k1 = (k1 + 0xbb67ae85) & LOW;
  }
  states[0] = c1 << 32 | c0;
  states[1] = c3 << 32 | c2;
}

}  // namespace stepwell
