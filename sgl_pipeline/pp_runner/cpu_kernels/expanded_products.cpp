// Products of rows with a weight of 4 bits or of FP8 (e4m3), which becomes bf16 in the L1 cache, some
// tiles at a time, and is multiplied by AVX-512's bf16 instruction.
//
// Called from compiled_quantized.py through ctypes; knows nothing of torch. Both kinds of numbers are
// exact in bf16. Sums over a group of inputs are fp32, then scaled and added up, the groups in
// ascending order. Rows of an FP8 product are rounded to e4m3 too, with a scale for each group.
//
// Packed, a weight of 4 bits lies as expanded_tiles.h has it, one of FP8 is [out / 16, in / 2, 16, 2].
// Both are padded, with what their scale of 0 cancels.

#include "expanded_tiles.h"
#include "fp8_rows.h"
#include "product_instructions.h"

#if defined(__AVX512BF16__)

namespace {

constexpr int kTileInputs = 32;

// The bf16 of small integers by their five lowest bits: 0 to 15, -16 to -1.
struct IntegerTable {
  uint16_t bits[32];
  IntegerTable() {
    for (int number = -16; number < 16; ++number)
      bits[number & 31] = bit_cast<uint32_t>(static_cast<float>(number)) >> 16;
  }
};

// The bf16 of e4m3's denormals: multiples of 2^-9.
struct DenormalTable {
  uint16_t bits[32];
  DenormalTable() {
    for (int number = 0; number < 32; ++number)
      bits[number] = bit_cast<uint32_t>(static_cast<float>(number) * 0x1p-9f) >> 16;
  }
};

const IntegerTable kIntegers;
const DenormalTable kDenormals;

// Integers, less `zeros` [16].
void expand_int4(const Byte* source, const Byte* zeros, Byte* target) {
  const __m512i table = _mm512_loadu_si512(kIntegers.bits), low = _mm512_set1_epi16(15);
  const __m512i zero = load_beside(zeros);
  expand_quads(source, target, [&](__m512i words) {
    return _mm512_permutexvar_epi16(_mm512_sub_epi16(_mm512_and_si512(words, low), zero), table);
  });
}

// A tile of 512 bytes of e4m3. A number's bits are those of its bf16 except for the exponent's offset.
void expand_fp8(const Byte* source, Byte* target) {
  const __m512i table = _mm512_loadu_si512(kDenormals.bits), eight = _mm512_set1_epi16(8);
  const __m512i magnitude_bits = _mm512_set1_epi16(0x7f), offset = _mm512_set1_epi16(120 << 7);
  for (int line = 0; line < kLines; ++line) {
    if (line % 2 == 0) __builtin_prefetch(source + kPrefetchAhead + line * kLine / 2);
    const __m512i bytes = _mm512_cvtepu8_epi16(
        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + line * kLine / 2)));
    const __m512i magnitude = _mm512_and_si512(bytes, magnitude_bits);
    const __m512i normal = _mm512_add_epi16(_mm512_slli_epi16(magnitude, 4), offset);
    const __mmask32 is_denormal = _mm512_cmplt_epu16_mask(magnitude, eight);
    const __m512i number =
        _mm512_mask_permutexvar_epi16(normal, is_denormal, magnitude, table);
    const __m512i sign = _mm512_slli_epi16(_mm512_andnot_si512(magnitude_bits, bytes), 8);
    _mm512_store_si512(target + line * kLine, _mm512_or_si512(number, sign));
  }
}

// Some tiles of two blocks, expanded, and the scales of their groups.
struct ExpandedPanel {
  const Byte* blocks[2];
  const float* scales[2];  // [groups, 16]
  int64_t tiles;
  int64_t group_tiles;
  int64_t row_tiles;
  int64_t scales_per_row;
  bool accumulate;
};

inline __m512bh load_pairs(const Byte* source) {
  return bit_cast<__m512bh>(_mm512_loadu_si512(source));
}

inline __m512bh broadcast_pair(const Byte* source) {
  return bit_cast<__m512bh>(broadcast_four_bytes(source));
}

