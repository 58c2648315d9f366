// One step of rows times columns of bfloat16, with AVX2, in halves: the second elements of all
// pairs, then the first elements.
//
// Three rows of two vectors have twelve totals. They leave four of the sixteen registers: one for
// each row's value and one for a column.

#pragma once

#include "panel_ops.h"

namespace stepwell {

enum class Half { SECOND, FIRST };

constexpr IntRegister SECOND_OF_PAIR = IntRegister{} - 0x10000;

template <Half HALF>
inline __attribute__((always_inline)) Register half_of(Register pairs) {
  using Ops = PanelOps<BFloat16>;
  return HALF == Half::FIRST ? Ops::first_of(pairs) : Ops::second_of(pairs);
}

// Adds a register of columns, times three rows' values, to the rows' totals. Written in assembly,
// because the compiler would keep both halves of all columns in registers, and some totals on the
// stack.
template <Half HALF>
inline __attribute__((always_inline)) void add_column(const BFloat16* pairs,
                                                      const Register (&values)[3], Register& first,
                                                      Register& second, Register& third) {
  typedef float Unaligned __attribute__((vector_size(32), aligned(2), may_alias));
  const Unaligned& from = *reinterpret_cast<const Unaligned*>(pairs);
  Register column;
#define ADD "vfmadd231ps %3, %4, %0\n\tvfmadd231ps %3, %5, %1\n\tvfmadd231ps %3, %6, %2"
#define TOTALS "+x"(first), "+x"(second), "+x"(third), "=&x"(column)
#define FACTORS "x"(values[0]), "x"(values[1]), "x"(values[2]), "m"(from)
  if constexpr (HALF == Half::FIRST) {
    asm("vmovups %7, %3\n\tvpslld $16, %3, %3\n\t" ADD : TOTALS : FACTORS);
  } else {
    asm("vmovups %7, %3\n\tvpand %8, %3, %3\n\t" ADD : TOTALS : FACTORS, "m"(SECOND_OF_PAIR));
  }
#undef ADD
#undef TOTALS
#undef FACTORS
}

template <Half HALF, class Rows, int ROWS, int VECTORS>
inline __attribute__((always_inline)) void add_half(Vector (&total)[ROWS][VECTORS],
                                                    const Rows& rows, const BFloat16* columns) {
  asm volatile("" ::: "memory");  // Otherwise rows would be loaded once, and both halves kept.
  Register values[ROWS];
#pragma GCC unroll 16
  for (int row = 0; row < ROWS; ++row) {
    float pair;
    std::memcpy(&pair, rows.address_of(row), sizeof pair);
    values[row] = half_of<HALF>((Register)_mm256_set1_ps(pair));
  }
#pragma GCC unroll 8
  for (int v = 0; v < VECTORS; ++v, columns += 2 * LANES) {
    if constexpr (ROWS == 3) {
      Vector &a = total[0][v], &b = total[1][v], &c = total[2][v];
      add_column<HALF>(columns, values, a.low, b.low, c.low);
      add_column<HALF>(columns + LANES, values, a.high, b.high, c.high);
    } else {
      const Vector pairs = PanelOps<BFloat16>::load(columns);
      const Vector column = {half_of<HALF>(pairs.low), half_of<HALF>(pairs.high)};
#pragma GCC unroll 16
      for (int row = 0; row < ROWS; ++row) {
        total[row][v] = fmadd(Vector{values[row], values[row]}, column, total[row][v]);
      }
    }
  }
}

// total[ROWS][VECTORS] += the pairs of `rows` in this step times VECTORS vectors of pairs.
template <class Rows, int ROWS, int VECTORS>
inline __attribute__((always_inline)) void add_pairs(Vector (&total)[ROWS][VECTORS],
                                                     const Rows& rows, const BFloat16* columns) {
  add_half<Half::SECOND>(total, rows, columns);
  add_half<Half::FIRST>(total, rows, columns);
}

}  // namespace stepwell
