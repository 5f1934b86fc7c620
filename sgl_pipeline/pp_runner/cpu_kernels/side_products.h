// Products by AVX2: rows packed in groups, whose numbers of an input lie side by side, with all panels
// of a weight.
//
// Included by vector_panels.h and avx2_integers.h. Knows nothing of the weight's numbers. A row's
// result is bitwise the same in any microbatch and on any number of threads, where it is so in each
// `Arithmetic`.
//
// Packed, a weight is a row of blocks of 16 outputs. A pair of blocks is a panel. Of a gated product,
// blocks of gates and of ups take turns.

#pragma once

#include "blocks.h"
#include "exports.h"
#include "product_call.h"
#include "product_instructions.h"
#include "team.h"
#include "vectors.h"

#if defined(SGLP_HAS_VECTOR_PRODUCTS) || defined(SGLP_HAS_AVX2_INTEGERS)

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace {

constexpr int kSideRows = 6;  // of a group: its sums with 16 outputs take 12 of 16 registers
constexpr int64_t kStepInputs = 32;  // of which packed rows have a multiple

struct SideProduct : ProductCall {
  using ProductCall::ProductCall;

  int64_t padded_inputs() const { return tiles_of(inputs, kStepInputs) * kStepInputs; }
  int blocks_of(int64_t panel) const { return std::min<int64_t>(2, blocks() - 2 * panel); }
  // The number of a panel's first or second block; an odd number of them ends with one twice.
  int64_t block(int64_t panel, int which) const {
    return std::min(2 * panel + which, blocks() - 1);
  }
};

// Calls with_rows(rows), a constant in its type, for 1 to kSideRows rows.
template <typename WithRows>
void for_rows(int num_rows, const WithRows& with_rows) {
  switch (num_rows) {
    case 1: return with_rows(std::integral_constant<int, 1>());
    case 2: return with_rows(std::integral_constant<int, 2>());
    case 3: return with_rows(std::integral_constant<int, 3>());
    case 4: return with_rows(std::integral_constant<int, 4>());
    case 5: return with_rows(std::integral_constant<int, 5>());
    default: return with_rows(std::integral_constant<int, kSideRows>());
  }
}

// A number for each output of a panel, in the order of its blocks.
template <typename T>
using OfPanel = T[2 * kBlock];

// The rows [first, first + count), packed, with what else an Arithmetic wants of each.
struct PackedRows {
  int64_t first;
  int64_t count;
  int64_t row_bytes;
  int64_t scales_per_row;
  const Byte* numbers;
  const float* scales;

  int64_t groups() const { return tiles_of(count, kSideRows); }
  int in_group(int64_t group) const {
    return std::min<int64_t>(kSideRows, count - group * kSideRows);
  }
  const Byte* group_numbers(int64_t group) const { return numbers + group * kSideRows * row_bytes; }
};

// The bytes of a packed block: those that a product reads, and padding.
struct BlockBytes {
  int64_t read;
  int64_t all;
};

// From the bytes [first, first + count) of a block to the part that comes next, of its panel or of the
// next one.
inline int64_t bytes_to_next(const BlockBytes& block, int64_t first, int64_t count) {
  return first + count < block.read ? count : 2 * block.all - first;
}

inline __m256i load_32(const Byte* source) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source));
}

inline float number_of(BFloat16 x) { return bit_cast<float>(uint32_t{x.bits} << 16); }
inline float number_of(float x) { return x; }

// `count` numbers, at most eight, and zeros after them.
inline __m128i load_words(const BFloat16* source, int64_t count) {
  BFloat16 padded[8] = {};
  if (count < 8) std::memcpy(padded, source, count * sizeof(BFloat16));
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(count < 8 ? padded : source));
}

// The largest of `count` magnitudes, which are ordered as their bits are; a NaN is the largest.
inline float largest_magnitude(const BFloat16* source, int64_t count) {
  const __m128i magnitude = _mm_set1_epi16(0x7fff);
  __m128i largest = _mm_setzero_si128();
  for (int64_t first = 0; first < count; first += 8) {
    const __m128i words = load_words(source + first, std::min<int64_t>(count - first, 8));
    largest = _mm_max_epu16(largest, _mm_and_si128(magnitude, words));
  }
  uint16_t words[8];
  std::memcpy(words, &largest, sizeof(words));
  return bit_cast<float>(uint32_t{*std::max_element(words, words + 8)} << 16);
}

