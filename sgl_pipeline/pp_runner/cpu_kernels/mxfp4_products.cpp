// Products of bf16 rows with a weight in MXFP4, which becomes bf16 in the L1 cache, some tiles at a
// time: a number times its scale, a power of two, is exact there. From then on it is a product of bf16,
// on AMX tiles or with AVX-512's bf16 instruction.
//
// Called from compiled_quantized.py through ctypes; knows nothing of torch. Sums are fp32, over the
// inputs in ascending order. Packed, a weight lies as expanded_tiles.h has it, its scales as
// [out / 16, in / 32, 16] bytes. Both are padded, with zeros.

#include "bfloat16_dot.h"
#include "expanded_tiles.h"
#include "product_instructions.h"

#if defined(__AVX512BF16__)

namespace {

// The bf16 of e2m1's sixteen numbers, twice.
struct E2m1Table {
  uint16_t bits[32];
  E2m1Table() {
    const float magnitudes[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
    for (int code = 0; code < 32; ++code) {
      const float number = magnitudes[code & 7];
      bits[code] = bit_cast<uint32_t>(code & 8 ? -number : number) >> 16;
    }
  }
};

const E2m1Table kE2m1;

// A tile of 256 bytes: e2m1 times 2 ** (exponents [16] - 127), whose sum of exponents a bf16 has.
void expand_mxfp4(const Byte* source, const Byte* exponents, Byte* target) {
  const __m512i table = _mm512_loadu_si512(kE2m1.bits), magnitude = _mm512_set1_epi16(7);
  const __m512i added = _mm512_slli_epi16(
      _mm512_sub_epi16(load_beside(exponents), _mm512_set1_epi16(127)), 7);
  expand_quads(source, target, [&](__m512i words) {
    const __m512i number = _mm512_permutexvar_epi16(words, table);  // by the five lowest bits
    return _mm512_mask_add_epi16(number, _mm512_test_epi16_mask(words, magnitude), number, added);
  });
}

struct Mxfp4Product {
  Product product;
  bool amx;
  const Byte* exponents;

  int64_t scales_per_row() const { return 0; }
  int64_t parts() const { return tile_parts(product); }
  void open() const { open_if(amx); }
  void close() const { close_if(amx); }

  void pack_rows(int64_t first, Byte* packed, float*) const {
    pack_bfloat16_rows(product, first, packed);
  }

  // One panel for all rows, some of its tiles after the others.
  void run(const RowGroups& rows, int64_t index) const {
    alignas(kLine) Byte expanded[2][kTilesAtOnce * kTile];
    const int64_t all_tiles = product.input_tiles();
    for (int64_t part = rows.first_part; part < rows.end_part; ++part) {
      const int64_t first = part * kTilesAtOnce, tiles = std::min(kTilesAtOnce, all_tiles - first);
      for (int block = 0; block < 2; ++block) expand(2 * index + block, first, tiles, expanded[block]);
      // GCC does not know that tile operations read memory.
      asm volatile("" ::"r"(&expanded) : "memory");
      // Nothing is asked for ahead: that is done where the weight is expanded.
      const Panel panel{{expanded[0], expanded[1]}, {}, tiles, product.row_tiles(), first > 0, 0, 0, 0};
      for (int64_t row = rows.first; row < rows.end; row += kGroupRows)
        multiply_group(rows, row, first, panel, index);
    }
  }

  void expand(int64_t block, int64_t first, int64_t tiles, Byte* target) const {
    block = std::min(block, product.blocks() - 1);
    const Byte* source = product.block(block) + first * product.tile_bytes;
    const Byte* scales = exponents + (block * product.input_tiles() + first) * kBlock;
    for (int64_t tile = 0; tile < tiles; ++tile)
      expand_mxfp4(source + tile * product.tile_bytes, scales + tile * kBlock, target + tile * kTile);
  }

  void multiply_group(const RowGroups& rows, int64_t first_row, int64_t first_tile,
                      const Panel& panel, int64_t index) const {
    const int64_t before = first_row - rows.first;
    const int num_rows = std::min<int64_t>(kGroupRows, rows.end - first_row);
    Sums& sums = rows.sums[before / kGroupRows];
    const Byte* const packed = rows.packed + before * panel.row_tiles * kLine + first_tile * kTile;
    multiply_by_dots<BFloat16Dot>(amx, packed, num_rows, panel, sums);
    if (first_tile + panel.tiles == product.input_tiles())
      finish(product, rows, first_row, num_rows, index,
             [&](int row, int block) { return load(&sums[row][block * kBlock]); });
  }
};

}  // namespace

extern "C" void sglp_mxfp4_product(int64_t num_rows, int64_t inputs, int64_t outputs, int gated,
                                   const void* rows, const void* weight, const void* exponents,
                                   const void* bias, void* out, int num_threads) {
  const ProductCall call(num_rows, inputs, outputs, gated, rows, bias, out);
  const Product product{call, kDotInputs, kTile / 4, weight};
  run_product(Mxfp4Product{product, use_amx(), static_cast<const Byte*>(exponents)}, num_threads);
}

#elif !defined(SGLP_HAS_VECTOR_PRODUCTS)

extern "C" void sglp_mxfp4_product(int64_t, int64_t, int64_t, int, const void*, const void*,
                                   const void*, const void*, void*, int) {}

#endif
