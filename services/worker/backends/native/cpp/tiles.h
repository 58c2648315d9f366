// The processor's tile registers and their operations (Intel AMX).
//
// With STEPWELL_EMULATED_TILES the same functions compute with any processor that has AVX2, bit for
// bit like the hardware, and end the process where the hardware would raise a fault. Where the
// hardware zeroes tiles, the emulation fills them with NaN, so that code that wrongly relies on the
// zeros returns NaN.
//
// A process needs the operating system's permission before its first tile instruction (see
// tiles.py). The shapes of the tiles are a state of each thread. A thread must call `release` when
// its work is done: otherwise every switch between threads would save the tiles.

#pragma once

#ifndef __aarch64__
#include <cpuid.h>
#endif

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "tile_model.h"

namespace stepwell {

constexpr int NUM_TILES = 8;
constexpr int TILE_BYTES = TILE_ROWS * TILE_ROW_BYTES;

// The operand of LDTILECFG.
struct alignas(64) TileShapes {
  std::uint8_t palette = 1;
  std::uint8_t start = 0;
  std::uint8_t reserved[14] = {};
  std::uint16_t row_bytes[16] = {};
  std::uint8_t rows[16] = {};

  void set(int tile, int num_rows, int bytes) {
    rows[tile] = std::uint8_t(num_rows);
    row_bytes[tile] = std::uint16_t(bytes);
  }
};

// The maximum palette number of the processor. Tiles are usable if it is at least 1: some virtual
// machines announce tile registers, but have none.
inline int num_tile_palettes() {
#ifdef __aarch64__
  return 0;
#else
  unsigned eax = 0, ebx, ecx, edx;
  if (!__get_cpuid_count(0x1d, 0, &eax, &ebx, &ecx, &edx)) return 0;
  return int(eax);
#endif
}

namespace tiles {

#ifndef STEPWELL_EMULATED_TILES
constexpr bool ARE_EMULATED = false;

// Assembly, because the compiler (GCC 12) removes stores to the operands of its own functions for
// tiles.
inline void configure(const TileShapes& shapes) {
  asm volatile("ldtilecfg %0" ::"m"(shapes) : "memory");
}

inline void release() { asm volatile("tilerelease" ::: "memory"); }

// Rows of tile TILE are `stride` bytes apart.
template <int TILE>
inline void load(const void* from, std::int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(TILE) : "memory");
}

template <int TILE>
inline void store(void* to, std::int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(TILE) : "memory");
}

template <int TILE>
inline void zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(TILE));
}

// C += A * B in bfloat16.
template <int C, int A, int B>
inline void multiply_bfloat16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

