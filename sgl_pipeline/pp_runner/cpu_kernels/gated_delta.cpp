// The gated delta rule of a step's chunks, each with a state of its own: fp32 arithmetic for fp32 and
// bf16 tensors, rounded once, in the result.
//
// Called from compiled_gated_delta.py through ctypes; knows nothing of torch. Rows of a chunk come
// one after the other, and every sum has one order: a row's result and the state after it are bitwise
// the same in chunks of any lengths, in any company and on any number of threads.
//
// A key head of a chunk is a task, with the value heads that belong to it. It takes the chunk's runs
// one after the other, and in a run kRows rows after the others: their queries, keys and values are
// convolved into fp32 that stays in the L2 cache, then each value head walks them (delta_state.h),
// and what it read is normed and gated.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "delta_state.h"
#include "exports.h"
#include "team.h"
#include "vectors.h"

namespace {

constexpr float kNormEpsilon = 1e-6f;  // of queries and keys; NORM_EPSILON of gated_delta.py

constexpr int kRows = 64;

// A layer's heads.
struct Heads {
  int num_key;
  int num_value;
  int key_dim;
  int value_dim;
  int conv_width;

  int per_key() const { return num_value / num_key; }
  int64_t values_of_row() const { return int64_t{num_value} * value_dim; }
  int64_t num_channels() const { return 2 * int64_t{num_key} * key_dim + values_of_row(); }
};

// A step, as sglp_gated_delta describes it.
template <typename T>
struct Step {
  Heads heads;
  const int32_t* run_indptr;
  const int32_t* row_indptr;
  const int64_t* read_slots;
  const int64_t* write_slots;
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
  T* out;

  float* state(int64_t slot, int head) const {
    return recurrent + (slot * heads.num_value + head) * heads.key_dim * heads.value_dim;
  }
  T* last_inputs_in(int64_t slot) const {
    return last_inputs + slot * (heads.conv_width - 1) * heads.num_channels();
  }
};

// Of the rows that a task is at. One thread's.
struct Scratch {
  explicit Scratch(const Heads& heads) {
    thread_local std::vector<Vec> room;
    const int values = heads.per_key() * heads.value_dim, gates = heads.per_key();
    const int64_t numbers = int64_t{kRows} * (2 * heads.key_dim + values + 2 * gates);
    room.resize(numbers / kWidth);  // kRows is a multiple of kWidth
    queries = reinterpret_cast<float*>(room.data());
    keys = queries + kRows * heads.key_dim;
    this->values = keys + kRows * heads.key_dim;
    decays = this->values + kRows * values;
    betas = decays + kRows * gates;
  }

  float* queries;  // [kRows, key_dim]
  float* keys;
  float* values;  // of each head [kRows, value_dim]
  float* decays;  // of each head [kRows]
  float* betas;
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

// exp(-exp(a_log) * softplus(a + dt_bias)) and sigmoid(b) of a head's rows [begin, end).
template <typename T>
NOINLINE void find_gates(const Step<T>& step, int64_t begin, int64_t end, int head, float* decays,
                         float* betas) {
  const Vec rate = exp_any(broadcast(step.a_log[head]));
  const int64_t stride = step.heads.num_value;
  for (int64_t row = begin; row < end; row += kWidth) {
    const int count = std::min<int64_t>(kWidth, end - row);
    T a[kWidth] = {}, b[kWidth] = {};
    for (int i = 0; i < count; ++i) {
      a[i] = step.a[(row + i) * stride + head];
      b[i] = step.b[(row + i) * stride + head];
    }
    const Vec time = softplus(load(a) + step.dt_bias[head]);
    store(decays + (row - begin), exp_nonpositive(-rate * time), count);
    store(betas + (row - begin), sigmoid(load(b)), count);
  }
}

// Some channels of a run: of the convolution's weights [K, W], the step's inputs [T, W], the last ones
// before the run [K - 1, W], and the place of the last ones after it.
template <typename T>
struct Channels {
  const T* weights;
  const T* inputs;
  const T* before;
  T* after;
  int64_t stride;     // W
  int64_t first_row;  // of the run
  bool is_new;        // zeros came before the run

