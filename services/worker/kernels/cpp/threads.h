// How many threads a piece of work gets: all, or one.
//
// Waking a sleeping thread costs some microseconds, and on a machine that others use too it can cost
// a scheduler's time slice, so small work stays where it is. Team sizes in between would make the
// OpenMP library end and start threads.

#pragma once

#include <omp.h>

#include <cstdint>

// Operations (multiplications or bytes moved, whichever are more) that pay for waking threads.
constexpr double PARALLEL_WORK = 4e5;

inline int threads_for(double work) {
  return work < PARALLEL_WORK ? 1 : omp_get_max_threads();
}

struct Range {
  std::int64_t begin;
  std::int64_t end;
};

// Part `index` of [0, count) cut in `parts` equal ones.
inline Range part_of(std::int64_t count, int index, int parts) {
  return {count * index / parts, count * (index + 1) / parts};
}

// Calls work(begin, end) for parts of [0, count), in parallel where `cost` of all is worth it.
template <class Work>
inline void split(std::int64_t count, double cost, Work&& work) {
  const int threads = threads_for(cost);
  if (threads == 1 || count == 1) {
    work(std::int64_t{0}, count);
    return;
  }
#pragma omp parallel num_threads(threads)
  {
    const Range own = part_of(count, omp_get_thread_num(), omp_get_num_threads());
    if (own.begin < own.end) work(own.begin, own.end);
  }
}
