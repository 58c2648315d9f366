// Panels of weights with 8 or 4 bits.
//
// A weight is code * scale + offset. A scale, and an optional offset, belong to a column and a
// group of consecutive depths. A panel (a block of columns, see panel.h) is a sequence of groups,
// each of them a record: the scales of its columns, the offsets, the codes. Before multiplication
// codes are unpacked to elements of a panel (panel.h), which represent them exactly, because
// bfloat16 has 8 significant bits. Products of codes are added up within a group, and the sum is
// multiplied by the scale. Therefore a result differs from a result with float32 weights only by
// the rounding of sums.

#pragma once

#include "panel.h"
#include "rounding.h"

namespace stepwell {

// The elements of a packed weight. INT8: -128 to 127. INT4: -8 to 7; 8 of them are side by side in
// a word of 32 bits. FP8: floats with four bits of exponent and three of mantissa (e4m3). W8A8:
// like INT8, for inputs in 8 bits; see coded_projection.h.
enum class WeightFormat : int { PLAIN, INT8, INT4, FP8, W8A8 };

namespace {  // Internal, so that functions with one caller are inlined.

// Codes that are unpacked at once: BLOCK_DEPTH elements of each column of a panel.
constexpr int BLOCK_DEPTH = 4;

constexpr std::int64_t SCALES_BYTES = PANEL_WIDTH * sizeof(float);

// Prefetch distance in a stream of codes, in bytes.
constexpr std::int64_t CODES_AHEAD = 4096;

constexpr std::int64_t code_bytes(WeightFormat format, std::int64_t depth) {
  return depth * PANEL_WIDTH / (format == WeightFormat::INT4 ? 2 : 1);
}

// Unpacks a block of codes: BYTES of codes become STEPS steps of a panel. A call unpacks one step.
// The object stores the look-up tables.
template <class T, WeightFormat FORMAT>
struct Unpacker;

template <>
struct Unpacker<float, WeightFormat::INT4> {
  static constexpr int BYTES = 64, STEPS = BLOCK_DEPTH;
  // Converts the codes at bits `shift` to `shift` + 3 of a register's words to floats.
  static Register numbers(const char* words, int shift) {
    IntRegister some;
    std::memcpy(&some, words, sizeof some);
    return __builtin_convertvector(((some >> shift) & 15) - 8, Register);
  }
  void operator()(const char* codes, int step, Vector (&columns)[PANEL_VECTORS]) const {
#pragma GCC unroll 2
    for (int v = 0; v < PANEL_VECTORS; ++v) {
      const int shift = 4 * (step * PANEL_VECTORS + v);
      columns[v] = of_registers([=](int i) { return numbers(codes + 4 * i, shift); });
    }
  }
};

// The bits of an FP8 number, moved to the same fields of a half-precision number, represent a
// number that is 2^8 times too small, because the bias of the half-precision exponent is 8 larger.
constexpr float OF_FP8_IN_HALVES = 256;

}  // namespace

}  // namespace stepwell

#ifdef __aarch64__
#include "unpackers_neon.h"
#else
#include "unpackers_x86.h"
#endif

namespace stepwell {

namespace {

// Codes of PANELS panels that are read side by side: the first panel's codes, the distance of
// panels in bytes, and the end of the first panel.
struct PanelCodes {
  const char* first;
  std::int64_t panel_bytes;
  const char* panel_end;
};

// total[ROWS] += rows of `a`, `stride` elements apart, times the codes of `steps` steps of PANELS
// panels, added in the order of `multiply`. Prefetches codes. At the end of the panels these are
// the codes of the next PANELS panels.
template <class T, WeightFormat FORMAT, int ROWS, int PANELS>
inline __attribute__((always_inline)) void multiply_codes(
    Vector (&total)[ROWS][PANELS * PANEL_VECTORS], const Unpacker<T, FORMAT>& unpacker, const T* a,
    std::int64_t stride, const PanelCodes panels, int steps) {
  using Block = Unpacker<T, FORMAT>;
  RowPointers<T, ROWS> rows(a, stride);
  DepthSums<T, ROWS, PANELS * PANEL_VECTORS> sums;
  const char* codes = panels.first;
  for (int done = 0; done < steps; done += Block::STEPS, codes += Block::BYTES) {
    Vector columns[Block::STEPS][PANELS * PANEL_VECTORS];
    const char* ahead = codes + CODES_AHEAD;
    if (PANELS > 1 && ahead >= panels.panel_end) ahead += (PANELS - 1) * panels.panel_bytes;
#pragma GCC unroll 4
    for (int panel = 0; panel < PANELS; ++panel) {
#pragma GCC unroll 4
      for (int step = 0; step < Block::STEPS; ++step) {
        Vector own[PANEL_VECTORS];
        unpacker(codes + panel * panels.panel_bytes, step, own);
#pragma GCC unroll 2
        for (int v = 0; v < PANEL_VECTORS; ++v) columns[step][panel * PANEL_VECTORS + v] = own[v];
      }
      __builtin_prefetch(ahead + panel * panels.panel_bytes, 0, PANELS > 1 ? 3 : 2);
    }
#pragma GCC unroll 4
    for (int step = 0; step < Block::STEPS; ++step) add_step(total, sums, rows, columns[step]);
  }
  sums.finish(total);
}

// The position of an element's code in a panel of byte codes. In bfloat16 the low and the high
// bytes of 64 elements are interleaved within lanes of 128 bits.
template <class T>
std::int64_t place_of_byte(std::int64_t element) {
  if (sizeof(T) != 2) return element;
  const std::int64_t vector = element / 32 % 2, word = element % 32;
  return round_down(element, 64) + word / 8 * 16 + vector * 8 + word % 8;
}

// The position of an INT4 element's code, counted in halves of a byte. A block has a word of the
// size of T for each element of a vector, with the codes of the vectors from the lowest bits up.
template <class T>
std::int64_t place_of_int4(std::int64_t element) {
  constexpr std::int64_t BLOCK = BLOCK_DEPTH * PANEL_WIDTH, LENGTH = 64 / sizeof(T);
  const std::int64_t vector = element % BLOCK / LENGTH, word = element % LENGTH;
  return round_down(element, BLOCK) + word * 2 * sizeof(T) + vector;
}

}  // namespace

// Packs a group of a panel. `code_of(column, depth)` returns the group's codes.
template <class T, class CodeOf>
void pack_codes(WeightFormat format, char* to, std::int64_t depth, CodeOf&& code_of) {
  constexpr int DEPTH = PanelOps<T>::DEPTH;
  std::memset(to, 0, code_bytes(format, depth));
  for (std::int64_t element = 0; element < depth * PANEL_WIDTH; ++element) {
    const std::int64_t cell = element / DEPTH;
    const int column = int(cell % PANEL_WIDTH);
    const int code = code_of(column, cell / PANEL_WIDTH * DEPTH + element % DEPTH);
    if (format == WeightFormat::INT4) {
      const std::int64_t place = place_of_int4<T>(element);
      to[place / 2] |= char((code + 8) << place % 2 * 4);
    } else {
      to[place_of_byte<T>(element)] = char(code);
    }
  }
}

}  // namespace stepwell
