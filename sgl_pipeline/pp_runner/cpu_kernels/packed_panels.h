// Panels of weights that are multiplied as they lie in memory, by an instruction that adds the
// products of four bytes of inputs to a sum: bf16 or int8, on AMX tiles or AVX-512 vectors.
//
// Shared by products.cpp and int8_products.cpp, which give the instruction (`Dot`).

#pragma once

#include "product_panels.h"

#if defined(__AVX512BW__)

namespace {

// Some tiles of two blocks of a weight, and those that will be wanted next: some lines of each of
// these are asked for, into the L2 cache. Asked for in the L1, they would push out what is in use.
struct Panel {
  const Byte* blocks[2];
  const Byte* next[2];
  int64_t tiles;
  int64_t row_tiles;  // of a packed row
  bool accumulate;    // to the sums of the tiles before
  int first_line;
  int end_line;

  // A quarter of the requests for a tile. They are to be spread over the work on it: those that
  // come at once do not all get as far as the L2.
  void prefetch(int64_t tile, int quarter) const {
    const int middle = (first_line + end_line) / 2;
    const int first = quarter < 2 ? first_line : middle, end = quarter < 2 ? middle : end_line;
    for (int line = first; line < end; ++line)
      __builtin_prefetch(next[quarter % 2] + tile * kTile + line * kLine, 0, 2);
  }

