// How a thread's instructions for floats round, and whether they flush small numbers to zero.

#pragma once

#include <immintrin.h>

namespace stepwell {

// Sets MXCSR in its scope, whatever the mode of the process: the threads of a team may have been
// started before the caller changed its own mode.
template <unsigned MXCSR>
class FloatMode {
 public:
  FloatMode() : before_(_mm_getcsr()) { _mm_setcsr(MXCSR); }
  ~FloatMode() { _mm_setcsr(before_); }
  FloatMode(const FloatMode&) = delete;
  FloatMode& operator=(const FloatMode&) = delete;

 private:
  unsigned before_;
};

// Rounds to nearest, and keeps small numbers.
using StandardMode = FloatMode<0x1f80>;

// Rounds to nearest. Numbers below 2^-126 are zeros, as operands and as results.
using FlushingMode = FloatMode<0x9fc0>;

}  // namespace stepwell
