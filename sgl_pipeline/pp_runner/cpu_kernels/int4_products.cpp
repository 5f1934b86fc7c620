// Products of rows with a weight of 4 bits: rows are rounded to 8 bits, each by its own scale, and
// multiplied by AVX-512's VNNI instruction, whose unsigned factors are the weight's numbers.
//
// Called from compiled_quantized.py through ctypes; knows nothing of torch. Sums over a group of
// inputs are int32 and exact, and begin with the zero point's share; then they are scaled and added
// up in fp32, the groups in ascending order. Long groups come here in parts, as groups of their own.
//
// Packed, a weight is [out / 16, in / 8, 16, 4] bytes: byte (i, o, j) has the number of input 8 i + j
// in its low half, that of input 8 i + 4 + j in its high half. Where a row is padded it has zeros.

#include "int8_rows.h"

extern "C" int sglp_most_int4_tiles() { return kMostInt4Steps; }

#if defined(SGLP_HAS_VNNI)

namespace {

constexpr int kStepInputs = 32;  // what every group has a multiple of
constexpr int kStepLines = 4;    // of a weight
constexpr int64_t kStepBytes = kStepLines * kLine;
constexpr int64_t kSteps = kTileInputs / kStepInputs;  // of a tile
constexpr int64_t kStepsAtOnce = kTilesAtOnce * kSteps;
static_assert(kMostInt4Steps <= kStepsAtOnce, "a group is multiplied at once");

// Some groups of two blocks of a weight. What lies `ahead` bytes on is asked for, into the L2 cache.
struct Int4Panel {
  const Byte* blocks[2];
  const float* scales[2];  // [groups, 16]
  const Byte* zeros[2];    // the same
  int64_t first_step;
  int64_t end_step;
  int64_t group_steps;
  int64_t scales_per_row;
  int64_t ahead;
};

// Adds the products of kRows rows with a step of a panel. The sums of low and of high halves of few
// rows are apart, since each would wait for the other; they are exact.
template <int kRows, int kChains>
inline void add_step(const Byte* rows, const Int4Panel& panel, int64_t step,
                     __m512i (&totals)[kRows][2][kChains]) {
  const __m512i low_half = _mm512_set1_epi8(15);
  const Byte* const inputs = rows + step / kSteps * kTile + step % kSteps * kStepInputs;
#pragma GCC unroll 4
  for (int line = 0; line < kStepLines; ++line) {
    __m512i weights[2][2];
    for (int block = 0; block < 2; ++block) {
      const Byte* const source = panel.blocks[block] + step * kStepBytes + line * kLine;
      __builtin_prefetch(source + panel.ahead, 0, 2);
      const __m512i both = _mm512_loadu_si512(source);
      weights[block][0] = _mm512_and_si512(both, low_half);
      weights[block][1] = _mm512_and_si512(_mm512_srli_epi16(both, 4), low_half);
    }
#pragma GCC unroll 12
    for (int row = 0; row < kRows; ++row)
      for (int half = 0; half < 2; ++half) {
        const __m512i x = broadcast_four_bytes(inputs + row * kLine + 8 * line + 4 * half);
        for (int block = 0; block < 2; ++block) {
          __m512i& total = totals[row][block][half % kChains];
          total = _mm512_dpbusd_epi32(total, weights[block][half], x);
        }
      }
  }
}

template <int kRows>
void multiply_rows(const Byte* rows, const float* row_scales, const Int4Panel& panel,
                   float (*sums)[2 * kBlock]) {
  constexpr int kChains = kRows > 4 ? 1 : 2;
  for (int64_t first = panel.first_step; first < panel.end_step; first += panel.group_steps) {
    const int64_t group = first / panel.group_steps;
    __m512i totals[kRows][2][kChains] = {};
    for (int block = 0; block < 2; ++block) {
      const __m512i zero = _mm512_cvtepu8_epi32(_mm_loadu_si128(
          reinterpret_cast<const __m128i*>(panel.zeros[block] + group * kBlock)));
#pragma GCC unroll 12
      for (int row = 0; row < kRows; ++row) {
        const int row_sum = bit_cast<int>(row_scales[row * panel.scales_per_row + 1 + group]);
        totals[row][block][0] = _mm512_mullo_epi32(zero, _mm512_set1_epi32(row_sum));
      }
    }
    const int64_t end = std::min(first + panel.group_steps, panel.end_step);
    for (int64_t step = first; step < end; ++step) add_step(rows, panel, step, totals);
    for (int block = 0; block < 2; ++block) {
      const __m512 scale = _mm512_loadu_ps(panel.scales[block] + group * kBlock);
#pragma GCC unroll 12
      for (int row = 0; row < kRows; ++row) {
        __m512i total = totals[row][block][0];
        if (kChains > 1) total = _mm512_add_epi32(total, totals[row][block][kChains - 1]);
        float* const sum = &sums[row][block * kBlock];
        const __m512 before = group > 0 ? _mm512_loadu_ps(sum) : _mm512_setzero_ps();
        _mm512_storeu_ps(sum, _mm512_fmadd_ps(_mm512_cvtepi32_ps(total), scale, before));
      }
    }
  }
}

struct Int4Product {
  Product product;
  int64_t group_steps;  // of inputs that share a scale; some neighbors may have the same
  const float* scales;  // [blocks, groups, 16]
  const Byte* zeros;    // the same

