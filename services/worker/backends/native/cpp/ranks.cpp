// The functions of ranks that share memory, for all data types of the model.

#include "shared_ranks.h"

namespace stepwell {

// Gathers `bytes` bytes of each rank, one after the other.
extern "C" void gather_ranks(SharedRanks& ranks, const char* own, char* all, std::int64_t bytes) {
  gather_over(ranks, own, all, 1, bytes, Team{});
}

extern "C" void end_ranks(SharedRanks& ranks) { ranks.end(); }

}  // namespace stepwell
