// Products of bf16 rows with a packed weight in bf16, by AVX2.
//
// Called from compiled_linear.py through ctypes; knows nothing of torch. Packed, a weight is
// [out / 16, in / 2, 16, 2], as in products.cpp.

#include "vector_panels.h"

#if defined(SGLP_HAS_VECTOR_PRODUCTS)

namespace {

constexpr int64_t kAhead = 4096;  // bytes of each block

// Lines of two blocks.
struct Lines {
  static constexpr bool kIsScaled = false;
  const Byte* blocks[2];
  int64_t asks_ahead;

  struct Four {
    const Byte* lines;
    __m256 numbers(int input, int half) const {
      return number_of_pair(load_32(lines + input / 2 * kLine + half * kLine / 2), input % 2);
    }
  };

  Four four(int block, int64_t input) const {
    const Byte* const lines = blocks[block] + input / 2 * kLine;
    __builtin_prefetch(lines + asks_ahead);
    __builtin_prefetch(lines + kLine + asks_ahead);
    return {lines};
  }
};

}  // namespace

extern "C" int sglp_has_products() { return 1; }

extern "C" void sglp_product(int64_t num_rows, int64_t inputs, int64_t outputs, int gated,
                             const void* rows, const void* weight, const void* bias, void* out,
                             int num_threads) {
  const SideProduct product(num_rows, inputs, outputs, gated, rows, bias, out);
  const int64_t row_of_blocks = product.padded_inputs() / 2 * kLine;
  const auto add_part = [&](const PackedRows& packed, const Part& part, PanelSums* sums) {
    Lines lines{{}, kAhead};
    for (int which = 0; which < 2; ++which)
      lines.blocks[which] = static_cast<const Byte*>(weight) +
                            product.block(part.panel, which) * row_of_blocks +
                            part.first / 2 * kLine;
    multiply_part(packed, part, lines, sums);
  };
  run_vector_product(product, num_threads, add_part);
}

#endif
