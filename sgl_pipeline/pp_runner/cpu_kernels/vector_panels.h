// Products of bf16 rows with a packed weight in fp32 vectors of AVX2, for machines without bf16
// instructions.
//
// Included by vector_products.cpp and avx2_expanded_products.cpp, which say what the weights are.
// Numbers of rows and weights are exact in fp32, but for rows of FP8, into which their scale is
// multiplied. Each sum is over the inputs in ascending order,
// whatever rows are beside it.
//
// A packed weight has whole tiles of 32 inputs, with zeros where there are none.

#pragma once

#include "side_products.h"

#if defined(SGLP_HAS_VECTOR_PRODUCTS)

namespace {

constexpr int64_t kTileInputs = kStepInputs;
constexpr int kFour = 4;         // inputs of which a weight has its numbers side by side
constexpr int kWideRows = 3;     // so many or fewer are multiplied by 32 outputs at once
constexpr int64_t kPartInputs = 256;  // of two blocks in bf16 and of a group of rows: 22 KiB
constexpr int64_t kRowsTogether = 96;  // that a panel is expanded for, and read from memory for

// A row's sums with a panel.
typedef OfPanel<float> PanelSums;

// The inputs [first, first + count) of a panel.
struct Part {
  int64_t panel;
  int64_t first;
  int64_t count;
};

// The bf16 numbers of an even input and the one after it, as fp32.
inline __m256 number_of_pair(__m256i pairs, bool is_second) {
  return _mm256_castsi256_ps(is_second ? _mm256_and_si256(pairs, _mm256_set1_epi32(0xffff0000))
                                       : _mm256_slli_epi32(pairs, 16));
}

// Packs the rows of a group: [padded_inputs, num_rows].
template <int kRows>
void pack_group(const SideProduct& product, int64_t first, float* target) {
  const int64_t inputs = product.inputs;
  const BFloat16* const source = product.rows + first * inputs;
  for (int64_t input = 0; input < inputs; ++input)
    for (int row = 0; row < kRows; ++row)
      target[input * kRows + row] = number_of(source[row * inputs + input]);
  std::fill(target + inputs * kRows, target + product.padded_inputs() * kRows, 0.0f);
}

// Adds the products of `kRows` rows with `kBlocks` blocks, from `first_block` on, to sums: `kSpans`
// spans of inputs from `begin` on, beside one another. `Weights` give the numbers of four inputs of a
// block, and where `kIsScaled` a scale of each output for each span, whose own sum is multiplied by
// it before it is added.
template <int kRows, int kBlocks, int kSpans, typename Weights>
inline void add_spans(const float* rows, const Weights& weights, int first_block, int64_t begin,
                      int64_t span, PanelSums* sums) {
  __m256 totals[kSpans][kRows][kBlocks][2];
  for (int s = 0; s < kSpans; ++s)
    for (int row = 0; row < kRows; ++row)
      for (int block = 0; block < kBlocks; ++block)
        for (int half = 0; half < 2; ++half)
          totals[s][row][block][half] =
              Weights::kIsScaled
                  ? _mm256_setzero_ps()
                  : _mm256_loadu_ps(sums[row] + (first_block + block) * kBlock + half * 8);
  for (int64_t input = begin; input < begin + span; input += kFour)
#pragma GCC unroll 2
    for (int s = 0; s < kSpans; ++s)
#pragma GCC unroll 2
      for (int block = 0; block < kBlocks; ++block) {
        const int64_t first = input + s * span;
        const typename Weights::Four four = weights.four(first_block + block, first);
#pragma GCC unroll 4
        for (int i = 0; i < kFour; ++i) {
          const __m256 numbers[2] = {four.numbers(i, 0), four.numbers(i, 1)};
#pragma GCC unroll 6
          for (int row = 0; row < kRows; ++row) {
            const __m256 x = _mm256_broadcast_ss(rows + (first + i) * kRows + row);
            for (int half = 0; half < 2; ++half) {
              __m256& total = totals[s][row][block][half];
              total = _mm256_fmadd_ps(x, numbers[half], total);
            }
          }
        }
      }
  for (int s = 0; s < kSpans; ++s)
    for (int block = 0; block < kBlocks; ++block)
      for (int half = 0; half < 2; ++half) {
        __m256 scale;
        if constexpr (Weights::kIsScaled)
          scale = weights.scale(first_block + block, begin + s * span, half);
        for (int row = 0; row < kRows; ++row) {
          float* const sum = sums[row] + (first_block + block) * kBlock + half * 8;
          __m256 total = totals[s][row][block][half];
          if constexpr (Weights::kIsScaled)
            total = _mm256_fmadd_ps(total, scale, _mm256_loadu_ps(sum));
          _mm256_storeu_ps(sum, total);
        }
      }
}

// The same for all inputs of a part, whose scaled weights have a scale for each `span` of them. A lone
// row with one span at a time would wait for its sums.
template <int kRows, int kBlocks, typename Weights>
NOINLINE void multiply(const float* rows, const Weights weights, int first_block, int64_t inputs,
                       int64_t span, PanelSums* sums) {
  if constexpr (!Weights::kIsScaled) {
    add_spans<kRows, kBlocks, 1>(rows, weights, first_block, 0, inputs, sums);
  } else {
    int64_t begin = 0;
    if constexpr (kRows == 1)
      for (; begin + 2 * span <= inputs; begin += 2 * span)
        add_spans<kRows, kBlocks, 2>(rows, weights, first_block, begin, span, sums);
    for (; begin < inputs; begin += span)
      add_spans<kRows, kBlocks, 1>(rows, weights, first_block, begin,
                                   std::min(span, inputs - begin), sums);
  }
}

template <int kRows, typename Weights>
void multiply_rows(const float* rows, const Weights& weights, int64_t inputs, int64_t span,
                   PanelSums* sums) {
  if constexpr (kRows <= kWideRows) {
    multiply<kRows, 2>(rows, weights, 0, inputs, span, sums);
  } else {
    multiply<kRows, 1>(rows, weights, 0, inputs, span, sums);
    multiply<kRows, 1>(rows, weights, 1, inputs, span, sums);
  }
}

// Adds all packed rows' products with a part of a panel to `sums` [rows.count]. Scaled weights have a
// scale for each `span` inputs.
template <typename Weights>
void multiply_part(const PackedRows& rows, const Part& part, Weights weights, PanelSums* sums,
                   int64_t span = kTileInputs) {
  for (int64_t group = 0; group < rows.groups(); ++group) {
    for_rows(rows.in_group(group), [&](auto count) {
      const float* const numbers = reinterpret_cast<const float*>(rows.group_numbers(group));
      multiply_rows<count>(numbers + part.first * count, weights, part.count, span,
                           sums + group * kSideRows);
    });
    weights.asks_ahead = 0;  // once is enough
  }
}

template <typename AddPart>
struct VectorArithmetic {
  SideProduct product;
  const AddPart& add_part;

  int64_t row_bytes() const { return product.padded_inputs() * sizeof(float); }
  int64_t scales_per_row() const { return 0; }

  template <int kRows>
  void pack(int64_t first, Byte* numbers, float*) const {
    pack_group<kRows>(product, first, reinterpret_cast<float*>(numbers));
  }

  void run(const PackedRows& rows, int64_t panel) const {
    alignas(kLine) PanelSums sums[kRowsTogether];
    std::memset(sums, 0, rows.count * sizeof(PanelSums));
    const int64_t inputs = product.padded_inputs();
    for (int64_t input = 0; input < inputs; input += kPartInputs)
      add_part(rows, Part{panel, input, std::min(kPartInputs, inputs - input)}, sums);
    finish(product, rows, panel, [&](int64_t row, int i) { return load(sums[row] + i); });
  }
};

// All rows with all panels. `add_part(rows, part, sums)` adds the products of one part.
template <typename AddPart>
void run_vector_product(const SideProduct& product, int num_threads, const AddPart& add_part) {
  run_side_product(VectorArithmetic<AddPart>{product, add_part}, kRowsTogether, num_threads);
}

}  // namespace

#endif  // SGLP_HAS_VECTOR_PRODUCTS
