// Products of few lanes with keys and values as they lie in their pages, by AVX-512 BF16.
//
// Called by attention_tiles.h for decodes. Packing a tile takes longer than a few lanes' products
// with it; here each line is used while it is in a register. Every sum has the order of
// `DotProducts` with packed tiles, and so its bits.

#pragma once

#include "tile_state.h"

#if defined(SGLP_HAS_DOT_PRODUCTS)

#include <algorithm>
#include <cstdint>

namespace {

inline Vec add_pairs(Vec sum, uint32_t pair, __m512i pairs) {
  return _mm512_dpbf16_ps(bit_cast<__m512>(sum), bit_cast<__m512bh>(_mm512_set1_epi32(pair)),
                          bit_cast<__m512bh>(pairs));
}

// scores [kLanes, kTiles] of queries [kLanes, depth_lines] with a head's keys. What stands in places
// of keys that are not there is never looked at.
template <int kLanes>
NOINLINE void score_rows(Rows<BFloat16> keys, int num_keys, const Line* queries, int depth_lines,
                         Vec* scores) {
  for (int first_key = 0; first_key < num_keys; first_key += 16) {
    Vec sums[kLanes] = {};
    for (int line = 0; line < depth_lines; ++line) {
      Vec pairs[16];
      load_pairs(keys, first_key, line, depth_lines, pairs);
#pragma GCC unroll 16
      for (int pair = 0; pair < 16; ++pair)
#pragma GCC unroll 4
        for (int lane = 0; lane < kLanes; ++lane)
          sums[lane] = add_pairs(sums[lane], queries[lane * depth_lines + line].pairs[pair],
                                 bit_cast<__m512i>(pairs[pair]));
    }
    for (int lane = 0; lane < kLanes; ++lane) scores[lane * kTiles + first_key / 16] = sums[lane];
  }
}

// Adds a head's values, weighted by weights [kLanes, kWeightLines], to outputs [kLanes,
// output_vectors]. Keys that are not there count as zeros.
template <int kLanes>
NOINLINE void add_rows(Rows<BFloat16> values, int num_keys, const Line* weights, Vec* outputs,
                       int output_vectors) {
  const __m512i first_columns = alternating_words(0, 32), last_columns = alternating_words(16, 32);
  const int num_pairs = num_keys > kDepth ? 32 : 16;
  for (int tile = 0; tile * 16 < values.size; tile += kTiles) {
    Vec sums[kLanes][kTiles];
    for (int lane = 0; lane < kLanes; ++lane)
      std::copy_n(outputs + lane * output_vectors + tile, kTiles, sums[lane]);
    for (int i = 0; i < num_pairs; ++i) {
      const int key = i / 16 * kDepth + i % 16, partner = key + 16;
      if (tile == 0) values.prefetch_next(key);
      if (tile == 0) values.prefetch_next(partner);
#pragma GCC unroll 2
      for (int half = 0; half < kTiles; half += 2) {
        const int line = (tile + half) / 2;
        const __m512i a = value_line(values, key, num_keys, line);
        const __m512i b = value_line(values, partner, num_keys, line);
        const __m512i columns[2] = {_mm512_permutex2var_epi16(a, first_columns, b),
                                    _mm512_permutex2var_epi16(a, last_columns, b)};
#pragma GCC unroll 4
        for (int lane = 0; lane < kLanes; ++lane) {
          const uint32_t pair = weights[lane * kWeightLines + i / 16].pairs[i % 16];
          sums[lane][half] = add_pairs(sums[lane][half], pair, columns[0]);
          sums[lane][half + 1] = add_pairs(sums[lane][half + 1], pair, columns[1]);
        }
      }
    }
    for (int lane = 0; lane < kLanes; ++lane)
      std::copy_n(sums[lane], kTiles, outputs + lane * output_vectors + tile);
  }
}

}  // namespace

#endif  // SGLP_HAS_DOT_PRODUCTS
