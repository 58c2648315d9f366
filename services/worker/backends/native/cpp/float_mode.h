// How a thread's instructions for floats round, and whether they flush small numbers to zero.

#pragma once

#ifndef __aarch64__
#include <immintrin.h>
#endif

namespace stepwell {

// The register that has the mode: x86's MXCSR or ARM's FPCR.
#ifdef __aarch64__
inline unsigned mode_register() { return unsigned(__builtin_aarch64_get_fpcr64()); }
inline void set_mode_register(unsigned mode) { __builtin_aarch64_set_fpcr64(mode); }
constexpr unsigned STANDARD = 0, FLUSHING = 1 << 24;
#else
inline unsigned mode_register() { return _mm_getcsr(); }
inline void set_mode_register(unsigned mode) { _mm_setcsr(mode); }
constexpr unsigned STANDARD = 0x1f80, FLUSHING = 0x9fc0;
#endif

// Within its scope, sets the rounding mode of a thread. The process's mode does not matter: the
// threads of a team may have been started before the caller changed its own mode.
template <unsigned MODE>
class FloatMode {
 public:
  FloatMode() : before_(mode_register()) { set_mode_register(MODE); }
  ~FloatMode() { set_mode_register(before_); }
  FloatMode(const FloatMode&) = delete;
  FloatMode& operator=(const FloatMode&) = delete;

 private:
  unsigned before_;
};

// Rounds to nearest, and keeps small numbers.
using StandardMode = FloatMode<STANDARD>;

// Rounds to nearest. Numbers below 2^-126 are zeros, as operands and as results.
using FlushingMode = FloatMode<FLUSHING>;

}  // namespace stepwell
