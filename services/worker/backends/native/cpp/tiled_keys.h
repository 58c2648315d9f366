// Attention of rows (query heads) over a block of keys, by the processor's products of tiles. The
// sums have the same bits as in packed_keys.h and single_query.h.
//
// Panels of keys and of values (key_block.h, packed_keys.h) already have the layout of tiles: a row
// of a tile is one step of depth of LANES columns. The rows of the other operand are queries, or
// query heads of one query, or their weights. A tile is SUM_STEPS steps deep.

#pragma once

#include <algorithm>
#include <cstdint>

#include "key_block.h"
#include "panel.h"
#include "tiles.h"

namespace stepwell {

// Elements of depth in a tile.
constexpr int SUM_DEPTH = SUM_STEPS<BFloat16> * PanelOps<BFloat16>::DEPTH;
static_assert(!SUMS_LIKE_TILES<BFloat16> || PANEL_WIDTH % SUM_DEPTH == 0);

// Rows that are `stride` elements apart. If they fill two tiles, the first tile has `first_rows`
// rows.
struct TiledRows {
  const BFloat16* first;
  int stride;
  int first_rows;
};

// One or two tiles of columns for each SUM_DEPTH of depth. Steps of depth are `step` elements
// apart.
struct TiledColumns {
  const BFloat16* first[2];
  int step;
};

// Computes the products of ROWS tiles of rows and COLUMNS tiles of columns, `depth` tiles deep.
// With ADD, adds them to the totals, whose rows are `stride` elements apart. Calls visit(tile of
// depth) before the products of each tile of depth.
template <int ROWS, int COLUMNS, bool ADD, class Visit>
void multiply_in_tiles(const TiledRows& rows, const TiledColumns& columns, int depth, float* total,
                       int stride, Visit&& visit) {
  constexpr std::int64_t SIZE = sizeof(float);
  const std::int64_t row_bytes = std::int64_t{rows.stride} * sizeof(BFloat16);
  const std::int64_t step_bytes = std::int64_t{columns.step} * sizeof(BFloat16);
  const BFloat16* second = rows.first + rows.first_rows * rows.stride;
  float* second_total = total + rows.first_rows * stride;
  // Calls work.template operator()<tile>(totals) for the tiles of totals.
  const auto for_totals = [=](auto&& work) {
    work.template operator()<0>(total);
    if constexpr (COLUMNS > 1) work.template operator()<1>(total + LANES);
    if constexpr (ROWS > 1) work.template operator()<2>(second_total);
    if constexpr (ROWS > 1 && COLUMNS > 1) work.template operator()<3>(second_total + LANES);
  };
  for_totals([=]<int TILE>([[maybe_unused]] const float* from) {
    if constexpr (ADD) {
      tiles::load<TILE>(from, stride * SIZE);
    } else {
      tiles::zero<TILE>();
    }
  });
  for (int tile = 0; tile < depth; ++tile) {
    const int d = tile * SUM_DEPTH;
    const std::int64_t step = std::int64_t{tile} * SUM_STEPS<BFloat16> * columns.step;
    visit(tile);
    tiles::load<4>(rows.first + d, row_bytes);
    tiles::load<6>(columns.first[0] + step, step_bytes);
    tiles::multiply_bfloat16<0, 4, 6>();
    if constexpr (COLUMNS > 1) {
      tiles::load<7>(columns.first[1] + step, step_bytes);
      tiles::multiply_bfloat16<1, 4, 7>();
    }
    if constexpr (ROWS > 1) {
      tiles::load<5>(second + d, row_bytes);
      tiles::multiply_bfloat16<2, 5, 6>();
      if constexpr (COLUMNS > 1) tiles::multiply_bfloat16<3, 5, 7>();
    }
  }
  for_totals([=]<int TILE>(float* to) { tiles::store<TILE>(to, stride * SIZE); });
}

// Calls work.template operator()<tiles of rows>(first row, rows of its first tile) for tiles that
// cover `rows` rows, two at a time. Only the very first tile may have fewer than TILE_ROWS rows.
template <class Work>
inline void for_tiles_of_rows(int rows, Work&& work) {
  constexpr int PAIR = 2 * TILE_ROWS;
  const int rest = rows % PAIR;
  if (rest > TILE_ROWS) {
    tiles::set_first_rows(rest - TILE_ROWS);
    work.template operator()<2>(0, rest - TILE_ROWS);
  } else if (rest > 0) {
    tiles::set_first_rows(rest);
    work.template operator()<1>(0, rest);
  }
  if (rest < rows) tiles::set_first_rows(TILE_ROWS);
  for (int row = rest; row < rows; row += PAIR) work.template operator()<2>(row, TILE_ROWS);
}

// scores[row][key] = the product of query[row] and the key, for the keys of panels [0, count).
// `dim` is a multiple of SUM_DEPTH. Queries are `stride` elements apart.
inline void score_in_tiles(const BFloat16* query, int stride, int rows,
                           const KeyPanels<BFloat16>& panels, int count, int dim, float* scores) {
  for_tiles_of_rows(rows, [&]<int ROWS>(int row, int first_rows) {
    const TiledRows queries{query + row * stride, stride, first_rows};
    float* own = scores + row * BLOCK_KEYS;
    const auto score = [&]<int PANELS>(int panel) {
      const TiledColumns keys{{panels.current[panel], panels.current[panel + PANELS - 1]},
                              panels.step};
      multiply_in_tiles<ROWS, PANELS, false>(
          queries, keys, dim / SUM_DEPTH, own + panel * LANES, BLOCK_KEYS, [&](int tile) {
            if (row > 0) return;
            for (int p = 0; p < PANELS; ++p) {
              const BFloat16* next = panels.next[panel + p] + tile * SUM_DEPTH * LANES;
#pragma GCC unroll 16
              for (int i = 0; i < TILE_ROWS; ++i) __builtin_prefetch(next + i * 2 * LANES, 0, 2);
            }
          });
    };
    int panel = 0;
    for (; panel + 2 <= count; panel += 2) score.template operator()<2>(panel);
    if (panel < count) score.template operator()<1>(panel);
  });
}

// total[row] += the sum of weights[row][key] * value[key] over `count` values of `dim` elements.
// The values are packed as by pack_values. Totals are `stride` elements apart.
inline void add_values_in_tiles(const BFloat16* weights, const BFloat16* packed, int count,
                                int rows, int dim, float* total, int stride) {
  const int depth = divide_up(count, SUM_DEPTH);
  for_tiles_of_rows(rows, [&]<int ROWS>(int row, int first_rows) {
    const TiledRows own{weights + row * BLOCK_KEYS, BLOCK_KEYS, first_rows};
    for (int d = 0; d < dim; d += PANEL_WIDTH) {
      const BFloat16* panel = packed + d * BLOCK_KEYS;
      const TiledColumns values{{panel, panel + 2 * LANES}, 2 * PANEL_WIDTH};
      multiply_in_tiles<ROWS, PANEL_VECTORS, true>(own, values, depth, total + row * stride + d,
                                                   stride, [](int) {});
    }
  });
}

}  // namespace stepwell
