// Attention in fp32 arithmetic on any machine's vectors, for fp32 and bf16 tensors.
//
// Called by attention.cpp for fp32, and for bf16 where attention_tiles.h has no faster way. Every
// lane reads its keys in tiles that start at multiples of kKeyTile and adds up in an order that
// depends on nothing but its own position and window, whatever shares its tile.

#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "attention_step.h"
#include "vectors.h"

namespace {

constexpr int kKeyTile = 32;  // keys scored between two updates of the running maximum
constexpr int kScoreVectors = kKeyTile / kWidth;
constexpr int kLanesWithoutCopy = 8;  // up to which a head's lanes read the pages themselves

constexpr float kLowest = -std::numeric_limits<float>::infinity();

// One thread's working memory: the running state of an item's lanes, and one key tile of one head.
struct VectorState {
  VectorState(const Step& step, const std::vector<WorkItem>& items)
      : VectorState(most_lanes(step, items), vectors_of(step.head_dim),
                    vectors_of(step.value_dim)) {}

  VectorState(int num_lanes, int vectors, int value_vectors)
      : vectors(vectors),
        value_vectors(value_vectors),
        copy_vectors(std::max(vectors, value_vectors)),
        queries(num_lanes * vectors),
        outputs(num_lanes * value_vectors),
        keys(kKeyTile * copy_vectors),
        values(kKeyTile * copy_vectors),
        scores(num_lanes * kScoreVectors),
        sums(num_lanes),
        maxima(num_lanes),
        copy_offsets(kKeyTile) {
    for (int key = 0; key < kKeyTile; ++key)
      copy_offsets[key] = int64_t{key} * copy_vectors * kWidth;
  }

  static int vectors_of(int size) { return (size + kWidth - 1) / kWidth; }

  static int most_lanes(const Step& step, const std::vector<WorkItem>& items) {
    int most = 0;
    for (const WorkItem& item : items)
      most = std::max(most, item.num_heads * item.lanes_of_head(step));
    return most;
  }

  const int vectors;        // of a query or key
  const int value_vectors;  // of a value or output
  const int copy_vectors;   // of a copied key or value
  std::vector<Vec> queries;     // [lanes, vectors], scaled
  std::vector<Vec> outputs;     // [lanes, value_vectors], not yet divided by the sums
  std::vector<Vec> keys;        // [kKeyTile, copy_vectors]
  std::vector<Vec> values;      // [kKeyTile, copy_vectors]
  std::vector<Vec> scores;      // [lanes, kScoreVectors], exponentials after update_softmax
  std::vector<Vec> sums;        // [lanes], one partial sum for each vector position
  std::vector<float> maxima;    // [lanes]
  std::vector<int64_t> copy_offsets;  // [kKeyTile], of the rows of keys and values, in floats
};

// The same with what pages that hold codes are decoded to.
template <typename T>
struct VectorScratch : VectorState {
  VectorScratch(const Step& step, const std::vector<WorkItem>& items)
      : VectorState(step, items),
        decoded_keys(step.kv_format, step.head_dim),
        decoded_values(step.kv_format, step.value_dim) {}

