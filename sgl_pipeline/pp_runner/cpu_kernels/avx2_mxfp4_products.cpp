// Products of bf16 rows with a packed weight in MXFP4 by AVX2: mxfp4_products.cpp for machines
// without bf16 instructions.
//
// Inputs come in groups of 32 that share a scale of the weight. Twice a number of the weight is an
// integer of at most 12. A row's numbers become integers too, below 2 ** 14 in size, times a unit, a
// power of two for each row and group: those above 1/64 of the group's greatest are exact, smaller
// ones are rounded to a multiple of the unit, which is at most 2 ** -13 of the greatest, or 2 ** -126.
// The sum of a group is then an integer that int32 and fp32 hold exactly. Groups are added up in fp32,
// in ascending order. A group with a number that is not finite makes a sum NaN.
//
// Packed, a weight is [out / 16, in / 4, 16, 2] bytes: the codes of inputs 4 i + j, and 4 bits higher
// of 4 i + 2 + j, of outputs 0 to 3, 8 to 11, 4 to 7 and 12 to 15, so that unpacking bytes gives pairs
// of inputs of eight outputs; its scales are [out / 16, in / 32, 16] bytes. Of up to six rows the
// numbers of a pair of inputs lie side by side.

#include "avx2_integers.h"

#include <limits>

#if defined(SGLP_HAS_VECTOR_PRODUCTS)

namespace {

constexpr int64_t kGroupInputs = 32;
constexpr int kPairs = kGroupInputs / 2;  // of inputs in a group
constexpr int kPairBytes = 2 * sizeof(int16_t);
constexpr int64_t kGroupBytes = kGroupInputs * kBlock / 2;          // of a block's codes
constexpr int64_t kGroupPairBytes = kPairs * kBlock * kPairBytes;   // of its integers
constexpr int64_t kPartGroups = 8;  // of two blocks, 16 KiB of integers, for all rows
constexpr int kMostExpandedRows = 3;  // that codes become integers in registers for
constexpr int kUnitBits = 13;  // from a group's greatest power of two down to its unit
// Integers of a weight are twice its numbers, and stand in the upper byte of int16.
constexpr float kIntegerUnit = 0x1p-9f;
static_assert(kGroupInputs * 12 * (int64_t{2} << kUnitBits) < 1 << 24, "fp32 holds a group's sum");
static_assert(kGroupInputs * 12 * 256 * (int64_t{2} << kUnitBits) <= INT32_MAX, "int32 does");

// The integers of four inputs of a block, two inputs in each 32 bits: of the first two inputs, then
// of the others, for outputs 0 to 7 and 8 to 15.
struct FourInputs {
  __m256i pairs[2][2];
};

// Codes of some groups of a block; beside each line of them one from `asked` on is asked for.
struct Codes {
  const Byte* codes;
  const Byte* asked;

  FourInputs four(int64_t group, int index) const {
    const int64_t place = group * kGroupBytes + index * (kLine / 2);
    if (index % 2 == 0) __builtin_prefetch(asked + place);
    const __m256i numbers = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12));
    const __m256i code = _mm256_set1_epi8(15), zero = _mm256_setzero_si256();
    const __m256i bytes = load_32(codes + place);
    FourInputs four;
#pragma GCC unroll 2
    for (int pair = 0; pair < 2; ++pair) {
      const __m256i one = _mm256_and_si256(pair ? _mm256_srli_epi16(bytes, 4) : bytes, code);
      const __m256i integers = _mm256_shuffle_epi8(numbers, one);
      four.pairs[pair][0] = _mm256_unpacklo_epi8(zero, integers);
      four.pairs[pair][1] = _mm256_unpackhi_epi8(zero, integers);
    }
    return four;
  }
};

// Integers of some groups of a block, which were codes.
struct Integers {
  const Byte* pairs;

  FourInputs four(int64_t group, int index) const {
    const Byte* const source = pairs + group * kGroupPairBytes + index * 2 * kLine;
    return {{{load_32(source), load_32(source + kLine / 2)},
             {load_32(source + kLine), load_32(source + kLine * 3 / 2)}}};
  }
};

