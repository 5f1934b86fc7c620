// The gated delta rule of a step's chunks, each with a state of its own: fp32 arithmetic for fp32 and
// bf16 tensors, rounded once, in the result.
//
// Called from compiled_gated_delta.py through ctypes; knows nothing of torch. Rows of a chunk come
// one after the other, and every sum has one order: a row's result and the state after it are bitwise
// the same in chunks of any lengths, in any company and on any number of threads.
//
// First all rows are convolved, on their way to head-major fp32 (`Mixed`), then each value head of a
// chunk walks its rows, with kColumns columns of its state in the L1 cache.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "delta_state.h"
#include "exports.h"
#include "team.h"
#include "vectors.h"

namespace {

constexpr float kNormEpsilon = 1e-6f;  // of queries and keys; NORM_EPSILON of gated_delta.py

// A layer's heads.
struct Heads {
  int num_key;
  int num_value;
  int key_dim;
  int value_dim;
  int conv_width;

  // Of the convolution: those of queries, keys and values, a head after the other.
  int num_groups() const { return 2 * num_key + num_value; }
  int64_t first_channel(int group) const {
    const int keys = std::min(group, 2 * num_key);
    return int64_t{keys} * key_dim + int64_t{group - keys} * value_dim;
  }
  int group_size(int group) const { return group < 2 * num_key ? key_dim : value_dim; }
  int64_t num_channels() const { return first_channel(num_groups()); }
  int64_t values_of_row() const { return int64_t{num_value} * value_dim; }
};

// What the convolution leaves for the recurrence.
struct Mixed {
  float* numbers;
  int64_t num_rows;

