// Division and rounding of sizes and positions, none of them negative.

#pragma once

#include <type_traits>

namespace stepwell {

template <class Int>
constexpr Int divide_up(Int number, std::type_identity_t<Int> by) {
  return (number + by - 1) / by;
}

template <class Int>
constexpr Int round_up(Int number, std::type_identity_t<Int> multiple) {
  return divide_up(number, multiple) * multiple;
}

template <class Int>
constexpr Int round_down(Int number, std::type_identity_t<Int> multiple) {
  return number / multiple * multiple;
}

}  // namespace stepwell
