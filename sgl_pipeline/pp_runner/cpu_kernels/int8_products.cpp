// Products of rows with a packed int8 weight: rows are rounded to 8 bits, each by its own scale, and
// multiplied by AVX-512's VNNI instruction, or on AMX tiles (not measured).
//
// Called from compiled_quantized.py through ctypes; knows nothing of torch. Sums are int32 and exact.
// The instruction wants unsigned rows, so 128 is added to each number of a row, and 128 times the
// sum of an output's weights, its `correction`, taken from the result. Packed, a weight is
// [out / 16, in / 4, 16, 4], padded with zeros.

#include "packed_panels.h"

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)

namespace {

constexpr int kTileInputs = 64;
constexpr float kLargest = 127.0f;
constexpr float kSmallestRow = 0x1p-100f;  // the largest number of a row that is all zeros to us

struct Int8Dot {
  static __m512i add(__m512i totals, __m512i x, __m512i weights) {
    return _mm512_dpbusd_epi32(totals, x, weights);
  }
#if defined(SGLP_HAS_AMX)
  static void tiles_0_4_6() { _tile_dpbusd(0, 4, 6); }
  static void tiles_1_4_7() { _tile_dpbusd(1, 4, 7); }
  static void tiles_2_5_6() { _tile_dpbusd(2, 5, 6); }
  static void tiles_3_5_7() { _tile_dpbusd(3, 5, 7); }
#endif
};

struct Int8Product {
  Product product;
  const float* scales;         // [outputs], gated [2 * outputs] with the gates first
  const int32_t* corrections;  // the same
  bool amx;

  int64_t scales_per_row() const { return 1; }
  void open() const { open_if(amx); }
  void close() const { close_if(amx); }

  // Sixteen rows from `first` on, zeros where there are none.
  void pack_rows(int64_t first, Byte* packed, float* row_scales) const {
    for (int64_t row = 0; row < kBlock; ++row, packed += kLine) {
      if (first + row >= product.num_rows) {
        for (int64_t tile = 0; tile < product.input_tiles(); ++tile)
          std::memset(packed + tile * kTile, 0, kLine);
        continue;
      }
      const BFloat16* source = product.rows + (first + row) * product.inputs;
      const float largest = largest_magnitude(source, product.inputs);
      row_scales[row] = largest / kLargest;
      round_row(source, largest > kSmallestRow ? kLargest / largest : 0.0f, packed);
    }
  }

  void round_row(const BFloat16* source, float factor, Byte* packed) const {
    const __m512i offset = _mm512_set1_epi32(128);
    for (int64_t input = 0; input < product.input_tiles() * kTileInputs; input += kWidth) {
      const int64_t left = std::clamp<int64_t>(product.inputs - input, 0, kWidth);
      const __m256i words = _mm512_castsi512_si256(load_words(source + input, left));
      const __m512i bits = _mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16);
      const __m512 scaled = _mm512_mul_ps(bit_cast<__m512>(bits), _mm512_set1_ps(factor));
      // As bytes the sum wraps around to the unsigned number.
      const __m512i numbers = _mm512_add_epi32(_mm512_cvtps_epi32(scaled), offset);
      Byte* const target = packed + input / kTileInputs * kTile + input % kTileInputs;
      _mm_storeu_si128(reinterpret_cast<__m128i*>(target), _mm512_cvtepi32_epi8(numbers));
    }
  }

  void run(const RowGroups& rows, int64_t panel) const {
    const PanelOutputs outputs(product, panel);
    Vec weight_scales[2];
    outputs.load_both(scales, weight_scales);
    Vec as_floats[2];  // bits of int32
    outputs.load_both(reinterpret_cast<const float*>(corrections), as_floats);
    const auto done = [&](int64_t first_row, int num_rows, const Sums& sums) {
      const auto value = [&](int row, int block) {
        const IntVec sum = bit_cast<IntVec>(load(&sums[row][block * kBlock]));
        const IntVec exact = sum - bit_cast<IntVec>(as_floats[block]);
        const Vec scaled = __builtin_convertvector(exact, Vec) * weight_scales[block];
        return rounded(scaled * rows.scales[first_row - rows.first + row]);
      };
      finish(product, first_row, num_rows, panel, value);
    };
    run_by_dots<Int8Dot>(amx, product, rows, panel, done);
  }
};

}  // namespace

extern "C" int sglp_has_int8_products() { return 1; }

extern "C" void sglp_int8_product(int64_t num_rows, int64_t inputs, int64_t outputs, int gated,
                                  const void* rows, const void* weight, const void* scales,
                                  const void* corrections, const void* bias, void* out,
                                  int num_threads) {
  const Product product{num_rows,    inputs, outputs,
                        gated != 0,  kTileInputs,
                        kTile,       static_cast<const BFloat16*>(rows),
                        weight,      static_cast<const BFloat16*>(bias),
                        static_cast<BFloat16*>(out)};
  run_product(Int8Product{product, static_cast<const float*>(scales),
                          static_cast<const int32_t*>(corrections), use_amx()},
              num_threads);
}

#else

extern "C" int sglp_has_int8_products() { return 0; }
extern "C" void sglp_int8_product(int64_t, int64_t, int64_t, int, const void*, const void*,
                                  const void*, const void*, const void*, void*, int) {}

#endif
