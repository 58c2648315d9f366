// Teams of threads: how many a piece of work gets, who does what, and how they wait for each other.
//
// A team is woken once for a piece of work, which may be a whole step; inside it threads meet at
// barriers. Waking costs tens of microseconds, and on a machine that others use too it can cost a
// scheduler's time slice, so small work stays in the calling thread. A team is all threads or one:
// sizes in between would make the OpenMP library end and start threads.

#pragma once

#include <linux/futex.h>
#include <omp.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>

#include "vector.h"

// Operations (multiplications, or bytes moved if those are more) that pay for waking threads.
constexpr double PARALLEL_WORK = 4e6;

// Of a whole step, between whose parts threads wait for each other many times.
constexpr double PARALLEL_STEP_WORK = 2e7;

struct Range {
  std::int64_t begin;
  std::int64_t end;
};

// Spins for some microseconds, and then sleeps: whoever is late has lost its processor to another
// process, and may be waiting for the very one that spinning keeps busy. Yielding would not do: to the
// kernel it means giving up one's share, so that beside a busy process every barrier could cost a
// time slice, and a step a tenth of its speed.
class Barrier {
 public:
  void wait(int size) {
    const int phase = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size) {
      arrived_.store(0, std::memory_order_relaxed);
      // In one order with a sleeper's announcement and its look at the phase: one sees the other.
      phase_.store(phase + 1, std::memory_order_seq_cst);
      if (sleepers_.load(std::memory_order_seq_cst) > 0) futex(FUTEX_WAKE_PRIVATE, INT_MAX);
      return;
    }
    for (int spins = 0; spins < SPINS; ++spins) {
      if (phase_.load(std::memory_order_acquire) != phase) return;
      _mm_pause();
    }
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    while (phase_.load(std::memory_order_seq_cst) == phase) futex(FUTEX_WAIT_PRIVATE, phase);
    sleepers_.fetch_sub(1, std::memory_order_relaxed);
  }

 private:
  static constexpr int SPINS = 500;

  void futex(int operation, int value) {
    static_assert(sizeof(phase_) == sizeof(std::uint32_t));
    syscall(SYS_futex, &phase_, operation, value, nullptr, nullptr, 0);
  }

  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int> phase_{0};
  std::atomic<int> sleepers_{0};
};

// A thread's place in its team.
struct Team {
  int index = 0;
  int size = 1;
  Barrier* barrier = nullptr;

  void wait() const {
    if (size > 1) barrier->wait(size);
  }

  // This thread's part of [0, count).
  Range part(std::int64_t count) const {
    return {count * index / size, count * (index + 1) / size};
  }
};

inline int threads_for(double work, double enough = PARALLEL_WORK) {
  return work < enough ? 1 : omp_get_max_threads();
}

// Calls work(team) in each of so many threads.
template <class Work>
inline void in_team(int threads, Work&& work) {
  if (threads == 1) {
    work(Team{});
    return;
  }
  Barrier barrier;
#pragma omp parallel num_threads(threads)
  work(Team{omp_get_thread_num(), omp_get_num_threads(), &barrier});
}
