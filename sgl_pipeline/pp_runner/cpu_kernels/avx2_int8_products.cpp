// Products of rows with a packed int8 weight by AVX2: int8_products.cpp for machines without VNNI.
//
// Numbers of rows and weights become int16, whose products the processor adds in pairs, as int32:
// exact for a weight of -128, too. AVX2's multiplication of bytes wants one of two factors unsigned,
// which takes as many instructions.
//
// A vector has four inputs of eight outputs. Its bytes at even places are one vector of int16, those
// at odd places another, so packed rows have the first and third of four inputs before the others.

#include "avx2_integers.h"

#if defined(SGLP_HAS_AVX2_INTEGERS)

namespace {

constexpr int64_t kPartInputs = 512;  // of a panel, 16 KiB, for all rows

// The even or odd inputs of a quad of eight outputs.
inline __m256i pairs_of(const Byte* source, bool is_odd) {
  const __m256i bytes = load_32(source);
  return _mm256_srai_epi16(is_odd ? bytes : _mm256_slli_epi16(bytes, 8), 8);
}

// Adds the products of a group of rows with a part of a block to the block's `sums`. Beside each line
// of it one of `asked` is asked for.
template <int kRows>
NOINLINE void multiply(const Byte* rows, const Byte* lines, const Byte* asked, int64_t quads,
                       int32_t* sums) {
  const auto sums_of = [&](int row, int half) {
    return reinterpret_cast<__m256i*>(sums + row * 2 * kBlock + half * kHalf);
  };
  __m256i totals[kRows][2];
#pragma GCC unroll 6
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) totals[row][half] = _mm256_load_si256(sums_of(row, half));
  for (int64_t quad = 0; quad < quads; ++quad) {
    __builtin_prefetch(asked + quad * kLine);
    const Byte* const line = lines + quad * kLine;
#pragma GCC unroll 2
    for (int odd = 0; odd < 2; ++odd) {
      const __m256i pairs[2] = {pairs_of(line, odd), pairs_of(line + kLine / 2, odd)};
#pragma GCC unroll 6
      for (int row = 0; row < kRows; ++row) {
        const __m256i x = broadcast_four_bytes(rows + ((quad * kRows + row) * 2 + odd) * 4);
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half)
          totals[row][half] =
              in_order(_mm256_add_epi32(totals[row][half], _mm256_madd_epi16(x, pairs[half])));
      }
    }
  }
#pragma GCC unroll 6
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) _mm256_store_si256(sums_of(row, half), totals[row][half]);
}

struct Int8Product {
  static constexpr int kNumberBytes = 2;
  SideProduct product;
  const Byte* weight;   // [out / 16, in / 4, 16, 4]
  const float* scales;  // [outputs], gated [2 * outputs] with the gates first

  int64_t row_bytes() const { return product.padded_inputs() * kNumberBytes; }
  int64_t scales_per_row() const { return 1; }

  // Of each quad the first, third, second and fourth number, of one row after the other.
  template <int kRows>
  void pack(int64_t first, Byte* numbers, float* row_scales) const {
    const __m256i order = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, -1, -1, -1, -1, -1, -1, -1, -1));
    for (int row = 0; row < kRows; ++row)
      row_scales[row] = round_row(product, first + row, [&](int64_t input, __m256i eight) {
        const __m256i words = _mm256_shuffle_epi8(_mm256_packs_epi32(eight, eight), order);
        Byte* const target = numbers + (input / kQuad * kRows + row) * 8;
        _mm_storel_epi64(reinterpret_cast<__m128i*>(target), _mm256_castsi256_si128(words));
        _mm_storel_epi64(reinterpret_cast<__m128i*>(target + kRows * 8),
                         _mm256_extracti128_si256(words, 1));
      });
  }

  void run(const PackedRows& rows, int64_t panel) const {
    alignas(kLine) OfPanel<int32_t> sums[kRowsTogether];
    std::memset(sums, 0, rows.count * sizeof(*sums));
    const int64_t inputs = product.padded_inputs();
    const int64_t part_inputs = rows.groups() > 1 ? kPartInputs : inputs;
    for (int64_t first = 0; first < inputs; first += part_inputs)
      for (int64_t group = 0; group < rows.groups(); ++group)
        for (int block = 0; block < product.blocks_of(panel); ++block)
          multiply_group(rows, group, 2 * panel + block, first,
                         std::min(part_inputs, inputs - first),
                         sums[group * kSideRows] + block * kBlock);
    OfPanel<float> weight_scales;
    gather(product, panel, scales, weight_scales);
    finish(product, rows, panel, [&](int64_t row, int i) {
      IntVec exact;
      std::memcpy(&exact, sums[row] + i, sizeof(exact));
      const Vec scaled = __builtin_convertvector(exact, Vec) * load(weight_scales + i);
      return rounded(scaled * rows.scales[row]);
    });
  }

  // The inputs [first, first + count) of a block.
  void multiply_group(const PackedRows& rows, int64_t group, int64_t block, int64_t first,
                      int64_t count, int32_t* sums) const {
    const BlockBytes bytes{product.padded_inputs() * kBlock, block_numbers(product)};
    const Byte* const lines = weight + block * bytes.all + first * kBlock;
    const Byte* const asked =
        lines + bytes_ahead(rows, group, bytes, first * kBlock, count * kBlock);
    for_rows(rows.in_group(group), [&](auto num_rows) {
      multiply<num_rows>(rows.group_numbers(group) + first * kNumberBytes * num_rows, lines, asked,
                         count / kQuad, sums);
    });
  }
};

}  // namespace

extern "C" int sglp_has_int8_products() { return 1; }

extern "C" void sglp_int8_product(int64_t num_rows, int64_t inputs, int64_t outputs, int gated,
                                  const void* rows, const void* weight, const void* scales,
                                  const void* /* corrections */, const void* bias, void* out,
                                  int num_threads) {
  const SideProduct product(num_rows, inputs, outputs, gated, rows, bias, out);
  run_side_product(Int8Product{product, static_cast<const Byte*>(weight),
                               static_cast<const float*>(scales)},
                   kRowsTogether, num_threads);
}

#endif
