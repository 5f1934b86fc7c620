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
#include <cstring>
#include <limits>
#include <vector>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int kWidth = 16;  // floats in a vector register
#define EVEN_POSITIONS 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#define ODD_POSITIONS 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31
#elif defined(__AVX__)
constexpr int kWidth = 8;
#define EVEN_POSITIONS 0, 2, 4, 6, 8, 10, 12, 14
#define ODD_POSITIONS 1, 3, 5, 7, 9, 11, 13, 15
#else
constexpr int kWidth = 4;
#define EVEN_POSITIONS 0, 2, 4, 6
#define ODD_POSITIONS 1, 3, 5, 7
#endif

constexpr int kKeyTile = 32;  // keys scored between two updates of the running maximum
constexpr int kScoreVectors = kKeyTile / kWidth;
constexpr int kPrefillLanes = 32;  // lanes that share a key tile in prefill

typedef float Vec __attribute__((vector_size(kWidth * 4)));
typedef int32_t IntVec __attribute__((vector_size(kWidth * 4)));
typedef uint16_t HalfVec __attribute__((vector_size(kWidth * 2)));

struct BFloat16 {
  uint16_t bits;
};

template <typename To, typename From>
inline To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "a bit cast keeps the size");
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

inline float to_float(float value) { return value; }
inline float to_float(BFloat16 value) { return bit_cast<float>(uint32_t{value.bits} << 16); }

inline void assign(float& target, float value) { target = value; }

// Rounds to nearest, ties to even; a NaN stays one.
inline void assign(BFloat16& target, float value) {
  const uint32_t bits = bit_cast<uint32_t>(value);
  const uint32_t rounded = bits + 0x7fff + ((bits >> 16) & 1);
  target.bits = value != value ? 0x7fc0 : static_cast<uint16_t>(rounded >> 16);
}

inline Vec load(const float* source) {
  Vec vec;
  std::memcpy(&vec, source, sizeof(vec));
  return vec;
}

inline Vec load(const BFloat16* source) {
  HalfVec halves;
  std::memcpy(&halves, source, sizeof(halves));
#if defined(__AVX512F__)  // GCC 12 makes three instructions of the generic conversion
  const IntVec widened = bit_cast<IntVec>(_mm512_cvtepu16_epi32(bit_cast<__m256i>(halves)));
#else
  const IntVec widened = __builtin_convertvector(halves, IntVec);
#endif
  return bit_cast<Vec>(widened << 16);
}

// head_dim elements as fp32 vectors, the last one padded with zeros.
template <typename T>
inline void widen(const T* source, int head_dim, Vec* target) {
  int done = 0;
  for (; done + kWidth <= head_dim; done += kWidth) target[done / kWidth] = load(source + done);
  if (done < head_dim) {
    float tail[kWidth] = {};
    for (int i = done; i < head_dim; ++i) tail[i - done] = to_float(source[i]);
    target[done / kWidth] = load(tail);
  }
}

inline Vec maximum(Vec a, Vec b) { return a > b ? a : b; }


inline float total(Vec vec) {
  float result = vec[0];
  for (int i = 1; i < kWidth; ++i) result += vec[i];
  return result;
}

#if defined(__clang__)
#define EVEN(a, b) __builtin_shufflevector(a, b, EVEN_POSITIONS)
#define ODD(a, b) __builtin_shufflevector(a, b, ODD_POSITIONS)
#else
#define EVEN(a, b) __builtin_shuffle(a, b, IntVec{EVEN_POSITIONS})
#define ODD(a, b) __builtin_shuffle(a, b, IntVec{ODD_POSITIONS})
#endif

// {a0 + a1, a2 + a3, .., b0 + b1, ..}
inline Vec add_neighbours(Vec a, Vec b) { return EVEN(a, b) + ODD(a, b); }

inline float largest(Vec vec) {
#pragma GCC unroll 4
  for (int count = kWidth; count > 1; count /= 2) vec = maximum(EVEN(vec, vec), ODD(vec, vec));
  return vec[0];
}