  Channels from(int64_t channel) const {
    return {weights + channel, inputs + channel, before + channel, after + channel,
            stride,            first_row,        is_new};
  }
};

// Vectors of channels, the last with `count` of them, of rows [begin, end): convolved, activated, and
// stored `size` apart.
template <int kTaps, int kVecs, typename T>
NOINLINE void convolve_vectors(const Channels<T>& channels, int64_t begin, int64_t end, int count,
                               float* target, int size) {
  constexpr int kAhead = 8;  // rows
  Vec weights[kTaps][kVecs], inputs[kTaps][kVecs];
  const auto load_row = [&](const T* source, Vec* vecs) {
#pragma GCC unroll 2
    for (int v = 0; v < kVecs; ++v)
      vecs[v] = load(source + v * kWidth, v < kVecs - 1 ? kWidth : count);
  };
#pragma GCC unroll 4
  for (int tap = 0; tap < kTaps; ++tap) load_row(channels.weights + tap * channels.stride, weights[tap]);
#pragma GCC unroll 3
  for (int tap = 0; tap < kTaps - 1; ++tap) {
    const int64_t row = begin - (kTaps - 1) + tap, before = row - channels.first_row;
    if (before >= 0)
      load_row(channels.inputs + row * channels.stride, inputs[tap + 1]);
    else if (!channels.is_new)
      load_row(channels.before + (before + kTaps - 1) * channels.stride, inputs[tap + 1]);
    else
      for (int v = 0; v < kVecs; ++v) inputs[tap + 1][v] = Vec{};
  }
  for (int64_t row = begin; row < end; ++row, target += size) {
    const T* const source = channels.inputs + row * channels.stride;
    __builtin_prefetch(source + kAhead * channels.stride);
#pragma GCC unroll 2
    for (int v = 0; v < kVecs; ++v) {
      Vec sum{};
#pragma GCC unroll 4
      for (int tap = 0; tap < kTaps; ++tap) {
        const int64_t last = kTaps - 1;
        inputs[tap][v] = tap < last ? inputs[tap + 1][v]
                                    : load(source + v * kWidth, v < kVecs - 1 ? kWidth : count);
        sum = multiply_add(inputs[tap][v], weights[tap][v], sum);
      }
      store(target + v * kWidth, silu(sum), v < kVecs - 1 ? kWidth : count);
    }
  }
}

// One head of queries, keys or values.
template <int kTaps, typename T>
void convolve_head(const Channels<T>& channels, int64_t begin, int64_t end, float* target, int size) {
  int offset = 0;
  for (; offset + 2 * kWidth <= size; offset += 2 * kWidth)  // in bf16 a line
    convolve_vectors<kTaps, 2>(channels.from(offset), begin, end, kWidth, target + offset, size);
  for (; offset < size; offset += kWidth)
    convolve_vectors<kTaps, 1>(channels.from(offset), begin, end, std::min(kWidth, size - offset),
                               target + offset, size);
}

// rows [num_rows, size], each divided by its length and multiplied by `scale`.
NOINLINE void norm_rows(float* rows, int64_t num_rows, int size, float scale) {
  for (float* row = rows; row < rows + num_rows * size; row += size) {
    Vec squares{};
    for_vectors(size, [&](int offset, int count) {
      const Vec x = load(row + offset, count);
      squares = multiply_add(x, x, squares);
    });
    const float factor = scale / std::sqrt(total(squares) + kNormEpsilon);
    for_vectors(size, [&](int offset, int count) {
      store(row + offset, load(row + offset, count) * factor, count);
    });
  }
}

// Keeps the last inputs after the run, which may have the place of those before it.
template <typename T>
void keep_inputs(const Channels<T>& channels, int64_t end, int taps, int size) {
  for (int tap = 0; tap < taps - 1; ++tap) {  // ascending: a row is read before it is overwritten
    T* const target = channels.after + tap * channels.stride;
    const int64_t row = end - (taps - 1) + tap, before = row - channels.first_row;
    if (before >= 0)
      std::memcpy(static_cast<void*>(target), channels.inputs + row * channels.stride, size * sizeof(T));
    else if (!channels.is_new)
      std::memcpy(static_cast<void*>(target), channels.before + (before + taps - 1) * channels.stride,
                  size * sizeof(T));
    else
      std::memset(static_cast<void*>(target), 0, size * sizeof(T));
  }
}

// What a head has read, normed and gated.
template <typename T>
NOINLINE void gate_rows(const Step<T>& step, int64_t begin, int64_t end, int head, const float* read) {
  constexpr int kAhead = 4;  // rows
  const int size = step.heads.value_dim;
  const int64_t stride = step.heads.values_of_row();
  for (int64_t row = begin; row < end; ++row, read += size) {
    const T* const gate = step.z + row * stride + int64_t{head} * size;
    T* const out = step.out + row * stride + int64_t{head} * size;
    Vec squares{};
    for_vectors(size, [&](int offset, int count) {
      const Vec x = load(read + offset, count);
      squares = multiply_add(x, x, squares);
    });
    const float scale = 1.0f / std::sqrt(total(squares) / size + step.epsilon);
    for_vectors(size, [&](int offset, int count) {
      __builtin_prefetch(gate + kAhead * stride + offset);
      __builtin_prefetch(out + kAhead * stride + offset, 1);
      const Vec normed = load(read + offset, count) * scale * load(step.norm + offset, count);
      store(out + offset, normed * silu(load(gate + offset, count)), count);
    });
  }
}

// One key head of a run. `next_state`: the one of the value head that this thread is likely to
// compute after its own (null: none).
template <int kTaps, typename T>
void take_run(const Step<T>& step, int run, int key_head, const float* next_state) {
  const Heads& heads = step.heads;
  const Scratch scratch(heads);
  const int64_t first = step.row_indptr[run], end = step.row_indptr[run + 1];
  const int64_t read_slot = step.read_slots[run], write_slot = step.write_slots[run];
  const bool is_new = step.starts_anew[run];
  const Channels<T> all{step.conv,
                        step.qkv,
                        step.last_inputs_in(read_slot),
                        step.last_inputs_in(write_slot),
                        heads.num_channels(),
                        first,
                        is_new};
  const int key_dim = heads.key_dim, value_dim = heads.value_dim, first_head = key_head * heads.per_key();
  const Channels<T> queries = all.from(int64_t{key_head} * key_dim);
  const Channels<T> keys = queries.from(int64_t{heads.num_key} * key_dim);
  const Channels<T> values = all.from(2 * int64_t{heads.num_key} * key_dim + int64_t{first_head} * value_dim);
  if (first == end)
    std::copy_n(step.state(read_slot, first_head), int64_t{heads.per_key()} * key_dim * value_dim,
                step.state(write_slot, first_head));
  for (int64_t begin = first; begin < end; begin += kRows) {
    const int64_t stop = std::min(end, begin + kRows);
    const int64_t source_slot = begin == first ? read_slot : write_slot;
    convolve_head<kTaps>(queries, begin, stop, scratch.queries, key_dim);
    convolve_head<kTaps>(keys, begin, stop, scratch.keys, key_dim);
    norm_rows(scratch.queries, stop - begin, key_dim, 1.0f / std::sqrt(float(key_dim)));
    norm_rows(scratch.keys, stop - begin, key_dim, 1.0f);
    for (int i = 0; i < heads.per_key(); ++i) {
      const int head = first_head + i;
      float* const read = scratch.values + int64_t{i} * kRows * value_dim;
      convolve_head<kTaps>(values.from(int64_t{i} * value_dim), begin, stop, read, value_dim);
      find_gates(step, begin, stop, head, scratch.decays + i * kRows, scratch.betas + i * kRows);
      const HeadRows rows{scratch.queries,         scratch.keys,           read, scratch.decays + i * kRows,
                          scratch.betas + i * kRows, int(stop - begin), key_dim, value_dim};
      const bool is_last = i + 1 == heads.per_key();
      walk_head(rows, step.state(source_slot, head), step.state(write_slot, head), is_new && begin == first,
                stop < end ? nullptr : is_last ? next_state : step.state(source_slot, head + 1));
      gate_rows(step, begin, stop, head, read);
    }
  }
  keep_inputs(queries, end, kTaps, key_dim);
  keep_inputs(keys, end, kTaps, key_dim);
  keep_inputs(values, end, kTaps, heads.per_key() * value_dim);
}

template <int kTaps, typename T>
void run_step(const Step<T>& step, int num_chunks, int num_threads) {
  const int num_keys = step.heads.num_key, num_tasks = num_chunks * num_keys;
  in_team(num_threads, [&] {
#pragma omp for schedule(dynamic, 1)
    for (int i = 0; i < num_tasks; ++i) {
      const int next = i + omp_get_num_threads();
      const int next_run = next < num_tasks ? step.run_indptr[next / num_keys] : -1;
      const bool reads = next_run >= 0 && !step.starts_anew[next_run];
      const float* const next_state =
          reads ? step.state(step.read_slots[next_run], next % num_keys * step.heads.per_key()) : nullptr;
      const int end = step.run_indptr[i / num_keys + 1];
      for (int run = step.run_indptr[i / num_keys]; run < end; ++run)
        take_run<kTaps>(step, run, i % num_keys, run + 1 < end ? nullptr : next_state);
    }
  });
}

}  // namespace

// Of chunks of runs of rows: chunk c has the runs from run_indptr[c] to run_indptr[c + 1], run r the
// rows from row_indptr[r] to row_indptr[r + 1]. A run begins with the state in slot read_slots[r], or
// with zeros where starts_anew[r], and leaves the state after it in slot write_slots[r], which may be
// the same; without rows, which only one that reads may have, it is a copy. What a chunk reads or
// writes, no other chunk writes. With W = 2 Hk Dk + Hv Dv channels and K = conv_width:
//   qkv [T, W], z [T, Hv Dv], b and a [T, Hv], conv [K, W], norm [Dv], conv_states [S, K - 1, W],
//   oldest first, and out [T, Hv Dv] of one type, bf16 or fp32;
//   a_log and dt_bias [Hv] and recurrent_states [S, Hv, Dk, Dv] fp32.
// All are contiguous. K is 2, 3 or 4.
extern "C" void sglp_gated_delta(int is_bf16, const int32_t* run_indptr, int num_chunks,
                                 const int32_t* row_indptr, int num_key_heads, int num_value_heads,
                                 int key_dim, int value_dim, int conv_width,
                                 const int64_t* read_slots, const int64_t* write_slots,
                                 const void* starts_anew, const void* qkv, const void* z, const void* b, const void* a,
                                 const void* conv, const float* a_log, const float* dt_bias,
                                 const void* norm, float epsilon, float* recurrent_states,
                                 void* conv_states, void* out, int num_threads) {
  const auto run = [&](auto element) {
    using T = decltype(element);
    const auto tensor = [](const void* pointer) { return static_cast<const T*>(pointer); };
    const Step<T> step{{num_key_heads, num_value_heads, key_dim, value_dim, conv_width},
                       run_indptr,
                       row_indptr,
                       read_slots,
                       write_slots,
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
                       static_cast<T*>(out)};
    if (conv_width == 2) run_step<2>(step, num_chunks, num_threads);
    if (conv_width == 3) run_step<3>(step, num_chunks, num_threads);
    if (conv_width == 4) run_step<4>(step, num_chunks, num_threads);
  };
  if (is_bf16)
    run(BFloat16{});
  else
    run(float{});
}
