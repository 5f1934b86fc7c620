// Products of rows with a weight of 4 bits or of FP8 (e4m3) by AVX2: expanded_products.cpp for machines
// without bf16 instructions.
//
// The weight's numbers become fp32, in registers for few rows, for more in the L1 cache, some inputs
// at a time for all of them. Sums over a group of inputs are scaled and added up, the groups in
// ascending order. Rows of an FP8 product are packed as the numbers that e4m3 rounds them to, scaled.
//
// Numbers of 4 bits are multiplied less 8, which tables of bytes can do. What their zero points, less
// 8, take away is a small product of its own, of the sums of a row's groups, which comes first.
//
// Packed, a weight of 4 bits lies as avx2_mxfp4_products.cpp has its codes, one of FP8 is
// [out / 16, in / 2, 16, 2].

#include "fp8_rows.h"
#include "vector_panels.h"

#if defined(SGLP_HAS_VECTOR_PRODUCTS)

namespace {

constexpr int64_t kAhead = 4096;          // bytes of each block, for few rows
constexpr int64_t kExpandedInputs = 128;  // of two blocks in fp32: 16 KiB; no group has more
static_assert(kExpandedInputs % kTileInputs == 0, "groups have whole tiles");

// The two bytes of each integer from -8 to 7 in bf16.
struct IntegerBytes {
  Byte low[16], high[16];
  IntegerBytes() {
    for (int number = 0; number < 16; ++number) {
      const uint32_t bits = bit_cast<uint32_t>(static_cast<float>(number - 8));
      low[number] = bits >> 16 & 0xff;
      high[number] = bits >> 24;
    }
  }
};

const IntegerBytes kIntegers;

inline __m256i table(const Byte* bytes) {
  return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)));
}

// Numbers of 4 bits, less 8, as pairs of bf16.
struct FourBits {
  static constexpr int kInputBytes = kBlock / 2;  // of an input of a block
  static constexpr float kUnit = 1.0f;            // of the numbers that become fp32
  static constexpr bool kHasZeros = true;

  struct Four {
    __m256i lines[2][2];
    __m256 numbers(int input, int half) const {
      return number_of_pair(lines[input / 2][half], input % 2);
    }
  };

  static Four four(const Byte* source) {
    const __m256i both = load_32(source), low_half = _mm256_set1_epi8(15);
    const __m256i codes[2] = {_mm256_and_si256(both, low_half),
                              _mm256_and_si256(_mm256_srli_epi16(both, 4), low_half)};
    Four four;
    for (int pair = 0; pair < 2; ++pair) {
      const __m256i low = _mm256_shuffle_epi8(table(kIntegers.low), codes[pair]);
      const __m256i high = _mm256_shuffle_epi8(table(kIntegers.high), codes[pair]);
      four.lines[pair][0] = _mm256_unpacklo_epi8(low, high);
      four.lines[pair][1] = _mm256_unpackhi_epi8(low, high);
    }
    return four;
  }
};

// e4m3 as fp16: the same bits with an exponent that has another offset, also below the least normal
// number.
struct Float8 {
  static constexpr int kInputBytes = kBlock;
  static constexpr float kUnit = 0x1p8f;
  static constexpr bool kHasZeros = false;

  struct Four {
    __m256i halves[4];  // of sixteen outputs
    __m256 numbers(int input, int half) const {
      return _mm256_cvtph_ps(half ? _mm256_extracti128_si256(halves[input], 1)
                                  : _mm256_castsi256_si128(halves[input]));
    }
  };

  static Four four(const Byte* source) {
    // A sign goes to two bits, of which the lower one is not its own.
    const __m256i kept = _mm256_set1_epi16(static_cast<int16_t>(0xbf80));
    Four four;
    for (int pair = 0; pair < 2; ++pair) {
      const __m256i bytes = load_32(source + pair * (kLine / 2));
      const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 1);
      four.halves[2 * pair] = _mm256_and_si256(even, kept);
      four.halves[2 * pair + 1] = _mm256_and_si256(_mm256_srai_epi16(bytes, 1), kept);
    }
    return four;
  }
};

// The scales of two blocks [groups, 16] for numbers in units of a format.
template <typename Format>
struct GroupScales {
  static constexpr bool kIsScaled = true;
  const float* scales[2];
  uint32_t group_inputs;

  __m256 scale(int block, int64_t input, int half) const {
    const int64_t group = static_cast<uint32_t>(input) / group_inputs;
    const float* const source = scales[block] + group * kBlock + half * 8;
    return _mm256_mul_ps(_mm256_loadu_ps(source), _mm256_set1_ps(Format::kUnit));
  }
};