// What stands beside the outputs of a panel in an array of one number for each, gates first; zeros
// where there are no outputs.
template <typename T>
void gather(const ProductCall& product, int64_t panel, const T* source, OfPanel<float>& target) {
  for (int i = 0; i < 2 * kBlock; ++i) {
    const int64_t output = product.gated ? panel * kBlock + i % kBlock : panel * 2 * kBlock + i;
    const int64_t place = output + (product.gated && i >= kBlock ? product.outputs : 0);
    target[i] = output < product.outputs ? number_of(source[place]) : 0.0f;
  }
}

// Adds biases to the results of rows with a panel, gates where asked to, rounds, and stores.
// `value(row, i)` gives those of some outputs from the panel's `i` on.
template <typename Value>
void finish(const ProductCall& product, const PackedRows& rows, int64_t panel, const Value& value) {
  const int64_t begin = panel * product.panel_outputs();
  const int count = std::min<int64_t>(product.outputs - begin, product.panel_outputs());
  OfPanel<float> biases = {};
  if (product.bias != nullptr) gather(product, panel, product.bias, biases);
  const auto sum = [&](int64_t row, int i) { return value(row, i) + load(biases + i); };
  for (int64_t row = 0; row < rows.count; ++row) {
    BFloat16* const target = product.out + (rows.first + row) * product.outputs + begin;
    for (int i = 0; i < count; i += kWidth) {
      Vec result = sum(row, i);
      if (product.gated) result = silu(result) * sum(row, i + kBlock);
      store(target + i, result, std::min(kWidth, count - i));
    }
  }
}

thread_local Workspace side_rows_workspace, side_scales_workspace;

// All rows with all panels, `most_rows` rows at a time. An `Arithmetic` packs the rows of a group
// (`pack<rows>`), `row_bytes` and `scales_per_row` numbers for each, and multiplies packed rows with
// a panel and finishes them (`run`).
template <typename Arithmetic>
void run_side_product(const Arithmetic& arithmetic, int64_t most_rows, int num_threads) {
  const ProductCall& product = arithmetic.product;
  const int64_t row_bytes = arithmetic.row_bytes(), per_row = arithmetic.scales_per_row();
  const int64_t together = std::min(product.num_rows, most_rows);
  // Few rows are packed by each thread, sooner than it would have heard that another one has.
  const bool is_shared = together > kSideRows;
  in_team(num_threads, [&] {
    Byte* numbers;
    float* scales;
    const auto reserve = [&] {
      numbers = side_rows_workspace.at_least<Byte>(together * row_bytes);
      scales = side_scales_workspace.at_least<float>(together * per_row * sizeof(float));
    };
    if (is_shared) {
#pragma omp single copyprivate(numbers, scales)
      reserve();
    } else {
      reserve();
    }
    for (int64_t first = 0; first < product.num_rows; first += together) {
      const int64_t count = std::min(together, product.num_rows - first);
      const PackedRows rows{first, count, row_bytes, per_row, numbers, scales};
      const auto pack = [&](int64_t group) {
        const int64_t row = group * kSideRows;
        for_rows(rows.in_group(group), [&](auto count) {
          arithmetic.template pack<count>(first + row, numbers + row * row_bytes,
                                          scales + row * per_row);
        });
      };
      if (is_shared) {
#pragma omp for
        for (int64_t group = 0; group < rows.groups(); ++group) pack(group);
      } else {
        pack(0);
      }
#pragma omp for schedule(static)
      for (int64_t panel = 0; panel < product.panels(); ++panel) arithmetic.run(rows, panel);
    }
  });
}

}  // namespace

#endif  // SGLP_HAS_VECTOR_PRODUCTS || SGLP_HAS_AVX2_INTEGERS
