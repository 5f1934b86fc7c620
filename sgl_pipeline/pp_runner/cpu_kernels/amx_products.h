// Matrix products of bf16 tiles by AMX.
//
// Called by attention_tiles.h. GCC does not know that tile operations read memory, so each function
// here begins with a barrier.

#pragma once

#include "amx.h"
#include "tile_products.h"

#if defined(SGLP_HAS_AMX)

#include <cstdint>
#include <cstring>

namespace {

// Owns its thread's tile registers from the first set_rows or set_lanes on.
class AmxProducts {
 public:
  static constexpr bool kReadsTiles = true;  // `score_keys` and `weigh_values`

  ~AmxProducts() {
    if (configured_.palette != 0) _tile_release();
  }

  // Prepares for TileProducts of `rows` rows.
  void set_rows(int rows) {
    configure({{rows, 64}, {rows, 64}, {rows, 64}, {rows, 64},  // sums
               {rows, 64}, {16, 64}, {16, 64}, {16, 64}});      // left, right
  }

  NOINLINE void operator()(const TileProduct& product) const {
    const int64_t sums_stride = product.sums_stride * int64_t{sizeof(Vec)};
    const int64_t left_stride = product.left_stride * int64_t{sizeof(Line)};
    asm volatile("" ::: "memory");
    if (product.accumulate) {
      _tile_loadd(0, product.sums, sums_stride);
      _tile_loadd(1, product.sums + 1, sums_stride);
      _tile_loadd(2, product.sums + 2, sums_stride);
      _tile_loadd(3, product.sums + 3, sums_stride);
    } else {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    }
    for (int line = 0; line < product.depth_lines; ++line) {
      const Line* right = product.right + line * kTiles * kTileRows;
      _tile_loadd(4, product.left + line, left_stride);
      _tile_loadd(5, right, sizeof(Line));
      _tile_dpbf16ps(0, 4, 5);
      _tile_loadd(6, right + kTileRows, sizeof(Line));
      _tile_dpbf16ps(1, 4, 6);
      _tile_loadd(7, right + 2 * kTileRows, sizeof(Line));
      _tile_dpbf16ps(2, 4, 7);
      _tile_loadd(5, right + 3 * kTileRows, sizeof(Line));
      _tile_dpbf16ps(3, 4, 5);
    }
    _tile_stored(0, product.sums, sums_stride);
    _tile_stored(1, product.sums + 1, sums_stride);
    _tile_stored(2, product.sums + 2, sums_stride);
    _tile_stored(3, product.sums + 3, sums_stride);
  }

  // Prepares for score_keys and weigh_values of `lanes` lanes.
  void set_lanes(int lanes) {
    lanes_ = lanes;
    configure({{lanes, 64}, {lanes, 64}, {lanes, 64}, {lanes, 64},         // sums, picks
               {16, 64}, {16, 4 * lanes}, {16, 4 * lanes}, {16, 64}});  // values, scores, queries,
  }                                                                     // keys

  // scores [16, lanes] = keys * queries, bitwise those of a TileProduct of queries and keys, whose
  // places are exchanged here: keys are read as they lie in memory, queries are
  // [depth_lines, 16, lanes] pairs.
  void score_keys(const RowTile& keys, const uint32_t* queries, int depth_lines,
                  float* scores) const {
    asm volatile("" ::: "memory");
    _tile_zero(5);
    for (int line = 0; line < depth_lines; ++line) {
      keys.ask();
      _tile_loadd(6, queries + line * 16 * lanes_, lanes_ * 4);
      keys.ask();
      _tile_loadd(7, keys.first + line * kDepth, keys.row_bytes);
      keys.ask();
      _tile_dpbf16ps(5, 7, 6);
      keys.ask();
    }
    _tile_stored(5, scores, lanes_ * 4);
  }

  // sums [2, lanes] = bitwise what a TileProduct would add for 32 weights and dimensions `line` *
  // 32 and on, first for the even dimensions, then for the odd ones. Values are read as they lie in
  // memory, where neighbors in a row are dimensions: of such a pair, weights with zeros between
  // them pick one. `picks` [4, lanes] have them at even and at odd places, for the keys of `first`,
  // and the same for those of `second`, their partners in a TileProduct. TDPBF16PS adds up the
  // products of first partners, those of second ones, and then the two, as is done here.
  void weigh_values(const RowTile& first, const RowTile* second, int line, const Line* picks,
                    Vec* sums) const {
    asm volatile("" ::: "memory");
    _tile_zero(0);
    _tile_zero(1);
    add_values(first, line, picks);
    if (second != nullptr) add_values(*second, line, picks + 2 * lanes_);
    _tile_stored(0, sums, sizeof(Vec));
    _tile_stored(1, sums + lanes_, sizeof(Vec));
  }

 private:
  struct TileShape {
    int rows;
    int row_bytes;
  };

  void add_values(const RowTile& values, int line, const Line* picks) const {
    values.ask();
    _tile_loadd(4, values.first + line * kDepth, values.row_bytes);
    values.ask();
    _tile_loadd(2, picks, sizeof(Line));
    _tile_dpbf16ps(0, 2, 4);
    values.ask();
    _tile_loadd(3, picks + lanes_, sizeof(Line));
    _tile_dpbf16ps(1, 3, 4);
    values.ask();
  }

  void configure(const TileShape (&shapes)[8]) {
    TileConfiguration wanted;
    for (int tile = 0; tile < 8; ++tile) {
      wanted.rows[tile] = shapes[tile].rows;
      wanted.row_bytes[tile] = shapes[tile].row_bytes;
    }
    if (std::memcmp(&wanted, &configured_, sizeof(wanted)) == 0) return;
    configured_ = wanted;
    _tile_loadconfig(&configured_);
  }

  TileConfiguration configured_{0};  // palette 0: none yet
  int lanes_ = 0;
};

}  // namespace

#endif  // SGLP_HAS_AMX
