// Teams of threads: how many a piece of work gets, who does what, and how they wait for each other.
//
// A team is woken once for a piece of work, which may be a whole step; inside it threads meet at
// barriers. Waking costs tens of microseconds, and on a machine that others use too it can cost a
// scheduler's time slice, so small work stays in the calling thread. A team is all threads or one:
// sizes in between would make the OpenMP library end and start threads.

#pragma once

#include <linux/futex.h>
#include <omp.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>
#include <vector>

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

// What is left of a thread's part of the items that its team is dividing: from the 48th bit on the
// round that it is of, from the 24th on the first item, and the end. And rounds that the thread began.
struct alignas(64) Share {
  std::atomic<std::uint64_t> left{0};
  std::uint64_t rounds = 0;
};

// A thread's place in its team.
struct Team {
  int index = 0;
  int size = 1;
  Barrier* barrier = nullptr;
  Share* shares = nullptr;

  void wait() const {
    if (size > 1) barrier->wait(size);
  }

  // This thread's part of [0, count), or another's.
  Range part(std::int64_t count) const { return part_of(index, count); }
  Range part_of(int thread, std::int64_t count) const {
    return {count * thread / size, count * (thread + 1) / size};
  }
};

// The items [0, count), fewer than 2^24, as one thread of a team gets them in a round: those of its
// own part in order, then what others have not begun, from the end of theirs. So nobody waits for one
// who was held up longer than an item takes, and everyone reads a stream. A share that is of an older
// round has not been touched in this one, and whoever comes first deals it. Between two rounds the
// team must meet at a barrier. The idea is that of work stealing (Blumofe and Leiserson).
class Claims {
 public:
  Claims(Team team, std::int64_t count) : team_(team), count_(count) {
    if (team.size > 1) round_ = ++team.shares[team.index].rounds & 0xffff;
  }

  // The next item; -1 where none is left.
  std::int64_t next() {
    if (team_.size == 1) return taken_ < count_ ? taken_++ : -1;
    for (; others_ < team_.size; ++others_) {
      const std::int64_t item = take((team_.index + others_) % team_.size);
      if (item >= 0) return item;
    }
    return -1;
  }

 private:
  std::int64_t take(int thread) {
    constexpr std::uint64_t MASK = (1 << 24) - 1;
    std::atomic<std::uint64_t>& left = team_.shares[thread].left;
    std::uint64_t seen = left.load(std::memory_order_acquire);
    while (true) {
      Range range = {std::int64_t(seen >> 24 & MASK), std::int64_t(seen & MASK)};
      if (seen >> 48 != round_) range = team_.part_of(thread, count_);
      if (range.begin >= range.end) return -1;
      const std::int64_t item = thread == team_.index ? range.begin++ : --range.end;
      const std::uint64_t then = round_ << 48 | std::uint64_t(range.begin) << 24 | range.end;
      if (left.compare_exchange_weak(seen, then, std::memory_order_acq_rel)) return item;
    }
  }

  Team team_;
  std::int64_t count_;
  std::uint64_t round_ = 0;
  std::int64_t taken_ = 0;  // By a thread alone.
  int others_ = 0;          // Whose shares are used up, from the thread's own on.
};

// The processors of a team that needs all that its first thread may use: each thread keeps to its own.
// Left to the kernel they end up on the same ones: whoever is woken at a barrier starts where the other
// runs, since a virtual processor that has just fallen asleep counts as taken, and two that take turns
// never look like too much for one. A smaller team has room, and so have its neighbours.
class Places {
 public:
  explicit Places(int threads) {
    are_kept_ = sched_getaffinity(0, sizeof all_, &all_) == 0 && CPU_COUNT(&all_) == threads;
  }

  // To be called by each thread of the team.
  void take(int thread) const {
    static thread_local int kept = -1;
    if (!are_kept_) return;
    int processor = -1;
    for (int left = thread; left >= 0; --left) {
      do ++processor;
      while (!CPU_ISSET(processor, &all_));
    }
    if (thread > 0 && processor == kept) return;
    cpu_set_t own;
    CPU_ZERO(&own);
    CPU_SET(processor, &own);
    if (sched_setaffinity(0, sizeof own, &own) == 0) kept = processor;
  }

  // To be called by the first thread when the work is done: it goes where it likes, and so do threads
  // that it starts. The others do nothing but such work.
  void leave() const {
    if (are_kept_) sched_setaffinity(0, sizeof all_, &all_);
  }

 private:
  cpu_set_t all_;
  bool are_kept_;
};

inline int threads_for(double work, double enough = PARALLEL_WORK) {
  return work < enough ? 1 : omp_get_max_threads();
}

// Within it a thread rounds to nearest and flushes no small numbers to zero, however the process has
// set it: threads of a team may have been started before their caller changed its own mode.
class StandardRounding {
 public:
  StandardRounding() : before_(_mm_getcsr()) { _mm_setcsr(STANDARD); }
  ~StandardRounding() { _mm_setcsr(before_); }
  StandardRounding(const StandardRounding&) = delete;
  StandardRounding& operator=(const StandardRounding&) = delete;

 private:
  static constexpr unsigned STANDARD = 0x1f80;
  unsigned before_;
};

// Calls work(team) in each of so many threads.
template <class Work>
inline void in_team(int threads, Work&& work) {
  if (threads == 1) {
    const StandardRounding rounding;
    work(Team{});
    return;
  }
  Barrier barrier;
  std::vector<Share> shares(threads);
  const Places places(threads);
#pragma omp parallel num_threads(threads)
  {
    const int index = omp_get_thread_num();
    places.take(index);
    const StandardRounding rounding;
    work(Team{index, omp_get_num_threads(), &barrier, shares.data()});
  }
  places.leave();
}