  // Of one head of queries, keys or values: [num_rows, its size], queries and keys normed.
  float* group(const Heads& heads, int group) const {
    return numbers + heads.first_channel(group) * num_rows;
  }
  // Of a row, and of each value head: what the state is multiplied by, then what part of a new value
  // is written to it.
  float* decays(const Heads& heads, int64_t row) const {
    return numbers + heads.num_channels() * num_rows + row * 2 * heads.num_value;
  }
  float* betas(const Heads& heads, int64_t row) const {
    return decays(heads, row) + heads.num_value;
  }
};

// A step, as sglp_gated_delta describes it.
template <typename T>
struct Step {
  Heads heads;
  const int32_t* query_indptr;
  const int64_t* slots;
  const uint8_t* starts_anew;
  const T* qkv;
  const T* z;
  const T* b;
  const T* a;
  const T* conv;
  const float* a_log;
  const float* dt_bias;
  const T* norm;
  float epsilon;
  float* recurrent;
  T* last_inputs;
  Mixed mixed;
  T* out;
};

// Calls run(offset, count) for each vector of `size` elements.
template <typename Run>
inline void for_vectors(int size, const Run& run) {
  int offset = 0;
  for (; offset + kWidth <= size; offset += kWidth) run(offset, kWidth);
  if (offset < size) run(offset, size - offset);
}

// exp(x), any x.
inline Vec exp_any(Vec x) {
  const Vec small = exp_nonpositive(x < 0.0f ? x : -x);
  return x < 0.0f ? small : 1.0f / small;
}

inline Vec sigmoid(Vec x) {
  const Vec small = exp_nonpositive(x < 0.0f ? x : -x);
  return (x < 0.0f ? small : broadcast(1.0f)) * reciprocal(1.0f + small);
}

// log(1 + exp(x)): with y = exp(-|x|), log(1 + y) = 2 atanh(y / (2 + y)), whose argument is at most
// 1 / 3. Relative error below 1e-6.
inline Vec softplus(Vec x) {
  const Vec y = exp_nonpositive(x < 0.0f ? x : -x);
  const Vec s = y / (2.0f + y), square = s * s;
  Vec series = broadcast(1.0f / 15);
  series = series * square + 1.0f / 13;
  series = series * square + 1.0f / 11;
  series = series * square + 1.0f / 9;
  series = series * square + 1.0f / 7;
  series = series * square + 1.0f / 5;
  series = series * square + 1.0f / 3;
  series = series * square + 1.0f;
  return (x > 0.0f ? x : Vec{}) + 2.0f * s * series;
}

// exp(-exp(a_log) * softplus(a + dt_bias)) and sigmoid(b) of a row.
template <typename T>
NOINLINE void find_gates(const Step<T>& step, int64_t row) {
  const int size = step.heads.num_value;
  const T* const a = step.a + row * size;
  const T* const b = step.b + row * size;
  float* const decays = step.mixed.decays(step.heads, row);
  float* const betas = step.mixed.betas(step.heads, row);
  for_vectors(size, [&](int head, int count) {
    const Vec rate = exp_any(load(step.a_log + head, count));
    const Vec time = softplus(load(a + head, count) + load(step.dt_bias + head, count));
    store(decays + head, exp_nonpositive(-rate * time), count);
    store(betas + head, sigmoid(load(b + head, count)), count);
  });
}

// The rows of a chunk of one group: convolved, activated, and where they are queries or keys, normed.
// The chunk's last inputs stay for the next one.
template <typename T>
NOINLINE void convolve(const Step<T>& step, int chunk, int group) {
  const Heads& heads = step.heads;
  const int64_t begin = step.query_indptr[chunk], end = step.query_indptr[chunk + 1];
  const int64_t channels = heads.num_channels(), first = heads.first_channel(group);
  const int size = heads.group_size(group), taps = heads.conv_width;
  const T* const inputs = step.qkv + first;
  T* const last = step.last_inputs + step.slots[chunk] * (taps - 1) * channels + first;
  if (step.starts_anew[chunk])
    for (int tap = 0; tap < taps - 1; ++tap)
      std::memset(static_cast<void*>(last + tap * channels), 0, size * sizeof(T));
  // Of an input by its row, also of those before the chunk.
  const auto input = [&](int64_t row) {
    return row < begin ? last + (row - begin + taps - 1) * channels : inputs + row * channels;
  };
  const bool is_normed = group < 2 * heads.num_key;
  const float scale = group < heads.num_key ? 1.0f / std::sqrt(float(heads.key_dim)) : 1.0f;
  float* target = step.mixed.group(heads, group) + begin * size;
  for (int64_t row = begin; row < end; ++row, target += size) {
    Vec squares{};
    for_vectors(size, [&](int offset, int count) {
      Vec sum{};
      for (int tap = 0; tap < taps; ++tap)
        sum = multiply_add(load(input(row - taps + 1 + tap) + offset, count),
                           load(step.conv + tap * channels + first + offset, count), sum);
      const Vec mixed = silu(sum);
      squares = multiply_add(mixed, mixed, squares);
      store(target + offset, mixed, count);
    });
    if (!is_normed) continue;
    const float factor = scale / std::sqrt(total(squares) + kNormEpsilon);
    for_vectors(size, [&](int offset, int count) {
      store(target + offset, load(target + offset, count) * factor, count);
    });
  }
  // Ascending: a row is read before it is overwritten.
  for (int tap = 0; tap < taps - 1; ++tap)
    std::memmove(static_cast<void*>(last + tap * channels), input(end - taps + 1 + tap),
                 size * sizeof(T));
}

// What a head has read, normed and gated.
template <typename T>
NOINLINE void gate_head(const Step<T>& step, int64_t row, int head, const float* read) {
  const int size = step.heads.value_dim;
  const int64_t place = row * step.heads.values_of_row() + int64_t{head} * size;
  Vec squares{};
  for_vectors(size, [&](int offset, int count) {
    const Vec x = load(read + offset, count);
    squares = multiply_add(x, x, squares);
  });
  const float scale = 1.0f / std::sqrt(total(squares) / size + step.epsilon);
  for_vectors(size, [&](int offset, int count) {
    const Vec normed = load(read + offset, count) * scale * load(step.norm + offset, count);
    store(step.out + place + offset, normed * silu(load(step.z + place + offset, count)), count);
  });
}

// One value head of a chunk, with the state in the pool. `next_state`: the one that this thread is
// likely to compute next (null: none).
template <typename T>
void walk(const Step<T>& step, int chunk, int head, const float* next_state) {
  const Heads& heads = step.heads;
  const int64_t begin = step.query_indptr[chunk], end = step.query_indptr[chunk + 1];
  const int key_head = head / (heads.num_value / heads.num_key);
  const int key_dim = heads.key_dim, value_dim = heads.value_dim;
  float* const values = step.mixed.group(heads, 2 * heads.num_key + head) + begin * value_dim;
  const HeadRows rows{step.mixed.group(heads, key_head) + begin * key_dim,
                      step.mixed.group(heads, heads.num_key + key_head) + begin * key_dim,
                      values,
                      step.mixed.decays(heads, begin) + head,
                      step.mixed.betas(heads, begin) + head,
                      2 * heads.num_value,
                      int(end - begin),
                      key_dim,
                      value_dim};
  const int64_t size = int64_t{key_dim} * value_dim;
  walk_head(rows, step.recurrent + (step.slots[chunk] * heads.num_value + head) * size,
            step.starts_anew[chunk], next_state);
  for (int64_t row = begin; row < end; ++row)
    gate_head(step, row, head, values + (row - begin) * value_dim);
}

template <typename T>
void run_step(const Step<T>& step, int num_chunks, int num_threads) {
  const Heads& heads = step.heads;
  const int groups = heads.num_groups();
  const int64_t state_size = int64_t{heads.key_dim} * heads.value_dim;
  const int64_t num_walks = int64_t{num_chunks} * heads.num_value;
  in_team(num_threads, [&] {
#pragma omp for schedule(static) nowait
    for (int64_t row = 0; row < step.mixed.num_rows; ++row) find_gates(step, row);
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < int64_t{num_chunks} * groups; ++i)
      convolve(step, int(i / groups), int(i % groups));
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < num_walks; ++i) {
      const int64_t next = i + omp_get_num_threads(), chunk = next / heads.num_value;
      const bool follows = next < num_walks && !step.starts_anew[chunk];
      const int64_t state = follows ? step.slots[chunk] * heads.num_value + next % heads.num_value : 0;
      walk(step, int(i / heads.num_value), int(i % heads.num_value),
           follows ? step.recurrent + state * state_size : nullptr);
    }
  });
}

}  // namespace

