// Products of bf16 rows with a packed weight in fp32 vectors of AVX2, for machines without bf16
// instructions.
//
// Included by vector_products.cpp, which says what the weights are. Numbers of rows and weights are
// exact in fp32. Each sum is over the inputs in ascending order, whatever rows are beside it: a row's
// result is bitwise the same in any microbatch and on any number of threads.
//
// Packed, a weight is a row of blocks of 16 outputs, and has whole tiles of 32 inputs, with zeros
// where there are none. A pair of blocks is a panel. Of a gated product, blocks of gates and of ups
// take turns. Of six rows the numbers of one input lie side by side.

#pragma once

#include "blocks.h"
#include "exports.h"
#include "product_instructions.h"
#include "side_rows.h"
#include "team.h"
#include "vectors.h"

#if defined(SGLP_HAS_VECTOR_PRODUCTS)

#include <immintrin.h>

#include <algorithm>
#include <cstring>

namespace {

constexpr int64_t kTileInputs = 32;
constexpr int kFour = 4;         // inputs of which a weight has its numbers side by side
constexpr int kWideRows = 3;     // so many or fewer are multiplied by 32 outputs at once
constexpr int64_t kPartInputs = 256;  // of two blocks in bf16 and of a group of rows: 22 KiB
constexpr int64_t kRowsTogether = 96;  // that a panel is expanded for, and read from memory for

struct VectorProduct {
  int64_t num_rows;
  int64_t inputs;
  int64_t outputs;
  bool gated;            // outputs are silu(gate) * up: a panel is a block of gates and its ups
  const BFloat16* rows;  // [num_rows, inputs]
  const BFloat16* bias;  // [outputs], gated [2 * outputs] with the gates first, or null
  BFloat16* out;         // [num_rows, outputs]

  int64_t padded_inputs() const { return tiles_of(inputs, kTileInputs) * kTileInputs; }
  int64_t blocks() const { return tiles_of(outputs, kBlock) * (gated ? 2 : 1); }
  int64_t panels() const { return tiles_of(blocks(), 2); }
  // The number of a panel's first or second block; an odd number of them ends with one twice.
  int64_t block(int64_t panel, int which) const {
    return std::min(2 * panel + which, blocks() - 1);
  }
};

// A row's sums with a panel.
typedef float PanelSums[2 * kBlock];

// Rows [first, first + count), packed.
struct PackedRows {
  int64_t first;
  int64_t count;
  const float* numbers;

