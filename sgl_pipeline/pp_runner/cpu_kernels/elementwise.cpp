// What a decoder layer does between its products, each in one pass over its rows, fp32 and bf16.
//
// Called from compiled_kernels.py through ctypes; knows nothing of torch. All arithmetic is fp32
// and every result is rounded once, as it is stored; only the residual stream is rounded before it
// is normed, because the rounded one is what the next layer adds to. A row's result depends on
// nothing but that row: bitwise the same in any microbatch and on any number of threads.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "exports.h"
#include "kv_codes.h"
#include "team.h"
#include "vectors.h"

namespace {

// Below this many elements a step is done before a second thread would have started.
constexpr int64_t kElementsWorthThreads = 1 << 15;

// Calls run(row) for all rows, on several threads where that pays.
template <typename Run>
void for_rows(int64_t num_rows, int64_t row_size, int num_threads, const Run& run) {
  in_team(num_rows * row_size < kElementsWorthThreads ? 1 : num_threads, [&] {
#pragma omp for
    for (int64_t row = 0; row < num_rows; ++row) run(row);
  });
}

// Calls run(offset, count) for each vector of a row; count is kWidth except for the last one.
template <typename Run>
inline void for_vectors(int size, const Run& run) {
  int offset = 0;
  for (; offset + kWidth <= size; offset += kWidth) run(offset, kWidth);
  if (offset < size) run(offset, size - offset);
}

inline float inverse_root_mean(Vec squares, int size, float epsilon) {
  return 1.0f / std::sqrt(total(squares) / size + epsilon);
}

template <typename T>
void norm_row(const T* row, const T* weight, float weight_offset, T* normed, int size,
              float epsilon) {
  Vec squares{};
  for_vectors(size, [&](int offset, int count) {
    const Vec x = load(row + offset, count);
    squares += x * x;
  });
  const float scale = inverse_root_mean(squares, size, epsilon);
  for_vectors(size, [&](int offset, int count) {
    const Vec factors = load(weight + offset, count) + weight_offset;
    store(normed + offset, load(row + offset, count) * scale * factors, count);
  });
}

template <typename T>
void add_row(const T* row, const T* added, T* sum, int size) {
  for_vectors(size, [&](int offset, int count) {
    store(sum + offset, load(row + offset, count) + load(added + offset, count), count);
  });
}

// silu(gate) * up.
struct SiluGate {
  Vec operator()(Vec gate, Vec up) const { return silu(gate) * up; }
};

// (up + 1) * gate * sigmoid(alpha * gate), where the gate is at most the limit and up within it.
struct ClampedGate {
  float alpha;
  float limit;
  Vec operator()(Vec gate, Vec up) const {
    const Vec most = broadcast(limit);
    gate = gate > most ? most : gate;
    up = up > most ? most : up < -most ? -most : up;
    return (up + 1.0f) * (silu(alpha * gate) * (1.0f / alpha));
  }
};

template <typename T, typename Gate>
void gate_row(const T* gate, const T* up, T* gated, int size, Gate function) {
  for_vectors(size, [&](int offset, int count) {
    store(gated + offset, function(load(gate + offset, count), load(up + offset, count)), count);
  });
}

// The sizes and places of a step's heads: see sglp_place_heads.
struct Heads {
  int num_query;
  int num_kv;
  int head_dim;
  int rotated_dims;
  bool interleaved;
  float weight_offset;
  float epsilon;

  KvFormat kv_format;

