// Which sources define the products: those of AVX-512's instructions, or without them those of AVX2.
//
// Defines no code.

#pragma once

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__) && !defined(__AVX512BF16__)
// Of bf16 in vector_products.cpp, of MXFP4 in avx2_mxfp4_products.cpp, of 4 bits and FP8 in
// avx2_expanded_products.cpp.
#define SGLP_HAS_VECTOR_PRODUCTS 1
#endif

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define SGLP_HAS_VNNI 1
#elif defined(__AVX2__) && defined(__FMA__)
#define SGLP_HAS_AVX2_INTEGERS 1
#endif
