// Products with the groups of a panel of a quantized weight (quantized.h), and with parts of
// groups.

#pragma once

#include <algorithm>

#include "projection.h"

namespace stepwell {

namespace {  // Internal, so that functions with one caller are inlined.

// A panel's groups. `record`: the first group.
struct Groups {
  template <class T>
  Groups(const Projection<T>& p, std::int64_t panel)
      : record(p.panel_of(panel)),
        bytes(p.group_bytes()),
        offset_of_codes(bytes - code_bytes(p.format, p.group)),
        depth(p.group),
        count(int(p.depth / p.group)) {}

  const float* scales(std::int64_t group) const {
    return reinterpret_cast<const float*>(record + group * bytes);
  }
  const float* offsets(std::int64_t group) const { return scales(group) + PANEL_WIDTH; }
  const char* codes(std::int64_t group) const { return record + group * bytes + offset_of_codes; }

  const char* record;
  std::int64_t bytes;
  std::int64_t offset_of_codes;
  std::int64_t depth;
  int count;
};

// A part of a panel's depth that is unpacked at once: `count` whole groups from `group` on, or
// `depth` elements of one group after its first `done` elements.
struct Piece {
  int group;
  int count;
  std::int64_t done;
  std::int64_t depth;  // Depth of each group.
  bool ends_groups;
  bool ends_panel;
};

// Calls work(piece) for pieces of at most `most` elements of each column.
template <class Work>
void for_pieces(const Groups& groups, std::int64_t most, Work&& work) {
  const int at_once = int(std::max<std::int64_t>(most / groups.depth, 1));
  for (int group = 0; group < groups.count; group += at_once) {
    const int count = std::min(at_once, groups.count - group);
    for (std::int64_t done = 0; done < groups.depth; done += most) {
      const std::int64_t depth = std::min(most, groups.depth - done);
      const bool ends = done + depth == groups.depth;
      work(Piece{group, count, done, depth, ends, ends && group + count == groups.count});
    }
  }
}

// Totals and sums, [rows, PANEL_WIDTH] each, panel after panel. `totals`: the bias plus all
// previous groups. `sums`: the parts of the current group that are already added.
struct PanelTotals {
  float* totals;
  float* sums;

  PanelTotals from(int row) const { return {totals + row * PANEL_WIDTH, sums + row * PANEL_WIDTH}; }
};

// Calls work(row, v, place) for each vector of ROWS rows of totals. `v` is the vector's number in
// its row, counted over all panels, and `place` its offset in the totals.
template <int ROWS, int PANELS, class Work>
inline __attribute__((always_inline)) void for_vectors_of_rows(Work&& work) {
#pragma GCC unroll 16
  for (int row = 0; row < ROWS; ++row) {
#pragma GCC unroll 8
    for (int v = 0; v < PANELS * PANEL_VECTORS; ++v) {
      work(row, v, (v / PANEL_VECTORS * ROWS + row) * PANEL_WIDTH + v % PANEL_VECTORS * LANES);
    }
  }
}

// Adds ROWS rows of `a` times PANELS panels to totals, and unpacks codes in registers. `groups` are
// the groups of the first panel, passed by value, because the compiler would reload members of a
// reference after each store.
template <class T, WeightFormat FORMAT, int ROWS, int PANELS>
__attribute__((noinline)) void add_codes(const Groups groups, float* totals, const T* a,
                                         std::int64_t stride) {
  const Unpacker<T, FORMAT> unpacker;
  const int steps = int(groups.depth / PanelOps<T>::DEPTH);
  const std::int64_t panel_bytes = groups.count * groups.bytes;
  for (int group = 0; group < groups.count; ++group) {
    Vector sums[ROWS][PANELS * PANEL_VECTORS] = {};
    const PanelCodes panels{groups.codes(group), panel_bytes, groups.record + panel_bytes};
    multiply_codes<T, FORMAT, ROWS, PANELS>(sums, unpacker, a + group * groups.depth, stride,
                                            panels, steps);
    const char* scales = reinterpret_cast<const char*>(groups.scales(group));
    Vector scale[PANELS * PANEL_VECTORS];
#pragma GCC unroll 8
    for (int v = 0; v < PANELS * PANEL_VECTORS; ++v) {
      const char* own = scales + v / PANEL_VECTORS * panel_bytes;
      scale[v] = load(reinterpret_cast<const float*>(own) + v % PANEL_VECTORS * LANES);
    }
    for_vectors_of_rows<ROWS, PANELS>([&](int row, int v, int place) {
      store(totals + place, fmadd(sums[row][v], scale[v], load(totals + place)));
    });
  }
}

template <class T, WeightFormat FORMAT>
constexpr auto ADD_CODES =
    functions_by_rows([]<int ROWS>() { return add_codes<T, FORMAT, ROWS, 1>; });

// Steps in a pass of add_groups' loop. With AVX-512, a single step takes 1 % longer for groups of
// 64. With AVX2, two steps need more registers than there are.
#ifdef __AVX512F__
constexpr int PASS_STEPS = 2;
#else
constexpr int PASS_STEPS = 1;
#endif

// The source of add_groups' columns for tiles after the first one: memory to which a piece was
// unpacked.
template <class T>
class UnpackedColumns {
 public:
  static constexpr int STEPS = PASS_STEPS;