  int in_group(int64_t group) const {
    return std::min<int64_t>(kSideRows, count - group * kSideRows);
  }
};

// The inputs [first, first + count) of a panel.
struct Part {
  int64_t panel;
  int64_t first;
  int64_t count;
};

inline float number_of(BFloat16 x) { return bit_cast<float>(uint32_t{x.bits} << 16); }

// Packs the rows of a group: [padded_inputs, num_rows].
template <int kRows>
void pack_group(const VectorProduct& product, const BFloat16* source, float* target) {
  const int64_t inputs = product.inputs;
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

// The same for all inputs of a part. A lone row with one span at a time would wait for its sums.
template <int kRows, int kBlocks, typename Weights>
NOINLINE void multiply(const float* rows, const Weights weights, int first_block, int64_t inputs,
                       PanelSums* sums) {
  if constexpr (!Weights::kIsScaled) {
    add_spans<kRows, kBlocks, 1>(rows, weights, first_block, 0, inputs, sums);
  } else {
    constexpr int kSpans = kRows == 1 ? 2 : 1;
    int64_t begin = 0;
    for (; begin + kSpans * kTileInputs <= inputs; begin += kSpans * kTileInputs)
      add_spans<kRows, kBlocks, kSpans>(rows, weights, first_block, begin, kTileInputs, sums);
    if (begin < inputs)
      add_spans<kRows, kBlocks, 1>(rows, weights, first_block, begin, kTileInputs, sums);
  }
}

template <int kRows, typename Weights>
void multiply_rows(const float* rows, const Weights& weights, int64_t inputs, PanelSums* sums) {
  if constexpr (kRows <= kWideRows) {
    multiply<kRows, 2>(rows, weights, 0, inputs, sums);
  } else {
    multiply<kRows, 1>(rows, weights, 0, inputs, sums);
    multiply<kRows, 1>(rows, weights, 1, inputs, sums);
  }
}

// Adds all packed rows' products with a part of a panel to `sums` [rows.count].
template <typename Weights>
void multiply_part(const VectorProduct& product, const PackedRows& rows, const Part& part,
                   Weights weights, PanelSums* sums) {
  for (int64_t group = 0; group * kSideRows < rows.count; ++group) {
    for_rows(rows.in_group(group), [&](auto count) {
      const float* const numbers = rows.numbers + group * kSideRows * product.padded_inputs();
      multiply_rows<count>(numbers + part.first * count, weights, part.count,
                           sums + group * kSideRows);
    });
    weights.asks_ahead = 0;  // once is enough
  }
}

// Adds biases to the sums of rows with a panel, gates where asked to, rounds, and stores.
inline void finish(const VectorProduct& product, const PackedRows& rows, int64_t panel,
                   const PanelSums* sums) {
  const int64_t begin = panel * (product.gated ? kBlock : 2 * kBlock);
  const int64_t second = product.gated ? product.outputs + begin : begin + kBlock;
  const int64_t left = product.outputs - begin;
  const int count = std::min<int64_t>(left, product.gated ? kBlock : 2 * kBlock);
  PanelSums biases = {};
  if (product.bias != nullptr)
    for (int i = 0; i < 2 * kBlock; ++i) {
      const bool is_inside = product.gated ? i % kBlock < count : i < count;
      const int64_t output = i < kBlock ? begin + i : second + i - kBlock;
      if (is_inside) biases[i] = number_of(product.bias[output]);
    }
  for (int64_t row = 0; row < rows.count; ++row) {
    BFloat16* const target = product.out + (rows.first + row) * product.outputs + begin;
    for (int i = 0; i < count; i += kWidth) {
      Vec result = load(sums[row] + i) + load(biases + i);
      if (product.gated)
        result = silu(result) * (load(sums[row] + kBlock + i) + load(biases + kBlock + i));
      store(target + i, result, std::min(kWidth, count - i));
    }
  }
}

thread_local Workspace vector_rows_workspace;

// All rows with all panels. `add_part(rows, part, sums)` adds the products of one part.
template <typename AddPart>
void run_vector_product(const VectorProduct& product, int num_threads, const AddPart& add_part) {
  const int64_t inputs = product.padded_inputs();
  const int64_t together = std::min(product.num_rows, kRowsTogether);
  // Few rows are packed by each thread, sooner than it would have heard that another one has.
  const bool is_shared = together > kSideRows;
  in_team(num_threads, [&] {
    float* packed;
    const auto reserve = [&] {
      packed = vector_rows_workspace.at_least<float>(together * inputs * sizeof(float));
    };
    if (is_shared) {
#pragma omp single copyprivate(packed)
      reserve();
    } else {
      reserve();
    }
    for (int64_t first = 0; first < product.num_rows; first += together) {
      const PackedRows rows{first, std::min(together, product.num_rows - first), packed};
      const int64_t groups = tiles_of(rows.count, kSideRows);
      const auto pack = [&](int64_t group) {
        for_rows(rows.in_group(group), [&](auto count) {
          const int64_t row = group * kSideRows;
          pack_group<count>(product, product.rows + (first + row) * product.inputs,
                            packed + row * inputs);
        });
      };
      if (is_shared) {
#pragma omp for
        for (int64_t group = 0; group < groups; ++group) pack(group);
      } else {
        pack(0);
      }
#pragma omp for schedule(static)
      for (int64_t panel = 0; panel < product.panels(); ++panel) {
        alignas(kLine) PanelSums sums[kRowsTogether];
        std::memset(sums, 0, rows.count * sizeof(PanelSums));
        for (int64_t input = 0; input < inputs; input += kPartInputs)
          add_part(rows, Part{panel, input, std::min(kPartInputs, inputs - input)}, sums);
        finish(product, rows, panel, sums);
      }
    }
  });
}

}  // namespace

#endif  // SGLP_HAS_VECTOR_PRODUCTS
