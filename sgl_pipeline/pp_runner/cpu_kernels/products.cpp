// Products of bf16 rows with a packed bf16 weight, on AMX tiles or with AVX-512's bf16 instruction.
//
// Called from compiled_linear.py through ctypes; knows nothing of torch. Sums are fp32, over the
// inputs in ascending order. Packed, a weight is [out / 16, in / 2, 16, 2], padded with zeros.

#include "bfloat16_dot.h"
#include "product_instructions.h"

#if defined(__AVX512BF16__)

namespace {

struct BFloat16Product {
  Product product;
  bool amx;

  int64_t scales_per_row() const { return 0; }
  int64_t parts() const { return tile_parts(product); }
  void open() const { open_if(amx); }
  void close() const { close_if(amx); }

  void pack_rows(int64_t first, Byte* packed, float*) const {
    pack_bfloat16_rows(product, first, packed);
  }

  void run(const RowGroups& rows, int64_t panel) const {
    const ResultPanel result(product, rows, panel);
    run_by_dots<BFloat16Dot>(amx, product, rows, panel, [result](int64_t row, const float* sums) {
      result.put(row, load(sums), load(sums + kBlock));
    });
  }
};

}  // namespace

extern "C" int sglp_has_products() { return 1; }
extern "C" int sglp_has_bf16_instructions() { return 1; }

extern "C" void sglp_product(int64_t num_rows, int64_t inputs, int64_t outputs, int gated,
                             const void* rows, const void* weight, const void* bias, void* out,
                             int num_threads) {
  const ProductCall call(num_rows, inputs, outputs, gated, rows, bias, out);
  const Product product{call, kDotInputs, kTile, weight};
  run_product(BFloat16Product{product, use_amx()}, num_threads);
}

#else

extern "C" int sglp_has_bf16_instructions() { return 0; }

#if !defined(SGLP_HAS_VECTOR_PRODUCTS)
extern "C" int sglp_has_products() { return 0; }
extern "C" void sglp_product(int64_t, int64_t, int64_t, int, const void*, const void*, const void*,
                             void*, int) {}
#endif

#endif
