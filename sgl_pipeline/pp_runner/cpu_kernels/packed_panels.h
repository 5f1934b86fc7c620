// Panels of weights that are multiplied as they lie in memory, by an instruction that adds the
// products of four bytes of inputs to a sum: bf16 or int8, on AMX tiles or AVX-512 vectors.
//
// Shared by products.cpp and int8_products.cpp, which give the instruction (`Dot`).

#pragma once

#include "product_panels.h"

#if defined(__AVX512BW__)

namespace {

constexpr int kFewGroups = 4;  // of rows, which wait for weights rather than for their products
// From so many on, weights are asked for in the order of memory, as the L2 cache then reads on by
// itself; for fewer it is faster to ask for some lines of each tile.
constexpr int64_t kRowsInOrder = 64;

// Some tiles of two blocks of a weight, and those that will be wanted next: some lines of each of
// these are asked for, into the L2 cache. Asked for in the L1, they would push out what is in use.
struct Panel {
  const Byte* blocks[2];
  const Byte* next[2];
  int64_t tiles;
  int64_t row_tiles;  // of a packed row
  bool accumulate;    // to the sums of the tiles before
  int64_t next_line;  // of each block, the first one that is asked for
  int lines_asked;    // of each block, with a tile
  int line_step;      // from the first of them to the first with the next tile
  const Byte* next_sums = nullptr;  // of which some lines are asked for with a tile, to be written
  int64_t sum_lines = 0;

  // A quarter of the requests beside a tile. They are to be spread over the work on it: those that
  // come at once do not all get as far as the L2.
  void prefetch(int64_t tile, int quarter) const {
    const int half = lines_asked / 2;
    const int first = quarter < 2 ? 0 : half, end = quarter < 2 ? half : lines_asked;
    const Byte* const source = next[quarter % 2] + (next_line + tile * line_step) * kLine;
    for (int line = first; line < end; ++line) __builtin_prefetch(source + line * kLine, 0, 2);
  }

  void prefetch_sums(int64_t tile) const {
    const Byte* const source = next_sums + tile * sum_lines * kLine;
    for (int line = 0; line < sum_lines; ++line) __builtin_prefetch(source + line * kLine, 1, 2);
  }

  // For the `part`-th of `parts` that share the work of asking.
  void share_prefetch(int part, int parts, bool in_order) {
    constexpr int kLines = kTile / kLine;
    const int first = kLines * part / parts;
    lines_asked = kLines * (part + 1) / parts - first;
    next_line = in_order ? first * tiles : first;
    line_step = in_order ? lines_asked : kLines;
  }
};

// Of a panel's result the rows [row, end) of a group, which wait with their `sums` to be put there.
struct WaitingRows {
  const float (*sums)[2 * kBlock];
  int64_t row;
  int64_t end;

  // Puts `count` of them, or as many as there are, by put_row(row, sums), of which it has a copy:
  // what others may refer to is read again after each store.
  template <typename Put>
  __attribute__((always_inline)) void put(int64_t count, const Put put_row) {
    const int64_t first = row, stop = std::min(row + count, end);
    const auto* const of_first = sums;
    for (int64_t i = 0; i < stop - first; ++i) put_row(first + i, of_first[i]);
    sums += stop - first;
    row = stop;
  }
};

// Done beside the tiles of a multiplication: nothing.
struct Nothing {
  void operator()() const {}
};

#if defined(SGLP_HAS_AMX)

// Static, as the compiler does not know that the instruction reads all of it.
const TileConfiguration kTileConfiguration{
    1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};

void open_tiles() { _tile_loadconfig(&kTileConfiguration); }
void close_tiles() { _tile_release(); }

// `beside_tile` is called once a tile: the vector units work while tiles are multiplied.
template <typename Dot, bool kSecondTile, typename Beside>
void multiply(const Byte* rows, const Panel& panel, Sums& sums, const Beside& beside_tile) {
  const Byte* second = rows + panel.row_tiles * kTile;
  asm volatile("" ::: "memory");  // GCC does not know that tile operations read memory
  if (panel.accumulate) {
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
    panel.prefetch_sums(tile);
    beside_tile();
  }
  _tile_stored(0, &sums[0][0], sizeof(sums[0]));
  _tile_stored(1, &sums[0][kBlock], sizeof(sums[0]));
  if (kSecondTile) _tile_stored(2, &sums[kBlock][0], sizeof(sums[0]));
  if (kSecondTile) _tile_stored(3, &sums[kBlock][kBlock], sizeof(sums[0]));
}

template <typename Dot>
struct AmxMultiplication {
  static constexpr bool kWorksBeside = true;

  template <typename Beside>
  NOINLINE void operator()(const Byte* rows, int num_rows, const Panel& panel, Sums& sums,
                           const Beside& beside_tile) const {
    if (num_rows > kBlock)
      multiply<Dot, true>(rows, panel, sums, beside_tile);
    else
      multiply<Dot, false>(rows, panel, sums, beside_tile);
  }
};
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
struct VectorMultiplication {
  static constexpr bool kWorksBeside = false;

