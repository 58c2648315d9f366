// Teams of threads: the number of threads for a piece of work, the part of each thread, and how
// threads wait for each other.
//
// A team is woken once for a piece of work, which may be a whole step. During the work, threads
// synchronize at barriers. Waking costs tens of microseconds, and on a machine with other busy
// processes it can cost one of the operating system's time slices. Therefore small work stays in
// the calling thread. A team is either all threads or one, because for other sizes the OpenMP
// library would end and start threads.

#pragma once

#include <linux/futex.h>
#include <omp.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <ctime>
#include <vector>

#include "float_mode.h"
#include "rounding.h"

namespace stepwell {

// The number of operations above which waking threads saves time. Operations are multiplications,
// or bytes moved if those are more.
constexpr double PARALLEL_WORK = 4e6;

// Takes the place of PARALLEL_WORK for a whole step, in which the threads wait for each other many
// times.
constexpr double PARALLEL_STEP_WORK = 2e7;

struct Range {
  std::int64_t begin;
  std::int64_t end;
};

// The number of checks by a waiting thread before it sleeps.
constexpr int BARRIER_SPINS = 500;

// The futex system call, for a word of this process. For a word in shared memory, `operation` lacks
// FUTEX_PRIVATE_FLAG. A timeout of 0 means none.
template <class Word>
inline void futex(std::atomic<Word>& word, int operation, int value,
                  std::chrono::nanoseconds timeout = {}) {
  static_assert(sizeof word == sizeof(std::uint32_t));
  const timespec limit = {0, timeout.count()};
  syscall(SYS_futex, &word, operation, value, timeout.count() > 0 ? &limit : nullptr, nullptr, 0);
}

// Tells the processor that this thread is in a loop that waits for another thread.
inline void pause() {
#ifdef __aarch64__
  asm volatile("yield" ::: "memory");
#else
  __builtin_ia32_pause();
#endif
}

// A thread that waits spins for a few microseconds and then sleeps. If another thread is still
// missing then, it has lost its processor to another process, and may need the waiting thread's
// processor. If the waiting thread yielded instead, its time slice could go to that process: a
// barrier could cost a time slice, and a step could become a tenth slower.
class Barrier {
 public:
  void wait(int size) {
    const int phase = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size) {
      arrived_.store(0, std::memory_order_relaxed);
      // Sequentially consistent, like the sleeper's increment and its check of the phase, so that
      // either this thread sees the sleeper, or the sleeper sees the new phase.
      phase_.store(phase + 1, std::memory_order_seq_cst);
      if (sleepers_.load(std::memory_order_seq_cst) > 0) {
        futex(phase_, FUTEX_WAKE_PRIVATE, INT_MAX);
      }
      return;
    }
    for (int spins = 0; spins < BARRIER_SPINS; ++spins) {
      if (phase_.load(std::memory_order_acquire) != phase) return;
      pause();
    }
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    while (phase_.load(std::memory_order_seq_cst) == phase) {
      futex(phase_, FUTEX_WAIT_PRIVATE, phase);
    }
    sleepers_.fetch_sub(1, std::memory_order_relaxed);
  }

 private:
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int> phase_{0};
  std::atomic<int> sleepers_{0};
};

// The remaining items of one thread's part of a round of work. `packed`: the round in bits 48 to
// 63, the first item in bits 24 to 47, the end in bits 0 to 23. `rounds`: number of rounds that the
// thread has begun.
struct alignas(64) RemainingItems {
  std::atomic<std::uint64_t> packed{0};
  std::uint64_t rounds = 0;
};

// A thread's index in its team, and what the threads of the team share.
struct Team {
  int index = 0;
  int size = 1;
  Barrier* barrier = nullptr;
  RemainingItems* remaining = nullptr;

  void wait() const {
    if (size > 1) barrier->wait(size);
  }

  // The part of [0, count) of this thread, or of the thread with another index.
  Range part(std::int64_t count) const { return part_of(index, count); }
  Range part_of(int thread, std::int64_t count) const {
    return {count * thread / size, count * (thread + 1) / size};
  }
};

// Assigns the items [0, count), fewer than 2^24, of one round of work to threads. A thread gets the
// items of its own part in order. Then it gets items that other threads have not begun, from the
// end of their parts. Therefore a suspended thread delays the others only by the items that it has
// begun, and each thread reads a sequential stream. The first thread that accesses a part in a
// round sets its remaining items to the whole part. Between two rounds the team must pass a
// barrier. This is work stealing (Blumofe and Leiserson).
class WorkItems {
 public:
  WorkItems(Team team, std::int64_t count) : team_(team), count_(count) {
    if (team.size > 1) round_ = ++team.remaining[team.index].rounds & 0xffff;
  }

