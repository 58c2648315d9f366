// Products of bytes with ARM's NEON: included by quads.h.

#pragma once

#include <arm_neon.h>

#include "vector.h"

namespace stepwell {

inline Register add_quads(Register total, Register a, Register b) {
  const uint8x16_t left = (uint8x16_t)a;
  const int8x16_t right = (int8x16_t)b;
#if defined(__ARM_FEATURE_MATMUL_INT8)
  return (Register)vusdotq_s32((int32x4_t)total, left, right);
#elif defined(__ARM_FEATURE_DOTPROD)
  // The instruction multiplies signed bytes only: a - 128 is multiplied, then 64 twice.
  const int8x16_t less = (int8x16_t)veorq_u8(left, vdupq_n_u8(128)), half = vdupq_n_s8(64);
  const int32x4_t rest = vdotq_s32(vdotq_s32((int32x4_t)total, half, right), half, right);
  return (Register)vdotq_s32(rest, less, right);
#else
  const auto quads = [](uint16x8_t words, int16x8_t others) {
    const int16x8_t own = (int16x8_t)words;
    const int32x4_t low = vmull_s16(vget_low_s16(own), vget_low_s16(others));
    return vpaddq_s32(low, vmull_high_s16(own, others));
  };
  const int32x4_t low = quads(vmovl_u8(vget_low_u8(left)), vmovl_s8(vget_low_s8(right)));
  const int32x4_t high = quads(vmovl_high_u8(left), vmovl_high_s8(right));
  return (Register)vaddq_s32((int32x4_t)total, vpaddq_s32(low, high));
#endif
}

}  // namespace stepwell