  // For the `part`-th of `parts` that share the work of asking.
  void share_prefetch(int part, int parts) {
    constexpr int kLines = kTile / kLine;
    first_line = kLines * part / parts;
    end_line = kLines * (part + 1) / parts;
  }
};

#if defined(SGLP_HAS_AMX)

// Static, as the compiler does not know that the instruction reads all of it.
const TileConfiguration kTileConfiguration{
    1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};

void open_tiles() { _tile_loadconfig(&kTileConfiguration); }
void close_tiles() { _tile_release(); }

template <typename Dot, bool kSecondTile>
void multiply(const Byte* rows, const Panel& panel, Sums& sums) {
  const Byte* second = rows + panel.row_tiles * kTile;
  if (panel.accumulate) {
    asm volatile("" ::: "memory");  // GCC does not know that tile operations read memory
    _tile_loadd(0, &sums[0][0], sizeof(sums[0]));
    _tile_loadd(1, &sums[0][kBlock], sizeof(sums[0]));
    if (kSecondTile) _tile_loadd(2, &sums[kBlock][0], sizeof(sums[0]));
    if (kSecondTile) _tile_loadd(3, &sums[kBlock][kBlock], sizeof(sums[0]));
  } else {
    _tile_zero(0);
    _tile_zero(1);
    if (kSecondTile) _tile_zero(2);
    if (kSecondTile) _tile_zero(3);
  }
  // Rows only pass through: the hint keeps the panel's place in the L1 cache for the next rows.
  for (int64_t tile = 0; tile < panel.tiles; ++tile) {
    panel.prefetch(tile, 0);
    _tile_stream_loadd(4, rows + tile * kTile, 64);
    _tile_loadd(6, panel.blocks[0] + tile * kTile, 64);
    panel.prefetch(tile, 1);
    Dot::tiles_0_4_6();
    _tile_loadd(7, panel.blocks[1] + tile * kTile, 64);
    panel.prefetch(tile, 2);
    Dot::tiles_1_4_7();
    if (kSecondTile) _tile_stream_loadd(5, second + tile * kTile, 64);
    panel.prefetch(tile, 3);
    if (kSecondTile) Dot::tiles_2_5_6();
    if (kSecondTile) Dot::tiles_3_5_7();
  }
  _tile_stored(0, &sums[0][0], sizeof(sums[0]));
  _tile_stored(1, &sums[0][kBlock], sizeof(sums[0]));
  if (kSecondTile) _tile_stored(2, &sums[kBlock][0], sizeof(sums[0]));
  if (kSecondTile) _tile_stored(3, &sums[kBlock][kBlock], sizeof(sums[0]));
}

template <typename Dot>
void multiply_amx(const Byte* rows, int num_rows, const Panel& panel, Sums& sums) {
  if (num_rows > kBlock)
    multiply<Dot, true>(rows, panel, sums);
  else
    multiply<Dot, false>(rows, panel, sums);
}
#endif

template <typename Dot, int kRows>
void multiply_rows(const Byte* rows, const Panel& panel, float (*sums)[2 * kBlock]) {
  __m512i totals[kRows][2];  // four bytes each, as `Dot` has them
  for (int row = 0; row < kRows; ++row)
    for (int block = 0; block < 2; ++block)
      totals[row][block] = panel.accumulate ? _mm512_loadu_si512(&sums[row][block * kBlock])
                                            : _mm512_setzero_si512();
  for (int64_t tile = 0; tile < panel.tiles; ++tile) {
    for (int quarter = 0; quarter < 4; ++quarter) panel.prefetch(tile, quarter);
    const Byte* first = panel.blocks[0] + tile * kTile;
    const Byte* second = panel.blocks[1] + tile * kTile;
    for (int line = 0; line < kTile; line += kLine) {
      const __m512i weights[2] = {_mm512_loadu_si512(first + line),
                                  _mm512_loadu_si512(second + line)};
#pragma GCC unroll 12
      for (int row = 0; row < kRows; ++row) {
        const __m512i x = broadcast_four_bytes(rows + tile * kTile + row * kLine + line / kBlock);
        totals[row][0] = Dot::add(totals[row][0], x, weights[0]);
        totals[row][1] = Dot::add(totals[row][1], x, weights[1]);
      }
    }
  }
  for (int row = 0; row < kRows; ++row)
    for (int block = 0; block < 2; ++block)
      _mm512_storeu_si512(&sums[row][block * kBlock], totals[row][block]);
}

template <typename Dot>
void multiply_avx512(const Byte* rows, int num_rows, Panel panel, Sums& sums) {
  for (int row = 0; row < num_rows; row += 8) {
    const Byte* first = rows + row / kBlock * panel.row_tiles * kTile + row % kBlock * kLine;
    const int left = num_rows - row;
    if (left > 4)
      multiply_rows<Dot, 8>(first, panel, &sums[row]);
    else if (left > 2)
      multiply_rows<Dot, 4>(first, panel, &sums[row]);
    else
      multiply_rows<Dot, 2>(first, panel, &sums[row]);
    panel.end_line = 0;
  }
}

// Of the inputs of `product` (`Arithmetic::parts`).
inline int64_t tile_parts(const Product& product) {
  return tiles_of(product.input_tiles(), kTilesAtOnce);
}

// One panel for all rows, some of its tiles after the others. `done(first_row, num_rows, sums)` is
// called with the sums of each group of rows when no tiles are left.
template <typename Multiply, typename Done>
void run_panel(const Product& product, const RowGroups& rows, int64_t index,
               const Multiply& multiply, const Done& done) {
  const int groups = tiles_of(rows.end - rows.first, kGroupRows);
  const int64_t all_tiles = product.input_tiles();
  const int64_t tiles_at_once = groups > 1 ? kTilesAtOnce : all_tiles;
  const int64_t first_tile = rows.first_part * kTilesAtOnce;
  const int64_t end_tile = std::min(rows.end_part * kTilesAtOnce, all_tiles);
  for (int64_t first = first_tile; first < end_tile; first += tiles_at_once) {
    const int64_t end = std::min(first + tiles_at_once, end_tile);
    const int64_t next = end < end_tile ? index : index + 1;
    const int64_t next_tile = end < end_tile ? end : first_tile;
    Panel panel{{product.block(2 * index) + first * kTile,
                 product.block(2 * index + 1) + first * kTile},
                {product.block(2 * next) + next_tile * kTile,
                 product.block(2 * next + 1) + next_tile * kTile},
                end - first,
                all_tiles,
                first > 0,
                0,
                0};
    for (int group = 0; group < groups; ++group) {
      const int64_t row = rows.first + int64_t{group} * kGroupRows;
      const int num_rows = std::min<int64_t>(kGroupRows, rows.end - row);
      panel.share_prefetch(group, groups);
      multiply(rows.packed + (row - rows.first) * all_tiles * kLine + first * kTile, num_rows,
               panel, rows.sums[group]);
      if (end == all_tiles) done(row, num_rows, rows.sums[group]);
    }
  }
}

// Some rows with a panel, by the fastest instruction of this machine.
template <typename Dot>
void multiply_by_dots(bool amx, const Byte* rows, int num_rows, const Panel& panel, Sums& sums) {
#if defined(SGLP_HAS_AMX)
  if (amx) return multiply_amx<Dot>(rows, num_rows, panel, sums);
#endif
  multiply_avx512<Dot>(rows, num_rows, panel, sums);
}

// `run_panel` by the fastest instruction of this machine.
template <typename Dot, typename Done>
void run_by_dots(bool amx, const Product& product, const RowGroups& rows, int64_t index,
                 const Done& done) {
#if defined(SGLP_HAS_AMX)
  if (amx) return run_panel(product, rows, index, multiply_amx<Dot>, done);
#endif
  run_panel(product, rows, index, multiply_avx512<Dot>, done);
}

inline bool use_amx() {
#if defined(SGLP_HAS_AMX)
  return amx_permitted();
#else
  return false;
#endif
}

inline void open_if(bool amx) {
#if defined(SGLP_HAS_AMX)
  if (amx) open_tiles();
#endif
}

inline void close_if(bool amx) {
#if defined(SGLP_HAS_AMX)
  if (amx) close_tiles();
#endif
}

}  // namespace

#endif  // __AVX512BW__