  DecodedTile<T, kKeyTile> decoded_keys;
  DecodedTile<T, kKeyTile> decoded_values;
};

// Lanes [first, end) of one head, each of which sees some key of the tile. What the first one sees
// ends with `visible` keys of the tile (or all there are), and with one more for each further row,
// that is after `group` lanes.
struct Lanes {
  int first;
  int end;
  int group;
  int visible;
};

// The scores of kWidth keys at once: their partial products are added up together.
template <int kVectors, typename T>
inline Vec score(const Vec* query, Rows<T> keys, int first_key, int num_vectors) {
  const int vectors = kVectors > 0 ? kVectors : num_vectors;  // known early, the loop is unrolled
  Vec partial[kWidth];
#pragma GCC unroll 16
  for (int key = 0; key < kWidth; ++key) {
    const T* row = keys[first_key + key];
    keys.prefetch_next(first_key + key);
    Vec products = query[0] * load(row);
    for (int v = 1; v < vectors; ++v) products += query[v] * load(row + v * kWidth);
    partial[key] = products;
  }
  return totals(partial);
}

// Scores a key tile for one lane that sees the keys [hidden, visible) of it, and folds it into the
// softmax. Plain: `hidden` is at most 0, and there is no softcap, in units of which products are
// otherwise.
template <int kVectors, bool kPlain, typename T>
NOINLINE void update_softmax(VectorState& scratch, Rows<T> keys, int lane, int visible, int hidden,
                             float softcap) {
  const int vectors = scratch.vectors, value_vectors = scratch.value_vectors;
  Vec* scores = &scratch.scores[lane * kScoreVectors];
  Vec highest = broadcast(scratch.maxima[lane]);
  IntVec position;
  for (int i = 0; i < kWidth; ++i) position[i] = i;
  for (int s = 0; s < kScoreVectors; ++s, position += kWidth) {
    Vec all = score<kVectors>(&scratch.queries[lane * vectors], keys, s * kWidth, vectors);
    if constexpr (!kPlain) {
      if (softcap != 0) all = softcap * hyperbolic_tangent(all);
      all = position < hidden ? broadcast(kLowest) : all;
    }
    scores[s] = position < visible ? all : broadcast(kLowest);
    highest = maximum(highest, scores[s]);
  }
  const float new_maximum = largest(highest);
  if (new_maximum != scratch.maxima[lane]) {
    const Vec shrink = exp_nonpositive(broadcast(scratch.maxima[lane] - new_maximum));
    scratch.maxima[lane] = new_maximum;
    scratch.sums[lane] *= shrink;
    for (int v = 0; v < value_vectors; ++v) scratch.outputs[lane * value_vectors + v] *= shrink;
  }
  for (int s = 0; s < kScoreVectors; ++s) {
    scores[s] = exp_nonpositive(scores[s] - new_maximum);
    scratch.sums[lane] += scores[s];
  }
}

// Adds the weighted values of a tile to kVectors vectors of kLanes lanes, held in registers.
template <int kLanes, int kVectors, typename T>
inline void add_values(VectorState& scratch, Rows<T> values, int lane, int first_vector,
                       int num_keys) {
  const int vectors = scratch.value_vectors;
  const float* weights = reinterpret_cast<const float*>(&scratch.scores[lane * kScoreVectors]);
  Vec* outputs = &scratch.outputs[lane * vectors + first_vector];
  Vec sums[kLanes][kVectors];
  for (int i = 0; i < kLanes; ++i)
    for (int v = 0; v < kVectors; ++v) sums[i][v] = outputs[i * vectors + v];
  for (int key = 0; key < num_keys; ++key) {
    const T* row = values[key] + first_vector * kWidth;
    if (first_vector == 0) values.prefetch_next(key);
    for (int v = 0; v < kVectors; ++v) {
      const Vec value = load(row + v * kWidth);
      for (int i = 0; i < kLanes; ++i) sums[i][v] += weights[i * kKeyTile + key] * value;
    }
  }
  for (int i = 0; i < kLanes; ++i)
    for (int v = 0; v < kVectors; ++v) outputs[i * vectors + v] = sums[i][v];
}

template <int kLanes, typename T>
NOINLINE void add_values(VectorState& scratch, Rows<T> values, int lane, int num_keys) {
  int v = 0;
  for (; v + 4 <= scratch.value_vectors; v += 4)
    add_values<kLanes, 4>(scratch, values, lane, v, num_keys);
  for (; v < scratch.value_vectors; ++v) add_values<kLanes, 1>(scratch, values, lane, v, num_keys);
}

template <bool kPlain, typename T>
void update_lanes(const Step& step, VectorState& scratch, Rows<T> keys, int num_keys, Lanes lanes) {
  for (int lane = lanes.first; lane < lanes.end; ++lane) {
    const int end = lanes.visible + (lane - lanes.first) / lanes.group;
    const int visible = std::min(num_keys, end), hidden = end - step.window;
    if (scratch.vectors == 4)
      update_softmax<4, kPlain>(scratch, keys, lane, visible, hidden, step.softcap);
    else if (scratch.vectors == 8)
      update_softmax<8, kPlain>(scratch, keys, lane, visible, hidden, step.softcap);
    else
      update_softmax<0, kPlain>(scratch, keys, lane, visible, hidden, step.softcap);
  }
}

// One key tile of one head, for all lanes that see some of it.
template <typename T>
void attend_tile(const Step& step, VectorState& scratch, Rows<T> keys, Rows<T> values,
                 int num_keys, Lanes lanes) {
  if (step.is_plain())
    update_lanes<true>(step, scratch, keys, num_keys, lanes);
  else
    update_lanes<false>(step, scratch, keys, num_keys, lanes);
  int lane = lanes.first;
  for (; lane + 4 <= lanes.end; lane += 4) add_values<4>(scratch, values, lane, num_keys);
  for (; lane + 2 <= lanes.end; lane += 2) add_values<2>(scratch, values, lane, num_keys);
  if (lane < lanes.end) add_values<1>(scratch, values, lane, num_keys);
}

// Attention of one step over keys and values of type T; `run` computes one item of its work.
template <typename T>
class VectorAttention {
 public:
  using Element = T;
  using Scratch = VectorScratch<T>;
  static constexpr int kMostLanes = 32, kLeastLanes = 32;

  VectorAttention(const Step& step, const Tensors<T>& tensors) : step_(step), tensors_(tensors) {}

