// Attention in bf16 by matrix products of tiles, for prefill and decode.
//
// Called by attention.cpp. Products of bf16 numbers are exact and added up in fp32; weights are
// rounded to bf16 before they meet the values. Every lane reads its keys in tiles of 64 that start
// at multiples of 64. A key that it does not see has weight 0, which changes no bit of it.

#pragma once

#include "row_products.h"
#include "tile_softmax.h"

#if defined(SGLP_HAS_DOT_PRODUCTS)

#include <algorithm>
#include <cstdint>
#include <vector>

#include "amx_products.h"
#include "attention_step.h"
#include "vectors.h"

namespace {

constexpr int kFewLanes = 4;  // up to which a head's keys and values are read in their pages

// Places for a permutation of two vectors: `start` of the first, of the second, `start` + 1, ...
inline __m512i alternating_floats(int start) {
  uint32_t places[16];
  for (int i = 0; i < 16; ++i) places[i] = start + i / 2 + i % 2 * 16;
  return bit_cast<__m512i>(places);
}

// One head's part of a key tile, whose first key is `start`.
struct HeadTile {
  int head_lane;  // the head's first lane in the item
  int lanes;
  int start;
  int num_keys;
  int num_unseen;  // see KeyTile
  Rows<BFloat16> keys;
  Rows<BFloat16> values;
};

// Attention of one step; `run` computes one item of its work.
template <typename Products>
class TileAttention {
 public:
  using Element = BFloat16;
  struct Scratch : TileState {
    using TileState::TileState;
    Products multiply;
  };
  static constexpr int kMostLanes = 256, kLeastLanes = 32;

  TileAttention(const Step& step, const Tensors<BFloat16>& tensors)
      : step_(step), tensors_(tensors), scoring_(step) {}

  void run(const WorkItem& item, const WorkItem* following, Scratch& scratch) const {
    const int end_key = item.end_key(step_), lanes = item.lanes_of_head(step_);
    prepare(item, scratch);
    const bool asks_ahead = reads_tiles_of_pages(lanes);
    if (asks_ahead) {
      constexpr int kBytes = sizeof(BFloat16);
      scratch.keys_ahead.start(step_, tensors_.key_pages, step_.head_dim * kBytes, item, following);
      scratch.values_ahead.start(step_, tensors_.value_pages, step_.value_dim * kBytes, item,
                                 following);
    }
    int start = first_tile<kTileKeys>(step_, item);
    KeyTile<kTileKeys> tile(step_, item, start);
    for (; start < end_key; start += kTileKeys) {
      const auto next = tile_after<kTileKeys>(step_, item, start, following);
      for (int head = 0; head < item.num_heads; ++head)
        attend_head({head * scratch.padded(lanes), lanes, start, tile.num_keys, tile.num_unseen,
                     rows_of(tensors_.key_pages, step_, head, tile.keys, next.keys,
                             !asks_ahead, scratch.decoded_keys),
                     rows_of(tensors_.value_pages, step_, head, tile.values, next.values,
                             !asks_ahead, scratch.decoded_values)},
                    scratch);
      tile = next;
    }
    finish(item, scratch);
  }

 private:
  static bool reads_pages(int lanes) { return lanes <= kFewLanes; }
  // Whether tiles are numbers in their pages.
  bool reads_tiles_of_pages(int lanes) const {
    return Products::kReadsTiles && reads_pages(lanes) && step_.kv_format == kNumbers;
  }

  void prepare(const WorkItem& item, Scratch& scratch) const {
    const int lanes = item.lanes_of_head(step_), padded = scratch.padded(lanes);
    for (int lane = 0; lane < padded; ++lane) {
      const int position = item.first_position(step_) + std::min(lane, lanes - 1) / step_.group();
      scratch.positions[lane] = position;
      scratch.first_seen[lane] = step_.first_seen(position);
    }
    for (int head = 0; head < item.num_heads; ++head)
      for (int lane = 0; lane < padded; ++lane) {
        const BFloat16* query = tensors_.query_of(step_, item, head, std::min(lane, lanes - 1));
        for (int line = 0; line < scratch.depth_lines; ++line)
          scratch.queries[(head * padded + lane) * scratch.depth_lines + line] =
              load_line(query, line, step_.head_dim);
      }
    start_softmax(item, padded, scratch);
    if constexpr (Products::kReadsTiles)
      if (reads_pages(lanes)) return prepare_reading_tiles(item, scratch);
    scratch.multiply.set_rows(std::min(padded, kTileRows));
  }

  // Of each lane; a sink is a key that was seen already, and whose value is 0.
  void start_softmax(const WorkItem& item, int padded, Scratch& scratch) const {
    const int all_lanes = item.num_heads * padded;
    std::fill_n(scratch.outputs.begin(), all_lanes * scratch.output_vectors(), Vec{});
    std::fill_n(scratch.sums.begin(), all_lanes, Vec{});
    std::fill_n(scratch.maxima.begin(), all_lanes, kUnseen);
    if (step_.sinks == nullptr) return;
    for (int lane = 0; lane < all_lanes; ++lane) {
      const int64_t query_head = item.query_head_of(step_, lane / padded, lane % padded);
      scratch.maxima[lane] = std::max(kUnseen, step_.sinks[query_head] * kLog2E);
      scratch.sums[lane][0] = 1;  // 2^(sink - maximum)
    }
  }