  int row_size() const { return (num_query + 2 * num_kv) * head_dim; }
  bool rotates_whole_vectors() const { return !interleaved && rotated_dims % (2 * kWidth) == 0; }
};

// Rotates each pair of dimensions; a pair is two neighbors, or one of each half.
inline void rotate(float* __restrict head, const float* __restrict cosine,
                   const float* __restrict sine, const Heads& heads) {
  const int pairs = heads.rotated_dims / 2;
  const int step = heads.interleaved ? 2 : 1;
  float* __restrict partner = head + (heads.interleaved ? 1 : pairs);
  for (int pair = 0; pair < pairs; ++pair) {
    const float first = head[pair * step], second = partner[pair * step];
    head[pair * step] = first * cosine[pair] - second * sine[pair];
    partner[pair * step] = second * cosine[pair] + first * sine[pair];
  }
}

// Where both partners of sixteen pairs are loaded as whole vectors, no buffer is needed.
template <typename T, typename Normed>
inline void rotate_halves(const Normed& normed, const float* cosine, const float* sine, int pairs,
                          T* target) {
  for (int offset = 0; offset < pairs; offset += kWidth) {
    const Vec first = normed(offset, kWidth), second = normed(offset + pairs, kWidth);
    const Vec cosines = load(cosine + offset), sines = load(sine + offset);
    store(target + offset, first * cosines - second * sines);
    store(target + pairs + offset, second * cosines + first * sines);
  }
}

// One query or key head: normed where there is a weight, then rotated. `buffer` holds a head.
template <typename T>
void place_head(const T* source, const T* norm_weight, const float* cosine, const float* sine,
                const Heads& heads, float* buffer, T* target) {
  const int size = heads.head_dim;
  float scale = 1.0f;
  if (norm_weight != nullptr) {
    Vec squares{};
    for_vectors(size, [&](int offset, int count) {
      const Vec x = load(source + offset, count);
      squares += x * x;
    });
    scale = inverse_root_mean(squares, size, heads.epsilon);
  }
  const auto normed = [&](int offset, int count) {
    const Vec x = load(source + offset, count);
    if (norm_weight == nullptr) return x;
    return x * scale * (load(norm_weight + offset, count) + heads.weight_offset);
  };
  if (heads.rotates_whole_vectors()) {
    const int pairs = heads.rotated_dims / 2;
    rotate_halves(normed, cosine, sine, pairs, target);
    for (int offset = 2 * pairs; offset < size; offset += kWidth) {
      const int count = std::min(kWidth, size - offset);
      store(target + offset, normed(offset, count), count);
    }
    return;
  }
  for_vectors(size, [&](int offset, int count) {
    store(buffer + offset, normed(offset, count), count);
  });
  rotate(buffer, cosine, sine, heads);
  for_vectors(size, [&](int offset, int count) {
    store(target + offset, load(buffer + offset, count), count);
  });
}

template <typename T>
void place_row(const T* row, const T* query_norm, const T* key_norm, const float* cosine,
               const float* sine, const Heads& heads, float* buffer, T* query, T* key, T* value) {
  const int size = heads.head_dim;
  for (int head = 0; head < heads.num_query; ++head)
    place_head(row + head * size, query_norm, cosine, sine, heads, buffer, query + head * size);
  row += heads.num_query * size;
  for (int head = 0; head < heads.num_kv; ++head)
    place_head(row + head * size, key_norm, cosine, sine, heads, buffer, key + head * size);
  std::memcpy(value, row + heads.num_kv * size, heads.num_kv * size * sizeof(T));
}

// The heads of one key or value, [num_kv, head_dim], into `pages`.
template <typename T>
void encode_heads(const T* heads_of_row, const Heads& heads, int64_t slot, void* pages) {
  const int64_t bytes = coded_row_bytes(heads.kv_format, heads.head_dim);
  int8_t* codes = static_cast<int8_t*>(pages) + slot * heads.num_kv * bytes;
  for (int head = 0; head < heads.num_kv; ++head)
    encode_row(heads.kv_format, heads_of_row + head * heads.head_dim, heads.head_dim,
               codes + head * bytes);
}

template <typename T>
void place_heads(int64_t num_rows, const Heads& heads, const void* qkv, const void* query_norm,
                 const void* key_norm, const float* cosine, const float* sine,
                 const int64_t* slots, void* query, void* key_pages, void* value_pages,
                 int num_threads) {
  const int64_t query_size = heads.num_query * heads.head_dim;
  const int64_t kv_size = heads.num_kv * heads.head_dim;
  const int64_t pairs = heads.rotated_dims / 2;
  for_rows(num_rows, heads.row_size(), num_threads, [&](int64_t row) {
    thread_local std::vector<float> buffer;
    thread_local std::vector<T> to_encode;  // a key and a value
    buffer.resize(heads.head_dim);
    T *key, *value;
    if (heads.kv_format == kNumbers) {
      key = static_cast<T*>(key_pages) + slots[row] * kv_size;
      value = static_cast<T*>(value_pages) + slots[row] * kv_size;
    } else {
      to_encode.resize(2 * kv_size);
      key = to_encode.data();
      value = key + kv_size;
    }
    place_row(static_cast<const T*>(qkv) + row * heads.row_size(),
              static_cast<const T*>(query_norm), static_cast<const T*>(key_norm),
              cosine + row * pairs, sine + row * pairs, heads, buffer.data(),
              static_cast<T*>(query) + row * query_size, key, value);
    if (heads.kv_format != kNumbers) {
      encode_heads(key, heads, slots[row], key_pages);
      encode_heads(value, heads, slots[row], value_pages);
    }
  });
}

template <typename T>
void norm_rows(int64_t num_rows, int size, const T* rows, const T* added, const T* weight,
               float weight_offset, float epsilon, T* sums, T* normed, int num_threads) {
  for_rows(num_rows, size, num_threads, [&](int64_t row) {
    const int64_t begin = row * size;
    const T* source = rows + begin;
    if (added != nullptr) {
      add_row(source, added + begin, sums + begin, size);
      source = sums + begin;
    }
    norm_row(source, weight, weight_offset, normed + begin, size, epsilon);
  });
}

template <typename T, typename Gate>
void gate_rows(int64_t num_rows, int size, const void* gate_up, void* gated, Gate function,
               int num_threads) {
  for_rows(num_rows, size, num_threads, [&](int64_t row) {
    const T* const gate = static_cast<const T*>(gate_up) + row * 2 * size;
    gate_row(gate, gate + size, static_cast<T*>(gated) + row * size, size, function);
  });
}

template <typename T>
void gate_outputs(int64_t num_rows, int size, const void* rows, const void* gate, void* gated,
                  int num_threads) {
  const auto function = [](Vec gate, Vec x) { return x * sigmoid(gate); };
  for_rows(num_rows, size, num_threads, [&](int64_t row) {
    const int64_t begin = row * size;
    gate_row(static_cast<const T*>(gate) + begin, static_cast<const T*>(rows) + begin,
             static_cast<T*>(gated) + begin, size, function);
  });
}

template <typename T>
void add_rows(int64_t num_rows, int size, const T* rows, const T* added, T* sums,
              int num_threads) {
  for_rows(num_rows, size, num_threads, [&](int64_t row) {
    add_row(rows + row * size, added + row * size, sums + row * size, size);
  });
}

template <typename T>
const T* as(const void* pointer) {
  return static_cast<const T*>(pointer);
}
template <typename T>
T* as(void* pointer) {
  return static_cast<T*>(pointer);
}

}  // namespace

