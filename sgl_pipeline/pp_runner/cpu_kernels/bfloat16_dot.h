// The instructions that add the products of bf16 pairs to sums in fp32, for packed_panels.h.

#pragma once

#include "packed_panels.h"

#if defined(__AVX512BF16__)

namespace {

struct BFloat16Dot {
  static __m512i add(__m512i totals, __m512i x, __m512i weights) {
    return bit_cast<__m512i>(_mm512_dpbf16_ps(bit_cast<__m512>(totals), bit_cast<__m512bh>(x),
                                              bit_cast<__m512bh>(weights)));
  }
#if defined(SGLP_HAS_AMX)
  static void tiles_0_4_6() { _tile_dpbf16ps(0, 4, 6); }
  static void tiles_1_4_7() { _tile_dpbf16ps(1, 4, 7); }
  static void tiles_2_5_6() { _tile_dpbf16ps(2, 5, 6); }
  static void tiles_3_5_7() { _tile_dpbf16ps(3, 5, 7); }
#endif
};

constexpr int kDotInputs = 32;  // of a tile

// Packs sixteen rows of a product from `first` on, zeros where there are none.
inline void pack_bfloat16_rows(const Product& product, int64_t first, Byte* packed) {
  const BFloat16* source = product.rows + first * product.inputs;
  const int64_t num_rows = std::min<int64_t>(kBlock, product.num_rows - first);
  for (int64_t input = 0; input < product.inputs; input += kDotInputs) {
    const int64_t left = std::min<int64_t>(product.inputs - input, kDotInputs);
    for (int64_t row = 0; row < kBlock; ++row, packed += kLine)
      _mm512_store_si512(packed, load_words(source + row * product.inputs + input,
                                            row < num_rows ? left : 0));
  }
}

}  // namespace

#endif  // __AVX512BF16__
