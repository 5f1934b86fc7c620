// What attention by tiles keeps in memory, and how keys and values are laid out for its products.
//
// Used by tile_softmax.h and attention_tiles.h.

#pragma once

#include "tile_products.h"

#if defined(SGLP_HAS_DOT_PRODUCTS)

#include <algorithm>
#include <cstdint>
#include <vector>

#include "attention_step.h"
#include "vectors.h"

namespace {

constexpr int kTileKeys = kColumns;               // keys scored at once
constexpr int kWeightLines = kTileKeys / kDepth;  // lines of one lane's weights

// One thread's working memory: the running state of an item's lanes, and one key tile of one head.
// Weights and values come in lines of 32 keys, in which key r and key r + 16 are partners.
struct TileState {
  TileState(const Step& step, const std::vector<WorkItem>& items)
      : depth_lines(lines_of(step.head_dim)),
        value_lines(lines_of(step.value_dim)),
        column_groups((step.value_dim + kColumns - 1) / kColumns),
        keys(depth_lines * kTiles * kTileRows),
        values(column_groups * kWeightLines * kTiles * kTileRows),
        row_copies(2 * kTileRows * std::max(depth_lines, value_lines)),
        decoded_keys(step.kv_format, step.head_dim),
        decoded_values(step.kv_format, step.value_dim) {
    int lanes = 0;
    for (const WorkItem& item : items)
      lanes = std::max(lanes, item.num_heads * padded(item.lanes_of_head(step)));
    queries.resize(lanes * depth_lines);
    outputs.resize(lanes * output_vectors());
    sums.resize(lanes);
    maxima.resize(lanes);
    positions.resize(lanes);
    first_seen.resize(lanes);
  }

  static int lines_of(int size) { return (size + kDepth - 1) / kDepth; }

  // A head's lanes are computed sixteen at a time, or all at once where they are fewer.
  static int padded(int lanes) { return lanes <= kTileRows ? lanes : (lanes + 15) / 16 * 16; }

  int output_vectors() const { return column_groups * kTiles; }

  // Of the tile that begins with key `start` a lane of a head sees the keys [hidden, visible).
  int visible(int lane_of_head, int start) const {
    return std::clamp(positions[lane_of_head] + 1 - start, 0, kTileKeys);
  }
  int hidden(int lane_of_head, int start) const {
    return std::clamp(first_seen[lane_of_head] - start, 0, kTileKeys);
  }

  const int depth_lines;         // of a query or key
  const int value_lines;         // of a value
  const int column_groups;       // of kColumns dimensions of a value
  std::vector<Line> keys;        // right operand of [depth_lines]
  std::vector<Line> values;      // [column_groups], each a right operand of [kWeightLines]
  std::vector<Line> row_copies;  // [2, 16, depth_lines or value_lines]
  DecodedTile<BFloat16, kTileKeys> decoded_keys;
  DecodedTile<BFloat16, kTileKeys> decoded_values;
  RowsAhead keys_ahead;
  RowsAhead values_ahead;
  std::vector<Line> queries;     // [lanes, depth_lines]
  std::vector<Vec> outputs;      // [lanes, output_vectors], not yet divided by the sums
  std::vector<Vec> sums;         // [lanes], one partial sum for each vector position
  std::vector<float> maxima;     // [lanes], in powers of two; may lag, see tile_softmax.h
  std::vector<int> positions;    // [lanes of a head], in their request
  std::vector<int> first_seen;   // [lanes of a head], the first keys that they see
  Vec scores[2][kTileRows * kTiles];
  Line weights[kTileRows * kWeightLines];
};

// Numbers [line * kDepth, ...) of a row of `size`, with zeros after its end.
inline Line load_line(const BFloat16* row, int line, int size) {
  const int count = size - line * kDepth;
  const __mmask32 mask = count >= kDepth ? ~__mmask32{0} : (__mmask32{1} << count) - 1;
  return bit_cast<Line>(_mm512_maskz_loadu_epi16(mask, row + line * kDepth));
}

// Rows and columns change places.
inline void transpose(Vec (&vecs)[16]) {
#pragma GCC unroll 4
  for (int round = 0; round < 4; ++round) {
    Vec dealt[16];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      dealt[i] = EVEN(vecs[2 * i], vecs[2 * i + 1]);
      dealt[i + 8] = ODD(vecs[2 * i], vecs[2 * i + 1]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) vecs[i] = dealt[i];
  }
}

// Places for a permutation of 16-bit words: `start`, `start` + `distance`, `start` + 1, ...
inline __m512i alternating_words(int start, int distance) {
  uint16_t places[32];
  for (int i = 0; i < 32; ++i) places[i] = start + i / 2 + i % 2 * distance;
  return bit_cast<__m512i>(places);
}

// Sixteen keys' pairs from `line` on, pair by pair: pairs[p] holds pair p of each key. Of keys that
// are not there it is any number.
inline void load_pairs(Rows<BFloat16> keys, int first_key, int line, int depth_lines,
                       Vec (&pairs)[16]) {
  for (int i = line; i < 16; i += depth_lines) keys.prefetch_next(first_key + i);
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i)
    pairs[i] = bit_cast<Vec>(load_line(keys[first_key + i], line, keys.size));
  transpose(pairs);
}

// A line of a value; zeros for one that is not there, as weight 0 does not silence a NaN.
inline __m512i value_line(Rows<BFloat16> values, int key, int num_keys, int line) {
  return bit_cast<__m512i>(key < num_keys ? load_line(values[key], line, values.size)
                                          : Line{});
}

// Lays one head's keys out as a right operand: dimensions are its depth, keys its columns. What
// stands in columns from `num_keys` on is never looked at.
NOINLINE void pack_keys(TileState& state, Rows<BFloat16> keys, int num_keys) {
  for (int first_key = 0; first_key < num_keys; first_key += 16)
    for (int line = 0; line < state.depth_lines; ++line) {
      Vec pairs[16];
      load_pairs(keys, first_key, line, state.depth_lines, pairs);
      Line* target = &state.keys[(line * kTiles + first_key / 16) * kTileRows];
      for (int i = 0; i < 16; ++i) target[i] = bit_cast<Line>(pairs[i]);
    }
}

// Lays one head's values out as right operands: keys are their depth, dimensions their columns.
NOINLINE void pack_values(TileState& state, Rows<BFloat16> values, int num_keys) {
  const __m512i first_columns = alternating_words(0, 32), last_columns = alternating_words(16, 32);
  for (int i = 0; i < (num_keys > kDepth ? 32 : 16); ++i) {
    const int key = i / 16 * kDepth + i % 16, partner = key + 16;
    values.prefetch_next(key);
    values.prefetch_next(partner);
    for (int line = 0; line < state.value_lines; ++line) {
      const int group = line * kDepth / kColumns, tile = line * kDepth % kColumns / 16;
      const int weight_line = group * kWeightLines + key / kDepth;
      Line* target = &state.values[(weight_line * kTiles + tile) * kTileRows + i % 16];
      const __m512i a = value_line(values, key, num_keys, line);
      const __m512i b = value_line(values, partner, num_keys, line);
      target[0] = bit_cast<Line>(_mm512_permutex2var_epi16(a, first_columns, b));
      target[kTileRows] = bit_cast<Line>(_mm512_permutex2var_epi16(a, last_columns, b));
    }
  }
}

}  // namespace

#endif  // SGLP_HAS_DOT_PRODUCTS
