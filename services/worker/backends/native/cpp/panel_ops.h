// The element types of panels: see panel.h.

#pragma once

#include "vector.h"

namespace stepwell {

constexpr int PANEL_VECTORS = 2;
constexpr int PANEL_WIDTH = PANEL_VECTORS * LANES;

// The layout of an element type in panels. DEPTH is the number of elements in one step of depth.
// `multiply_add` returns total + a * b for one step. `load` and `load_part` read from a panel or a
// row as it is stored. `interleave` builds one step of a panel from DEPTH rows: `count` elements
// from `from` on. Totals over interleaved vectors are in the order of `to_interleaved_order`.
// `to_element_order` reverses it.
template <class T>
struct PanelOps;

template <>
struct PanelOps<float> {
  static constexpr int DEPTH = 1;
  static Vector broadcast(const float* a) { return splat(*a); }
  static Vector load(const float* b) { return stepwell::load(b); }
  static Vector load_part(const float* b, int count) { return load_partial(b, count); }
  static Vector multiply_add(Vector total, Vector a, Vector b) { return fmadd(a, b, total); }
  static void interleave(const float* const (&rows)[1], int from, int count,
                         Vector (&result)[PANEL_VECTORS]) {
    for (int v = 0; v < PANEL_VECTORS; ++v) {
      result[v] = load_partial(rows[0] + from + v * LANES, count - v * LANES);
    }
  }
  static void to_interleaved_order(Vector (&)[PANEL_VECTORS]) {}
  static void to_element_order(Vector (&)[PANEL_VECTORS]) {}
};

// Without an instruction for dot products of pairs, two multiplications and additions have the
// order of this instruction: the second elements of the pairs first.
template <>
struct PanelOps<BFloat16> {
  static constexpr int DEPTH = 2;
  static Vector broadcast(const BFloat16* a) {
    std::int32_t pair;
    std::memcpy(&pair, a, sizeof pair);
    return repeat((Register)(IntRegister{} + pair));
  }
  static Vector load(const BFloat16* b) {
    return stepwell::load(reinterpret_cast<const float*>(b));
  }
#ifdef __AVX512F__
  static Vector load_part(const BFloat16* b, int count) {
    return (Vector)_mm512_maskz_loadu_epi16(lane_mask(count), b);
  }
  static Vector multiply_add(Vector total, Vector a, Vector b) {
#ifdef __AVX512BF16__
    return (Vector)_mm512_dpbf16_ps((__m512)total, (__m512bh)a, (__m512bh)b);
#else
    return add_pairs(total, a, b);
#endif
  }
  static void interleave(const BFloat16* const (&rows)[2], int from, int count,
                         Vector (&result)[PANEL_VECTORS]) {
    const __m512i even = (__m512i)load_part(rows[0] + from, count);
    const __m512i odd = (__m512i)load_part(rows[1] + from, count);
    result[0] = (Vector)_mm512_unpacklo_epi16(even, odd);
    result[1] = (Vector)_mm512_unpackhi_epi16(even, odd);
  }
  static void to_interleaved_order(Vector (&columns)[PANEL_VECTORS]) {
    const __m512 first = (__m512)columns[0], second = (__m512)columns[1];
    columns[0] = (Vector)_mm512_shuffle_f32x4(first, second, 0x88);
    columns[1] = (Vector)_mm512_shuffle_f32x4(first, second, 0xdd);
  }
  static void to_element_order(Vector (&columns)[PANEL_VECTORS]) {
    const __m512d first = (__m512d)columns[0], second = (__m512d)columns[1];
    const __m512i low = _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0);
    const __m512i high = _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4);
    columns[0] = (Vector)_mm512_permutex2var_pd(first, low, second);
    columns[1] = (Vector)_mm512_permutex2var_pd(first, high, second);
  }
#else
  static Vector load_part(const BFloat16* b, int count) {
    BFloat16 some[2 * LANES] = {};
    if (count > 0) std::memcpy(some, b, (count < 2 * LANES ? count : 2 * LANES) * sizeof(BFloat16));
    return load(some);
  }
  static Vector multiply_add(Vector total, Vector a, Vector b) {
    return map_registers([](Register t, Register x, Register y) { return add_pairs(t, x, y); },
                         total, a, b);
  }
  static void interleave(const BFloat16* const (&rows)[2], int from, int count,
                         Vector (&result)[PANEL_VECTORS]) {
    const Vector even = load_part(rows[0] + from, count), odd = load_part(rows[1] + from, count);
    result[0] = zip_words<0>(even, odd);
    result[1] = zip_words<1>(even, odd);
  }
  static void to_interleaved_order(Vector (&)[PANEL_VECTORS]) {}
  static void to_element_order(Vector (&)[PANEL_VECTORS]) {}
  static Vector first_of(Vector pairs) {
    return map_registers([](Register part) { return first_of(part); }, pairs);
  }
  static Vector second_of(Vector pairs) {
    return map_registers([](Register part) { return second_of(part); }, pairs);
  }
#endif

#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
  static constexpr bool HAS_DOT_PRODUCTS = true;  // BFDOT, which rounds sums differently.
#else
  static constexpr bool HAS_DOT_PRODUCTS = false;
#endif

  // The first and the second elements of pairs, as floats.
  static Register first_of(Register pairs) { return (Register)((IntRegister)pairs << 16); }
  static Register second_of(Register pairs) { return (Register)((IntRegister)pairs & -0x10000); }

 private:
  static Register add_pairs(Register total, Register a, Register b) {
#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
    return (Register)vbfdotq_f32((float32x4_t)total, (bfloat16x8_t)a, (bfloat16x8_t)b);
#else
    return fmadd(first_of(a), first_of(b), fmadd(second_of(a), second_of(b), total));
#endif
  }
};

}  // namespace stepwell
