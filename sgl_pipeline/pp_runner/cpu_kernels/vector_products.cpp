// Products of bf16 rows with a packed weight in bf16 or MXFP4, by AVX2.
//
// Called from compiled_linear.py and compiled_quantized.py through ctypes; knows nothing of torch.
// Packed, a weight in bf16 is [out / 16, in / 2, 16, 2], as in products.cpp. One in MXFP4 is
// [out / 16, in / 4, 16, 2] bytes: the codes of inputs 4 i + j, and 4 bits higher of 4 i + 2 + j, of
// outputs 0 to 3, 8 to 11, 4 to 7 and 12 to 15, so that unpacking bytes gives lines of bf16; its
// scales are [out / 16, in / 32, 16] bytes.

#include "vector_panels.h"

#if defined(SGLP_HAS_VECTOR_PRODUCTS)

namespace {

constexpr int64_t kAhead = 4096;  // bytes of each block

// 2 ** (byte - 127) of eight bytes from 1 on; 0 of 0.
inline __m256 powers_of_two(const Byte* bytes) {
  const __m128i eight = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu8_epi32(eight), 23));
}

// Lines of bf16 of two blocks, with scales of MXFP4 or none.
template <bool kScaled>
struct Lines {
  static constexpr bool kIsScaled = kScaled;
  const Byte* blocks[2];
  const Byte* exponents[2];
  int64_t asks_ahead;

  struct Four {
    const Byte* lines;
    __m256 numbers(int input, int half) const {
      return number_of_pair(load_32(lines + input / 2 * kLine + half * kLine / 2), input % 2);
    }
  };

  Four four(int block, int64_t input) const {
    const Byte* const lines = blocks[block] + input / 2 * kLine;
    if (!kScaled) {
      __builtin_prefetch(lines + asks_ahead);
      __builtin_prefetch(lines + kLine + asks_ahead);
    }
    return {lines};
  }
  __m256 scale(int block, int64_t input, int half) const {
    return powers_of_two(exponents[block] + input / kTileInputs * kBlock + half * 8);
  }
};

// The four lines of two codes in each byte: of inputs 0 and 1, then of 2 and 3, eight outputs each.
inline void expand_codes(__m256i bytes, __m256i (&lines)[2][2]) {
  // The two bytes of e2m1's sixteen numbers in bf16.
  const __m256i low_bytes = _mm256_broadcastsi128_si256(_mm_setr_epi8(
      0, 0, -128, -64, 0, 64, -128, -64, 0, 0, -128, -64, 0, 64, -128, -64));
  const __m256i high_bytes = _mm256_broadcastsi128_si256(_mm_setr_epi8(
      0, 63, 63, 63, 64, 64, 64, 64, -128, -65, -65, -65, -64, -64, -64, -64));
  const __m256i code = _mm256_set1_epi8(15);
  const __m256i codes[2] = {_mm256_and_si256(bytes, code),
                            _mm256_and_si256(_mm256_srli_epi16(bytes, 4), code)};
  for (int pair = 0; pair < 2; ++pair) {
    const __m256i low = _mm256_shuffle_epi8(low_bytes, codes[pair]);
    const __m256i high = _mm256_shuffle_epi8(high_bytes, codes[pair]);
    lines[pair][0] = _mm256_unpacklo_epi8(low, high);
    lines[pair][1] = _mm256_unpackhi_epi8(low, high);
  }
}

// Codes of two blocks, which become numbers in registers.
struct Codes {
  static constexpr bool kIsScaled = true;
  const Byte* blocks[2];
  const Byte* exponents[2];
  int64_t asks_ahead;

  struct Four {
    __m256i lines[2][2];
    __m256 numbers(int input, int half) const {
      return number_of_pair(lines[input / 2][half], input % 2);
    }
  };

  Four four(int block, int64_t input) const {
    const Byte* const bytes = blocks[block] + input / kFour * (kLine / 2);
    __builtin_prefetch(bytes + asks_ahead);
    Four four;
    expand_codes(load_32(bytes), four.lines);
    return four;
  }
  __m256 scale(int block, int64_t input, int half) const {
    return powers_of_two(exponents[block] + input / kTileInputs * kBlock + half * 8);
  }
};

// Lines of a part's codes, for more rows than wait for them.
void expand_part(const Codes& codes, int64_t inputs, Byte (*lines)[kPartInputs * kLine / 2]) {
  for (int block = 0; block < 2; ++block)
    for (int64_t input = 0; input < inputs; input += kFour) {
      const Codes::Four four = codes.four(block, input);
      Byte* const target = lines[block] + input / 2 * kLine;
      for (int place = 0; place < 4; ++place)
        _mm256_store_si256(reinterpret_cast<__m256i*>(target + place * (kLine / 2)),
                           four.lines[place / 2][place % 2]);
    }
}

}  // namespace

extern "C" int sglp_has_products() { return 1; }

extern "C" void sglp_product(int64_t num_rows, int64_t inputs, int64_t outputs, int gated,
                             const void* rows, const void* weight, const void* bias, void* out,
                             int num_threads) {
  const SideProduct product(num_rows, inputs, outputs, gated, rows, bias, out);
  const int64_t row_of_blocks = product.padded_inputs() / 2 * kLine;
  const auto add_part = [&](const PackedRows& packed, const Part& part, PanelSums* sums) {
    Lines<false> lines{{}, {}, kAhead};
    for (int which = 0; which < 2; ++which)
      lines.blocks[which] = static_cast<const Byte*>(weight) +
                            product.block(part.panel, which) * row_of_blocks +
                            part.first / 2 * kLine;
    multiply_part(packed, part, lines, sums);
  };
  run_vector_product(product, num_threads, add_part);
}

extern "C" void sglp_mxfp4_product(int64_t num_rows, int64_t inputs, int64_t outputs, int gated,
                                   const void* rows, const void* weight, const void* exponents,
                                   const void* bias, void* out, int num_threads) {
  const SideProduct product(num_rows, inputs, outputs, gated, rows, bias, out);
  const int64_t padded = product.padded_inputs();
  const auto add_part = [&](const PackedRows& packed, const Part& part, PanelSums* sums) {
    Codes codes{{}, {}, kAhead};
    for (int which = 0; which < 2; ++which) {
      const int64_t block = product.block(part.panel, which);
      codes.blocks[which] =
          static_cast<const Byte*>(weight) + (block * padded + part.first) * kBlock / 2;
      codes.exponents[which] = static_cast<const Byte*>(exponents) +
                               (block * padded + part.first) / kTileInputs * kBlock;
    }
    if (packed.count <= kWideRows) return multiply_part(packed, part, codes, sums);
    alignas(kLine) Byte expanded[2][kPartInputs * kLine / 2];
    expand_part(codes, part.count, expanded);
    const Lines<true> lines{
        {expanded[0], expanded[1]}, {codes.exponents[0], codes.exponents[1]}, 0};
    multiply_part(packed, part, lines, sums);
  };
  run_vector_product(product, num_threads, add_part);
}

#endif
