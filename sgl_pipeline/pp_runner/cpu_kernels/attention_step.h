// One step's attention as work: which rows, which heads, and where their keys lie in the pages.
//
// Shared by the kernels of attention_vectors.h and attention_tiles.h. Computes nothing itself.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kv_codes.h"
#include "vectors.h"

namespace {

constexpr int kNoWindow = INT32_MAX;

// A step as PagedLayout describes it, with the sizes and rules of AttentionShape.
struct Step {
  const int32_t* query_indptr;
  const int32_t* page_indptr;
  const int32_t* page_indices;
  const int32_t* kv_lengths;
  int64_t query_row_stride;
  int num_chunks;
  int page_size;
  int num_query_heads;
  int num_kv_heads;
  int head_dim;   // of a query or key
  int value_dim;  // of a value or output
  float scale;
  int window;          // as many keys, its own the last, a row sees at most
  float softcap;       // 0: none
  const float* sinks;  // [num_query_heads]; null: none
  KvFormat kv_format;

  // Of a key or value in its page: elements of the tensors' type, or bytes of codes.
  int key_size() const { return row_size(head_dim); }
  int value_size() const { return row_size(value_dim); }
  int group() const { return num_query_heads / num_kv_heads; }
  // The first key that a row at `position` sees.
  int first_seen(int position) const { return std::max(0, position + 1 - window); }
  // Whether scores are products, and a row sees every key up to its own.
  bool is_plain() const { return window == kNoWindow && softcap == 0; }

 private:
  int row_size(int size) const {
    return kv_format == kNumbers ? size : coded_row_bytes(kv_format, size);
  }
};

// Query rows [row, row + num_rows) of a chunk, for key/value heads [head, head + num_heads). A
// "lane" is one row of one query head; those of a key/value head are ordered by row, then place in
// the group.
struct WorkItem {
  int chunk;
  int row;
  int num_rows;
  int head;
  int num_heads;

  // The position of the first row in its request.
  int first_position(const Step& step) const {
    return step.kv_lengths[chunk] - (step.query_indptr[chunk + 1] - row);
  }
  // The keys that some row sees: [first_key, end_key).
  int first_key(const Step& step) const { return step.first_seen(first_position(step)); }
  int end_key(const Step& step) const { return first_position(step) + num_rows; }
  int lanes_of_head(const Step& step) const { return num_rows * step.group(); }
  int64_t row_of(const Step& step, int lane) const { return row + lane / step.group(); }
  int64_t query_head_of(const Step& step, int head_in_item, int lane) const {
    return (head + head_in_item) * step.group() + lane % step.group();
  }
};

// A step's tensors, laid out as sglp_paged_attention says.
template <typename T>
struct Tensors {
  const T* query;
  const void* key_pages;  // numbers of type T or codes
  const void* value_pages;
  T* out;

  const T* query_of(const Step& step, const WorkItem& item, int head_in_item, int lane) const {
    return query + item.row_of(step, lane) * step.query_row_stride +
           item.query_head_of(step, head_in_item, lane) * step.head_dim;
  }
  T* out_of(const Step& step, const WorkItem& item, int head_in_item, int lane) const {
    return out + (item.row_of(step, lane) * step.num_query_heads +
                  item.query_head_of(step, head_in_item, lane)) *
                     step.value_dim;
  }
};

// A lone row takes several heads in one sweep over its pages, as one token's heads lie side by side
// in memory, but leaves work for every thread. Longer chunks go head by head, in at most
// `most_lanes` lanes, and fewer, but not below `least_lanes`, where that leaves threads idle. The
// longest come first, so that no thread is left with one at the end.
inline std::vector<WorkItem> split(const Step& step, int num_threads, int most_lanes,
                                   int least_lanes) {
  std::vector<WorkItem> items;
  const int64_t all_lanes = int64_t{step.query_indptr[step.num_chunks]} * step.num_query_heads;
  const int64_t fair_lanes = all_lanes / (4 * num_threads);  // four items for each thread
  const int lanes = std::clamp<int64_t>(fair_lanes, least_lanes, most_lanes);
  const int item_rows = std::max(1, lanes / step.group());
  for (int chunk = 0; chunk < step.num_chunks; ++chunk) {
    const int begin = step.query_indptr[chunk], end = step.query_indptr[chunk + 1];
    const int heads_at_once = end - begin == 1 ? std::max(1, step.num_kv_heads / num_threads) : 1;
    for (int head = 0; head < step.num_kv_heads; head += heads_at_once)
      for (int row = begin; row < end; row += item_rows)
        items.push_back({chunk, row, std::min(item_rows, end - row), head,
                         std::min(heads_at_once, step.num_kv_heads - head)});
  }
  const auto cost = [&](const WorkItem& item) {
    return int64_t{item.end_key(step) - item.first_key(step)} * item.num_rows * item.num_heads;
  };
  if (num_threads > 1)
    std::stable_sort(items.begin(), items.end(), [&](const WorkItem& a, const WorkItem& b) {
      return cost(a) > cost(b);
    });
  return items;
}

// Where the keys of a tile, or their values, lie in the pages.
template <int kKeys>
struct Places {
  int num_keys;
  int size;                // numbers of a row, one head's key or value
  int64_t head_size;       // elements from one head's row to the next one's
  int64_t offsets[kKeys];  // of each row's first element, for the item's first head; of keys that
};                         // are not there: 0, an element that may be read

// The keys of an item from `start` on, a multiple of kKeys, and kKeys of them at most. Those that
// no row sees any more are not read: in their places stands the first one that is seen.
template <int kKeys>
struct KeyTile {
  KeyTile(const Step& step, const WorkItem& item, int start)
      : num_keys(std::clamp(item.end_key(step) - start, 0, kKeys)),
        num_unseen(std::clamp(item.first_key(step) - start, 0, kKeys)),
        keys{num_keys, step.head_dim, step.key_size(), {}},
        values{num_keys, step.value_dim, step.value_size(), {}} {
    const int32_t* pages = step.page_indices + step.page_indptr[item.chunk];
    const int first = start + num_unseen;
    int page = first / step.page_size, place = first % step.page_size;
    for (int key = num_unseen; key < num_keys; ++key) {
      const int64_t slot = int64_t{pages[page]} * step.page_size + place;
      const int64_t row = slot * step.num_kv_heads + item.head;
      keys.offsets[key] = row * keys.head_size;
      values.offsets[key] = row * values.head_size;
      if (++place == step.page_size) place = 0, ++page;
    }
    if (num_unseen == 0) return;
    std::fill_n(keys.offsets, num_unseen, keys.offsets[num_unseen]);
    std::fill_n(values.offsets, num_unseen, values.offsets[num_unseen]);
  }

