// Vectors of fp32 numbers as wide as this machine's registers, for the kernels beside it.
//
// Written with the vector extensions of GCC and Clang, so that one text serves AVX-512, AVX2 and
// 128-bit machines. Nothing here knows what they are for.

#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

// Keeps a hot loop's registers to itself.
#define NOINLINE __attribute__((noinline))

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

typedef float Vec __attribute__((vector_size(kWidth * 4)));
typedef int32_t IntVec __attribute__((vector_size(kWidth * 4)));
typedef uint16_t HalfVec __attribute__((vector_size(kWidth * 2)));

// Of two vectors laid end to end, the elements at even or at odd positions.
#if defined(__clang__)
#define EVEN(a, b) __builtin_shufflevector(a, b, EVEN_POSITIONS)
#define ODD(a, b) __builtin_shufflevector(a, b, ODD_POSITIONS)
#else
#define EVEN(a, b) __builtin_shuffle(a, b, IntVec{EVEN_POSITIONS})
#define ODD(a, b) __builtin_shuffle(a, b, IntVec{ODD_POSITIONS})
#endif

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

inline Vec broadcast(float value) { return value - Vec{}; }  // x - 0 is x, also for -0

inline Vec load(const float* source) {
  Vec vec;
  std::memcpy(&vec, source, sizeof(vec));
  return vec;
}

inline Vec load(const BFloat16* source) {
  HalfVec halves;
  std::memcpy(&halves, source, sizeof(halves));
#if defined(__AVX512F__)  // GCC 12 makes five instructions of the generic conversion
  constexpr __mmask16 all = 0xffff;
  const auto widened = _mm512_maskz_cvtepu16_epi32(all, bit_cast<__m256i>(halves));
  return bit_cast<Vec>(bit_cast<IntVec>(widened) << 16);
#else
  return bit_cast<Vec>(__builtin_convertvector(halves, IntVec) << 16);
#endif
}

// The first `count` elements, at most kWidth; zeros in the places after them.
template <typename T>
inline Vec load(const T* source, int count) {
  if (count == kWidth) return load(source);
  T padded[kWidth] = {};
  std::memcpy(padded, source, count * sizeof(T));
  return load(padded);
}

// `count` elements as vectors, the last one padded with zeros.
template <typename T>
inline void widen(const T* source, int count, Vec* target) {
  int done = 0;
  for (; done + kWidth <= count; done += kWidth) target[done / kWidth] = load(source + done);
  if (done < count) target[done / kWidth] = load(source + done, count - done);
}

inline void store(float* target, Vec vec) { std::memcpy(target, &vec, sizeof(vec)); }

// Rounds to nearest, ties to even; a NaN stays one.
inline void store(BFloat16* target, Vec vec) {
#if defined(__AVX512BF16__)  // takes denormals for zeros
  constexpr __mmask16 every = 0xffff;
  const auto narrowed = _mm512_maskz_cvtneps_pbh(every, bit_cast<__m512>(vec));
  std::memcpy(target, &narrowed, sizeof(narrowed));
#else
  const IntVec bits = bit_cast<IntVec>(vec);
  const IntVec odd = (bits >> 16) & 1;
  const IntVec rounded = vec != vec ? IntVec{} + 0x7fc0 : ((bits + 0x7fff + odd) >> 16) & 0xffff;
#if defined(__AVX512F__)  // as in load
  constexpr __mmask16 all = 0xffff;
  const auto halves = _mm512_maskz_cvtepi32_epi16(all, bit_cast<__m512i>(rounded));
#else
  const HalfVec halves = __builtin_convertvector(rounded, HalfVec);
#endif
  std::memcpy(target, &halves, sizeof(halves));
#endif
}

// Stores the first `count` elements, at most kWidth.
template <typename T>
inline void store(T* target, Vec vec, int count) {
  if (count == kWidth) return store(target, vec);
  T padded[kWidth];
  store(padded, vec);
  std::memcpy(target, padded, count * sizeof(T));
}

