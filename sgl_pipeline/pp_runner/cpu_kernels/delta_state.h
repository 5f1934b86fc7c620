// One head's rows against its state, by the gated delta rule, some columns of the state at a time.
//
// Included by gated_delta.cpp. Knows nothing of steps, slots and tensors' types. Per row, with the
// state S [Dk, Dv], key k, query q, value v:
//   delta = beta * (v - decay * k S);  S = decay * S + k delta;  read = q S.
// The pass that updates S for a row also multiplies it with that row's query and with the next row's
// key: each number is loaded and stored once a row. Sums are over Dk in ascending order.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "vectors.h"

#if defined(__FMA__)
#include <immintrin.h>
#endif

namespace {

constexpr int kVectors = 4;                   // of columns at a time
constexpr int kColumns = kVectors * kWidth;   // 128 of them by 64 floats fit the L1 cache

// a * b + c, in one rounding where the machine has that. It is spelled out, as a compiler that fuses
// `a * b + c * d` may round either product, here one and there the other.
inline Vec multiply_add(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  constexpr __mmask16 all = 0xffff;
  return bit_cast<Vec>(_mm512_maskz_fmadd_ps(all, bit_cast<__m512>(a), bit_cast<__m512>(b),
                                             bit_cast<__m512>(c)));
#elif defined(__FMA__)
  return bit_cast<Vec>(
      _mm256_fmadd_ps(bit_cast<__m256>(a), bit_cast<__m256>(b), bit_cast<__m256>(c)));
#elif defined(__FP_FAST_FMAF)
  for (int i = 0; i < kWidth; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
#else
  return a * b + c;
#endif
}

// The rows of a chunk for one head.
struct HeadRows {
  const float* queries;  // [num_rows, key_dim]
  const float* keys;     // [num_rows, key_dim]
  float* values;         // [num_rows, value_dim]; what each row reads takes the place of its value
  const float* decays;   // [num_rows]
  const float* betas;    // [num_rows]
  int num_rows;
  int key_dim;
  int value_dim;
};

// Some columns of a state: [key_dim, kColumns], rows `stride` apart.
struct Columns {
  float* first;
  int64_t stride;
};

// Asks for memory little by little, as far as the L2 cache: all of it in `calls` calls of ask().
class Prefetch {
 public:
  Prefetch(const float* first, int64_t size, int64_t calls)
      : next_(first), end_(first + size), step_(((size + calls - 1) / calls + kLine - 1) / kLine) {}

  void ask() {
    if (next_ >= end_) return;
    for (int line = 0; line < step_; ++line, next_ += kLine) __builtin_prefetch(next_, 0, 2);
  }

 private:
  static constexpr int kLine = 16;

  const float* next_;
  const float* end_;
  int64_t step_;
};

// sums [kVectors] = key * state.
NOINLINE void multiply(const Columns& state, int key_dim, const float* key, Vec* sums,
                       Prefetch& prefetch) {
  Vec known[kVectors] = {};
  const float* row = state.first;
  for (int d = 0; d < key_dim; ++d, row += state.stride) {
    prefetch.ask();
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v)
      known[v] = multiply_add(broadcast(key[d]), load(row + v * kWidth), known[v]);
  }
  std::copy_n(known, kVectors, sums);
}

// target = decay * source + key * delta; sums = next_key * target, read = query * target.
// Without a next row it asks for memory instead.
template <bool kHasNext>
NOINLINE void update(const Columns& source, const Columns& target, int key_dim, float decay,
                     const float* key, const Vec* delta, const float* query, const float* next_key,
                     Vec* sums, Vec* read, Prefetch& prefetch) {
  Vec known[kVectors] = {}, found[kVectors] = {}, written[kVectors];
  std::copy_n(delta, kVectors, written);
  const Vec decays = broadcast(decay);
  const float* from = source.first;
  float* to = target.first;
#pragma GCC unroll 2
  for (int d = 0; d < key_dim; ++d, from += source.stride, to += target.stride) {
    if (!kHasNext) prefetch.ask();
    const Vec own = broadcast(key[d]), asked = broadcast(query[d]);
    const Vec next = kHasNext ? broadcast(next_key[d]) : Vec{};
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const Vec state = multiply_add(decays, load(from + v * kWidth), own * written[v]);
      store(to + v * kWidth, state);
      found[v] = multiply_add(asked, state, found[v]);
      if (kHasNext) known[v] = multiply_add(next, state, known[v]);
    }
  }
  std::copy_n(found, kVectors, read);
  std::copy_n(known, kVectors, sums);
}