// exp(x) for x <= 0, relative error below 3e-7; exactly 0 below -87, where fp32 runs out.
inline Vec exp_nonpositive(Vec x) {
  const Vec clamped = maximum(x, Vec{} - 87.0f);
  const Vec shifted = clamped * 1.44269504f + 12582912.0f;  // + 1.5 * 2^23 rounds to an integer
  const Vec powers = shifted - 12582912.0f;
  const Vec rest = (clamped - powers * 0.693359375f) + powers * 2.12194440e-4f;  // ln(2), in two
  Vec series = Vec{} + 1.0f / 720;  // Taylor; |rest| <= ln(2) / 2
  series = series * rest + 1.0f / 120;
  series = series * rest + 1.0f / 24;
  series = series * rest + 1.0f / 6;
  series = series * rest + 0.5f;
  series = series * rest + 1.0f;
  series = series * rest + 1.0f;
  const IntVec exponents = bit_cast<IntVec>(shifted) << 23;  // the low bits of the sum are `powers`
  const Vec result = bit_cast<Vec>(bit_cast<IntVec>(series) + exponents);
  return x < -87.0f ? Vec{} : result;
}

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
        maxima(num_lanes) {}

  const int vectors;            // of one head
  std::vector<Vec> queries;     // [lanes, vectors], scaled
  std::vector<Vec> outputs;     // [lanes, vectors], not yet divided by the sums
  std::vector<Vec> keys;        // [kKeyTile, vectors]
  std::vector<Vec> values;      // [kKeyTile, vectors]
  std::vector<Vec> scores;      // [lanes, kScoreVectors], exponentials after update_softmax
  std::vector<Vec> sums;        // [lanes], one partial sum for each vector position
  std::vector<float> maxima;    // [lanes]
};

// The keys of one tile: where each one's first element for the item's first head lies in the pages.
struct KeyTile {
  KeyTile(const Step& step, const WorkItem& item, int start, int end)
      : num_keys(std::max(0, std::min(kKeyTile, end - start))) {
    const int32_t* pages = step.page_indices + step.page_indptr[item.chunk];
    for (int key = 0; key < num_keys; ++key) {
      const int64_t first_slot = int64_t{pages[(start + key) / step.page_size]} * step.page_size;
      const int64_t slot = first_slot + (start + key) % step.page_size;
      offsets[key] = (slot * step.num_kv_heads + item.head) * step.head_dim;
    }
  }

  // Brings one head into `target`, as fp32.
  template <typename T>
  __attribute__((noinline)) void load(const T* pages, int head, int head_dim, Vec* target) const {
    const int vectors = (head_dim + kWidth - 1) / kWidth;
    for (int key = 0; key < num_keys; ++key)
      widen(pages + offsets[key] + head * head_dim, head_dim, target + key * vectors);
  }

  // Asks the memory for part `part` of `parts` of the tile, in the order in which it lies there.
  template <typename T>
  void prefetch(const T* pages, int part, int parts, int head_dim) const {
    for (int key = part * num_keys / parts; key < (part + 1) * num_keys / parts; ++key)
      for (int d = 0; d < parts * head_dim; d += 64 / int{sizeof(T)})
        __builtin_prefetch(pages + offsets[key] + d, 0, 2);
  }

  int num_keys;
  int64_t offsets[kKeyTile];
};

// The scores of kWidth keys at once: their partial products are added up together.
inline Vec score(const Vec* query, const Vec* keys, int vectors) {
  Vec partial[kWidth] = {};
  for (int v = 0; v < vectors; ++v)
#pragma GCC unroll 16
    for (int key = 0; key < kWidth; ++key) partial[key] += query[v] * keys[key * vectors + v];
#pragma GCC unroll 4
  for (int count = kWidth / 2; count > 0; count /= 2)
#pragma GCC unroll 8
    for (int i = 0; i < count; ++i) partial[i] = add_neighbours(partial[2 * i], partial[2 * i + 1]);
  return partial[0];
}