// Of chunks of rows: chunk c has those from query_indptr[c] to query_indptr[c + 1], and the state in
// slot slots[c], which begins with zeros where starts_anew[c]. With W = 2 Hk Dk + Hv Dv channels and
// K = conv_width:
//   qkv [T, W], z [T, Hv Dv], b and a [T, Hv], conv [K, W], norm [Dv], conv_states [S, K - 1, W],
//   oldest first, and out [T, Hv Dv] of one type, bf16 or fp32;
//   a_log and dt_bias [Hv], recurrent_states [S, Hv, Dk, Dv] and scratch [T, W + 2 Hv] fp32.
// All are contiguous.
extern "C" void sglp_gated_delta(int is_bf16, const int32_t* query_indptr, int num_chunks,
                                 int num_key_heads, int num_value_heads, int key_dim, int value_dim,
                                 int conv_width, const int64_t* slots, const void* starts_anew,
                                 const void* qkv, const void* z, const void* b, const void* a,
                                 const void* conv, const float* a_log, const float* dt_bias,
                                 const void* norm, float epsilon, float* recurrent_states,
                                 void* conv_states, float* scratch, void* out, int num_threads) {
  const auto run = [&](auto element) {
    using T = decltype(element);
    const auto tensor = [](const void* pointer) { return static_cast<const T*>(pointer); };
    const Step<T> step{{num_key_heads, num_value_heads, key_dim, value_dim, conv_width},
                       query_indptr,
                       slots,
                       static_cast<const uint8_t*>(starts_anew),
                       tensor(qkv),
                       tensor(z),
                       tensor(b),
                       tensor(a),
                       tensor(conv),
                       a_log,
                       dt_bias,
                       tensor(norm),
                       epsilon,
                       recurrent_states,
                       static_cast<T*>(conv_states),
                       {scratch, query_indptr[num_chunks]},
                       static_cast<T*>(out)};
    run_step(step, num_chunks, num_threads);
  };
  if (is_bf16)
    run(BFloat16{});
  else
    run(float{});
}
