// A thread's scratch memory. It is kept between calls, and never shrinks.

#pragma once

#include <cstdint>
#include <vector>

#include "rounding.h"

namespace stepwell {

class Scratch {
 public:
  static Scratch& own() {
    static thread_local Scratch scratch;
    return scratch;
  }

  // Frees all pieces, and reserves `bytes` bytes. `bytes` must count each piece rounded up to a
  // multiple of 64.
  void reserve(std::int64_t bytes) {
    used_ = 0;
    if (std::int64_t(memory_.size()) < bytes + 64) memory_.resize(bytes + 64);
    begin_ =
        reinterpret_cast<char*>(round_up(reinterpret_cast<std::uintptr_t>(memory_.data()), 64));
  }

  // Allocates `count` elements, aligned to 64 bytes, and valid until the next `reserve`.
  template <class T>
  T* take(std::int64_t count) {
    char* taken = begin_ + used_;
    used_ += round_up(count * std::int64_t(sizeof(T)), 64);
    return reinterpret_cast<T*>(taken);
  }

 private:
  std::vector<char> memory_;
  char* begin_ = nullptr;
  std::int64_t used_ = 0;
};

}  // namespace stepwell
