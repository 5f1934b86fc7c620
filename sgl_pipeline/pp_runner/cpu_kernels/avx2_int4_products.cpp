// Products of rows rounded to 8 bits with a packed weight of 4 bits by AVX2: int4_products.cpp for
// machines without VNNI.
//
// The weight's numbers are unsigned bytes, the rows' signed ones, and the processor adds their
// products in pairs, as int16. A step is as long as such sums are exact: 8 pairs of at most
// 2 * 15 * 127. Steps are added up in int32, groups in fp32, in ascending order.

#include "avx2_integers.h"

#if defined(SGLP_HAS_AVX2_INTEGERS)

namespace {

constexpr int kStepLines = 4;  // of a weight
constexpr int64_t kStepBytes = kStepLines * kLine;
constexpr int64_t kPartSteps = 16;  // of a panel, 8 KiB, for all rows
static_assert(kMostInt4Steps <= kPartSteps, "a group is multiplied at once");
static_assert(kStepInputs / 2 / 2 * 2 * 15 * 127 <= INT16_MAX, "the sums of a step are exact");

// Some whole groups of a block, and what is asked for beside them.
struct Int4Part {
  const Byte* lines;
  const float* scales;  // [groups, 16]
  const Byte* zeros;    // the same
  const Byte* asked;
  int64_t num_steps;
  int64_t group_steps;
};

// Adds the products of a group of rows with a step of a block.
template <int kRows>
inline void add_step(const Byte* rows, const Byte* lines, const Byte* asked,
                     __m256i (&totals)[kRows][2]) {
  const __m256i low_half = _mm256_set1_epi8(15);
  __m256i pairs[kRows][2] = {};  // int16
  for (int line = 0; line < kStepLines; ++line) {
    __builtin_prefetch(asked + line * kLine);
#pragma GCC unroll 2
    for (int high = 0; high < 2; ++high) {
      __m256i numbers[2];
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        const __m256i both = load_32(lines + line * kLine + half * kLine / 2);
        numbers[half] = _mm256_and_si256(high ? _mm256_srli_epi16(both, 4) : both, low_half);
      }
#pragma GCC unroll 6
      for (int row = 0; row < kRows; ++row) {
        const __m256i x = broadcast_four_bytes(rows + ((2 * line + high) * kRows + row) * kQuad);
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half)
          pairs[row][half] =
              in_order(_mm256_add_epi16(pairs[row][half], _mm256_maddubs_epi16(numbers[half], x)));
      }
    }
  }
#pragma GCC unroll 6
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half)
      totals[row][half] = _mm256_add_epi32(
          totals[row][half], _mm256_madd_epi16(pairs[row][half], _mm256_set1_epi16(1)));
}

// Adds the products of a group of rows with a part of a block to the block's `sums`. In `group_sums`
// are a row's sums of its groups' numbers, negated, `scales_per_row` after those of the row before.
template <int kRows>
NOINLINE void multiply(const Byte* rows, const float* group_sums, int64_t scales_per_row,
                       const Int4Part& part, float* sums) {
  int64_t step = 0;
  for (int64_t group = 0; step < part.num_steps; ++group) {
    __m256i totals[kRows][2] = {};
    const int64_t end = std::min(step + part.group_steps, part.num_steps);
    for (; step < end; ++step)
      add_step<kRows>(rows + step * kStepInputs * kRows, part.lines + step * kStepBytes,
                      part.asked + step * kStepBytes, totals);
    for (int half = 0; half < 2; ++half) {
      const int64_t place = group * kBlock + half * kHalf;
      const __m256 scale = _mm256_loadu_ps(part.scales + place);
      const __m128i eight = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(part.zeros + place));
      const __m256 zero = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(eight));
#pragma GCC unroll 6
      for (int row = 0; row < kRows; ++row) {
        const __m256 row_sum = _mm256_broadcast_ss(group_sums + row * scales_per_row + group);
        // Below 2^24, hence exact in fp32.
        const __m256 exact =
            _mm256_fmadd_ps(zero, row_sum, _mm256_cvtepi32_ps(totals[row][half]));
        float* const sum = sums + row * 2 * kBlock + half * kHalf;
        _mm256_store_ps(sum, _mm256_fmadd_ps(exact, scale, _mm256_load_ps(sum)));
      }
    }
  }
}

inline int total(__m256i eight) {
  int32_t each[8];
  std::memcpy(each, &eight, sizeof(each));
  int sum = 0;
  for (int one : each) sum += one;
  return sum;
}