  explicit UnpackedColumns(const T* panel) : panel_(panel) {}

  // Reads the columns of the step that is `step` steps ahead.
  __attribute__((always_inline)) void read(int step, Vector (&columns)[PANEL_VECTORS]) {
#pragma GCC unroll 2
    for (int v = 0; v < PANEL_VECTORS; ++v) {
      columns[v] = PanelOps<T>::load(panel_ + step * SIZE + v * LANES * PanelOps<T>::DEPTH);
    }
  }

  // `advance` is called after `steps` steps, and `end_group` after all steps of a group.
  __attribute__((always_inline)) void advance(int steps) { panel_ += steps * SIZE; }
  void end_group() {}

 private:
  static constexpr int SIZE = PANEL_WIDTH * PanelOps<T>::DEPTH;

  const T* panel_;
};

// The source of add_groups' columns for the first tile: codes, with `between` bytes between groups.
// Writes unpacked columns to `unpacked`.
template <class T, WeightFormat FORMAT>
class UnpackingColumns {
 public:
  static constexpr int STEPS = std::max(PASS_STEPS, Unpacker<T, FORMAT>::STEPS);

  UnpackingColumns(const char* codes, std::int64_t between, T* unpacked)
      : codes_(codes), between_(between), unpacked_(unpacked) {}

  __attribute__((always_inline)) void read(int step, Vector (&columns)[PANEL_VECTORS]) {
    using Block = Unpacker<T, FORMAT>;
    const char* block = codes_ + step / Block::STEPS * Block::BYTES;
    unpacker_(block, step % Block::STEPS, columns);
    if (step % Block::STEPS == 0) __builtin_prefetch(block + CODES_AHEAD, 0, 2);
#pragma GCC unroll 2
    for (int v = 0; v < PANEL_VECTORS; ++v) {
      T* to = unpacked_ + (step * PANEL_VECTORS + v) * LANES * PanelOps<T>::DEPTH;
      store_halves(reinterpret_cast<float*>(to), columns[v]);
    }
  }

  __attribute__((always_inline)) void advance(int steps) {
    codes_ += steps / Unpacker<T, FORMAT>::STEPS * Unpacker<T, FORMAT>::BYTES;
    unpacked_ += steps * PANEL_WIDTH * PanelOps<T>::DEPTH;
  }
  void end_group() { codes_ += between_; }

