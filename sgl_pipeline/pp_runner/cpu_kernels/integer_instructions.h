// Which instructions multiply rows of int8: those of AVX-512 VNNI, or without them those of AVX2.
//
// Decides which sources define the products of integers. Defines no code.

#pragma once

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define SGLP_HAS_VNNI 1
#elif defined(__AVX2__) && defined(__FMA__)
#define SGLP_HAS_AVX2_INTEGERS 1
#endif