  int num_keys;
  int num_unseen;
  Places<kKeys> keys;
  Places<kKeys> values;
};

// Where an item's first tile begins. Tiles begin at multiples of kKeys, whatever the item's rows:
// a row meets its keys in the same tiles wherever its chunk begins.
template <int kKeys>
inline int first_tile(const Step& step, const WorkItem& item) {
  return item.first_key(step) / kKeys * kKeys;
}

// The tile that is read after the one of `item` that begins with key `start`: the item's next, or
// the first of `following`, the item that this thread is likely to compute next (null: none).
template <int kKeys>
inline KeyTile<kKeys> tile_after(const Step& step, const WorkItem& item, int start,
                                 const WorkItem* following) {
  if (following == nullptr || start + kKeys < item.end_key(step))
    return {step, item, start + kKeys};
  return {step, *following, first_tile<kKeys>(step, *following)};
}

// One head's keys or values of a tile, in the pages or as a copy.
template <typename T>
struct Rows {
  const T* first;
  const int64_t* offsets;
  const int64_t* next_offsets;  // of the tile read after this one; null where they are not asked for so
  int size;                     // numbers of a row
  int64_t spacing;  // of sixteen rows from a multiple of sixteen on; 0: they may lie anywhere

  const T* operator[](int key) const { return first + offsets[key]; }

  // Asks for the key's counterpart in that tile: little by little, and only as far as the L2
  // cache, as misses of the L1 would hold up the loads behind them.
  void prefetch_next(int key) const {
    if (next_offsets == nullptr) return;
    for (int d = 0; d < size; d += 64 / int{sizeof(T)})
      __builtin_prefetch(first + next_offsets[key] + d, 0, 2);
  }
};

// The numbers of a tile of keys or values, `size` in a row, where the pages hold codes. One
// thread's.
template <typename T, int kKeys>
class DecodedTile {
 public:
  DecodedTile(KvFormat format, int size) {
    if (format == kNumbers) return;
    const int vectors = (size * int{sizeof(T)} + 63) / 64 * (64 / int{sizeof(Vec)});
    numbers_.resize(kKeys * vectors);
    for (int key = 0; key < kKeys; ++key) offsets_[key] = int64_t{key} * vectors * kNumbersOfVec;
  }

  // Of the rows `codes`, which lie at `places`. Asks for their counterparts in the next tile.
  NOINLINE Rows<T> decode(KvFormat format, const int8_t* codes, const Places<kKeys>& places,
                          const Places<kKeys>& next) {
    T* const numbers = reinterpret_cast<T*>(numbers_.data());
    for (int key = 0; key < places.num_keys; ++key) {
      for (int byte = 0; byte < places.head_size; byte += 64)
        __builtin_prefetch(codes + next.offsets[key] + byte, 0, 2);
      decode_row(format, codes + places.offsets[key], places.size, numbers + offsets_[key]);
    }
    return {numbers, offsets_, nullptr, places.size, offsets_[1]};
  }

 private:
  static constexpr int kNumbersOfVec = sizeof(Vec) / sizeof(T);

  std::vector<Vec> numbers_;
  int64_t offsets_[kKeys];
};

// The keys or values of an item's head number `head_in_item`, in `pages`; with those of the next
// tile to be asked for head by head, if it `asks_next`.
template <typename T, int kKeys>
inline Rows<T> rows_of(const void* pages, const Step& step, int head_in_item,
                       const Places<kKeys>& places, const Places<kKeys>& next,
                       bool asks_next, DecodedTile<T, kKeys>& decoded) {
  const int64_t offset = head_in_item * places.head_size;
  if (step.kv_format != kNumbers)
    return decoded.decode(step.kv_format, static_cast<const int8_t*>(pages) + offset, places, next);
  const int64_t spacing = step.page_size % 16 == 0 ? step.num_kv_heads * places.head_size : 0;
  const T* first = static_cast<const T*>(pages) + offset;
  const Rows<T> rows{first, places.offsets, asks_next ? next.offsets : nullptr, places.size, spacing};
  // The last tile of a request has few keys, and the first one of the next has many.
  for (int key = places.num_keys; key < next.num_keys; ++key) rows.prefetch_next(key);
  return rows;
}

// outputs [size], in vectors, divided by `weight`.
template <typename T>
inline void store_quotient(const Vec* outputs, float weight, int size, T* target) {
  for (int v = 0; v * kWidth < size; ++v)
    store(target + v * kWidth, outputs[v] / weight, std::min(kWidth, size - v * kWidth));
}

}  // namespace
