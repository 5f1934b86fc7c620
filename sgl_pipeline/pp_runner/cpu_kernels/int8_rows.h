// Rows of bf16 numbers rounded to 8 bits, each by its own scale, as products of integers want them.
//
// Shared by int8_products.cpp and int4_products.cpp. A packed row's line has 64 inputs.

#pragma once

#include "product_instructions.h"
#include "product_panels.h"

#if defined(SGLP_HAS_VNNI)

namespace {

constexpr int kTileInputs = 64;
constexpr float kLargest = 127.0f;
constexpr float kSmallestRow = 0x1p-100f;  // the largest number of a row that is all zeros to us

// Writes the numbers of `source` [inputs] plus `offset` as bytes, zeros plus it up to the end of the
// last tile. Returns the row's scale.
inline float round_row(const BFloat16* source, const Product& product, int offset, Byte* packed) {
  const float largest = largest_magnitude(source, product.inputs);
  const __m512 factor = _mm512_set1_ps(largest > kSmallestRow ? kLargest / largest : 0.0f);
  for (int64_t input = 0; input < product.input_tiles() * kTileInputs; input += kWidth) {
    const int64_t left = std::clamp<int64_t>(product.inputs - input, 0, kWidth);
    const __m256i words = _mm512_castsi512_si256(load_words(source + input, left));
    const __m512i bits = _mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16);
    const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(bit_cast<__m512>(bits), factor));
    // As bytes the sum wraps around to the unsigned number.
    const __m512i numbers = _mm512_add_epi32(whole, _mm512_set1_epi32(offset));
    Byte* const target = packed + input / kTileInputs * kTile + input % kTileInputs;
    _mm_storeu_si128(reinterpret_cast<__m128i*>(target), _mm512_cvtepi32_epi8(numbers));
  }
  return largest / kLargest;
}

// A row of zeros, which is not there.
inline void clear_row(const Product& product, Byte* packed) {
  for (int64_t tile = 0; tile < product.input_tiles(); ++tile)
    std::memset(packed + tile * kTile, 0, kLine);
}

}  // namespace

#endif
