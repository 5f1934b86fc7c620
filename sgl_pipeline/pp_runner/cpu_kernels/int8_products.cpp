// Products of rows with a packed int8 weight: rows are rounded to 8 bits, each by its own scale, and
// multiplied by AVX-512's VNNI instruction, or on AMX tiles (not measured).
//
// Called from compiled_quantized.py through ctypes; knows nothing of torch. Sums are int32 and exact.
// The instruction wants unsigned rows, so 128 is added to each number of a row, and 128 times the
// sum of an output's weights, its `correction`, taken from the result. Packed, a weight is
// [out / 16, in / 4, 16, 4], padded with zeros.

#include "int8_rows.h"
#include "packed_panels.h"

#if defined(SGLP_HAS_VNNI)

namespace {

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
  int64_t parts() const { return tile_parts(product); }
  void open() const { open_if(amx); }
  void close() const { close_if(amx); }

  // Sixteen rows from `first` on, zeros where there are none.
  void pack_rows(int64_t first, Byte* packed, float* row_scales) const {
    for (int64_t row = 0; row < kBlock; ++row, packed += kLine) {
      if (first + row >= product.num_rows)
        clear_row(product, packed);
      else
        row_scales[row] =
            round_row(product.rows + (first + row) * product.inputs, product, 128, packed);
    }
  }

  void run(const RowGroups& rows, int64_t panel) const {
    const PanelOutputs outputs(product, panel);
    Vec weight_scales[2];
    outputs.load_both(scales, weight_scales);
    Vec as_floats[2];  // bits of int32
    outputs.load_both(reinterpret_cast<const float*>(corrections), as_floats);
    const ResultPanel result(product, rows, panel);
    run_by_dots<Int8Dot>(amx, product, rows, panel, [&](int64_t row, const float* sums) {
      const auto value = [&](int block) {
        const IntVec sum = bit_cast<IntVec>(load(sums + block * kBlock));
        const IntVec exact = sum - bit_cast<IntVec>(as_floats[block]);
        const Vec scaled = __builtin_convertvector(exact, Vec) * weight_scales[block];
        return rounded(scaled * rows.scales[row - rows.first]);
      };
      result.put(row, value(0), value(1));
    });
  }
};

}  // namespace

extern "C" int sglp_has_int8_products() { return 1; }

extern "C" void sglp_int8_product(int64_t num_rows, int64_t inputs, int64_t outputs, int gated,
                                  const void* rows, const void* weight, const void* scales,
                                  const void* corrections, const void* bias, void* out,
                                  int num_threads) {
  const ProductCall call(num_rows, inputs, outputs, gated, rows, bias, out);
  const Product product{call, kTileInputs, kTile, weight};
  run_product(Int8Product{product, static_cast<const float*>(scales),
                          static_cast<const int32_t*>(corrections), use_amx()},
              num_threads);
}

#elif !defined(SGLP_HAS_AVX2_INTEGERS)

extern "C" int sglp_has_int8_products() { return 0; }
extern "C" void sglp_int8_product(int64_t, int64_t, int64_t, int, const void*, const void*,
                                  const void*, const void*, const void*, void*, int) {}

#endif