// All tensors below are contiguous and of one type, bf16 or fp32, unless their type says otherwise.

// normed = rms_norm(rows) * (weight + weight_offset); where `added` is given, sums = rows + added,
// and of these.
// rows, added, sums, normed [num_rows, size], weight [size].
extern "C" void sglp_rms_norm(int is_bf16, int64_t num_rows, int size, const void* rows,
                              const void* added, const void* weight, float weight_offset,
                              float epsilon, void* sums, void* normed, int num_threads) {
  if (is_bf16)
    norm_rows<BFloat16>(num_rows, size, as<BFloat16>(rows), as<BFloat16>(added),
                        as<BFloat16>(weight), weight_offset, epsilon, as<BFloat16>(sums),
                        as<BFloat16>(normed), num_threads);
  else
    norm_rows<float>(num_rows, size, as<float>(rows), as<float>(added), as<float>(weight),
                     weight_offset, epsilon, as<float>(sums), as<float>(normed), num_threads);
}

// sums = rows + added, all [num_rows, size].
extern "C" void sglp_add(int is_bf16, int64_t num_rows, int size, const void* rows,
                         const void* added, void* sums, int num_threads) {
  if (is_bf16)
    add_rows<BFloat16>(num_rows, size, as<BFloat16>(rows), as<BFloat16>(added),
                       as<BFloat16>(sums), num_threads);
  else
    add_rows<float>(num_rows, size, as<float>(rows), as<float>(added), as<float>(sums),
                    num_threads);
}