// Codes of two blocks, which become numbers in registers.
template <typename Format>
struct Codes : GroupScales<Format> {
  using Four = typename Format::Four;
  const Byte* blocks[2];
  int64_t asks_ahead;  // bytes: for few rows kAhead, for more the part that comes next

  Four four(int block, int64_t input) const {
    const Byte* const source = blocks[block] + input * Format::kInputBytes;
    __builtin_prefetch(source + asks_ahead);
    return Format::four(source);
  }
};

// Numbers of two blocks, [inputs, 16].
template <typename Format>
struct Numbers : GroupScales<Format> {
  const float* blocks[2];
  int64_t asks_ahead;  // for nothing: they are there

  struct Four {
    const float* lines;
    __m256 numbers(int input, int half) const {
      return _mm256_load_ps(lines + input * kBlock + half * 8);
    }
  };

  Four four(int block, int64_t input) const { return {blocks[block] + input * kBlock}; }
};

template <typename Format>
void expand(const Codes<Format>& codes, int64_t inputs, float (*blocks)[kExpandedInputs * kBlock]) {
  for (int block = 0; block < 2; ++block)
    for (int64_t input = 0; input < inputs; input += kFour) {
      const auto four = codes.four(block, input);
      for (int i = 0; i < kFour; ++i)
        for (int half = 0; half < 2; ++half)
          _mm256_store_ps(blocks[block] + (input + i) * kBlock + half * 8, four.numbers(i, half));
    }
}

// What the sum of a group of a row is multiplied by, as a weight whose inputs are the groups.
struct ZeroPoints {
  static constexpr bool kIsScaled = false;
  const float* scales[2];  // [groups, 16]
  const Byte* zeros[2];    // the same
  int64_t groups;
  int64_t asks_ahead;  // for nothing: few bytes

  struct Four {
    const ZeroPoints& points;
    int block;
    int64_t first;

    __m256 numbers(int input, int half) const {
      // After the last group there are sums of zero.
      const int64_t group = std::min(first + input, points.groups - 1);
      const int64_t place = group * kBlock + half * 8;
      const auto* const source = reinterpret_cast<const __m128i*>(points.zeros[block] + place);
      const __m256i zero = _mm256_cvtepu8_epi32(_mm_loadl_epi64(source));
      const __m256i left = _mm256_sub_epi32(_mm256_set1_epi32(8), zero);
      return _mm256_mul_ps(_mm256_cvtepi32_ps(left), _mm256_loadu_ps(points.scales[block] + place));
    }
  };

  Four four(int block, int64_t group) const { return {*this, block, group}; }
};

template <typename Format>
struct ExpandedProduct {
  SideProduct product;
  int64_t group_inputs;      // that share a scale; some neighbors may have the same
  int64_t row_group_inputs;  // of a row in FP8 that share one
  const Byte* weight;
  const float* scales;  // [blocks, groups, 16]
  const Byte* zeros;    // the same, of 4 bits

  int64_t groups() const { return tiles_of(product.padded_inputs(), group_inputs); }
  int64_t group_sums() const { return Format::kHasZeros ? tiles_of(groups(), kFour) * kFour : 0; }
  // A row's numbers, then the sums of its groups.
  int64_t row_bytes() const { return (product.padded_inputs() + group_sums()) * sizeof(float); }
  int64_t scales_per_row() const { return 0; }

  template <int kRows>
  void pack(int64_t first, Byte* numbers, float*) const {
    float* const target = reinterpret_cast<float*>(numbers);
    if constexpr (Format::kHasZeros) {
      pack_group<kRows>(product, first, target);
      sum_groups<kRows>(first, target + product.padded_inputs() * kRows);
    } else {
      round_rows<kRows>(first, target);
    }
  }

  template <int kRows>
  void sum_groups(int64_t first, float* target) const {
    std::fill(target, target + group_sums() * kRows, 0.0f);
    for (int row = 0; row < kRows; ++row) {
      const BFloat16* const source = product.rows + (first + row) * product.inputs;
      for (int64_t group = 0; group < groups(); ++group) {
        const int64_t end = std::min((group + 1) * group_inputs, product.inputs);
        Vec sum{};
        for (int64_t input = group * group_inputs; input < end; input += kWidth)
          sum += load(source + input, std::min<int64_t>(kWidth, end - input));
        target[group * kRows + row] = total(sum);
      }
    }
  }