  void run(const WorkItem& item, const WorkItem* following, Scratch& scratch) const {
    start(item, scratch);
    const int first_position = item.first_position(step_), end_key = item.end_key(step_);
    const int lanes_of_head = item.lanes_of_head(step_), group = step_.group();
    int start = first_tile<kKeyTile>(step_, item);
    KeyTile<kKeyTile> tile(step_, item, start);
    for (; start < end_key; start += kKeyTile) {
      const auto next = tile_after<kKeyTile>(step_, item, start, following);
      const int first_row = std::max(0, start - first_position);  // earlier ones see none of it yet
      const int end_row = std::min<int64_t>(  // from this one on, none of it is seen any more
          item.num_rows, int64_t{start} + kKeyTile - 1 + step_.window - first_position);
      for (int head = 0; head < item.num_heads; ++head) {
        const int first_lane = head * lanes_of_head;
        const Lanes lanes{first_lane + first_row * group, first_lane + end_row * group, group,
                          first_position + first_row + 1 - start};
        attend_head(tile, next, head, lanes, scratch);
      }
      tile = next;
    }
    finish(item, scratch);
  }

 private:
  void start(const WorkItem& item, Scratch& scratch) const {
    const float scale = step_.softcap == 0 ? step_.scale : step_.scale / step_.softcap;
    const int lanes_of_head = item.lanes_of_head(step_);
    for (int i = 0; i < item.num_heads * lanes_of_head; ++i) {
      const int head = i / lanes_of_head, lane = i % lanes_of_head;
      Vec* vecs = &scratch.queries[i * scratch.vectors];
      widen(tensors_.query_of(step_, item, head, lane), step_.head_dim, vecs);
      for (int v = 0; v < scratch.vectors; ++v) vecs[v] *= scale;
    }
    start_softmax(item, scratch);
  }

  // Of each lane; a sink is a key that was seen already, and whose value is 0.
  void start_softmax(const WorkItem& item, Scratch& scratch) const {
    std::fill(scratch.outputs.begin(), scratch.outputs.end(), Vec{});
    std::fill(scratch.sums.begin(), scratch.sums.end(), Vec{});
    std::fill(scratch.maxima.begin(), scratch.maxima.end(), kLowest);
    if (step_.sinks == nullptr) return;
    const int lanes_of_head = item.lanes_of_head(step_);
    for (int i = 0; i < item.num_heads * lanes_of_head; ++i) {
      scratch.maxima[i] = step_.sinks[item.query_head_of(step_, i / lanes_of_head,
                                                         i % lanes_of_head)];
      scratch.sums[i][0] = 1;  // exp(sink - maximum)
    }
  }

  // Many lanes share a widened copy of the tile; few read the pages themselves.
  void attend_head(const KeyTile<kKeyTile>& tile, const KeyTile<kKeyTile>& next, int head,
                   Lanes lanes, Scratch& scratch) const {
    const Rows<T> keys =
        rows_of(tensors_.key_pages, step_, head, tile.keys, next.keys, true, scratch.decoded_keys);
    const Rows<T> values =
        rows_of(tensors_.value_pages, step_, head, tile.values, next.values, true, scratch.decoded_values);
    const bool fill_vectors = step_.head_dim % kWidth == 0 && step_.value_dim % kWidth == 0;
    if (lanes.end - lanes.first <= kLanesWithoutCopy && fill_vectors) {
      attend_tile(step_, scratch, keys, values, tile.num_keys, lanes);
    } else {
      const Rows<float> key_copy = copy(keys, tile.num_keys, scratch.keys, scratch);
      const Rows<float> value_copy = copy(values, tile.num_keys, scratch.values, scratch);
      attend_tile(step_, scratch, key_copy, value_copy, tile.num_keys, lanes);
    }
  }

  Rows<float> copy(Rows<T> rows, int num_keys, std::vector<Vec>& target, Scratch& scratch) const {
    for (int key = 0; key < num_keys; ++key)
      widen(rows[key], rows.size, &target[key * scratch.copy_vectors]);
    const float* first = reinterpret_cast<const float*>(target.data());
    return {first, scratch.copy_offsets.data(), nullptr, rows.size, 0};
  }

  void finish(const WorkItem& item, Scratch& scratch) const {
    const int lanes_of_head = item.lanes_of_head(step_);
    for (int i = 0; i < item.num_heads * lanes_of_head; ++i)
      store_quotient(&scratch.outputs[i * scratch.value_vectors], total(scratch.sums[i]),
                     step_.value_dim,
                     tensors_.out_of(step_, item, i / lanes_of_head, i % lanes_of_head));
  }

  const Step& step_;
  const Tensors<T>& tensors_;
};

}  // namespace
