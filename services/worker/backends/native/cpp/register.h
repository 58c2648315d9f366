// One vector register of the processor, in the compiler's vector extension.

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
typedef float Register __attribute__((vector_size(REGISTER_BYTES)));
typedef std::int32_t IntRegister __attribute__((vector_size(REGISTER_BYTES)));

}  // namespace stepwell
