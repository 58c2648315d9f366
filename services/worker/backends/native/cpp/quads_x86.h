// Products of bytes with AVX-512 and AVX2: included by quads.h.

#pragma once

#include <immintrin.h>

#include "vector.h"

namespace stepwell {

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

}  // namespace stepwell
