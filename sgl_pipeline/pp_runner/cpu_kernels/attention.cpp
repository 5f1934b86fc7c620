// Paged causal attention on CPU cores: one kernel for prefill and decode, fp32 and bf16.
//
// Called from cpu_attention.py through ctypes; knows nothing of torch. A "lane" below is one query
// row of one head. Every lane reads its keys in tiles that start at position 0 and adds up in an
// order that depends on nothing but its own position: a row's result is bitwise the same whatever
// shares its tile, its microbatch or its thread, decoded, in one chunk or in many.
//
// Online softmax: Milakov and Gimelshein, arXiv 1805.02867, tiled as in FlashAttention-2,
// arXiv 2307.08691. All arithmetic is fp32.

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "vectors.h"

// Keeps a hot loop's registers to itself.
#define NOINLINE __attribute__((noinline))

namespace {

constexpr int kKeyTile = 32;  // keys scored between two updates of the running maximum
constexpr int kScoreVectors = kKeyTile / kWidth;
constexpr int kPrefillLanes = 32;  // lanes that share a key tile in prefill
constexpr int kLanesWithoutCopy = 8;  // up to which a head's lanes read the pages themselves

constexpr float kLowest = -std::numeric_limits<float>::infinity();

// A step as PagedLayout describes it, with the sizes of AttentionShape.
struct Step {
  const int32_t* query_indptr;
  const int32_t* page_indptr;
  const int32_t* page_indices;
  const int32_t* kv_lengths;
  int64_t query_row_stride;
  int page_size;
  int num_query_heads;
  int num_kv_heads;
  int head_dim;
  float scale;

  int group() const { return num_query_heads / num_kv_heads; }
  int vectors() const { return (head_dim + kWidth - 1) / kWidth; }
};

// Query rows [row, row + num_rows) of a chunk, for key/value heads [head, head + num_heads).
struct WorkItem {
  int chunk;
  int row;
  int num_rows;
  int head;
  int num_heads;
};

// A lone row takes several heads in one sweep over its pages, as one token's heads lie side by side
// in memory, but leaves work for every thread. Longer chunks go head by head in tiles of rows.
std::vector<WorkItem> split(const Step& step, int num_chunks, int num_threads) {
  std::vector<WorkItem> items;
  const int tile_rows = std::max(1, kPrefillLanes / step.group());
  for (int chunk = 0; chunk < num_chunks; ++chunk) {
    const int begin = step.query_indptr[chunk], end = step.query_indptr[chunk + 1];
    const int heads_at_once = end - begin == 1 ? std::max(1, step.num_kv_heads / num_threads) : 1;
    for (int head = 0; head < step.num_kv_heads; head += heads_at_once)
      for (int row = begin; row < end; row += tile_rows)
        items.push_back({chunk, row, std::min(tile_rows, end - row), head,
                         std::min(heads_at_once, step.num_kv_heads - head)});
  }
  return items;
}

// One thread's working memory: the running state of an item's lanes, and one key tile of one head.
struct Scratch {
  Scratch(int num_lanes, int vectors)
      : vectors(vectors),
        queries(num_lanes * vectors),
        outputs(num_lanes * vectors),
        keys(kKeyTile * vectors),
        values(kKeyTile * vectors),
        scores(num_lanes * kScoreVectors),
        sums(num_lanes),
        maxima(num_lanes),
        copy_offsets(kKeyTile) {
    for (int key = 0; key < kKeyTile; ++key) copy_offsets[key] = int64_t{key} * vectors * kWidth;
  }

  const int vectors;            // of one head
  std::vector<Vec> queries;     // [lanes, vectors], scaled
  std::vector<Vec> outputs;     // [lanes, vectors], not yet divided by the sums
  std::vector<Vec> keys;        // [kKeyTile, vectors]
  std::vector<Vec> values;      // [kKeyTile, vectors]
  std::vector<Vec> scores;      // [lanes, kScoreVectors], exponentials after update_softmax
  std::vector<Vec> sums;        // [lanes], one partial sum for each vector position
  std::vector<float> maxima;    // [lanes]
  std::vector<int64_t> copy_offsets;  // [kKeyTile], of the rows of keys and values, in floats
};

// The keys of one tile: where each one's first element for the item's first head lies in the pages.
struct KeyTile {
  KeyTile(const Step& step, const WorkItem& item, int start, int end)
      : num_keys(std::max(0, std::min(kKeyTile, end - start))), offsets() {
    const int32_t* pages = step.page_indices + step.page_indptr[item.chunk];
    for (int key = 0; key < num_keys; ++key) {
      const int64_t first_slot = int64_t{pages[(start + key) / step.page_size]} * step.page_size;
      const int64_t slot = first_slot + (start + key) % step.page_size;
      offsets[key] = (slot * step.num_kv_heads + item.head) * step.head_dim;
    }
  }

  int num_keys;
  int64_t offsets[kKeyTile];  // of keys that are not there: 0, an element that may be read
};

// One head's keys or values of a tile, in the pages or as a copy.
template <typename T>
struct Rows {
  const T* first;
  const int64_t* offsets;
  const int64_t* next_offsets;  // of the tile after this one; null in a copy
  int head_dim;

