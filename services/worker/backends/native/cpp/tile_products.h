// Products of rows and panels (panel.h), computed with the processor's tiles (tiles.h).
//
// The rows of a block are copied into tiles once. A panel is read as it is stored: it has two tiles
// of columns side by side, whose rows are PANEL_WIDTH groups of depth apart. Two tiles of rows are
// multiplied by two tiles of columns at a time, so that each tile is loaded once for two products.
// A chunk of depth stays in the first-level cache while all rows of a block are multiplied by it.

#pragma once

#include <algorithm>

#include "quantized_projection.h"
#include "scratch.h"

namespace stepwell {

namespace {  // Internal, so that functions with one caller are inlined.

// Elements of a row in a tile.
template <class Element>
constexpr int TILE_DEPTH = TILE_ROW_BYTES / int(sizeof(Element));

// Number of rows that are multiplied together.
constexpr int PAIR_ROWS = 2 * TILE_ROWS;

// Bytes of the two tiles of columns of a panel.
constexpr std::int64_t PANEL_TILE_BYTES = 2 * TILE_BYTES;

constexpr std::int64_t CHUNK_TILES = 8;

// The maximum size of the rows of a block, with which they stay in the second-level cache.
constexpr std::int64_t TILE_BLOCK_BYTES = 1152 * 1024;

// Prefetch distances in a sequential stream, in bytes: for one tile of rows, and for two.
constexpr std::int64_t TILES_AHEAD[] = {2048, 8192};

// Whether `rows` rows are multiplied by a weight with tiles. A W8A8 weight may use tiles or not,
// because its sums are exact in any order. A single row is multiplied by a PLAIN weight without
// tiles, but in the order of tiles, because memory delivers the weight faster to vectors than to
// tiles.
template <class T>
bool uses_tiles(const Projection<T>& p, std::int64_t rows) {
  if (!SUMS_LIKE_TILES<T>) return false;
  if (p.format == WeightFormat::PLAIN && rows == 1) return false;
  if (p.format == WeightFormat::W8A8) return p.coded_depth() % TILE_DEPTH<ValueByte> == 0;
  return (p.is_unpacked() ? p.group : p.depth) % TILE_DEPTH<T> == 0;
}

// Copies rows, `stride` elements apart, into tiles [tiles of rows, tiles of depth], and sets the
// shapes of the thread's tiles. Zeros fill the last tile of rows. The copy is valid until the
// thread's next call.
template <class Element>
const char* rows_in_tiles(const Element* rows, std::int64_t stride, int count, std::int64_t depth) {
  static thread_local Scratch scratch;
  const std::int64_t across = depth / TILE_DEPTH<Element>;
  const std::int64_t bytes = round_up(count, TILE_ROWS) * across * TILE_ROW_BYTES;
  scratch.reserve(bytes);
  char* tiles = scratch.take<char>(bytes);
  for (int row = 0; row < round_up(count, TILE_ROWS); ++row, rows += stride) {
    char* to = tiles + (row / TILE_ROWS * across * TILE_ROWS + row % TILE_ROWS) * TILE_ROW_BYTES;
    for (std::int64_t i = 0; i < across; ++i, to += TILE_BYTES) {
      if (row < count) {
        std::memcpy(to, rows + i * TILE_DEPTH<Element>, TILE_ROW_BYTES);
      } else {
        std::memset(to, 0, TILE_ROW_BYTES);
      }
    }
  }
  tiles::set_first_rows(std::min(count, TILE_ROWS));
  return tiles;
}

template <class Element, int C, int A, int B>
inline void multiply_tile() {
  if constexpr (sizeof(Element) == 1) {
    tiles::multiply_bytes<C, A, B, std::uint8_t, std::int8_t>();
  } else {
    tiles::multiply_bfloat16<C, A, B>();
  }
}

// Writes `from` plus rows times a panel, for `count` tiles of depth, to `to` [ROW_TILES *
// TILE_ROWS, PANEL_WIDTH]. Rows of `from` are `from_stride` elements apart. Tiles of rows are
// `rows_stride` bytes apart. Prefetches `prefetch`, of which a step is a tile of depth.
template <class Element, int ROW_TILES>
inline void add_tiles(const float* from, std::int64_t from_stride, const char* rows,
                      std::int64_t rows_stride, const char* panel, std::int64_t count,
                      Prefetch prefetch, float* to) {
  const std::int64_t stride = from_stride * sizeof(float);
  constexpr std::int64_t TO_STRIDE = PANEL_WIDTH * sizeof(float), PANEL_STRIDE = 2 * TILE_ROW_BYTES;
  tiles::load<0>(from, stride);
  tiles::load<1>(from + LANES, stride);
  if constexpr (ROW_TILES > 1) {
    tiles::load<2>(from + TILE_ROWS * from_stride, stride);
    tiles::load<3>(from + TILE_ROWS * from_stride + LANES, stride);
  }
  const char* fetched = static_cast<const char*>(prefetch.first);
  for (std::int64_t i = 0; i < count; ++i, rows += TILE_BYTES, panel += PANEL_TILE_BYTES) {
    tiles::load<4>(rows, TILE_ROW_BYTES);
    tiles::load<6>(panel, PANEL_STRIDE);
    multiply_tile<Element, 0, 4, 6>();
    for (std::int64_t line = 0; line < prefetch.step_bytes; line += LINE_BYTES) {
      __builtin_prefetch(fetched + line, 0, 2);
    }
    fetched += prefetch.step_bytes;
    tiles::load<7>(panel + TILE_ROW_BYTES, PANEL_STRIDE);
    multiply_tile<Element, 1, 4, 7>();
    if constexpr (ROW_TILES > 1) {
      tiles::load<5>(rows + rows_stride, TILE_ROW_BYTES);
      multiply_tile<Element, 2, 5, 6>();
      multiply_tile<Element, 3, 5, 7>();
    }
  }
  tiles::store<0>(to, TO_STRIDE);
  tiles::store<1>(to + LANES, TO_STRIDE);
  if constexpr (ROW_TILES > 1) {
    tiles::store<2>(to + TILE_ROWS * PANEL_WIDTH, TO_STRIDE);
    tiles::store<3>(to + TILE_ROWS * PANEL_WIDTH + LANES, TO_STRIDE);
  }
}

// The prefetches of the rows from `row` on while they are multiplied by a chunk of `count` tiles of
// depth. With few rows, these are the stream of panels, otherwise the rows' part of the next chunk.
inline Prefetch prefetch_of_rows(const char* chunk, std::int64_t count, int row, int rows) {
  if (rows <= PAIR_ROWS) return {chunk + TILES_AHEAD[rows > TILE_ROWS ? 1 : 0], PANEL_TILE_BYTES};
  const std::int64_t lines = count * PANEL_TILE_BYTES / LINE_BYTES;
  const std::int64_t own = divide_up(lines, divide_up(rows, PAIR_ROWS));
  const std::int64_t step_bytes = divide_up(own, count) * LINE_BYTES;
  return {chunk + count * PANEL_TILE_BYTES + row / PAIR_ROWS * count * step_bytes, step_bytes};
}

// Does the same as project_panel, with tiles. `totals` has room for whole tiles of rows.
template <class T, class Panel, bool LORA>
void project_panel_in_tiles(const Projection<T>& p, const InputRows<T>& rows, Output output,
                            std::int64_t panel, float* totals, const LoraPanel<T>*) {
  using Element = typename Panel::Element;
  const PanelColumns<T> columns(p, panel);
  const Panel factors(p, rows, panel, columns);
  const char* packed = reinterpret_cast<const char*>(factors.packed);
  const std::int64_t across = factors.depth / TILE_DEPTH<Element>;
  const std::int64_t chunks = rows.count <= PAIR_ROWS ? 1 : divide_up(across, CHUNK_TILES);
  for (std::int64_t chunk = 0; chunk < chunks; ++chunk) {
    const std::int64_t begin = across * chunk / chunks;
    const std::int64_t count = across * (chunk + 1) / chunks - begin;
    const char* part = packed + begin * PANEL_TILE_BYTES;
    for (int row = 0; row < rows.count; row += PAIR_ROWS) {
      float* to = totals + row * PANEL_WIDTH;
      const auto add = rows.count - row > TILE_ROWS ? add_tiles<Element, 2> : add_tiles<Element, 1>;
      add(chunk == 0 ? factors.begins : to, chunk == 0 ? 0 : PANEL_WIDTH,
          rows.tiles + (row / TILE_ROWS * across + begin) * TILE_BYTES, across * TILE_BYTES, part,
          count, prefetch_of_rows(part, count, row, rows.count), to);
      if (chunk + 1 < chunks) continue;
      const int finished = std::min(rows.count - row, PAIR_ROWS);
      factors.finish(row, finished, to);
      if (LORA) continue;
      write_rows(p, to, finished, columns.first, columns.width, output.from(row * columns.width));
    }
  }
}

template <class T, WeightFormat FORMAT>
void unpack(const Groups& groups, const Piece& piece, T* unpacked) {
  using Columns = UnpackingColumns<T, FORMAT>;
  const char* codes = groups.codes(piece.group) + code_bytes(FORMAT, piece.done);
  Columns source(codes, groups.offset_of_codes, unpacked);
  for (int group = 0; group < piece.count; ++group) {
    for (std::int64_t d = 0; d < piece.depth; d += Columns::STEPS * PanelOps<T>::DEPTH) {
      Vector columns[PANEL_VECTORS];
#pragma GCC unroll 4
      for (int step = 0; step < Columns::STEPS; ++step) source.read(step, columns);
      source.advance(Columns::STEPS);
    }
    source.end_group();
  }
}

// Does the same as project_quantized_panel, with tiles.
template <class T, WeightFormat FORMAT>
__attribute__((noinline)) void project_quantized_in_tiles(const Projection<T>& p,
                                                          const InputRows<T>& rows, Output output,
                                                          std::int64_t panel, float* totals,
                                                          const LoraPanel<T>* lora) {
  constexpr std::int64_t CHUNK = CHUNK_TILES * TILE_DEPTH<T>;
  static constexpr float ZEROS[PANEL_WIDTH] = {};
  alignas(64) T unpacked[CHUNK * PANEL_WIDTH];
  alignas(64) float sums[TOTAL_ROWS * PANEL_WIDTH];
  const PanelColumns<T> columns(p, panel);
  const Groups groups(p, panel);
  const std::int64_t across = p.depth / TILE_DEPTH<T>;
  begin_totals(columns, rows.count, totals);
  for_pieces(groups, CHUNK, [&](const Piece& piece) {
    unpack<T, FORMAT>(groups, piece, unpacked);
    for (int i = 0; i < piece.count; ++i) {
      const int group = piece.group + i;
      const std::int64_t begin = (group * groups.depth + piece.done) / TILE_DEPTH<T>;
      const char* part = reinterpret_cast<const char*>(unpacked + i * piece.depth * PANEL_WIDTH);
      for (int row = 0; row < rows.count; row += PAIR_ROWS) {
        float* to = sums + row * PANEL_WIDTH;
        const auto add = rows.count - row > TILE_ROWS ? add_tiles<T, 2> : add_tiles<T, 1>;
        add(piece.done == 0 ? ZEROS : to, piece.done == 0 ? 0 : PANEL_WIDTH,
            rows.tiles + (row / TILE_ROWS * across + begin) * TILE_BYTES, across * TILE_BYTES, part,
            piece.depth / TILE_DEPTH<T>, {}, to);
      }
      if (!piece.ends_groups) continue;
      const Vector scales[] = {load(groups.scales(group)), load(groups.scales(group) + LANES)};
      for (int place = 0; place < rows.count * PANEL_WIDTH; place += LANES) {
        const Vector scale = scales[place / LANES % PANEL_VECTORS];
        store(totals + place, fmadd(load(sums + place), scale, load(totals + place)));
      }
    }
  });
  if (p.has_offsets) add_offsets(rows.first, rows.stride, rows.count, groups, totals);
  if (lora != nullptr) return;
  write_rows(p, totals, rows.count, columns.first, columns.width, output);
}

}  // namespace

}  // namespace stepwell