  void attend_head(const HeadTile& tile, Scratch& scratch) const {
    if (reads_pages(tile.lanes)) return attend_in_pages(tile, scratch);
    pack_keys(scratch, tile.keys, tile.num_keys);
    pack_values(scratch, tile.values, tile.num_keys);
    attend_packed(tile, scratch);
  }

  // The packed tile, for all lanes that see some of it, `rows` at a time.
  void attend_packed(const HeadTile& tile, Scratch& scratch) const {
    const int padded = scratch.padded(tile.lanes), rows = std::min(padded, kTileRows);
    int lane = 0, end = padded;
    while (scratch.visible(lane + rows - 1, tile.start) == 0) lane += rows;
    while (scratch.hidden(end - rows, tile.start) == kTileKeys) end -= rows;
    score(tile, lane, scratch);
    for (; lane < end; lane += rows) {
      // The next scores are under way while these are turned into weights.
      if (lane + rows < end) score(tile, lane + rows, scratch);
      weigh(scratch, tile.head_lane, lane, rows, tile.start, scoring_, scores_of(lane, scratch));
      add_values(tile, lane, scratch.visible(lane + rows - 1, tile.start), scratch);
    }
  }

  static Vec* scores_of(int lane, Scratch& scratch) {
    return scratch.scores[lane / kTileRows % 2];
  }

  void score(const HeadTile& tile, int lane, Scratch& scratch) const {
    scratch.multiply({&scratch.queries[(tile.head_lane + lane) * scratch.depth_lines],
                      scratch.depth_lines, scratch.keys.data(), scratch.depth_lines,
                      scores_of(lane, scratch), kTiles, false});
  }

  // Adds weighted values to the outputs, of keys of which the last lane sees `visible`.
  void add_values(const HeadTile& tile, int lane, int visible, Scratch& scratch) const {
    Vec* outputs = &scratch.outputs[(tile.head_lane + lane) * scratch.output_vectors()];
    for (int group = 0; group < scratch.column_groups; ++group)
      scratch.multiply({scratch.weights, kWeightLines,
                        &scratch.values[group * kWeightLines * kTiles * kTileRows],
                        visible > kDepth ? 2 : 1, outputs + group * kTiles,
                        scratch.output_vectors(), true});
  }

  // Each head's queries [lanes, pairs] become [pairs, lanes].
  void prepare_reading_tiles(const WorkItem& item, Scratch& scratch) const {
    const int lanes = item.lanes_of_head(step_), pairs = scratch.depth_lines * 16;
    scratch.multiply.set_lanes(lanes);
    for (int head = 0; head < item.num_heads; ++head) {
      uint32_t* queries = scratch.queries[head * lanes * scratch.depth_lines].pairs;
      uint32_t* copy = scratch.row_copies[0].pairs;
      std::copy(queries, queries + lanes * pairs, copy);
      for (int lane = 0; lane < lanes; ++lane)
        for (int pair = 0; pair < pairs; ++pair)
          queries[pair * lanes + lane] = copy[lane * pairs + pair];
    }
  }

  // What packing and attend_packed do, bit for bit, for few lanes and without packing: a decode
  // reads each key once, and has to keep up with memory.
  void attend_in_pages(const HeadTile& tile, Scratch& scratch) const {
    if constexpr (Products::kReadsTiles) {
      attend_in_tiles(tile, scratch);
    } else {
      static_assert(kFewLanes == 4, "each number of lanes has its call");
      if (tile.lanes == 1) attend_in_rows<1>(tile, scratch);
      if (tile.lanes == 2) attend_in_rows<2>(tile, scratch);
      if (tile.lanes == 3) attend_in_rows<3>(tile, scratch);
      if (tile.lanes == 4) attend_in_rows<4>(tile, scratch);
    }
  }

  template <int kLanes>
  void attend_in_rows(const HeadTile& tile, Scratch& scratch) const {
    score_rows<kLanes>(tile.keys, tile.num_keys,
                       &scratch.queries[tile.head_lane * scratch.depth_lines], scratch.depth_lines,
                       scratch.scores[0]);
    weigh(scratch, tile.head_lane, 0, kLanes, tile.start, scoring_, scratch.scores[0]);
    add_rows<kLanes>(tile.values, tile.num_keys, scratch.weights,
                     &scratch.outputs[tile.head_lane * scratch.output_vectors()],
                     scratch.output_vectors());
  }

  void attend_in_tiles(const HeadTile& tile, Scratch& scratch) const {
    const int lanes = tile.lanes;
    const uint32_t* queries = scratch.queries[tile.head_lane * scratch.depth_lines].pairs;
    float scores[kTileKeys * kFewLanes] = {};
    for (int key = 0; key < tile.num_keys; key += 16)
      scratch.multiply.score_keys(row_tile(tile, tile.keys, key, 0, scratch.keys_ahead, scratch),
                                  queries, scratch.depth_lines, scores + key * lanes);
    sort_by_lane(scores, lanes, scratch.scores[0]);
    weigh(scratch, tile.head_lane, 0, lanes, tile.start, scoring_, scratch.scores[0]);
    for (int key = 0; key < tile.num_keys; key += kDepth) add_page_values(tile, key, scratch);
  }

