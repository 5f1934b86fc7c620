// Keys and values in 8 bits: how a row, a head's key or value of one token, becomes codes and back.
//
// Shared by elementwise.cpp, which writes pages, and by attention, which reads them. kv_format.py has
// the definition, in plain torch, and these are its bits, wherever a row stands.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "vectors.h"

namespace {

// What pages hold; `KvFormat` of library.py.
enum KvFormat { kNumbers, kInt8, kFloat8 };

typedef int8_t SignedBytes __attribute__((vector_size(kWidth)));

constexpr int kScaleBytes = 4;  // of int8, behind a row's codes
constexpr float kLargestInt8 = 127.0f;
constexpr float kLargestFloat8 = 448.0f;
constexpr float kSmallestRange = 0x1p-100f;  // of a row; below it the scale could run out of fp32

// Bytes of a row of codes.
inline int coded_row_bytes(KvFormat format, int head_dim) {
  return format == kInt8 ? head_dim + kScaleBytes : head_dim;
}

// Where a NaN is in one of the two, it is in the result.
inline Vec maximum_or_nan(Vec a, Vec b) {
  const Vec highest = a > b ? a : b;
  return a != a ? a : highest;
}

inline Vec magnitude(Vec x) { return bit_cast<Vec>(bit_cast<IntVec>(x) & 0x7fffffff); }

// The nearest integers, ties to even, of numbers below 2^22.
inline IntVec nearest_integers(Vec x) {
  constexpr float kShift = 0x1.8p23f;
  return bit_cast<IntVec>(x + kShift) - bit_cast<IntVec>(broadcast(kShift));
}

// The nearest e4m3 numbers, ties to even, as their bits; the largest for those beyond.
inline IntVec float8_codes(Vec x) {
  constexpr float kShift = 0x1.8p14f;  // where a unit in the last place is 2^-9, that of denormals
  const Vec bounded = magnitude(x) > kLargestFloat8 ? broadcast(kLargestFloat8) : magnitude(x);
  const IntVec bits = bit_cast<IntVec>(bounded);
  const IntVec normal = ((bits + 0x7ffff + ((bits >> 20) & 1)) >> 20) - (120 << 3);
  const IntVec denormal = bit_cast<IntVec>(bounded + kShift) & 0xf;
  const IntVec code = bounded < 0x1p-6f ? denormal : normal;
  return (x == x ? code : IntVec{} + 0x7f) | ((bit_cast<IntVec>(x) >> 24) & 0x80);
}

inline Vec float8_numbers(IntVec codes) {
  const IntVec bits = codes & 0x7f;
  const Vec normal = bit_cast<Vec>((bits << 20) + (120 << 23));
  const Vec denormal = __builtin_convertvector(bits, Vec) * 0x1p-9f;
  const IntVec number = bit_cast<IntVec>(bits < 8 ? denormal : normal);
  return bit_cast<Vec>((bits == 0x7f ? IntVec{} + 0x7fc00000 : number) | ((codes & 0x80) << 24));
}

// Codes with their signs, zeros after the first `count`, at most kWidth.
inline IntVec load_codes(const int8_t* source, int count) {
  int8_t padded[kWidth] = {};
  if (count < kWidth) source = static_cast<int8_t*>(std::memcpy(padded, source, count));
#if defined(__AVX512F__)  // as in `load` of vectors.h
  constexpr __mmask16 all = 0xffff;
  __m128i bytes;
  std::memcpy(&bytes, source, sizeof(bytes));
  return bit_cast<IntVec>(_mm512_maskz_cvtepi8_epi32(all, bytes));
#else
  SignedBytes bytes;
  std::memcpy(&bytes, source, sizeof(bytes));
  return __builtin_convertvector(bytes, IntVec);
#endif
}

inline void store_codes(int8_t* target, IntVec codes, int count) {
  const SignedBytes bytes = __builtin_convertvector(codes, SignedBytes);
  std::memcpy(target, &bytes, count);
}

// row [size] becomes the codes of `format`, and their scale.
template <typename T>
void encode_row(KvFormat format, const T* row, int size, int8_t* codes) {
  float scale = 1.0f;
  if (format == kInt8) {
    Vec largest = broadcast(kSmallestRange);
    for (int i = 0; i < size; i += kWidth)
      largest = maximum_or_nan(magnitude(load(row + i, std::min(kWidth, size - i))), largest);
#pragma GCC unroll 4
    for (int count = kWidth; count > 1; count /= 2)
      largest = maximum_or_nan(EVEN(largest, largest), ODD(largest, largest));
    scale = largest[0] / kLargestInt8;
    std::memcpy(codes + size, &scale, kScaleBytes);
  }
  for (int i = 0; i < size; i += kWidth) {
    const int count = std::min(kWidth, size - i);
    const Vec numbers = load(row + i, count);
    store_codes(codes + i, format == kInt8 ? nearest_integers(numbers / scale)
                                           : float8_codes(numbers), count);
  }
}

// codes [size] of `format`, and their scale, become numbers.
template <typename T>
inline void decode_row(KvFormat format, const int8_t* codes, int size, T* row) {
  float scale = 1.0f;
  if (format == kInt8) std::memcpy(&scale, codes + size, kScaleBytes);
  for (int i = 0; i < size; i += kWidth) {
    const int count = std::min(kWidth, size - i);
    const IntVec some = load_codes(codes + i, count);
    const Vec numbers = format == kInt8 ? __builtin_convertvector(some, Vec) * scale
                                        : float8_numbers(some);
    store(row + i, numbers, count);
  }
}

}  // namespace
