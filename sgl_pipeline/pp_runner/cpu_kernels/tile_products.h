// Matrix products of bf16 tiles with fp32 sums, and their form by the dot products of AVX-512 BF16.
//
// Called by attention_tiles.h; amx_products.h has the form by AMX. Each element of a product is a
// sum in an order that depends on its length alone: no row and no column of a tile changes the bits
// of another.

#pragma once

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512DQ__)
#define SGLP_HAS_DOT_PRODUCTS 1

#include <immintrin.h>

#include <cstdint>

#include "rows_ahead.h"
#include "vectors.h"

namespace {

// 64 bytes: 32 numbers in bf16, as 16 pairs.
struct alignas(64) Line {
  uint32_t pairs[16];
};

constexpr int kTileRows = 16;  // of a left operand at most; pairs of rows of a right one
constexpr int kTiles = 4;      // of 16 columns each, that one product computes
constexpr int kColumns = kTiles * 16;
constexpr int kDepth = 32;  // numbers that one line adds to a sum

// sums [rows, kColumns] = left [rows, kDepth * depth_lines] * right, or += that. A row of the left
// operand is `left_stride` lines long, one of the sums `sums_stride` vectors. The right operand is
// [depth_lines, kTiles, 16] lines: line p of a tile holds, for its 16 columns, the two rows that
// meet pair p of the left operand.
struct TileProduct {
  const Line* left;
  int left_stride;
  const Line* right;
  int depth_lines;
  Vec* sums;
  int sums_stride;
  bool accumulate;
};

// Sixteen rows of bf16 numbers, `row_bytes` apart.
struct RowTile {
  const BFloat16* first;
  int64_t row_bytes;
  RowsAhead* ahead;  // asked for meanwhile (null: nothing)

  void ask() const {
    if (ahead != nullptr) ahead->ask();
  }
};

// Products by AVX-512 BF16.
class DotProducts {
 public:
  static constexpr bool kReadsTiles = false;

  void set_rows(int rows) { rows_ = rows; }

  void operator()(const TileProduct& product) const {
    int row = 0;
    for (; row + 4 <= rows_; row += 4) multiply<4>(product, row);
    for (; row + 2 <= rows_; row += 2) multiply<2>(product, row);
    if (row < rows_) multiply<1>(product, row);
  }

 private:
  template <int kRows>
  NOINLINE static void multiply(const TileProduct& product, int first_row) {
    Vec* const first_sums = product.sums + first_row * product.sums_stride;
    const Line* const first_left = product.left + first_row * product.left_stride;
    Vec sums[kRows][kTiles] = {};
#pragma GCC unroll 4
    for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
      for (int tile = 0; tile < kTiles; ++tile)
        if (product.accumulate) sums[row][tile] = first_sums[row * product.sums_stride + tile];
    for (int line = 0; line < product.depth_lines; ++line)
      for (int pair = 0; pair < 16; ++pair) {
        const Line* right = &product.right[line * kTiles * kTileRows + pair];
#pragma GCC unroll 4
        for (int row = 0; row < kRows; ++row) {
          const uint32_t left = first_left[row * product.left_stride + line].pairs[pair];
          const auto factors = bit_cast<__m512bh>(_mm512_set1_epi32(left));
#pragma GCC unroll 4
          for (int tile = 0; tile < kTiles; ++tile)
            sums[row][tile] = _mm512_dpbf16_ps(sums[row][tile], factors,
                                               bit_cast<__m512bh>(right[tile * kTileRows]));
        }
      }
#pragma GCC unroll 4
    for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
      for (int tile = 0; tile < kTiles; ++tile)
        first_sums[row * product.sums_stride + tile] = sums[row][tile];
  }

  int rows_ = 0;
};

}  // namespace

#endif  // __AVX512BF16__