  // scores [kTileKeys, lanes] become by_lane [lanes, kTiles].
  static void sort_by_lane(const float* scores, int lanes, Vec* by_lane) {
    if (lanes == 3) {
      for (int i = 0; i < kTileKeys * lanes; ++i)
        by_lane[i % lanes * kTiles + i / lanes / 16][i / lanes % 16] = scores[i];
      return;
    }
    const int vectors = lanes * kTiles;
    for (int i = 0; i < vectors; ++i) by_lane[i] = load(scores + 16 * i);
    for (int dealt_lanes = 1; dealt_lanes < lanes; dealt_lanes *= 2) {
      Vec dealt[kFewLanes * kTiles];
      for (int i = 0; i < vectors / 2; ++i) {
        dealt[i] = EVEN(by_lane[2 * i], by_lane[2 * i + 1]);
        dealt[vectors / 2 + i] = ODD(by_lane[2 * i], by_lane[2 * i + 1]);
      }
      std::copy_n(dealt, vectors, by_lane);
    }
  }

  // Adds the weighted values of the keys [key, key + kDepth) to the outputs.
  void add_page_values(const HeadTile& tile, int key, Scratch& scratch) const {
    const int lanes = tile.lanes;
    const IntVec low_words = IntVec{} + 0xffff;
    Line picks[4 * kFewLanes];
    for (int lane = 0; lane < lanes; ++lane) {
      const auto weights = bit_cast<IntVec>(scratch.weights[lane * kWeightLines + key / kDepth]);
      picks[lane] = bit_cast<Line>(weights & low_words);
      picks[lanes + lane] = bit_cast<Line>(weights << 16);
      picks[2 * lanes + lane] = bit_cast<Line>((weights >> 16) & low_words);
      picks[3 * lanes + lane] = bit_cast<Line>(weights & ~low_words);
    }
    const bool has_partners = key + 16 < tile.num_keys;
    RowsAhead& ahead = scratch.values_ahead;
    const RowTile first = row_tile(tile, tile.values, key, 0, ahead, scratch);
    const RowTile second =
        has_partners ? row_tile(tile, tile.values, key + 16, 1, ahead, scratch) : first;
    for (int line = 0; line < scratch.value_lines; ++line) {
      Vec sums[2 * kFewLanes];
      scratch.multiply.weigh_values(first, has_partners ? &second : nullptr, line, picks, sums);
      for (int lane = 0; lane < lanes; ++lane) {
        Vec* outputs =
            &scratch.outputs[(tile.head_lane + lane) * scratch.output_vectors() + 2 * line];
        const Vec even = sums[lane], odd = sums[lanes + lane];
        outputs[0] += _mm512_permutex2var_ps(even, alternating_floats(0), odd);
        outputs[1] += _mm512_permutex2var_ps(even, alternating_floats(8), odd);
      }
    }
  }

  // Sixteen rows of keys or values: in their page where they fill a tile of it, otherwise copy
  // number `copy`, with zeros for what is not there.
  RowTile row_tile(const HeadTile& tile, Rows<BFloat16> rows, int first_key, int copy,
                   RowsAhead& ahead, Scratch& scratch) const {
    RowsAhead* const asked = reads_tiles_of_pages(tile.lanes) ? &ahead : nullptr;
    const bool fill_tile = rows.spacing != 0 && rows.size % kDepth == 0;
    if (fill_tile && first_key >= tile.num_unseen && first_key + 16 <= tile.num_keys)
      return {rows[first_key], rows.spacing * int64_t{sizeof(BFloat16)}, asked};
    const int num_lines = TileState::lines_of(rows.size);
    Line* lines = &scratch.row_copies[copy * 16 * num_lines];
    for (int i = 0; i < 16; ++i)
      for (int line = 0; line < num_lines; ++line)
        lines[i * num_lines + line] = first_key + i < tile.num_keys
                                          ? load_line(rows[first_key + i], line, rows.size)
                                          : Line{};
    return {reinterpret_cast<const BFloat16*>(lines), num_lines * int64_t{sizeof(Line)}, asked};
  }

  void finish(const WorkItem& item, Scratch& scratch) const {
    const int lanes = item.lanes_of_head(step_), padded = scratch.padded(lanes);
    for (int head = 0; head < item.num_heads; ++head)
      for (int lane = 0; lane < lanes; ++lane) {
        const int i = head * padded + lane;
        store_quotient(&scratch.outputs[i * scratch.output_vectors()], total(scratch.sums[i]),
                       step_.value_dim, tensors_.out_of(step_, item, head, lane));
      }
  }

  const Step& step_;
  const Tensors<BFloat16>& tensors_;
  const Scoring scoring_;
};

}  // namespace

#endif  // SGLP_HAS_DOT_PRODUCTS
