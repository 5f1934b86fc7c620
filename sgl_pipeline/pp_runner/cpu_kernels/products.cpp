// Products of bf16 rows with a packed bf16 weight, on AMX tiles or with AVX-512's bf16 instruction.
//
// Called from compiled_linear.py through ctypes; knows nothing of torch. Sums are fp32, over the
// inputs in ascending order. Packed, a weight is [out / 16, in / 2, 16, 2], padded with zeros.

#include "packed_panels.h"

#if defined(__AVX512BF16__)

namespace {

constexpr int kTileInputs = 32;

struct BFloat16Dot {
  static __m512i add(__m512i totals, __m512i x, __m512i weights) {
    return bit_cast<__m512i>(_mm512_dpbf16_ps(bit_cast<__m512>(totals), bit_cast<__m512bh>(x),
                                              bit_cast<__m512bh>(weights)));
  }
#if defined(SGLP_HAS_AMX)
  static void tiles_0_4_6() { _tile_dpbf16ps(0, 4, 6); }
  static void tiles_1_4_7() { _tile_dpbf16ps(1, 4, 7); }
  static void tiles_2_5_6() { _tile_dpbf16ps(2, 5, 6); }
  static void tiles_3_5_7() { _tile_dpbf16ps(3, 5, 7); }
#endif
};

struct BFloat16Product {
  Product product;
  bool amx;

  int64_t scales_per_row() const { return 0; }
  void open() const { open_if(amx); }
  void close() const { close_if(amx); }

  // Sixteen rows from `first` on, zeros where there are none.
  void pack_rows(int64_t first, Byte* packed, float*) const {
    const BFloat16* source = product.rows + first * product.inputs;
    const int64_t num_rows = std::min<int64_t>(kBlock, product.num_rows - first);
    for (int64_t input = 0; input < product.inputs; input += kTileInputs) {
      const int64_t left = std::min<int64_t>(product.inputs - input, kTileInputs);
      for (int64_t row = 0; row < kBlock; ++row, packed += kLine)
        _mm512_store_si512(packed, load_words(source + row * product.inputs + input,
                                              row < num_rows ? left : 0));
    }
  }

  void run(const RowGroups& rows, int64_t panel) const {
    const auto done = [&](int64_t first_row, int num_rows, const Sums& sums) {
      finish(product, first_row, num_rows, panel,
             [&](int row, int block) { return load(&sums[row][block * kBlock]); });
    };
    run_by_dots<BFloat16Dot>(amx, product, rows, panel, done);
  }
};

}  // namespace

extern "C" int sglp_has_products() { return 1; }

extern "C" void sglp_product(int64_t num_rows, int64_t inputs, int64_t outputs, int gated,
                             const void* rows, const void* weight, const void* bias, void* out,
                             int num_threads) {
  const Product product{num_rows,    inputs, outputs,
                        gated != 0,  kTileInputs,
                        kTile,       static_cast<const BFloat16*>(rows),
                        weight,      static_cast<const BFloat16*>(bias),
                        static_cast<BFloat16*>(out)};
  run_product(BFloat16Product{product, use_amx()}, num_threads);
}

#else

extern "C" int sglp_has_products() { return 0; }
extern "C" void sglp_product(int64_t, int64_t, int64_t, int, const void*, const void*, const void*,
                             void*, int) {}

#endif
