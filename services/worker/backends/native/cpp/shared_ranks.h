// The collectives of ranks that are processes of one machine, through memory that all of them map.
//
// A collective is one or more rounds. In a round each rank writes to its slot, marks that it has
// arrived, waits until the other ranks have arrived, and reads their slots. Each rank has two
// slots, used alternately. When a rank arrives at a round, it has read the slots of the previous
// round, so these slots can be written again in the next round. Therefore a round needs only one
// wait. vLLM has such collectives for its CPU ranks (csrc/cpu/shm.cpp).

#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <cstring>

#include "threads.h"
#include "vector.h"

namespace stepwell {

// The last round at which a rank has arrived, in shared memory.
struct alignas(64) RankCell {
  std::atomic<std::uint32_t> round;
  std::atomic<std::uint32_t> sleepers;  // Number of waiting ranks that no longer spin.
};

// The state of one rank. `missing`: the rank that did not arrive at a round, or -1. Once a rank is
// missing, collectives return at once, and their results are undefined.
struct SharedRanks {
  RankCell* cells;
  char* slots;
  std::int64_t slot_bytes;
  double timeout_seconds;
  int rank;
  int size;
  std::uint32_t round;
  std::atomic<int> is_ended;
  int missing;

  // The slot of a rank in the next round.
  char* next_slot(int of_rank) const {
    return slots + (std::int64_t(~round & 1) * size + of_rank) * slot_bytes;
  }

  // Arrives at the next round, and waits for the other ranks.
  void arrive_and_wait() {
    if (missing >= 0) return;
    cells[rank].round.store(++round, std::memory_order_seq_cst);
    if (cells[rank].sleepers.load(std::memory_order_seq_cst) > 0) wake(cells[rank]);
    for (int other = 0; other < size && missing < 0; ++other) {
      if (!has_arrived(cells[other]) && !wait_for(cells[other])) missing = other;
    }
  }

  // Ends this rank's waiting. Other ranks are woken too, and then continue to wait.
  void end() {
    is_ended.store(1, std::memory_order_seq_cst);
    for (int other = 0; other < size; ++other) wake(cells[other]);
  }

 private:
  static constexpr std::chrono::milliseconds LONGEST_SLEEP{100};

  bool has_arrived(const RankCell& cell) const {
    return std::int32_t(cell.round.load(std::memory_order_acquire) - round) >= 0;
  }

  // Spins, and then sleeps (see Barrier). Returns false if the rank does not arrive in time, or
  // after `end`. Sleeps are short, because a wake-up between the check of `is_ended` and the sleep
  // is lost.
  bool wait_for(RankCell& cell) const {
    for (int spins = 0; spins < BARRIER_SPINS; ++spins) {
      if (has_arrived(cell)) return true;
      pause();
    }
    using Clock = std::chrono::steady_clock;
    const auto deadline = Clock::now() + std::chrono::duration<double>(timeout_seconds);
    cell.sleepers.fetch_add(1, std::memory_order_seq_cst);
    bool is_there;
    while (true) {
      const std::uint32_t seen = cell.round.load(std::memory_order_seq_cst);
      is_there = std::int32_t(seen - round) >= 0;
      if (is_there || is_ended.load(std::memory_order_seq_cst) || Clock::now() > deadline) break;
      futex(cell.round, FUTEX_WAIT, int(seen), LONGEST_SLEEP);
    }
    cell.sleepers.fetch_sub(1, std::memory_order_relaxed);
    return is_there;
  }

  static void wake(RankCell& cell) { futex(cell.round, FUTEX_WAKE, INT_MAX); }
};

namespace {  // Internal, so that functions with one caller are inlined.

// Sums `part` of all ranks, `count` elements each, in rank order, in float32, and rounds the sums
// to T.
template <class T>
void sum_over(SharedRanks& ranks, T* part, std::int64_t count, Team team) {
  const std::int64_t most = ranks.slot_bytes / std::int64_t(sizeof(T));
  for (std::int64_t begin = 0; begin < count; begin += most) {
    const Range own = team.part(std::min(most, count - begin));
    const char* first = ranks.next_slot(0);
    T* slot = reinterpret_cast<T*>(ranks.next_slot(ranks.rank));
    std::memcpy(slot + own.begin, part + begin + own.begin, (own.end - own.begin) * sizeof(T));
    team.wait();
    if (team.index == 0) ranks.arrive_and_wait();
    team.wait();
    for (std::int64_t i = own.begin; i < own.end; i += LANES) {
      const int lanes = int(std::min<std::int64_t>(LANES, own.end - i));
      Vector total = {};
      for (int rank = 0; rank < ranks.size; ++rank) {
        const T* other = reinterpret_cast<const T*>(first + rank * ranks.slot_bytes) + i;
        const Vector added = load_partial(other, lanes);
        total = rank == 0 ? added : total + added;
      }
      store_partial(part + begin + i, total, lanes);
    }
  }
}

// Concatenates `rows` rows of `width` bytes of each rank, in rank order. `own` may be the end of
// `all`, because in each round the rows that are written end before the rows that were not read
// yet.
inline void gather_over(SharedRanks& ranks, const char* own, char* all, std::int64_t rows,
                        std::int64_t width, Team team) {
  const std::int64_t bytes = rows * width;
  for (std::int64_t begin = 0; begin < bytes; begin += ranks.slot_bytes) {
    const Range part = team.part(std::min(ranks.slot_bytes, bytes - begin));
    const char* first = ranks.next_slot(0);
    std::memcpy(ranks.next_slot(ranks.rank) + part.begin, own + begin + part.begin,
                part.end - part.begin);
    team.wait();
    if (team.index == 0) ranks.arrive_and_wait();
    team.wait();
    for (int rank = 0; rank < ranks.size; ++rank) {
      const char* slot = first + rank * ranks.slot_bytes;
      std::int64_t taken;
      for (std::int64_t i = part.begin; i < part.end; i += taken) {
        const std::int64_t row = (begin + i) / width, column = (begin + i) % width;
        taken = std::min(part.end - i, width - column);
        std::memcpy(all + (row * ranks.size + rank) * width + column, slot + i, taken);
      }
    }
  }
}

}  // namespace

}  // namespace stepwell
