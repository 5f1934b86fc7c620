// The tile registers of AMX: a process's permission to use them, and their shapes.
//
// Shared by packed_panels.h and amx_products.h. Computes nothing.

#pragma once

#if defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__AVX512BF16__) && defined(__linux__)
#define SGLP_HAS_AMX 1

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace {

// Asks the kernel to let this process use tiles, which it may refuse.
inline bool amx_permitted() {
  constexpr int request_permission = 0x1023, tile_data = 18;  // arch_prctl(2), XSAVE component
  static const bool granted = syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
  return granted;
}

// The shapes of the eight tile registers, as LDTILECFG reads them.
struct alignas(64) TileConfiguration {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

}  // namespace

#endif  // __AMX_BF16__ and what it is used with