// C += A * B in bytes of the types std::int8_t or std::uint8_t.
template <int C, int A, int B, class OfA, class OfB>
inline void multiply_bytes() {
  constexpr bool SIGNED_A = OfA(-1) < 0, SIGNED_B = OfB(-1) < 0;
  if constexpr (SIGNED_A && SIGNED_B) {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
  } else if constexpr (SIGNED_A) {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
  } else if constexpr (SIGNED_B) {
    asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
  } else {
    asm volatile("tdpbuud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
  }
}
#else
constexpr bool ARE_EMULATED = true;

struct Registers {
  TileShapes shapes;
  bool is_configured = false;
  alignas(64) char tiles[NUM_TILES][TILE_BYTES];

  void fill_with_nan() { std::memset(tiles, 0xff, sizeof tiles); }
};

inline thread_local Registers registers;

inline void require(bool is_met, const char* what) {
  if (is_met) return;
  std::fprintf(stderr, "emulated tiles: %s\n", what);
  std::abort();
}

inline void configure(const TileShapes& shapes) {
  require(shapes.palette == 1 && shapes.start == 0, "palette");
  for (int i = 0; i < 16; ++i) {
    const int rows = shapes.rows[i], bytes = shapes.row_bytes[i];
    require(shapes.reserved[i % 14] == 0, "reserved bytes");
    require(rows <= TILE_ROWS && bytes <= TILE_ROW_BYTES && (rows == 0) == (bytes == 0), "shape");
    require(i < NUM_TILES || rows == 0, "number of a tile");
  }
  registers.shapes = shapes;
  registers.is_configured = true;
  registers.fill_with_nan();
}

inline void release() {
  registers.is_configured = false;
  registers.fill_with_nan();
}

template <int TILE>
inline char* used() {
  static_assert(TILE >= 0 && TILE < NUM_TILES);
  require(registers.is_configured && registers.shapes.rows[TILE] > 0, "tile without a shape");
  return registers.tiles[TILE];
}

// Bytes beyond the shape of a tile become zero, as in the hardware.
template <int TILE>
inline void load(const void* from, std::int64_t stride) {
  char* tile = used<TILE>();
  std::memset(tile, 0, TILE_BYTES);
  for (int row = 0; row < registers.shapes.rows[TILE]; ++row) {
    std::memcpy(tile + row * TILE_ROW_BYTES, static_cast<const char*>(from) + row * stride,
                registers.shapes.row_bytes[TILE]);
  }
}

template <int TILE>
inline void store(void* to, std::int64_t stride) {
  const char* tile = used<TILE>();
  for (int row = 0; row < registers.shapes.rows[TILE]; ++row) {
    std::memcpy(static_cast<char*>(to) + row * stride, tile + row * TILE_ROW_BYTES,
                registers.shapes.row_bytes[TILE]);
  }
}

template <int TILE>
inline void zero() {
  std::memset(used<TILE>(), 0, TILE_BYTES);
}

// Calls multiply(a, b, rows, groups of depth, c) with the tiles. Columns beyond the shape become
// zero.
template <int C, int A, int B, class Multiply>
inline void multiply_tiles(Multiply&& multiply) {
  static_assert(C != A && C != B && A != B);
  char* c = used<C>();
  const char *a = used<A>(), *b = used<B>();
  const TileShapes& shapes = registers.shapes;
  const int rows = shapes.rows[C], groups = shapes.rows[B], bytes = shapes.row_bytes[C];
  require(shapes.rows[A] == rows && shapes.row_bytes[A] == 4 * groups &&
              shapes.row_bytes[B] == bytes && bytes % 4 == 0,
          "shapes of a product");
  multiply(a, b, rows, groups, c);
  for (int row = 0; row < rows; ++row) {
    std::memset(c + row * TILE_ROW_BYTES + bytes, 0, TILE_ROW_BYTES - bytes);
  }
}

template <int C, int A, int B>
inline void multiply_bfloat16() {
  multiply_tiles<C, A, B>(tile_model::multiply_bfloat16);
}

template <int C, int A, int B, class OfA, class OfB>
inline void multiply_bytes() {
  multiply_tiles<C, A, B>(tile_model::multiply_bytes<OfA, OfB>);
}
#endif

// Tiles 0 to 3 are totals, 4 and 5 are rows of A, and 6 and 7 are columns of B. Tiles 0, 1 and 4
// belong to the first tile of rows, and tiles 2, 3 and 5 to the second. `set_first_rows` sets the
// number of rows of the first tile of rows, 1 to TILE_ROWS. All other tiles are whole. It returns
// at once if the thread's tiles already have these shapes.
inline thread_local int first_rows = 0;

inline void set_first_rows(int rows) {
  if (rows == first_rows) return;
  TileShapes shapes;
  for (int tile = 0; tile < NUM_TILES; ++tile) {
    const bool is_first = tile == 0 || tile == 1 || tile == 4;
    shapes.set(tile, is_first ? rows : TILE_ROWS, TILE_ROW_BYTES);
  }
  configure(shapes);
  first_rows = rows;
}

// Must be called at the end of a thread's work.
inline void end() {
  if (first_rows == 0) return;
  release();
  first_rows = 0;
}

}  // namespace tiles

// The scope of a thread's work with tiles. In this scope, all other instructions round like
// products of tiles.
class TileScope {
 public:
  ~TileScope() { tiles::end(); }

 private:
  FlushingMode mode_;
};

}  // namespace stepwell