inline Vec maximum(Vec a, Vec b) { return a > b ? a : b; }

inline float largest(Vec vec) {
#pragma GCC unroll 4
  for (int count = kWidth; count > 1; count /= 2) vec = maximum(EVEN(vec, vec), ODD(vec, vec));
  return vec[0];
}

inline float total(Vec vec) {
#pragma GCC unroll 4
  for (int count = kWidth; count > 1; count /= 2) vec = EVEN(vec, vec) + ODD(vec, vec);
  return vec[0];
}

// The totals of kWidth vectors, as one vector. Each is added up in the same order wherever it
// stands, neighbors first. Overwrites its argument.
inline Vec totals(Vec (&vecs)[kWidth]) {
#pragma GCC unroll 4
  for (int count = kWidth / 2; count > 0; count /= 2)
#pragma GCC unroll 8
    for (int i = 0; i < count; ++i)
      vecs[i] = EVEN(vecs[2 * i], vecs[2 * i + 1]) + ODD(vecs[2 * i], vecs[2 * i + 1]);
  return vecs[0];
}

// 1 / x for x in [1, 2], relative error below 2e-7.
inline Vec reciprocal(Vec x) {
#if defined(__AVX512F__)  // a division takes 16 cycles or more
  constexpr __mmask16 all = 0xffff;
  const Vec estimate = _mm512_maskz_rcp14_ps(all, x);
  return estimate * (2.0f - x * estimate);
#else
  return 1.0f / x;
#endif
}

// exp(x) = 2^n (1 + rest * quotient), |rest| <= ln(2) / 2.
struct ExpParts {
  Vec rest;
  Vec quotient;
  IntVec exponents;  // n, in its place in a float
};

// For x in [-87, 0].
inline ExpParts exp_parts(Vec x) {
  const Vec shifted = x * 1.44269504f + 12582912.0f;  // + 1.5 * 2^23 rounds to an integer
  const Vec powers = shifted - 12582912.0f;
  const Vec rest = (x - powers * 0.693359375f) + powers * 2.12194440e-4f;  // ln(2), in two
  Vec series = broadcast(1.0f / 720);  // Taylor
  series = series * rest + 1.0f / 120;
  series = series * rest + 1.0f / 24;
  series = series * rest + 1.0f / 6;
  series = series * rest + 0.5f;
  series = series * rest + 1.0f;
  return {rest, series, bit_cast<IntVec>(shifted) << 23};  // the low bits of `shifted`: `powers`
}

// exp(x) for x <= 0, relative error below 3e-7; exactly 0 below -87, where fp32 runs out.
inline Vec exp_nonpositive(Vec x) {
  const ExpParts parts = exp_parts(maximum(x, broadcast(-87.0f)));
  const Vec series = parts.quotient * parts.rest + 1.0f;
  const Vec result = bit_cast<Vec>(bit_cast<IntVec>(series) + parts.exponents);
  return x < -87.0f ? Vec{} : result;
}

// tanh(x), relative error below 1e-6, from d = exp(-2 |x|) - 1, which loses no digits near 0.
inline Vec hyperbolic_tangent(Vec x) {
  const Vec doubled = x < 0.0f ? 2.0f * x : -2.0f * x;
  const ExpParts parts = exp_parts(doubled < -40.0f ? broadcast(-40.0f) : doubled);  // NaN stays
  const Vec power = bit_cast<Vec>(parts.exponents + 0x3f800000);
  const Vec d = power * (parts.rest * parts.quotient) + (power - 1.0f);
  const Vec size = -d * reciprocal(2.0f + d);
  return x < 0.0f ? -size : size;
}

// 1 / (1 + exp(-x)): the exponential is taken where it is at most 1.
inline Vec sigmoid(Vec x) {
  const Vec small = exp_nonpositive(x < 0.0f ? x : -x);
  return (x < 0.0f ? small : broadcast(1.0f)) * reciprocal(1.0f + small);
}

inline Vec silu(Vec x) { return x * sigmoid(x); }

}  // namespace