  // The next item, or -1 if none remains.
  std::int64_t next() {
    const Range taken = next(1, 1);
    return taken.begin < taken.end ? taken.begin : -1;
  }

  // The next items: at most `most` items of the thread's own part, so that the last one precedes a
  // multiple of `group`, or else one item of another thread's part. Empty if none remains.
  Range next(std::int64_t most, std::int64_t group) {
    if (team_.size == 1) {
      const Range taken = begin_of({taken_, count_}, most, group);
      taken_ = taken.end;
      return taken;
    }
    for (; others_ < team_.size; ++others_) {
      const Range taken = take((team_.index + others_) % team_.size, most, group);
      if (taken.begin < taken.end) return taken;
    }
    return {};
  }

 private:
  static Range begin_of(Range range, std::int64_t most, std::int64_t group) {
    const std::int64_t end = std::min(range.begin + most, round_down(range.begin, group) + group);
    return {range.begin, std::min(end, range.end)};
  }

  Range take(int thread, std::int64_t most, std::int64_t group) {
    constexpr std::uint64_t MASK = (1 << 24) - 1;
    std::atomic<std::uint64_t>& packed = team_.remaining[thread].packed;
    std::uint64_t seen = packed.load(std::memory_order_acquire);
    while (true) {
      Range range = {std::int64_t(seen >> 24 & MASK), std::int64_t(seen & MASK)};
      if (seen >> 48 != round_) range = team_.part_of(thread, count_);
      if (range.begin >= range.end) return {};
      Range taken = {range.end - 1, range.end};
      if (thread == team_.index) {
        taken = begin_of(range, most, group);
        range.begin = taken.end;
      } else {
        range.end = taken.begin;
      }
      const std::uint64_t rest = round_ << 48 | std::uint64_t(range.begin) << 24 | range.end;
      if (packed.compare_exchange_weak(seen, rest, std::memory_order_acq_rel)) return taken;
    }
  }

  Team team_;
  std::int64_t count_;
  std::uint64_t round_ = 0;
  std::int64_t taken_ = 0;  // Items taken so far, if the team is one thread.
  int others_ = 0;          // Number of exhausted parts, the thread's own part first.
};

// Pins each thread to its own processor if the team needs all processors that its first thread may
// use. Otherwise the operating system may put two threads on one processor: a thread that is woken
// at a barrier starts on the processor of the waking thread, because a virtual processor that has
// just become idle counts as busy. It stays there, because two threads that run alternately do not
// count as too much load. A smaller team is not pinned, because it has free processors for itself
// and for other processes.
class ProcessorPins {
 public:
  explicit ProcessorPins(int threads) {
    is_needed_ = sched_getaffinity(0, sizeof all_, &all_) == 0 && CPU_COUNT(&all_) == threads;
  }

  // Must be called by each thread of the team.
  void pin(int thread) const {
    static thread_local int pinned = -1;
    if (!is_needed_) return;
    int processor = -1;
    for (int left = thread; left >= 0; --left) {
      do ++processor;
      while (!CPU_ISSET(processor, &all_));
    }
    if (thread > 0 && processor == pinned) return;
    cpu_set_t own;
    CPU_ZERO(&own);
    CPU_SET(processor, &own);
    if (sched_setaffinity(0, sizeof own, &own) == 0) pinned = processor;
  }

  // Must be called by the first thread when the work is done. This thread, and threads that it
  // starts, may then use all processors again. The other threads do nothing between two pieces of
  // work, and stay pinned.
  void unpin() const {
    if (is_needed_) sched_setaffinity(0, sizeof all_, &all_);
  }

 private:
  cpu_set_t all_;
  bool is_needed_;
};

inline int threads_for(double work, double enough = PARALLEL_WORK) {
  return work < enough ? 1 : omp_get_max_threads();
}

// Calls work(team) in each of `threads` threads, in the scope of a `Scope` object.
template <class Scope = StandardMode, class Work>
inline void in_team(int threads, Work&& work) {
  if (threads == 1) {
    const Scope scope;
    work(Team{});
    return;
  }
  Barrier barrier;
  std::vector<RemainingItems> remaining(threads);
  const ProcessorPins pins(threads);
#pragma omp parallel num_threads(threads)
  {
    const int index = omp_get_thread_num();
    pins.pin(index);
    const Scope scope;
    work(Team{index, omp_get_num_threads(), &barrier, remaining.data()});
  }
  pins.unpin();
}

}  // namespace stepwell
