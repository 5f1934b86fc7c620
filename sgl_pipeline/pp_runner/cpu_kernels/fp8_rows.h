// Rows of bf16 numbers rounded to FP8 (e4m3), each group of inputs by its own scale.
//
// Shared by expanded_products.cpp and avx2_expanded_products.cpp.

#pragma once

#include "vectors.h"

namespace {

constexpr float kLargestFp8 = 448.0f;
constexpr float kSmallestGroup = 0x1p-100f;  // the largest number of a group that is zeros to us

// What a group is multiplied by before it is rounded, by its largest magnitude.
inline float fp8_factor(float largest) {
  return largest > kSmallestGroup ? kLargestFp8 / largest : 0.0f;
}

// To the nearest e4m3 number, ties to even; |x| is at most 448 and a rounding error.
inline Vec round_to_fp8(Vec x) {
  const IntVec bits = bit_cast<IntVec>(x), magnitude = bits & 0x7fffffff;
  const IntVec normal = (magnitude + 0x7ffff + ((magnitude >> 20) & 1)) & ~0xfffff;
  const Vec shift = broadcast(0x1.8p14f);  // where a unit in the last place is 2^-9
  const IntVec denormal = bit_cast<IntVec>((bit_cast<Vec>(magnitude) + shift) - shift);
  const IntVec smallest_normal = bit_cast<IntVec>(broadcast(0x1p-6f));
  const IntVec number = magnitude < smallest_normal ? denormal : normal;
  return bit_cast<Vec>(number | (bits & ~0x7fffffff));
}

}  // namespace
