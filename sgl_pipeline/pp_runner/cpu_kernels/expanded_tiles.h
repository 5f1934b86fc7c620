// Tiles of 4-bit numbers that become tiles of bf16, for products with weights of that size.
//
// Packed, such a weight is [out / 16, in / 8, 16, 2] of 16 bits: the number of input 8 i + 2 k + j has
// the bits 4 k of (i, o, j).

#pragma once

#include "product_panels.h"

#if defined(__AVX512BW__)

namespace {

constexpr int kLines = kTile / kLine;
constexpr int64_t kPrefetchAhead = 4096;  // bytes, in each block

// One byte for each of sixteen outputs, as two words for each.
inline __m512i load_beside(const Byte* source) {
  const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source)));
  return _mm512_or_si512(wide, _mm512_slli_epi32(wide, 16));
}

// A tile of 256 bytes of 4-bit numbers: `number(words)` gives the bf16 of what lies in the low four
// bits of each word; the others are noise.
template <typename Number>
inline void expand_quads(const Byte* source, Byte* target, Number number) {
  for (int quad = 0; quad < kLines / 4; ++quad) {
    __builtin_prefetch(source + kPrefetchAhead + quad * kLine);
    const __m512i four = _mm512_loadu_si512(source + quad * kLine);
    const __m512i shifted[4] = {four, _mm512_srli_epi16(four, 4), _mm512_srli_epi16(four, 8),
                                _mm512_srli_epi16(four, 12)};
    for (int k = 0; k < 4; ++k)
      _mm512_store_si512(target + (4 * quad + k) * kLine, number(shifted[k]));
  }
}

}  // namespace

#endif  // __AVX512BW__