void expand(const Codes& codes, int64_t groups, Byte* pairs) {
  for (int64_t group = 0; group < groups; ++group)
    for (int index = 0; index < kPairs / 2; ++index) {
      const FourInputs four = codes.four(group, index);
      Byte* const target = pairs + group * kGroupPairBytes + index * 2 * kLine;
      for (int place = 0; place < 4; ++place)
        _mm256_store_si256(reinterpret_cast<__m256i*>(target + place * (kLine / 2)),
                           four.pairs[place / 2][place % 2]);
    }
}

// 2 ** (byte - 127) of eight bytes from 1 on; 0 of 0.
inline __m256 powers_of_two(const Byte* bytes) {
  const __m128i eight = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu8_epi32(eight), 23));
}

// Rows of a group of them from some input on, and the units of the first one.
struct SideRows {
  const Byte* numbers;
  const float* units;
  int64_t units_per_row;
};

// Adds the products of `kRows` rows with some groups of inputs of a block to the block's `sums`.
template <int kRows, typename Weights>
NOINLINE void multiply(const SideRows rows, const Weights weights, const Byte* exponents,
                       int64_t groups, float* sums) {
  const Byte* numbers = rows.numbers;
  for (int64_t group = 0; group < groups; ++group) {
    __m256i totals[kRows][2] = {};
    for (int index = 0; index < kPairs / 2; ++index) {
      const FourInputs four = weights.four(group, index);
#pragma GCC unroll 2
      for (int pair = 0; pair < 2; ++pair)
#pragma GCC unroll 6
        for (int row = 0; row < kRows; ++row, numbers += kPairBytes) {
          const __m256i x = broadcast_four_bytes(numbers);
#pragma GCC unroll 2
          for (int half = 0; half < 2; ++half)
            totals[row][half] = in_order(_mm256_add_epi32(
                totals[row][half], _mm256_madd_epi16(four.pairs[pair][half], x)));
        }
    }
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const __m256 scale = powers_of_two(exponents + group * kBlock + half * kHalf);
#pragma GCC unroll 6
      for (int row = 0; row < kRows; ++row) {
        const __m256 unit = _mm256_broadcast_ss(rows.units + row * rows.units_per_row + group);
        const __m256 exact = _mm256_mul_ps(_mm256_cvtepi32_ps(totals[row][half]), unit);
        float* const sum = sums + row * 2 * kBlock + half * kHalf;
        _mm256_store_ps(sum, _mm256_fmadd_ps(exact, scale, _mm256_load_ps(sum)));
      }
    }
  }
}

struct Mxfp4Product {
  SideProduct product;
  const Byte* weight;
  const Byte* exponents;

  int64_t groups() const { return product.padded_inputs() / kGroupInputs; }
  int64_t block_bytes() const { return groups() * kGroupBytes; }
  int64_t row_bytes() const { return product.padded_inputs() * sizeof(int16_t); }
  // The units of its groups, times that of a weight's integers.
  int64_t scales_per_row() const { return groups(); }

  // Of each pair of inputs the numbers of one row after the other.
  template <int kRows>
  void pack(int64_t first, Byte* numbers, float* units) const {
    for (int row = 0; row < kRows; ++row)
      for (int64_t group = 0; group < groups(); ++group)
        units[row * groups() + group] =
            pack_group(first + row, group, kRows * kPairBytes,
                       numbers + (group * kPairs * kRows + row) * kPairBytes);
  }

