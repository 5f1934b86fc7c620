// Groups of rows whose numbers of an input lie side by side, as products by AVX2 read them.
//
// Included by vector_panels.h and avx2_integers.h. Knows nothing of the numbers.

#pragma once

#include <type_traits>

namespace {

constexpr int kSideRows = 6;  // of a group: its sums with 16 outputs take 12 of 16 registers

// Calls with_rows(rows), a constant in its type, for 1 to kSideRows rows.
template <typename WithRows>
void for_rows(int num_rows, const WithRows& with_rows) {
  switch (num_rows) {
    case 1: return with_rows(std::integral_constant<int, 1>());
    case 2: return with_rows(std::integral_constant<int, 2>());
    case 3: return with_rows(std::integral_constant<int, 3>());
    case 4: return with_rows(std::integral_constant<int, 4>());
    case 5: return with_rows(std::integral_constant<int, 5>());
    default: return with_rows(std::integral_constant<int, kSideRows>());
  }
}

}  // namespace