// The sums of a group's even and odd lines are apart until its end: few rows would wait for one
// addition after the other. Every number of rows does the same.
template <int kRows>
void multiply_rows(const Byte* rows, const float* row_scales, const ExpandedPanel& panel,
                   float (*sums)[2 * kBlock]) {
  int64_t group = 0;
  for (int64_t first = 0; first < panel.tiles; first += panel.group_tiles, ++group) {
    __m512 totals[kRows][2][2] = {};  // of each row, block, and parity
    const int64_t end = std::min(first + panel.group_tiles, panel.tiles);
    for (int64_t tile = first; tile < end; ++tile)
      for (int line = 0; line < kLines; line += 2)
#pragma GCC unroll 2
        for (int parity = 0; parity < 2; ++parity) {
          const int64_t place = tile * kTile + (line + parity) * kLine;
          const __m512bh weights[2] = {load_pairs(panel.blocks[0] + place),
                                       load_pairs(panel.blocks[1] + place)};
#pragma GCC unroll 4
          for (int row = 0; row < kRows; ++row) {
            const __m512bh x =
                broadcast_pair(rows + tile * kTile + row * kLine + (line + parity) * 4);
            for (int block = 0; block < 2; ++block)
              totals[row][block][parity] =
                  _mm512_dpbf16_ps(totals[row][block][parity], x, weights[block]);
          }
        }
    for (int row = 0; row < kRows; ++row)
      for (int block = 0; block < 2; ++block) {
        __m512 scale = _mm512_loadu_ps(panel.scales[block] + group * kBlock);
        if (panel.scales_per_row > 0) {
          const float row_scale = row_scales[row * panel.scales_per_row + group];
          scale = _mm512_mul_ps(scale, _mm512_set1_ps(row_scale));
        }
        float* const sum = &sums[row][block * kBlock];
        const __m512 before =
            group > 0 || panel.accumulate ? _mm512_loadu_ps(sum) : _mm512_setzero_ps();
        const __m512 both = _mm512_add_ps(totals[row][block][0], totals[row][block][1]);
        _mm512_storeu_ps(sum, _mm512_fmadd_ps(both, scale, before));
      }
  }
}

struct ExpandedProduct {
  Product product;
  bool is_fp8;
  int64_t group_tiles;      // of inputs that share a scale; some neighbors may have the same
  int64_t row_group_tiles;  // of inputs of a row that share one
  const float* scales;      // [blocks, groups, 16]
  const Byte* zeros;        // the same

  int64_t groups() const { return tiles_of(product.input_tiles(), group_tiles); }
  int64_t scales_per_row() const { return is_fp8 ? groups() : 0; }
  // Whole groups, which no part divides.
  int64_t part_tiles() const { return kTilesAtOnce / group_tiles * group_tiles; }
  int64_t parts() const { return tiles_of(product.input_tiles(), part_tiles()); }
  void open() const {}
  void close() const {}

  // Sixteen rows from `first` on, zeros where there are none.
  void pack_rows(int64_t first, Byte* packed, float* row_scales) const {
    for (int64_t row = 0; row < kBlock; ++row) {
      const bool inside = first + row < product.num_rows;
      const BFloat16* source = product.rows + (first + row) * product.inputs;
      for (int64_t start = 0; start < product.input_tiles(); start += row_group_tiles) {
        const int64_t end = std::min(start + row_group_tiles, product.input_tiles());
        float factor = 1.0f;
        if (is_fp8) {
          const int64_t input = start * kTileInputs;
          const int64_t count = std::min(end * kTileInputs, product.inputs) - input;
          const float largest = inside ? largest_magnitude(source + input, count) : 0.0f;
          factor = fp8_factor(largest);
          for (int64_t tile = start; tile < end; tile += group_tiles)
            row_scales[row * groups() + tile / group_tiles] = largest / kLargestFp8;
        }
        for (int64_t tile = start; tile < end; ++tile)
          pack_line(inside ? source : nullptr, tile, factor, packed + tile * kTile + row * kLine);
      }
    }
  }

  void pack_line(const BFloat16* source, int64_t tile, float factor, Byte* target) const {
    const int64_t input = tile * kTileInputs;
    const int64_t left = std::min<int64_t>(product.inputs - input, kTileInputs);
    const __m512i words =
        source == nullptr ? _mm512_setzero_si512() : load_words(source + input, left);
    if (!is_fp8) return _mm512_store_si512(target, words);
    BFloat16 numbers[kTileInputs];
    std::memcpy(numbers, &words, sizeof(numbers));
    for (int half = 0; half < kTileInputs; half += kWidth)
      store(reinterpret_cast<BFloat16*>(target) + half,
            round_to_fp8(load(numbers + half) * broadcast(factor)));
  }