 private:
  Unpacker<T, FORMAT> unpacker_{};
  const char* codes_;
  std::int64_t between_;
  T* unpacked_;
};

// The operands of add_groups: a piece, with `steps` steps of each group. `scales`: the scales of
// the first group. Groups are `group_bytes` apart. `bias`: the initial totals, or null if earlier
// groups were added already. If the piece does not begin a group, `to.sums` has the sums of the
// group's earlier parts.
struct PieceGroups {
  template <class T>
  PieceGroups(const Projection<T>& p, const Piece& piece, const Groups& groups, const float* begin,
              const PanelTotals& totals)
      : scales(groups.scales(piece.group)),
        group_bytes(groups.bytes),
        count(piece.count),
        steps(int(piece.depth / PanelOps<T>::DEPTH)),
        bias(piece.group == 0 ? begin : nullptr),
        to(totals),
        begins_group(piece.done == 0),
        ends_group(piece.ends_groups) {}

  const float* scales;
  std::int64_t group_bytes;
  int count;
  int steps;
  const float* bias;
  PanelTotals to;
  bool begins_group;
  bool ends_group;
};

// Adds ROWS rows of `a` times the columns of groups, or of a part of one group. With PREFETCH,
// prefetches `prefetch`. A separate function, so that the loop has all registers.
template <class T, int ROWS, bool PREFETCH, class Columns>
__attribute__((noinline, aligned(64))) void add_groups(const PieceGroups& groups, const T* a,
                                                       std::int64_t stride, Columns columns,
                                                       Prefetch prefetch) {
  RowPointers<T, ROWS> rows(a, stride);
  const char* fetched = static_cast<const char*>(prefetch.first);
  const char* scales = reinterpret_cast<const char*>(groups.scales);
  const float* bias = groups.bias;
  int left = groups.count;
  do {
    Vector sums[ROWS][PANEL_VECTORS] = {};
    if (!groups.begins_group) {
      for_vectors_of_rows<ROWS, 1>(
          [&](int row, int v, int place) { sums[row][v] = load(groups.to.sums + place); });
    }
    DepthSums<T, ROWS, PANEL_VECTORS> depth_sums;
    const auto add_steps = [&]<int STEPS>() __attribute__((always_inline)) {
#pragma GCC unroll 4
      for (int step = 0; step < STEPS; ++step) {
        Vector own[PANEL_VECTORS];
        columns.read(step, own);
        if (PREFETCH) {
          __builtin_prefetch(fetched, 0, 2);
          __builtin_prefetch(fetched + prefetch.step_bytes / PANEL_VECTORS, 0, 2);
          fetched += prefetch.step_bytes;
        }
        add_step(sums, depth_sums, rows, own);
      }
      columns.advance(STEPS);
    };
    int step = 0;
    for (; step + Columns::STEPS <= groups.steps; step += Columns::STEPS) {
      add_steps.template operator()<Columns::STEPS>();
    }
    if constexpr (Columns::STEPS > 1) {
      for (; step < groups.steps; ++step) add_steps.template operator()<1>();
    }
    depth_sums.finish(sums);
    columns.end_group();
    if (!groups.ends_group) {
      for_vectors_of_rows<ROWS, 1>(
          [&](int row, int v, int place) { store(groups.to.sums + place, sums[row][v]); });
      return;
    }
    float* to = groups.to.totals;
    const Vector scale[] = {load(reinterpret_cast<const float*>(scales)),
                            load(reinterpret_cast<const float*>(scales) + LANES)};
    scales += groups.group_bytes;
    if (bias != nullptr) {
      const Vector before[] = {load(bias), load(bias + LANES)};
      for_vectors_of_rows<ROWS, 1>([&](int row, int v, int place) {
        store(to + place, fmadd(sums[row][v], scale[v], before[v]));
      });
      bias = nullptr;
    } else {
      for_vectors_of_rows<ROWS, 1>([&](int row, int v, int place) {
        store(to + place, fmadd(sums[row][v], scale[v], load(to + place)));
      });
    }
  } while (--left > 0);
}

template <class T, bool PREFETCH>
constexpr auto ADD_GROUPS =
    functions_by_rows([]<int ROWS>() { return add_groups<T, ROWS, PREFETCH, UnpackedColumns<T>>; });

}  // namespace

}  // namespace stepwell