  template <int kRows>
  void round_rows(int64_t first, float* target) const {
    const int64_t inputs = product.inputs;
    for (int row = 0; row < kRows; ++row) {
      const BFloat16* const source = product.rows + (first + row) * inputs;
      for (int64_t begin = 0; begin < inputs; begin += row_group_inputs) {
        const int64_t end = std::min(begin + row_group_inputs, inputs);
        const float largest = largest_magnitude(source + begin, end - begin);
        const Vec factor = broadcast(fp8_factor(largest)), scale = broadcast(largest / kLargestFp8);
        for (int64_t input = begin; input < end; input += kWidth) {
          const int count = std::min<int64_t>(kWidth, end - input);
          float numbers[kWidth];
          store(numbers, round_to_fp8(load(source + input, count) * factor) * scale);
          for (int i = 0; i < count; ++i) target[(input + i) * kRows + row] = numbers[i];
        }
      }
    }
    std::fill(target + inputs * kRows, target + product.padded_inputs() * kRows, 0.0f);
  }

  // Few rows take all inputs at once: the groups' sums are the same.
  void run(const PackedRows& rows, int64_t panel) const {
    alignas(kLine) PanelSums sums[kRowsTogether];
    std::memset(sums, 0, rows.count * sizeof(PanelSums));
    if constexpr (Format::kHasZeros) add_zero_points(rows, panel, sums);
    const int64_t inputs = product.padded_inputs();
    const bool is_few = rows.count <= kWideRows;
    const int64_t part_inputs = is_few ? inputs : kExpandedInputs / group_inputs * group_inputs;
    for (int64_t first = 0; first < inputs; first += part_inputs) {
      const Part part{panel, first, std::min(part_inputs, inputs - first)};
      if (is_few)
        multiply_part(rows, part, codes_of(panel, first, kAhead), sums, group_inputs);
      else
        multiply_expanded(rows, part, codes_of(panel, first, bytes_to_next_part(part)), sums);
    }
    finish(product, rows, panel, [&](int64_t row, int i) { return load(sums[row] + i); });
  }

  void multiply_expanded(const PackedRows& rows, const Part& part, const Codes<Format>& codes,
                         PanelSums* sums) const {
    alignas(kLine) float expanded[2][kExpandedInputs * kBlock];
    expand(codes, part.count, expanded);
    multiply_part(rows, part, Numbers<Format>{codes, {expanded[0], expanded[1]}, 0}, sums,
                  group_inputs);
  }

  void add_zero_points(const PackedRows& rows, int64_t panel, PanelSums* sums) const {
    ZeroPoints points{{}, {}, groups(), 0};
    for (int which = 0; which < 2; ++which) {
      const int64_t beside = product.block(panel, which) * groups() * kBlock;
      points.scales[which] = scales + beside;
      points.zeros[which] = zeros + beside;
    }
    multiply_part(rows, Part{panel, product.padded_inputs(), group_sums()}, points, sums);
  }

  int64_t bytes_to_next_part(const Part& part) const {
    const int64_t block = product.padded_inputs() * Format::kInputBytes;
    return bytes_to_next({block, block}, part.first * Format::kInputBytes,
                         part.count * Format::kInputBytes);
  }

  // Those of a panel from an input on, the first of a group; others, `ahead` bytes on, are asked for.
  Codes<Format> codes_of(int64_t panel, int64_t first, int64_t ahead) const {
    Codes<Format> codes{{{}, static_cast<uint32_t>(group_inputs)}, {}, ahead};
    for (int which = 0; which < 2; ++which) {
      const int64_t block = product.block(panel, which);
      const int64_t before = block * product.padded_inputs() + first;
      codes.blocks[which] = weight + before * Format::kInputBytes;
      codes.scales[which] = scales + (block * groups() + first / group_inputs) * kBlock;
    }
    return codes;
  }
};

}  // namespace

extern "C" int sglp_most_expanded_tiles() { return kExpandedInputs / kTileInputs; }

extern "C" void sglp_expanded_product(int is_fp8, int64_t num_rows, int64_t inputs,
                                      int64_t outputs, int gated, int64_t group_tiles,
                                      int64_t row_group_tiles, const void* rows,
                                      const void* weight, const void* scales, const void* zeros,
                                      const void* bias, void* out, int num_threads) {
  const auto run = [&](auto format) {
    run_side_product(
        ExpandedProduct<decltype(format)>{
            SideProduct(num_rows, inputs, outputs, gated, rows, bias, out),
            group_tiles * kTileInputs, row_group_tiles * kTileInputs,
            static_cast<const Byte*>(weight), static_cast<const float*>(scales),
            static_cast<const Byte*>(zeros)},
        kRowsTogether, num_threads);
  };
  return is_fp8 ? run(Float8{}) : run(FourBits{});
}

#endif