struct Int4Product {
  SideProduct product;
  int64_t group_steps;  // of inputs that share a scale; some neighbors may have the same
  const Byte* weight;   // [out / 16, in / 8, 16, 4]
  const float* scales;  // [blocks, groups, 16]
  const Byte* zeros;    // the same

  int64_t steps() const { return product.padded_inputs() / kStepInputs; }
  int64_t groups() const { return tiles_of(steps(), group_steps); }
  int64_t row_bytes() const { return product.padded_inputs(); }
  // That of the row, then the sums of its groups, negated.
  int64_t scales_per_row() const { return 1 + groups(); }

  // Of each quad the numbers of one row after the other.
  template <int kRows>
  void pack(int64_t first, Byte* numbers, float* row_scales) const {
    const int64_t group_inputs = group_steps * kStepInputs;
    for (int row = 0; row < kRows; ++row, row_scales += scales_per_row()) {
      __m256i group_sum = _mm256_setzero_si256();
      row_scales[0] = round_row(product, first + row, [&](int64_t input, __m256i eight) {
        const __m256i words = _mm256_packs_epi32(eight, eight);
        const __m256i bytes = _mm256_packs_epi16(words, words);
        const int32_t quads[2] = {_mm256_extract_epi32(bytes, 0), _mm256_extract_epi32(bytes, 4)};
        for (int i = 0; i < 2; ++i)
          std::memcpy(numbers + ((input / kQuad + i) * kRows + row) * kQuad, &quads[i], kQuad);
        if (input % group_inputs == 0) group_sum = _mm256_setzero_si256();
        group_sum = _mm256_add_epi32(group_sum, eight);
        const int64_t end = input + 8;
        if (end % group_inputs == 0 || end == product.padded_inputs())
          row_scales[1 + input / group_inputs] = -total(group_sum);
      });
    }
  }

  // One panel for all rows, some of its groups after the others where there are many rows.
  void run(const PackedRows& rows, int64_t panel) const {
    alignas(kLine) OfPanel<float> sums[kRowsTogether];
    std::memset(sums, 0, rows.count * sizeof(*sums));
    const int64_t part_steps =
        rows.groups() > 1 ? kPartSteps / group_steps * group_steps : steps();
    for (int64_t first = 0; first < steps(); first += part_steps)
      for (int64_t group = 0; group < rows.groups(); ++group)
        for (int block = 0; block < product.blocks_of(panel); ++block)
          multiply_group(rows, group, part_of(rows, group, 2 * panel + block, first, part_steps),
                         first, sums[group * kSideRows] + block * kBlock);
    finish(product, rows, panel, [&](int64_t row, int i) {
      return rounded(load(sums[row] + i) * rows.scales[row * rows.scales_per_row]);
    });
  }

  Int4Part part_of(const PackedRows& rows, int64_t group, int64_t block, int64_t first,
                   int64_t part_steps) const {
    const BlockBytes bytes{steps() * kStepBytes, block_numbers(product) / 2};
    const Byte* const lines = weight + block * bytes.all + first * kStepBytes;
    const int64_t num_steps = std::min(part_steps, steps() - first);
    const int64_t beside = (block * groups() + first / group_steps) * kBlock;
    const int64_t ahead =
        bytes_ahead(rows, group, bytes, first * kStepBytes, num_steps * kStepBytes);
    return {lines, scales + beside, zeros + beside, lines + ahead, num_steps, group_steps};
  }

  void multiply_group(const PackedRows& rows, int64_t group, const Int4Part& part, int64_t first,
                      float* sums) const {
    const float* const group_sums = rows.scales + group * kSideRows * rows.scales_per_row + 1;
    for_rows(rows.in_group(group), [&](auto count) {
      multiply<count>(rows.group_numbers(group) + first * kStepInputs * count,
                      group_sums + first / group_steps, rows.scales_per_row, part, sums);
    });
  }
};

}  // namespace

extern "C" void sglp_int4_product(int64_t num_rows, int64_t inputs, int64_t outputs, int gated,
                                  int64_t group_steps, const void* rows, const void* weight,
                                  const void* scales, const void* zeros, const void* bias,
                                  void* out, int num_threads) {
  const SideProduct product(num_rows, inputs, outputs, gated, rows, bias, out);
  run_side_product(
      Int4Product{product, group_steps, static_cast<const Byte*>(weight),
                  static_cast<const float*>(scales), static_cast<const Byte*>(zeros)},
      kRowsTogether, num_threads);
}

#endif
