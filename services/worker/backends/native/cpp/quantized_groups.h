// Products with the groups of a panel of a quantized weight, and with parts of groups.

#pragma once

#include <algorithm>

#include "projection.h"

namespace stepwell {

namespace {  // Internal, so that functions with one caller are inlined.

// A panel's groups. `record`: the first of them.
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
// `depth` elements of one group after `done` others.
struct Piece {
  int group;
  int count;
  std::int64_t done;
  std::int64_t depth;  // Of each group.
  bool ends_groups;
  bool ends_panel;
};

inline Piece whole_panel(const Groups& groups) {
  return {0, groups.count, 0, groups.depth, true, true};
}

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

// Rows of the totals of all groups before, which begin as the bias, and of the sums of a group that
// has been added up in part: [rows, PANEL_WIDTH] both. Of several panels, one after the other.
struct PanelTotals {
  float* totals;
  float* sums;

  PanelTotals from(int row) const { return {totals + row * PANEL_WIDTH, sums + row * PANEL_WIDTH}; }
};

// Calls work(row, v, place) for each vector of ROWS rows of totals, v counting those of a row in
// all panels, and its place in them.
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

// Adds a piece to ROWS rows of PANELS panels, whose first one's groups are given. multiply(sums, i)
// adds the products of the piece's group i. The description is passed by value: the compiler would
// read members of references anew after each store.
template <int ROWS, int PANELS, class Multiply>
inline __attribute__((always_inline)) void add_piece(const Piece piece, const Groups groups,
                                                     std::int64_t panel_bytes, const PanelTotals to,
                                                     Multiply&& multiply) {
  for (int i = 0; i < piece.count; ++i) {
    Vector sums[ROWS][PANELS * PANEL_VECTORS] = {};
    if (piece.done > 0) {
      for_vectors_of_rows<ROWS, PANELS>(
          [&](int row, int v, int place) { sums[row][v] = load(to.sums + place); });
    }
    multiply(sums, i);
    if (!piece.ends_groups) {
      for_vectors_of_rows<ROWS, PANELS>(
          [&](int row, int v, int place) { store(to.sums + place, sums[row][v]); });
      return;
    }
    const char* scales = reinterpret_cast<const char*>(groups.scales(piece.group + i));
    Vector scale[PANELS * PANEL_VECTORS];
#pragma GCC unroll 8
    for (int v = 0; v < PANELS * PANEL_VECTORS; ++v) {
      const char* own = scales + v / PANEL_VECTORS * panel_bytes;
      scale[v] = load(reinterpret_cast<const float*>(own) + v % PANEL_VECTORS * LANES);
    }
    for_vectors_of_rows<ROWS, PANELS>([&](int row, int v, int place) {
      store(to.totals + place, fmadd(sums[row][v], scale[v], load(to.totals + place)));
    });
  }
}

// Adds ROWS rows of `a` times a piece's codes; with UNPACKS writes the piece to `unpacked`.
template <class T, WeightFormat FORMAT, int ROWS, int PANELS, bool UNPACKS>
__attribute__((noinline)) void add_codes(const Piece& piece, const Groups& groups,
                                         const PanelTotals& to, const T* a, std::int64_t stride,
                                         T* unpacked) {
  const Unpacker<T, FORMAT> block;
  const int steps = int(piece.depth / PanelOps<T>::DEPTH);
  const std::int64_t panel_bytes = groups.count * groups.bytes;
  const auto multiply = [&](Vector(&sums)[ROWS][PANELS* PANEL_VECTORS], int i) {
    const PanelCodes panels{groups.codes(piece.group + i) + code_bytes(FORMAT, piece.done),
                            panel_bytes, groups.record + panel_bytes};
    multiply_codes<T, FORMAT, ROWS, PANELS, UNPACKS>(sums, block, a + i * piece.depth, stride,
                                                     panels, steps,
                                                     unpacked + i * piece.depth * PANEL_WIDTH);
  };
  add_piece<ROWS, PANELS>(piece, groups, panel_bytes, to, multiply);
}

// Where a tile's products with a group, or with a part of one, are added: `sums` has those of the
// group's parts before. Of a whole group, `totals` become its sums times `scales` plus what
// `before` has, in rows `before_stride` elements apart.
struct GroupTotals {
  const float* scales;
  const float* before;
  std::int64_t before_stride;
  PanelTotals to;
  bool begins_group;
  bool ends_group;
};

// Steps of a pass of the loop over an unpacked group. With one, products with groups of 64 take a
// hundredth longer.
constexpr int GROUP_UNROLLED = 2;

// Adds ROWS rows of `a` times an unpacked group or a part of one. With PREFETCH, fetches `prefetch`
// meanwhile. A function of its own, so that the loop has all registers.
template <class T, int ROWS, bool PREFETCH>
__attribute__((noinline)) void add_group(const GroupTotals& group, const T* a, std::int64_t stride,
                                         const T* unpacked, int steps, Prefetch prefetch) {
  Vector sums[ROWS][PANEL_VECTORS] = {};
  if (!group.begins_group) {
    for_vectors_of_rows<ROWS, 1>(
        [&](int row, int v, int place) { sums[row][v] = load(group.to.sums + place); });
  }
  multiply<T, ROWS, PANEL_VECTORS, PREFETCH, PANEL_WIDTH, GROUP_UNROLLED>(sums, a, stride, unpacked,
                                                                          steps, prefetch);
  if (!group.ends_group) {
    float* to = group.to.sums;
    for_vectors_of_rows<ROWS, 1>(
        [&](int row, int v, int place) { store(to + place, sums[row][v]); });
    return;
  }
  const Vector scale[] = {load(group.scales), load(group.scales + LANES)};
  const float* before = group.before;
  const std::int64_t before_stride = group.before_stride;
  float* to = group.to.totals;
  for_vectors_of_rows<ROWS, 1>([&](int row, int v, int place) {
    const Vector total = load(before + row * before_stride + v * LANES);
    store(to + place, fmadd(sums[row][v], scale[v], total));
  });
}

// Adds ROWS rows of `a` times an unpacked piece, whose first group's totals begin as the bias.
template <class T, int ROWS, bool PREFETCH>
void add_unpacked(const Piece& piece, const Groups& groups, const float* bias,
                  const PanelTotals& to, const T* a, std::int64_t stride, const T* unpacked,
                  Prefetch prefetch) {
  const int steps = int(piece.depth / PanelOps<T>::DEPTH);
  const char* fetched = static_cast<const char*>(prefetch.first);
  for (int i = 0; i < piece.count; ++i) {
    const int group = piece.group + i;
    const GroupTotals totals{groups.scales(group),
                             group == 0 ? bias : to.totals,
                             group == 0 ? 0 : PANEL_WIDTH,
                             to,
                             piece.done == 0,
                             piece.ends_groups};
    add_group<T, ROWS, PREFETCH>(totals, a + i * piece.depth, stride,
                                 unpacked + i * piece.depth * PANEL_WIDTH, steps,
                                 {fetched + i * steps * prefetch.step_bytes, prefetch.step_bytes});
  }
}

}  // namespace

}  // namespace stepwell