// Scores a key tile for one lane that sees its first `visible` keys, and folds it into the softmax.
__attribute__((noinline)) void update_softmax(Scratch& scratch, int lane, int visible) {
  const int vectors = scratch.vectors;
  Vec* scores = &scratch.scores[lane * kScoreVectors];
  Vec highest = Vec{} + scratch.maxima[lane];
  IntVec position;
  for (int i = 0; i < kWidth; ++i) position[i] = i;
  for (int s = 0; s < kScoreVectors; ++s, position += kWidth) {
    const Vec all = score(&scratch.queries[lane * vectors], &scratch.keys[s * kWidth * vectors], vectors);
    scores[s] = position < visible ? all : Vec{} - std::numeric_limits<float>::infinity();
    highest = maximum(highest, scores[s]);
  }
  const float new_maximum = largest(highest);
  if (new_maximum != scratch.maxima[lane]) {
    const Vec shrink = exp_nonpositive(Vec{} + (scratch.maxima[lane] - new_maximum));
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
template <int kLanes, int kVectors>
inline void add_values(Scratch& scratch, int lane, int first_vector, int num_keys) {
  const int vectors = scratch.vectors;
  const float* weights = reinterpret_cast<const float*>(&scratch.scores[lane * kScoreVectors]);
  Vec* outputs = &scratch.outputs[lane * vectors + first_vector];
  Vec sums[kLanes][kVectors];
  for (int i = 0; i < kLanes; ++i)
    for (int v = 0; v < kVectors; ++v) sums[i][v] = outputs[i * vectors + v];
  for (int key = 0; key < num_keys; ++key) {
    const Vec* value = &scratch.values[key * vectors + first_vector];
    for (int i = 0; i < kLanes; ++i)
      for (int v = 0; v < kVectors; ++v) sums[i][v] += weights[i * kKeyTile + key] * value[v];
  }
  for (int i = 0; i < kLanes; ++i)
    for (int v = 0; v < kVectors; ++v) outputs[i * vectors + v] = sums[i][v];
}

template <int kLanes>
__attribute__((noinline)) void add_values(Scratch& scratch, int lane, int num_keys) {
  int v = 0;
  for (; v + 4 <= scratch.vectors; v += 4) add_values<kLanes, 4>(scratch, lane, v, num_keys);
  for (; v < scratch.vectors; ++v) add_values<kLanes, 1>(scratch, lane, v, num_keys);
}

template <typename T>
void attend(const Step& step, const WorkItem& item, const T* query, const T* key_pages,
            const T* value_pages, T* out, Scratch& scratch) {
  const int group = step.group(), vectors = step.vectors(), head_lanes = item.num_rows * group;
  const int num_lanes = item.num_heads * head_lanes;
  // Lanes are ordered by head, row, place in the group.
  auto element = [&](int lane, int64_t row_stride) {
    const int64_t row = item.row + lane % head_lanes / group;
    const int head = (item.head + lane / head_lanes) * group + lane % group;
    return row * row_stride + head * step.head_dim;
  };
  for (int lane = 0; lane < num_lanes; ++lane) {
    Vec* vecs = &scratch.queries[lane * vectors];
    widen(query + element(lane, step.query_row_stride), step.head_dim, vecs);
    for (int v = 0; v < vectors; ++v) vecs[v] *= step.scale;
  }
  std::fill(scratch.outputs.begin(), scratch.outputs.end(), Vec{});
  std::fill(scratch.sums.begin(), scratch.sums.end(), Vec{});
  std::fill(scratch.maxima.begin(), scratch.maxima.end(), -std::numeric_limits<float>::infinity());

  const int rows_after = step.query_indptr[item.chunk + 1] - item.row;
  const int first_position = step.kv_lengths[item.chunk] - rows_after;
  const int num_visible = first_position + item.num_rows;
  KeyTile tile(step, item, 0, num_visible);
  for (int start = 0; start < num_visible; start += kKeyTile) {
    const KeyTile next(step, item, start + kKeyTile, num_visible);
    const int num_keys = tile.num_keys;
    const int first_row = std::max(0, start - first_position);  // earlier rows see none of the tile
    for (int head = 0; head < item.num_heads; ++head) {
      next.prefetch(key_pages, head, item.num_heads, step.head_dim);
      next.prefetch(value_pages, head, item.num_heads, step.head_dim);
      tile.load(key_pages, head, step.head_dim, scratch.keys.data());
      tile.load(value_pages, head, step.head_dim, scratch.values.data());
      const int end = (head + 1) * head_lanes;
      int lane = head * head_lanes + first_row * group;
      for (int i = lane; i < end; ++i)
        update_softmax(scratch, i, std::min(num_keys, first_position + i % head_lanes / group + 1 - start));
      for (; lane + 4 <= end; lane += 4) add_values<4>(scratch, lane, num_keys);
      for (; lane + 2 <= end; lane += 2) add_values<2>(scratch, lane, num_keys);
      if (lane < end) add_values<1>(scratch, lane, num_keys);
    }
    tile = next;
  }
  for (int lane = 0; lane < num_lanes; ++lane) {
    const float* sums = reinterpret_cast<const float*>(&scratch.outputs[lane * vectors]);
    const float weight = total(scratch.sums[lane]);
    T* target = out + element(lane, int64_t{step.num_query_heads} * step.head_dim);
    for (int d = 0; d < step.head_dim; ++d) assign(target[d], sums[d] / weight);
  }
}

template <typename T>
void attend_step(const Step& step, int num_chunks, int num_threads, const void* query,
                 const void* key_pages, const void* value_pages, void* out) {
  const std::vector<WorkItem> items = split(step, num_chunks, num_threads);
  const int num_items = static_cast<int>(items.size());
  const int most_lanes = std::max({step.num_query_heads, kPrefillLanes, step.group()});
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
  {
    Scratch scratch(most_lanes, step.vectors());
#pragma omp for schedule(dynamic, 1)
    for (int i = 0; i < num_items; ++i)
      attend(step, items[i], static_cast<const T*>(query), static_cast<const T*>(key_pages),
             static_cast<const T*>(value_pages), static_cast<T*>(out), scratch);
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