  // One panel for all rows, some of its tiles after the others.
  void run(const RowGroups& rows, int64_t index) const {
    alignas(kLine) Byte expanded[2][kTilesAtOnce * kTile];
    const int64_t all_tiles = product.input_tiles();
    for (int64_t part = rows.first_part; part < rows.end_part; ++part) {
      const int64_t first = part * part_tiles(), tiles = std::min(part_tiles(), all_tiles - first);
      ExpandedPanel panel{{expanded[0], expanded[1]}, {},    tiles, group_tiles, product.row_tiles(),
                          scales_per_row(),           first > 0};
      for (int block = 0; block < 2; ++block) {
        const int64_t number = std::min(2 * index + block, product.blocks() - 1);
        panel.scales[block] = scales + (number * groups() + first / group_tiles) * kBlock;
        expand(number, first, tiles, expanded[block]);
      }
      for (int64_t row = rows.first; row < rows.end; row += kGroupRows)
        multiply(rows, row, first, panel, first + tiles == all_tiles, index);
    }
  }

  void expand(int64_t block, int64_t first, int64_t tiles, Byte* target) const {
    for (int64_t tile = first; tile < first + tiles; ++tile, target += kTile) {
      const Byte* const source = product.block(block) + tile * product.tile_bytes;
      if (is_fp8)
        expand_fp8(source, target);
      else
        expand_int4(source, zeros + (block * groups() + tile / group_tiles) * kBlock, target);
    }
  }

  // A group of rows from `first_row` on with the tiles of `panel`, the `first_tile`-th and after.
  void multiply(const RowGroups& rows, int64_t first_row, int64_t first_tile,
                const ExpandedPanel& panel, bool is_last, int64_t index) const {
    const int64_t before = first_row - rows.first;
    const int num_rows = std::min<int64_t>(kGroupRows, rows.end - first_row);
    Sums& sums = rows.sums[before / kGroupRows];
    for (int row = 0; row < num_rows; row += 4) {
      const int64_t packed_row = before + row;
      const Byte* const source = rows.packed + packed_row / kBlock * panel.row_tiles * kTile +
                                 first_tile * kTile + packed_row % kBlock * kLine;
      const float* const row_scales =
          rows.scales + packed_row * panel.scales_per_row + first_tile / group_tiles;
      if (num_rows - row > 2)
        multiply_rows<4>(source, row_scales, panel, &sums[row]);
      else if (num_rows - row > 1)
        multiply_rows<2>(source, row_scales, panel, &sums[row]);
      else
        multiply_rows<1>(source, row_scales, panel, &sums[row]);
    }
    if (is_last)
      finish(product, rows, first_row, num_rows, index,
             [&](int row, int block) { return load(&sums[row][block * kBlock]); });
  }
};

}  // namespace

extern "C" int sglp_most_expanded_tiles() { return kTilesAtOnce; }

extern "C" void sglp_expanded_product(int is_fp8, int64_t num_rows, int64_t inputs,
                                      int64_t outputs, int gated, int64_t group_tiles,
                                      int64_t row_group_tiles, const void* rows,
                                      const void* weight, const void* scales, const void* zeros,
                                      const void* bias, void* out, int num_threads) {
  const ProductCall call(num_rows, inputs, outputs, gated, rows, bias, out);
  const Product product{call, kTileInputs, is_fp8 ? kTile / 2 : kTile / 4, weight};
  run_product(ExpandedProduct{product, is_fp8 != 0, group_tiles, row_group_tiles,
                              static_cast<const float*>(scales), static_cast<const Byte*>(zeros)},
              num_threads);
}

#elif !defined(SGLP_HAS_VECTOR_PRODUCTS)

extern "C" int sglp_most_expanded_tiles() { return 0; }
extern "C" void sglp_expanded_product(int, int64_t, int64_t, int64_t, int, int64_t, int64_t,
                                      const void*, const void*, const void*, const void*,
                                      const void*, void*, int) {}

#endif