  void operator()(const Byte* rows, int num_rows, Panel panel, Sums& sums, const Nothing&) const {
    for (int row = 0; row < num_rows; row += 8) {
      const Byte* first = rows + row / kBlock * panel.row_tiles * kTile + row % kBlock * kLine;
      const int left = num_rows - row;
      if (left > 4)
        multiply_rows<Dot, 8>(first, panel, &sums[row]);
      else if (left > 2)
        multiply_rows<Dot, 4>(first, panel, &sums[row]);
      else
        multiply_rows<Dot, 2>(first, panel, &sums[row]);
      panel.lines_asked = 0;
    }
  }
};

// Of the inputs of `product` (`Arithmetic::parts`).
inline int64_t tile_parts(const Product& product) {
  return tiles_of(product.input_tiles(), kTilesAtOnce);
}

// One panel for all rows, some of its tiles after the others. `put(row, sums)` is called with the
// sums of each row when no tiles are left: with tiles and many rows, beside the products of the group
// of rows after its own.
template <typename Multiply, typename Put>
void run_panel(const Product& product, const RowGroups& rows, int64_t index,
               const Multiply& multiply, const Put& put) {
  const int groups = tiles_of(rows.end - rows.first, kGroupRows);
  const int64_t all_tiles = product.input_tiles();
  const int64_t tiles_at_once = groups > 1 ? kTilesAtOnce : all_tiles;
  const int64_t first_tile = rows.first_part * kTilesAtOnce;
  const int64_t end_tile = std::min(rows.end_part * kTilesAtOnce, all_tiles);
  const int64_t sum_lines = tiles_of(sizeof(Sums) / kLine, end_tile - first_tile);
  const bool in_order = rows.end - rows.first >= kRowsInOrder;
  const bool works_beside = Multiply::kWorksBeside && groups > kFewGroups;
  WaitingRows waiting{};
  for (int64_t first = first_tile; first < end_tile; first += tiles_at_once) {
    const int64_t end = std::min(first + tiles_at_once, end_tile);
    const int64_t next = end < end_tile ? index : index + 1;
    const int64_t next_tile = end < end_tile ? end : first_tile;
    Panel panel{{product.block(2 * index) + first * kTile,
                 product.block(2 * index + 1) + first * kTile},
                {product.block(2 * next) + next_tile * kTile,
                 product.block(2 * next + 1) + next_tile * kTile},
                end - first,
                product.row_tiles(),
                first > 0,
                0,
                0,
                0};
    for (int group = 0; group < groups; ++group) {
      const int64_t row = rows.first + int64_t{group} * kGroupRows;
      const int num_rows = std::min<int64_t>(kGroupRows, rows.end - row);
      const Byte* const packed =
          rows.packed + (row - rows.first) * product.row_tiles() * kLine + first * kTile;
      Sums& sums = rows.sums[group];
      panel.share_prefetch(group, groups, in_order);
      if (rows.next_sums != nullptr) {
        panel.next_sums = reinterpret_cast<const Byte*>(rows.next_sums + group) +
                          (first - first_tile) * sum_lines * kLine;
        panel.sum_lines = sum_lines;
      }
      bool is_done = false;
      if constexpr (Multiply::kWorksBeside) {
        if (waiting.row < waiting.end) {
          const int64_t count = tiles_of(waiting.end - waiting.row, panel.tiles);
          multiply(packed, num_rows, panel, sums, [&] { waiting.put(count, put); });
          is_done = true;
        }
      }
      if (!is_done) multiply(packed, num_rows, panel, sums, Nothing{});
      if (end == all_tiles) waiting = {sums, row, row + num_rows};
      if (!works_beside) waiting.put(kGroupRows, put);
    }
  }
  waiting.put(kGroupRows, put);
}

// Some rows with a panel, by the fastest instruction of this machine.
template <typename Dot>
void multiply_by_dots(bool amx, const Byte* rows, int num_rows, const Panel& panel, Sums& sums) {
#if defined(SGLP_HAS_AMX)
  if (amx) return AmxMultiplication<Dot>{}(rows, num_rows, panel, sums, Nothing{});
#endif
  VectorMultiplication<Dot>{}(rows, num_rows, panel, sums, Nothing{});
}

// `run_panel` by the fastest instruction of this machine.
template <typename Dot, typename Put>
void run_by_dots(bool amx, const Product& product, const RowGroups& rows, int64_t index,
                 const Put& put) {
#if defined(SGLP_HAS_AMX)
  if (amx) return run_panel(product, rows, index, AmxMultiplication<Dot>{}, put);
#endif
  run_panel(product, rows, index, VectorMultiplication<Dot>{}, put);
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