  int64_t steps() const { return tiles_of(product.inputs, kStepInputs); }
  int64_t groups() const { return tiles_of(steps(), group_steps); }
  // That of the row, then the sums of its groups, negated, as bits of int32.
  int64_t scales_per_row() const { return 1 + groups(); }
  // Whole groups, which no part divides.
  int64_t part_steps() const { return kStepsAtOnce / group_steps * group_steps; }
  int64_t parts() const { return tiles_of(steps(), part_steps()); }
  void open() const {}
  void close() const {}

  // Sixteen rows from `first` on, zeros where there are none.
  void pack_rows(int64_t first, Byte* packed, float* row_scales) const {
    for (int64_t row = 0; row < kBlock; ++row, packed += kLine, row_scales += scales_per_row()) {
      if (first + row >= product.num_rows) {
        clear_row(product, packed);
        continue;
      }
      row_scales[0] = round_row(product.rows + (first + row) * product.inputs, product, 0, packed);
      for (int64_t group = 0; group < groups(); ++group) {
        const int64_t end = std::min((group + 1) * group_steps, steps());
        row_scales[1 + group] = bit_cast<float>(-sum_of(packed, group * group_steps, end));
      }
    }
  }

  // Of the numbers of a packed row in the steps [step, end).
  static int sum_of(const Byte* packed, int64_t step, int64_t end) {
    __m256i sums = _mm256_setzero_si256();
    for (; step < end; ++step) {
      const Byte* const source = packed + step / kSteps * kTile + step % kSteps * kStepInputs;
      const __m256i numbers = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source));
      sums = _mm256_dpbusd_epi32(sums, _mm256_set1_epi8(1), numbers);
    }
    int32_t each[8];
    std::memcpy(each, &sums, sizeof(each));
    int sum = 0;
    for (int one : each) sum += one;
    return sum;
  }

  // One panel for all rows, some of its groups after the others where there are many rows.
  void run(const RowGroups& rows, int64_t index) const {
    Int4Panel panel{{}, {}, {}, 0, 0, group_steps, scales_per_row(), 0};
    for (int block = 0; block < 2; ++block) {
      const int64_t number = std::min(2 * index + block, product.blocks() - 1);
      panel.blocks[block] = product.block(number);
      panel.scales[block] = scales + number * groups() * kBlock;
      panel.zeros[block] = zeros + number * groups() * kBlock;
    }
    const bool is_few = rows.end - rows.first <= kGroupRows;
    const int64_t steps_at_once = is_few ? steps() : part_steps();
    const int64_t end = std::min(rows.end_part * part_steps(), steps());
    for (int64_t first = rows.first_part * part_steps(); first < end; first += steps_at_once) {
      panel.first_step = first;
      panel.end_step = std::min(first + steps_at_once, end);
      panel.ahead = 2 * product.input_tiles() * product.tile_bytes;
      for (int64_t row = rows.first; row < rows.end; row += kGroupRows) {
        multiply(rows, row, panel, index);
        panel.ahead = 0;  // for the first rows alone
      }
    }
  }

  void multiply(const RowGroups& rows, int64_t first_row, Int4Panel panel, int64_t index) const {
    const int64_t before = first_row - rows.first;
    const int num_rows = std::min<int64_t>(kGroupRows, rows.end - first_row);
    Sums& sums = rows.sums[before / kGroupRows];
    for (int row = 0; row < num_rows; row += 8) {
      const int64_t packed_row = before + row;
      const Byte* const source = rows.packed +
                                 packed_row / kBlock * product.row_tiles() * kTile +
                                 packed_row % kBlock * kLine;
      const float* const row_scales = rows.scales + packed_row * panel.scales_per_row;
      const int left = num_rows - row;
      if (left > 4)
        multiply_rows<8>(source, row_scales, panel, &sums[row]);
      else if (left > 2)
        multiply_rows<4>(source, row_scales, panel, &sums[row]);
      else if (left > 1)
        multiply_rows<2>(source, row_scales, panel, &sums[row]);
      else
        multiply_rows<1>(source, row_scales, panel, &sums[row]);
      panel.ahead = 0;
    }
    if (panel.end_step < steps()) return;
    const float* const row_scales = rows.scales + before * panel.scales_per_row;
    finish(product, rows, first_row, num_rows, index, [&](int row, int block) {
      return rounded(load(&sums[row][block * kBlock]) * row_scales[row * panel.scales_per_row]);
    });
  }
};

}  // namespace

extern "C" void sglp_int4_product(int64_t num_rows, int64_t inputs, int64_t outputs, int gated,
                                  int64_t group_steps, const void* rows, const void* weight,
                                  const void* scales, const void* zeros, const void* bias,
                                  void* out, int num_threads) {
  const ProductCall call(num_rows, inputs, outputs, gated, rows, bias, out);
  const Product product{call, kTileInputs, kTile / 2, weight};
  run_product(Int4Product{product, group_steps, static_cast<const float*>(scales),
                          static_cast<const Byte*>(zeros)},
              num_threads);
}

#elif !defined(SGLP_HAS_AVX2_INTEGERS)

extern "C" void sglp_int4_product(int64_t, int64_t, int64_t, int, int64_t, const void*, const void*,
                                  const void*, const void*, const void*, void*, int) {}

#endif
