// Unpackers for ARM's NEON: included by quantized.h.

#pragma once

#include <arm_neon.h>

#include "quantized.h"

namespace stepwell {

namespace {  // Internal, so that functions with one caller are inlined.

// The numbers of eight codes, as floats.
struct EightFloats {
  float32x4_t first;
  float32x4_t second;

  // Returns the upper halves of the floats. They are the same numbers in bfloat16 if the lower
  // halves are zero.
  Register upper_halves() const {
    return (Register)vuzp2q_u16((uint16x8_t)first, (uint16x8_t)second);
  }
};

template <WeightFormat FORMAT>
EightFloats floats_of(const char* codes);

template <>
inline EightFloats floats_of<WeightFormat::INT8>(const char* codes) {
  const int16x8_t words = vmovl_s8(vld1_s8(reinterpret_cast<const std::int8_t*>(codes)));
  return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(words))), vcvtq_f32_s32(vmovl_high_s16(words))};
}

template <>
inline EightFloats floats_of<WeightFormat::FP8>(const char* codes) {
  const uint8x8_t some = vld1_u8(reinterpret_cast<const std::uint8_t*>(codes));
  const uint16x8_t words = vshll_n_u8(some, 8), sign = vandq_u16(words, vdupq_n_u16(0x8000));
  const uint16x8_t rest = vshrq_n_u16(vandq_u16(words, vdupq_n_u16(0x7f00)), 1);
  const float16x8_t halves = (float16x8_t)vorrq_u16(sign, rest);
  return {vcvt_f32_f16(vget_low_f16(halves)) * OF_FP8_IN_HALVES,
          vcvt_high_f32_f16(halves) * OF_FP8_IN_HALVES};
}

template <WeightFormat FORMAT>
  requires(FORMAT == WeightFormat::INT8 || FORMAT == WeightFormat::FP8)
struct Unpacker<float, FORMAT> {
  static constexpr int BYTES = PANEL_WIDTH, STEPS = 1;
  void operator()(const char* codes, int, Vector (&columns)[PANEL_VECTORS]) const {
#pragma GCC unroll 2
    for (int v = 0; v < PANEL_VECTORS; ++v) {
      const EightFloats low = floats_of<FORMAT>(codes + v * LANES);
      const EightFloats high = floats_of<FORMAT>(codes + v * LANES + LANES / 2);
      columns[v] = {(Register)low.first, (Register)low.second, (Register)high.first,
                    (Register)high.second};
    }
  }
};

// The codes of eight words of a register are side by side (see place_of_byte).
template <WeightFormat FORMAT>
  requires(FORMAT == WeightFormat::INT8 || FORMAT == WeightFormat::FP8)
struct Unpacker<BFloat16, FORMAT> {
  static constexpr int BYTES = 64, STEPS = 1;
  void operator()(const char* codes, int, Vector (&columns)[PANEL_VECTORS]) const {
#pragma GCC unroll 2
    for (int v = 0; v < PANEL_VECTORS; ++v) {
      columns[v] = of_registers(
          [=](int lane) { return floats_of<FORMAT>(codes + lane * 4 + v * 8).upper_halves(); });
    }
  }
};

// The instruction looks up bytes in a table of 32 bytes: first the low bytes of the numbers, then
// the high ones.
template <>
struct Unpacker<BFloat16, WeightFormat::INT4> {
  static constexpr int BYTES = 64, STEPS = BLOCK_DEPTH / 2;
  Unpacker() {
    for (int i = 0; i < 16; ++i) {
      const std::uint16_t bits = from_float<BFloat16>(float(i - 8)).bits;
      bytes[i] = std::uint8_t(bits);
      bytes[16 + i] = std::uint8_t(bits >> 8);
    }
  }
  void operator()(const char* codes, int step, Vector (&columns)[PANEL_VECTORS]) const {
    const uint8x16x2_t table = {vld1q_u8(bytes), vld1q_u8(bytes + 16)};
#pragma GCC unroll 2
    for (int v = 0; v < PANEL_VECTORS; ++v) {
      const int16x8_t right = vdupq_n_s16(std::int16_t(-4 * (step * PANEL_VECTORS + v)));
      columns[v] = of_registers([=](int lane) {
        const uint16x8_t words =
            vld1q_u16(reinterpret_cast<const std::uint16_t*>(codes) + 2 * lane);
        const uint16x8_t code = vandq_u16(vshlq_u16(words, right), vdupq_n_u16(15));
        const uint16x8_t index = vmlaq_n_u16(vdupq_n_u16(0x1000), code, 0x0101);
        return (Register)vqtbl2q_u8(table, (uint8x16_t)index);
      });
    }
  }
  std::uint8_t bytes[32];
};

}  // namespace

}  // namespace stepwell