// Rows of qkv [T, (Hq + 2 Hkv) * D] to query [T, Hq, D] and into slots [T] of the pages
// [N, S, Hkv, D], or [N, S, Hkv, row of codes], of the rounded numbers. Queries and keys are normed
// by query_norm and key_norm [D] plus weight_offset, where given, and their first rotated_dims
// dimensions rotated by cosine and sine [T, rotated_dims / 2].
extern "C" void sglp_place_heads(int is_bf16, int64_t num_rows, int num_query_heads,
                                 int num_kv_heads, int head_dim, int rotated_dims, int interleaved,
                                 int kv_format, const void* qkv, const void* query_norm,
                                 const void* key_norm, float weight_offset, float epsilon,
                                 const float* cosine, const float* sine, const int64_t* slots,
                                 void* query, void* key_pages, void* value_pages,
                                 int num_threads) {
  const Heads heads{num_query_heads,  num_kv_heads,  head_dim, rotated_dims,
                    interleaved != 0, weight_offset, epsilon,  static_cast<KvFormat>(kv_format)};
  const auto run = is_bf16 ? place_heads<BFloat16> : place_heads<float>;
  run(num_rows, heads, qkv, query_norm, key_norm, cosine, sine, slots, query, key_pages,
      value_pages, num_threads);
}

// gated [num_rows, size] = silu(gate) * up of gate_up [num_rows, 2 * size].
extern "C" void sglp_gate(int is_bf16, int64_t num_rows, int size, const void* gate_up, void* gated,
                          int num_threads) {
  const auto run = is_bf16 ? gate_rows<BFloat16, SiluGate> : gate_rows<float, SiluGate>;
  run(num_rows, size, gate_up, gated, SiluGate{}, num_threads);
}

// The same with ClampedGate.
extern "C" void sglp_clamped_gate(int is_bf16, int64_t num_rows, int size, float alpha, float limit,
                                  const void* gate_up, void* gated, int num_threads) {
  const auto run = is_bf16 ? gate_rows<BFloat16, ClampedGate> : gate_rows<float, ClampedGate>;
  run(num_rows, size, gate_up, gated, ClampedGate{alpha, limit}, num_threads);
}

// gated = rows * sigmoid(gate), all [num_rows, size].
extern "C" void sglp_output_gate(int is_bf16, int64_t num_rows, int size, const void* rows,
                                 const void* gate, void* gated, int num_threads) {
  const auto run = is_bf16 ? gate_outputs<BFloat16> : gate_outputs<float>;
  run(num_rows, size, rows, gate, gated, num_threads);
}

// reordered[row][i] = rows[row][order[i]], all of them bf16 [num_rows, size].
extern "C" void sglp_reorder(int64_t num_rows, int size, const void* rows, const int64_t* order,
                             void* reordered, int num_threads) {
  for_rows(num_rows, size, num_threads, [&](int64_t row) {
    const BFloat16* const source = as<BFloat16>(rows) + row * size;
    BFloat16* const target = as<BFloat16>(reordered) + row * size;
    for (int i = 0; i < size; ++i) target[i] = source[order[i]];
  });
}