  const T* operator[](int key) const { return first + offsets[key]; }

  // Asks for the key's counterpart in the next tile: little by little, and only as far as the L2
  // cache, as misses of the L1 would hold up the loads behind them.
  void prefetch_next(int key) const {
    if (next_offsets == nullptr) return;
    for (int d = 0; d < head_dim; d += 64 / int{sizeof(T)})
      __builtin_prefetch(first + next_offsets[key] + d, 0, 2);
  }
};

// Lanes [first, end) of one head. The first one sees `visible` keys of the tile (or all there are),
// and each further row, that is after `group` lanes, one more.
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

// Scores a key tile for one lane that sees its first `visible` keys, and folds it into the softmax.
template <int kVectors, typename T>
NOINLINE void update_softmax(Scratch& scratch, Rows<T> keys, int lane, int visible) {
  const int vectors = scratch.vectors;
  Vec* scores = &scratch.scores[lane * kScoreVectors];
  Vec highest = broadcast(scratch.maxima[lane]);
  IntVec position;
  for (int i = 0; i < kWidth; ++i) position[i] = i;
  for (int s = 0; s < kScoreVectors; ++s, position += kWidth) {
    const Vec all = score<kVectors>(&scratch.queries[lane * vectors], keys, s * kWidth, vectors);
    scores[s] = position < visible ? all : broadcast(kLowest);
    highest = maximum(highest, scores[s]);
  }
  const float new_maximum = largest(highest);
  if (new_maximum != scratch.maxima[lane]) {
    const Vec shrink = exp_nonpositive(broadcast(scratch.maxima[lane] - new_maximum));
    scratch.maxima[lane] = new_maximum;
    scratch.sums[lane] *= shrink;
    for (int v = 0; v < vectors; ++v) scratch.outputs[lane * vectors + v] *= shrink;
  }
  for (int s = 0; s < kScoreVectors; ++s) {
    scores[s] = exp_nonpositive(scores[s] - new_maximum);
    scratch.sums[lane] += scores[s];
  }
}

// Adds the weighted values of a tile to kVectors vectors of kLanes lanes, held in registers.
template <int kLanes, int kVectors, typename T>
inline void add_values(Scratch& scratch, Rows<T> values, int lane, int first_vector, int num_keys) {
  const int vectors = scratch.vectors;
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
NOINLINE void add_values(Scratch& scratch, Rows<T> values, int lane, int num_keys) {
  int v = 0;
  for (; v + 4 <= scratch.vectors; v += 4)
    add_values<kLanes, 4>(scratch, values, lane, v, num_keys);
  for (; v < scratch.vectors; ++v) add_values<kLanes, 1>(scratch, values, lane, v, num_keys);
}

// One key tile of one head, for all lanes of that head.
template <typename T>
void attend_tile(Scratch& scratch, Rows<T> keys, Rows<T> values, int num_keys, Lanes lanes) {
  for (int lane = lanes.first; lane < lanes.end; ++lane) {
    const int visible = lanes.visible + (lane - lanes.first) / lanes.group;
    if (scratch.vectors == 4)
      update_softmax<4>(scratch, keys, lane, std::min(num_keys, visible));
    else if (scratch.vectors == 8)
      update_softmax<8>(scratch, keys, lane, std::min(num_keys, visible));
    else
      update_softmax<0>(scratch, keys, lane, std::min(num_keys, visible));
  }
  int lane = lanes.first;
  for (; lane + 4 <= lanes.end; lane += 4) add_values<4>(scratch, values, lane, num_keys);
  for (; lane + 2 <= lanes.end; lane += 2) add_values<2>(scratch, values, lane, num_keys);
  if (lane < lanes.end) add_values<1>(scratch, values, lane, num_keys);
}

// Attention of one step over keys and values of type T; `run` computes one item of its work.
template <typename T>
class Attention {
 public:
  Attention(const Step& step, const T* query, const T* key_pages, const T* value_pages, T* out)
      : step_(step), query_(query), key_pages_(key_pages), value_pages_(value_pages), out_(out) {}

  void run(const WorkItem& item, Scratch& scratch) const {
    start(item, scratch);
    const int rows_after = step_.query_indptr[item.chunk + 1] - item.row;
    const int first_position = step_.kv_lengths[item.chunk] - rows_after;
    const int num_visible = first_position + item.num_rows;
    KeyTile tile(step_, item, 0, num_visible);
    for (int start = 0; start < num_visible; start += kKeyTile) {
      const KeyTile next(step_, item, start + kKeyTile, num_visible);
      const int first_row = std::max(0, start - first_position);  // earlier ones see none of it
      for (int head = 0; head < item.num_heads; ++head) {
        const int first_lane = head * lanes_of_head(item);
        const Lanes lanes{first_lane + first_row * step_.group(), first_lane + lanes_of_head(item),
                          step_.group(), first_position + first_row + 1 - start};
        attend_head(tile, next, head, lanes, scratch);
      }
      tile = next;
    }
    finish(item, scratch);
  }

 private:
  int lanes_of_head(const WorkItem& item) const { return item.num_rows * step_.group(); }

  // Lanes are ordered by head, row, place in the group.
  int64_t row_of(const WorkItem& item, int lane) const {
    return item.row + lane % lanes_of_head(item) / step_.group();
  }
  int64_t query_head_of(const WorkItem& item, int lane) const {
    return (item.head + lane / lanes_of_head(item)) * step_.group() + lane % step_.group();
  }

  void start(const WorkItem& item, Scratch& scratch) const {
    for (int lane = 0; lane < item.num_heads * lanes_of_head(item); ++lane) {
      Vec* vecs = &scratch.queries[lane * scratch.vectors];
      widen(query_ + row_of(item, lane) * step_.query_row_stride +
                query_head_of(item, lane) * step_.head_dim,
            step_.head_dim, vecs);
      for (int v = 0; v < scratch.vectors; ++v) vecs[v] *= step_.scale;
    }
    std::fill(scratch.outputs.begin(), scratch.outputs.end(), Vec{});
    std::fill(scratch.sums.begin(), scratch.sums.end(), Vec{});
    std::fill(scratch.maxima.begin(), scratch.maxima.end(), kLowest);
  }

  // Many lanes share a widened copy of the tile; few read the pages themselves.
  void attend_head(const KeyTile& tile, const KeyTile& next, int head, Lanes lanes,
                   Scratch& scratch) const {
    const int64_t begin = int64_t{head} * step_.head_dim;
    const Rows<T> keys{key_pages_ + begin, tile.offsets, next.offsets, step_.head_dim};
    const Rows<T> values{value_pages_ + begin, tile.offsets, next.offsets, step_.head_dim};
    if (lanes.end - lanes.first <= kLanesWithoutCopy && step_.head_dim % kWidth == 0) {
      attend_tile(scratch, keys, values, tile.num_keys, lanes);
    } else {
      const Rows<float> key_copy = copy(keys, tile.num_keys, scratch.keys, scratch);
      const Rows<float> value_copy = copy(values, tile.num_keys, scratch.values, scratch);
      attend_tile(scratch, key_copy, value_copy, tile.num_keys, lanes);
    }
  }

  Rows<float> copy(Rows<T> rows, int num_keys, std::vector<Vec>& target, Scratch& scratch) const {
    for (int key = 0; key < num_keys; ++key)
      widen(rows[key], step_.head_dim, &target[key * scratch.vectors]);
    const float* first = reinterpret_cast<const float*>(target.data());
    return {first, scratch.copy_offsets.data(), nullptr, step_.head_dim};
  }

  void finish(const WorkItem& item, Scratch& scratch) const {
    for (int lane = 0; lane < item.num_heads * lanes_of_head(item); ++lane) {
      Vec* vecs = &scratch.outputs[lane * scratch.vectors];
      const float weight = total(scratch.sums[lane]);
      T* target = out_ + (row_of(item, lane) * step_.num_query_heads + query_head_of(item, lane)) *
                             step_.head_dim;
      for (int v = 0; v < scratch.vectors; ++v)
        store(target + v * kWidth, vecs[v] / weight, std::min(kWidth, step_.head_dim - v * kWidth));
    }
  }

  const Step& step_;
  const T* query_;
  const T* key_pages_;
  const T* value_pages_;
  T* out_;
};

template <typename T>
void attend_step(const Step& step, int num_chunks, int num_threads, const void* query,
                 const void* key_pages, const void* value_pages, void* out) {
  const std::vector<WorkItem> items = split(step, num_chunks, num_threads);
  const int num_items = static_cast<int>(items.size());
  const Attention<T> attention(step, static_cast<const T*>(query), static_cast<const T*>(key_pages),
                               static_cast<const T*>(value_pages), static_cast<T*>(out));
  const int most_lanes = std::max({step.num_query_heads, kPrefillLanes, step.group()});
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
  {
    Scratch scratch(most_lanes, step.vectors());
#pragma omp for schedule(dynamic, 1)
    for (int i = 0; i < num_items; ++i)
      attention.run(items[i], scratch);
  }
}

}  // namespace

// query and out [T, Hq, D], pages [N, S, Hkv, D], all bf16 or all fp32. Contiguous, but for the
// rows of query, which lie query_row_stride elements apart.
extern "C" void sglp_paged_attention(int is_bf16, const void* query, int64_t query_row_stride,
                                     const void* key_pages, const void* value_pages, void* out,
                                     const int32_t* query_indptr, const int32_t* page_indptr,
                                     const int32_t* page_indices, const int32_t* kv_lengths,
                                     int num_chunks, int page_size, int num_query_heads,
                                     int num_kv_heads, int head_dim, float scale,
                                     int num_threads) {
  const Step step{query_indptr,     page_indptr, page_indices,    kv_lengths,
                  query_row_stride, page_size,   num_query_heads, num_kv_heads,
                  head_dim,         scale};
  if (is_bf16)
    attend_step<BFloat16>(step, num_chunks, num_threads, query, key_pages, value_pages, out);
  else
    attend_step<float>(step, num_chunks, num_threads, query, key_pages, value_pages, out);
}