  // Packs a row's numbers of a group: its pairs, `stride` bytes apart. Returns their unit.
  float pack_group(int64_t row, int64_t group, int stride, Byte* target) const {
    const int64_t first = group * kGroupInputs;
    const BFloat16* const source = product.rows + row * product.inputs + first;
    const int64_t count = std::min(kGroupInputs, product.inputs - first);
    constexpr uint32_t kNotFinite = 255;
    const uint32_t exponent = bit_cast<uint32_t>(largest_magnitude(source, count)) >> 23;
    // Of normal numbers, as is its reciprocal.
    const uint32_t unit_exponent = std::max<uint32_t>(exponent, kUnitBits + 1) - kUnitBits;
    const __m256 factor = _mm256_set1_ps(bit_cast<float>((254 - unit_exponent) << 23));
    for (int64_t input = 0; input < kGroupInputs; input += kHalf) {
      const __m128i words = load_words(source + input, std::clamp<int64_t>(count - input, 0, kHalf));
      const __m256i bits = _mm256_slli_epi32(_mm256_cvtepu16_epi32(words), 16);
      const __m256i whole = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_castsi256_ps(bits), factor));
      alignas(32) int32_t pairs[kHalf];
      _mm256_store_si256(reinterpret_cast<__m256i*>(pairs), _mm256_packs_epi32(whole, whole));
      for (int place : {0, 1, 4, 5}) {
        std::memcpy(target, pairs + place, kPairBytes);
        target += stride;
      }
    }
    if (exponent == kNotFinite) return std::numeric_limits<float>::quiet_NaN();
    return bit_cast<float>(unit_exponent << 23) * kIntegerUnit;
  }

  // One panel for all rows: for few as it lies in memory, for more some of its groups after the others.
  void run(const PackedRows& rows, int64_t panel) const {
    alignas(kLine) OfPanel<float> sums[kRowsTogether];
    std::memset(sums, 0, rows.count * sizeof(*sums));
    const int num_blocks = product.blocks_of(panel);
    if (rows.count <= kMostExpandedRows) {
      for (int block = 0; block < num_blocks; ++block) {
        const int64_t index = 2 * panel + block;
        multiply_group(rows, 0, 0, groups(), codes_of(index, 0, kAhead), index,
                       sums[0] + block * kBlock);
      }
    } else {
      for (int64_t first = 0; first < groups(); first += kPartGroups)
        run_part(rows, panel, first, std::min(kPartGroups, groups() - first), sums);
    }
    finish(product, rows, panel, [&](int64_t row, int i) { return load(sums[row] + i); });
  }

  // The groups [first, first + count) of inputs. Beside them the next ones are asked for, of this
  // panel or of the next one.
  void run_part(const PackedRows& rows, int64_t panel, int64_t first, int64_t count,
                OfPanel<float>* sums) const {
    alignas(kLine) Byte integers[2][kPartGroups * kGroupPairBytes];
    const int64_t ahead = bytes_to_next({block_bytes(), block_bytes()}, first * kGroupBytes,
                                        count * kGroupBytes);
    const int num_blocks = product.blocks_of(panel);
    for (int block = 0; block < num_blocks; ++block)
      expand(codes_of(2 * panel + block, first, ahead), count, integers[block]);
    for (int64_t group = 0; group < rows.groups(); ++group)
      for (int block = 0; block < num_blocks; ++block)
        multiply_group(rows, group, first, count, Integers{integers[block]}, 2 * panel + block,
                       sums[group * kSideRows] + block * kBlock);
  }

  Codes codes_of(int64_t block, int64_t first, int64_t ahead) const {
    const Byte* const codes = weight + block * block_bytes() + first * kGroupBytes;
    return {codes, codes + ahead};
  }

  // A group of rows with the groups [first, first + count) of a block's inputs.
  template <typename Weights>
  void multiply_group(const PackedRows& rows, int64_t group, int64_t first, int64_t count,
                      const Weights& weights, int64_t block, float* sums) const {
    const Byte* const scales = exponents + (block * groups() + first) * kBlock;
    for_rows(rows.in_group(group), [&](auto num_rows) {
      const SideRows side{rows.group_numbers(group) + first * kPairs * kPairBytes * num_rows,
                          rows.scales + group * kSideRows * groups() + first, groups()};
      multiply<num_rows>(side, weights, scales, count, sums);
    });
  }
};

}  // namespace

extern "C" void sglp_mxfp4_product(int64_t num_rows, int64_t inputs, int64_t outputs, int gated,
                                   const void* rows, const void* weight, const void* exponents,
                                   const void* bias, void* out, int num_threads) {
  const SideProduct product(num_rows, inputs, outputs, gated, rows, bias, out);
  run_side_product(Mxfp4Product{product, static_cast<const Byte*>(weight),
                                static_cast<const Byte*>(exponents)},
                   kRowsTogether, num_threads);
}

#endif
