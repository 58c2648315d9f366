// The functions of ranks that share memory, whatever the model's data type is.

#include "shared_ranks.h"

namespace stepwell {

// Of `bytes` of each rank those of all, one behind the other.
extern "C" void gather_ranks(SharedRanks& ranks, const char* own, char* all, std::int64_t bytes) {
  gather_over(ranks, own, all, 1, bytes, Team{});
}

extern "C" void end_ranks(SharedRanks& ranks) { ranks.end(); }

}  // namespace stepwell
