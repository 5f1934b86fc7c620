// The online softmax of attention by tiles: scores of a key tile become weights in bf16.
//
// Called by attention_tiles.h. The sum of a lane's weights is that of the rounded ones, which meet
// the values, so that they add up to one whatever rounding did.
//
// A lane's maximum may lag: it moves only where a score is more than 2^kSlack times above it, which
// spares nearly every rescaling. Whether it moves depends on the lane's own scores alone.

#pragma once

#include "tile_state.h"

#if defined(SGLP_HAS_DOT_PRODUCTS)

#include <cstdint>

namespace {

constexpr float kSlack = 8;        // in powers of two
constexpr float kHidden = -1e30f;  // the score of a key that is not seen; finite, for exp2_roughly
constexpr float kUnseen = kHidden / 2;  // the maximum before any key is seen: a hidden one weighs 0
constexpr float kLog2E = 1.44269504f;

// 2^x for x below 127, relative error below 8e-5, a fiftieth of bf16's rounding; 0 far below.
inline Vec exp2_roughly(Vec x) {
  constexpr __mmask16 all = 0xffff;  // GCC 12 warns of its own unmasked intrinsics
  const Vec rest = _mm512_maskz_reduce_ps(all, x, _MM_FROUND_TO_NEG_INF);  // x - floor(x)
  Vec series = broadcast(0.07802452f);                                     // minimax on [0, 1)
  series = series * rest + 0.22606716f;
  series = series * rest + 0.69583356f;
  series = series * rest + 0.99992520f;
  return _mm512_maskz_scalef_ps(all, series, x);  // times 2^floor(x)
}

// How a product of query and key becomes a score, in powers of two.
struct Scoring {
  explicit Scoring(const Step& step)
      : is_plain(step.is_plain()),
        softcap(step.softcap * kLog2E),
        scale(step.softcap == 0 ? step.scale * kLog2E : step.scale / step.softcap) {}

  Vec operator()(Vec products) const {
    return softcap == 0 ? products * scale : softcap * hyperbolic_tangent(products * scale);
  }

  bool is_plain;  // there is no softcap, and no window hides a key
  float softcap;
  float scale;  // with a softcap: to units of it
};

NOINLINE void raise_maximum(TileState& state, int lane, float maximum) {
  const Vec shrink = exp2_roughly(broadcast(state.maxima[lane] - maximum));
  state.maxima[lane] = maximum;
  state.sums[lane] *= shrink;
  Vec* outputs = &state.outputs[lane * state.output_vectors()];
  for (int v = 0; v < state.output_vectors(); ++v) outputs[v] *= shrink;
}

// The first `count` keys of a tile, a bit for each.
inline uint64_t first_keys(int count) {
  return count == kTileKeys ? ~uint64_t{0} : (uint64_t{1} << count) - 1;
}

// Turns a lane's products with a tile's keys, of which it sees those in `seen`, into weights; adds
// these to its sum. In a loop the compiler keeps the constants in registers, so this must be
// inlined.
template <bool kPlain>
__attribute__((always_inline)) inline void weigh_lane(TileState& state, int lane, uint64_t seen,
                                                      const Scoring& scoring, const Vec* products,
                                                      Line* weights) {
  Vec scores[kTiles];
  for (int i = 0; i < kTiles; ++i)
    if constexpr (kPlain)
      scores[i] = _mm512_mask_mul_ps(broadcast(kHidden), seen >> (16 * i), products[i],
                                     broadcast(scoring.scale));
    else
      scores[i] = _mm512_mask_mov_ps(broadcast(kHidden), seen >> (16 * i), scoring(products[i]));
  const Vec highest = maximum(maximum(scores[0], scores[1]), maximum(scores[2], scores[3]));
  const Vec limit = broadcast(state.maxima[lane] + kSlack);
  if (_mm512_cmp_ps_mask(highest, limit, _CMP_GT_OQ) != 0)
    raise_maximum(state, lane, largest(highest));
  const Vec top = broadcast(state.maxima[lane]);
  const __m512i partners = alternating_words(0, 16);
  const auto ones = bit_cast<__m512bh>(_mm512_set1_epi32(0x3f803f80));
  for (int i = 0; i < kWeightLines; ++i) {
    const auto in_order = bit_cast<__m512i>(_mm512_cvtne2ps_pbh(
        exp2_roughly(scores[2 * i + 1] - top), exp2_roughly(scores[2 * i] - top)));
    weights[i] = bit_cast<Line>(_mm512_maskz_permutexvar_epi16(~0u, partners, in_order));
    state.sums[lane] = _mm512_dpbf16_ps(state.sums[lane], bit_cast<__m512bh>(weights[i]), ones);
  }
}

template <bool kPlain>
NOINLINE void weigh_lanes(TileState& state, int head_lane, int lane, int rows, int start,
                          Scoring scoring, const Vec* products) {
  for (int row = 0; row < rows; ++row) {
    uint64_t seen = first_keys(state.visible(lane + row, start));
    if constexpr (!kPlain) seen &= ~first_keys(state.hidden(lane + row, start));
    weigh_lane<kPlain>(state, head_lane + lane + row, seen, scoring, products + row * kTiles,
                       state.weights + row * kWeightLines);
  }
}

// The same for `rows` lanes of the head whose first lane is `head_lane`: from its lane `lane` on,
// for the key tile that begins with key `start`.
inline void weigh(TileState& state, int head_lane, int lane, int rows, int start,
                  const Scoring& scoring, const Vec* products) {
  if (scoring.is_plain)
    weigh_lanes<true>(state, head_lane, lane, rows, start, scoring, products);
  else
    weigh_lanes<false>(state, head_lane, lane, rows, start, scoring, products);
}

}  // namespace

#endif  // SGLP_HAS_DOT_PRODUCTS
