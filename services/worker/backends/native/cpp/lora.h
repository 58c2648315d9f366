// LoRA deltas of projections: B (A x) for a token's input row x, with A and B of the adapter of its
// request (Hu et al., LoRA).
//
// The rows of a step are grouped by adapter once. Before a projection, the rows of each adapter are
// multiplied by the adapter's A. The products are stored in `inside`, in the order of the groups.
// During the projection the product of `inside` and B is added to the totals of each panel (block
// of output columns), before gating and rounding, so adapters work with all storage formats of the
// weight. Rows of one adapter are multiplied together, wherever they are in the step, because
// reading A and B takes most of the time. Tiles of rows add the products of an element in order of
// depth, so that a row's result does not depend on other rows. Grouping is from punica (Chen et
// al.).

#pragma once

#include <algorithm>
#include <cstdint>

#include "prefetch_list.h"
#include "rounding.h"
#include "threads.h"

namespace stepwell {

// A and B of one adapter for one projection, as native/lora.py packs them.
template <class T>
struct LoraProjection {
  const T* a;  // Panels of LANES rows of A, in the layout of a weight. Null: nothing is added.
  const T* b;  // Panels like the projection's, `rank` deep.
  // For each vector of a panel's columns, the index in a row of `inside` at which the `rank`
  // elements for B begin, or -1 if B is zero for the vector.
  const int* begins;
  std::int64_t width;  // Rows of A: a multiple of LANES.
  std::int64_t rank;
};

// Up to this many rows, a tile is multiplied by several panels at a time. The sums of a single
// panel would be too few: each addition would have to wait for the previous one.
#ifdef __AVX512F__
constexpr int MAX_SMALL_TILE_ROWS = 4;
#else
constexpr int MAX_SMALL_TILE_ROWS = 2;
#endif

// The projections of a layer that adapters add to.
enum LoraPart : int { LORA_QKV, LORA_OUTPUT, LORA_GATE_UP, LORA_DOWN, NUM_LORA_PARTS };

template <class T>
struct LoraLayer {
  LoraProjection<T> parts[NUM_LORA_PARTS];
};

// The adapters of a step's rows.
template <class T>
struct StepLora {
  const LoraLayer<T>* const* adapters;  // The layers of each adapter.
  const int* rows;                      // Row numbers, adapter by adapter, ascending for each.
  const int* starts;                    // [num_adapters + 1], in `rows`.
  std::int64_t width;                   // Maximum number of rows of an A.
  int num_adapters;
};

// The adapters of a step in one projection. `inside` [starts[num_adapters], width] has a row for
// each entry of the step's `rows`.
template <class T>
struct LoraDelta {
  const StepLora<T>* step;
  int layer;
  LoraPart part;
  T* inside;

  const LoraProjection<T>& of(int adapter) const {
    return step->adapters[adapter][layer].parts[part];
  }

  bool is_empty() const {
    for (int i = 0; i < step->num_adapters; ++i) {
      if (of(i).a != nullptr) return false;
    }
    return true;
  }
};

// Prefetches the structures with the addresses of a layer's A and B matrices. They are separate for
// each adapter, and a step reads them once for each layer.
template <class T>
inline void prefetch_addresses(const StepLora<T>& step, int layer) {
  for (int i = 0; i < step.num_adapters; ++i) {
    const char* first = reinterpret_cast<const char*>(step.adapters[i] + layer);
    const char* last = first + sizeof(LoraLayer<T>) - 1;
    for (const char* at = first; at < last; at += LINE_BYTES) __builtin_prefetch(at);
    __builtin_prefetch(last);
  }
}

// The A matrices of a projection that a thread will read, for its part of the adapters. They are
// prefetched while the previous projection is computed, a part of them with each panel: with many
// rows that projection is bound by arithmetic, but reading A matrices is bound by memory.
template <class T>
class LoraReadAhead {
 public:
  LoraReadAhead(const LoraDelta<T>& delta, std::int64_t depth, Team team)
      : delta_(delta), depth_(depth), adapters_(team.part(delta.step->num_adapters)) {
    for (std::int64_t i = adapters_.begin; i < adapters_.end; ++i) left_ += size_of(i);
  }

  // Must be called before panels are multiplied. `panels` is their approximate total number.
  void begin_panels(std::int64_t panels) {
    of_panel_ = divide_up(left_, std::max(panels, INT64_C(1)));
  }

  // Adds one of `parts` parts of a panel's prefetches to the list, at most `most` bytes.
  void add_part(int parts, std::int64_t most, PrefetchList& list) {
    std::int64_t count = round_up(divide_up(of_panel_, parts), LINE_BYTES / sizeof(T));
    count = std::min<std::int64_t>({count, most / std::int64_t{sizeof(T)}, left_});
    while (count > 0) {
      const std::int64_t taken = std::min(count, size_of(adapters_.begin) - taken_);
      list.add(delta_.of(int(adapters_.begin)).a + taken_, taken * sizeof(T));
      taken_ += taken;
      count -= taken;
      left_ -= taken;
      if (taken_ < size_of(adapters_.begin)) return;
      ++adapters_.begin;
      taken_ = 0;
    }
  }

 private:
  std::int64_t size_of(std::int64_t adapter) const {
    const LoraProjection<T>& p = delta_.of(int(adapter));
    return p.a == nullptr ? 0 : p.width * depth_;
  }

  LoraDelta<T> delta_;
  std::int64_t depth_;
  Range adapters_;
  std::int64_t taken_ = 0;     // Prefetched elements of the first remaining adapter.
  std::int64_t left_ = 0;      // Remaining elements of all adapters.
  std::int64_t of_panel_ = 0;  // Elements to prefetch with a panel.
};

}  // namespace stepwell
