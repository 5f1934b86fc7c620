// Products by AVX2 with packed weights of integers: what is asked for ahead, and rows rounded to 8
// bits, for machines without AVX-512 VNNI.
//
// Rows of 8 bits are of avx2_int8_products.cpp and avx2_int4_products.cpp, whose `Arithmetic`
// multiplies; avx2_mxfp4_products.cpp has rows of its own. They are rounded as int8_rows.h does it, and
// what follows exact sums has the order of the products by VNNI, hence their bits, except in the gate.
//
// Packed weights have the layouts of int8_products.cpp and int4_products.cpp: whole tiles of 64
// inputs. The rows of a group have the numbers of four inputs, a quad, side by side.

#pragma once

#include "side_products.h"

#if defined(SGLP_HAS_VECTOR_PRODUCTS) || defined(SGLP_HAS_AVX2_INTEGERS)

namespace {

constexpr int kHalf = 8;    // outputs of a vector
constexpr int kQuad = 4;    // inputs of which a weight has its numbers side by side
constexpr int64_t kTileInputs = 64;     // of a packed weight
constexpr int64_t kRowsTogether = 192;  // for which a panel is read from memory once
constexpr int64_t kAhead = 2048;        // bytes, where no other rows wait for the weight
constexpr float kLargest = 127.0f;
constexpr float kSmallestRow = 0x1p-100f;  // the largest number of a row that is all zeros to us

// Numbers of a packed block of the weight.
inline int64_t block_numbers(const SideProduct& product) {
  return tiles_of(product.inputs, kTileInputs) * kTileInputs * kBlock;
}

// From such a part to what is asked for beside a group's products with it. One group alone reads the
// weight as it lies in memory. Of several groups the first asks for the part that comes next; the
// others, for which it is there, ask for what they read.
inline int64_t bytes_ahead(const PackedRows& rows, int64_t group, const BlockBytes& block,
                           int64_t first, int64_t count) {
  if (rows.groups() == 1) return kAhead;
  return group > 0 ? 0 : bytes_to_next(block, first, count);
}

inline __m256i broadcast_four_bytes(const Byte* source) {
  int32_t four;
  std::memcpy(&four, source, sizeof(four));
  return _mm256_set1_epi32(four);
}

// A sum that is finished before the next number is added to it: GCC would add up the numbers first,
// which takes more registers than there are.
inline __m256i in_order(__m256i sum) {
  asm("" : "+x"(sum));
  return sum;
}

// Calls put(input, eight) with eight numbers from `input` on, int32 of -127 to 127, zeros where there
// are no inputs up to the padded ones. Returns the row's scale.
template <typename Put>
float round_row(const SideProduct& product, int64_t row, const Put& put) {
  const BFloat16* const source = product.rows + row * product.inputs;
  const float largest = largest_magnitude(source, product.inputs);
  const __m256 factor = _mm256_set1_ps(largest > kSmallestRow ? kLargest / largest : 0.0f);
  for (int64_t input = 0; input < product.padded_inputs(); input += 8) {
    const int64_t left = std::clamp<int64_t>(product.inputs - input, 0, 8);
    const __m128i words = load_words(source + input, left);
    const __m256i bits = _mm256_slli_epi32(_mm256_cvtepu16_epi32(words), 16);
    const __m256i whole = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_castsi256_ps(bits), factor));
    // The low byte: that of a NaN is zero.
    put(input, _mm256_srai_epi32(_mm256_slli_epi32(whole, 24), 24));
  }
  return largest / kLargest;
}

// Nothing of a multiplication is to be fused with what follows: torch rounds in between.
inline Vec rounded(Vec vec) {
  asm("" : "+x"(vec));
  return vec;
}

}  // namespace

#endif  // SGLP_HAS_VECTOR_PRODUCTS || SGLP_HAS_AVX2_INTEGERS
