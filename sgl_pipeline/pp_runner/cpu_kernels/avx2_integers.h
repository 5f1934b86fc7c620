// Products of rows rounded to 8 bits with packed weights of integers, in vectors of AVX2, for
// machines without AVX-512 VNNI.
//
// Shared by avx2_int8_products.cpp and avx2_int4_products.cpp, whose `Arithmetic` multiplies. Rows are
// rounded as int8_rows.h does it, and what follows exact sums has the order of the products by VNNI,
// hence their bits, except in the gate. A row's result is bitwise the same in any microbatch and on
// any number of threads.
//
// Packed weights have the layouts of int8_products.cpp and int4_products.cpp: blocks of 16 outputs,
// whole tiles of 64 inputs. A pair of blocks is a panel; of a gated product, blocks of gates and of
// ups take turns. Of up to six rows, a group, the numbers of four inputs, a quad, lie side by side.

#pragma once

#include "blocks.h"
#include "exports.h"
#include "product_instructions.h"
#include "side_rows.h"
#include "team.h"
#include "vectors.h"

#if defined(SGLP_HAS_VECTOR_PRODUCTS) || defined(SGLP_HAS_AVX2_INTEGERS)

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace {

constexpr int kHalf = 8;    // outputs of a vector
constexpr int kQuad = 4;    // inputs of which a weight has its numbers side by side
constexpr int64_t kTileInputs = 64;     // of a packed weight
constexpr int64_t kStepInputs = 32;     // of which packed rows have a multiple
constexpr int64_t kRowsTogether = 192;  // for which a panel is read from memory once
constexpr int64_t kAhead = 2048;        // bytes, where no other rows wait for the weight
constexpr float kLargest = 127.0f;
constexpr float kSmallestRow = 0x1p-100f;  // the largest number of a row that is all zeros to us

struct IntegerProduct {
  int64_t num_rows;
  int64_t inputs;
  int64_t outputs;
  bool gated;            // outputs are silu(gate) * up: a panel is a block of gates and its ups
  const BFloat16* rows;  // [num_rows, inputs]
  const BFloat16* bias;  // [outputs], gated [2 * outputs] with the gates first, or null
  BFloat16* out;         // [num_rows, outputs]

  int64_t padded_inputs() const { return tiles_of(inputs, kStepInputs) * kStepInputs; }
  // Numbers of a packed block of the weight.
  int64_t block_numbers() const { return tiles_of(inputs, kTileInputs) * kTileInputs * kBlock; }
  int64_t blocks() const { return tiles_of(outputs, kBlock) * (gated ? 2 : 1); }
  int64_t panels() const { return tiles_of(blocks(), 2); }
  int blocks_of(int64_t panel) const { return std::min<int64_t>(2, blocks() - 2 * panel); }
};

// A number for each output of a panel, in the order of its blocks.
template <typename T>
using OfPanel = T[2 * kBlock];

// The rows [first, first + count), packed, each with its scale and what else an Arithmetic wants.
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

// From such a part to what is asked for beside a group's products with it. One group alone reads the
// weight as it lies in memory. Of several groups the first asks for the part that comes next; the
// others, for which it is there, ask for what they read.
inline int64_t bytes_ahead(const PackedRows& rows, int64_t group, const BlockBytes& block,
                           int64_t first, int64_t count) {
  if (rows.groups() == 1) return kAhead;
  return group > 0 ? 0 : bytes_to_next(block, first, count);
}

inline __m256i load_32(const Byte* source) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source));
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

// Calls put(input, eight) with eight numbers from `input` on, int32 of -127 to 127, zeros where there
// are no inputs up to the padded ones. Returns the row's scale.
template <typename Put>
float round_row(const IntegerProduct& product, int64_t row, const Put& put) {
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

// What stands beside the outputs of a panel in an array of one number for each, gates first; zeros
// where there are no outputs.
template <typename T>
void gather(const IntegerProduct& product, int64_t panel, const T* source, OfPanel<float>& target) {
  for (int i = 0; i < 2 * kBlock; ++i) {
    const int64_t output = product.gated ? panel * kBlock + i % kBlock : panel * 2 * kBlock + i;
    const int64_t place = output + (product.gated && i >= kBlock ? product.outputs : 0);
    target[i] = output < product.outputs ? number_of(source[place]) : 0.0f;
  }
}

// Nothing of a multiplication is to be fused with what follows: torch rounds in between.
inline Vec rounded(Vec vec) {
  asm("" : "+x"(vec));
  return vec;
}

// Adds biases to the results of rows with a panel, gates where asked to, rounds, and stores.
// `value(row, i)` gives those of some outputs from the panel's `i` on.
template <typename Value>
void finish(const IntegerProduct& product, const PackedRows& rows, int64_t panel,
            const Value& value) {
  const int64_t begin = panel * (product.gated ? kBlock : 2 * kBlock);
  const int count = std::min<int64_t>(product.outputs - begin, product.gated ? kBlock : 2 * kBlock);
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

thread_local Workspace integer_rows_workspace, integer_scales_workspace;

// All rows with all panels. An `Arithmetic` packs the rows of a group (`pack<rows>`), `kNumberBytes`
// for an input, with `scales_per_row` numbers for each row, and multiplies packed rows with a panel
// and finishes them (`run`).
template <typename Arithmetic>
void run_integer_product(const Arithmetic& arithmetic, int num_threads) {
  const IntegerProduct& product = arithmetic.product;
  const int64_t row_bytes = product.padded_inputs() * Arithmetic::kNumberBytes;
  const int64_t per_row = arithmetic.scales_per_row();
  const int64_t together = std::min(product.num_rows, kRowsTogether);
  // Few rows are packed by each thread, sooner than it would have heard that another one has.
  const bool is_shared = together > kSideRows;
  in_team(num_threads, [&] {
    Byte* numbers;
    float* scales;
    const auto reserve = [&] {
      numbers = integer_rows_workspace.at_least<Byte>(together * row_bytes);
      scales = integer_scales_workspace.at_least<float>(together * per_row * sizeof(float));
    };
    if (is_shared) {
#pragma omp single copyprivate(numbers, scales)
      reserve();
    } else {
      reserve();
    }
    for (int64_t first = 0; first < product.num_rows; first += together) {
      const PackedRows rows{first,   std::min(together, product.num_rows - first),
                            row_bytes, per_row, numbers, scales};
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