// Walks all rows, for the columns of the state that `before` has, and leaves those after them in
// `after`, which may be the same place; `is_new`: they were zeros instead. `count`: how many of the
// values from `column` on there are. `cache` has room for the columns.
inline void walk_columns(const HeadRows& rows, int column, int count, const Columns& before,
                         const Columns& after, const Columns& cache, bool is_new,
                         Prefetch& prefetch) {
  Columns source = before;
  Vec known[kVectors] = {}, read[kVectors], delta[kVectors];
  if (is_new) {
    for (int d = 0; d < rows.key_dim; ++d)
      std::memset(cache.first + d * cache.stride, 0, kColumns * sizeof(float));
    source = cache;
  } else {
    multiply(source, rows.key_dim, rows.keys, known, prefetch);
  }
  for (int row = 0; row < rows.num_rows; ++row) {
    const float* const key = rows.keys + int64_t{row} * rows.key_dim;
    const float* const query = rows.queries + int64_t{row} * rows.key_dim;
    float* const value = rows.values + int64_t{row} * rows.value_dim + column;
    const float decay = rows.decays[row];
    const float beta = rows.betas[row];
    const auto count_of = [&](int v) { return std::clamp(count - v * kWidth, 0, kWidth); };
    for (int v = 0; v < kVectors; ++v)
      delta[v] = beta * multiply_add(broadcast(-decay), known[v], load(value + v * kWidth, count_of(v)));
    if (row + 1 < rows.num_rows)
      update<true>(source, cache, rows.key_dim, decay, key, delta, query, key + rows.key_dim, known,
                   read, prefetch);
    else
      update<false>(source, after, rows.key_dim, decay, key, delta, query, nullptr, known, read,
                    prefetch);
    source = cache;
    for (int v = 0; v < kVectors; ++v) store(value + v * kWidth, read[v], count_of(v));
  }
}

// Walks all rows, from the whole state `before` [key_dim, value_dim] to the one `after` them, which
// may have the same place; `is_new`: from zeros instead. `next_state`: one of the same size that is
// read after it (null: none).
inline void walk_head(const HeadRows& rows, float* before, float* after, bool is_new,
                      const float* next_state) {
  thread_local std::vector<Vec> room;
  const int64_t size = int64_t{rows.key_dim} * kColumns, stride = rows.value_dim;
  room.resize(2 * size / kWidth);
  float* const numbers = reinterpret_cast<float*>(room.data());
  const Columns cache{numbers, kColumns}, padded{numbers + size, kColumns};
  const int64_t blocks = (rows.value_dim + kColumns - 1) / kColumns;
  Prefetch prefetch(next_state, next_state == nullptr ? 0 : rows.key_dim * stride,
                    (is_new ? 1 : 2) * blocks * rows.key_dim);
  for (int column = 0; column < rows.value_dim; column += kColumns) {
    const int count = std::min(kColumns, rows.value_dim - column);
    float* const source = before + column;
    float* const target = after + column;
    if (count == kColumns) {
      walk_columns(rows, column, count, {source, stride}, {target, stride}, cache, is_new, prefetch);
      continue;
    }
    std::fill_n(padded.first, size, 0.0f);
    for (int d = 0; d < rows.key_dim; ++d)
      std::copy_n(source + d * stride, count, padded.first + d * kColumns);
    walk_columns(rows, column, count, padded, padded, cache, is_new, prefetch);
    for (int d = 0; d < rows.key_dim; ++d)
      std::copy_n(padded.first + d * kColumns, count, target + d * stride);
  }
}

}  // namespace
