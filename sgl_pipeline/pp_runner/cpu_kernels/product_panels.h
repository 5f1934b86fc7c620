// What products of rows with a packed weight share, whatever numbers they multiply.
//
// Where few rows meet a large weight the time is that of reading the weight, so it lies in memory in
// the order in which it is read, and is asked for ahead. Sums have four bytes and go over the inputs
// in the same order for every row: a row's result is bitwise the same in any microbatch.
//
// Packed, a weight is a row of blocks of 16 outputs. A block is a row of tiles of 16 lines; a line of
// 64 bytes holds four bytes of inputs for each output. A pair of blocks is a panel. Of a gated
// product, blocks of gates and of ups take turns. Rows are packed by 16, a line of each to a tile.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "amx.h"
#include "exports.h"
#include "team.h"
#include "vectors.h"

#if defined(__AVX512BW__)

namespace {

typedef unsigned char Byte;

constexpr int kBlock = 16;  // outputs of a block, rows and lines of a tile
constexpr int kLine = 64;   // bytes
constexpr int kTile = kBlock * kLine;
constexpr int kGroupRows = 2 * kBlock;  // rows that share the loads of a panel
// Of packed rows as many bytes stay in the L2 cache, beside sums and what is prefetched.
constexpr int64_t kPackedRowsBytes = 5 << 18;
constexpr int64_t kRowsAtOnce = 256;
// Sums that wait take no more, but for a single group of rows: the memory is kept for the next call.
constexpr int64_t kWaitingSumsBytes = 32 << 20;
constexpr int64_t kTilesAtOnce = 16;  // of each block of a panel, in the L1 cache for all rows

int64_t tiles_of(int64_t size, int64_t tile) { return (size + tile - 1) / tile; }

struct Product {
  int64_t num_rows;
  int64_t inputs;
  int64_t outputs;
  bool gated;              // outputs are silu(gate) * up: a panel is a block of gates and its ups
  int64_t tile_inputs;     // of a tile
  int64_t tile_bytes;      // of a tile of the weight, which may be smaller than what it expands to
  const BFloat16* rows;    // [num_rows, inputs]
  const void* weight;      // packed
  const BFloat16* bias;    // [outputs], gated [2 * outputs] with the gates first, or null
  BFloat16* out;           // [num_rows, outputs]

  int64_t input_tiles() const { return tiles_of(inputs, tile_inputs); }
  int64_t blocks() const { return tiles_of(outputs, kBlock) * (gated ? 2 : 1); }
  int panel_outputs() const { return gated ? kBlock : 2 * kBlock; }
  int64_t panels() const { return tiles_of(blocks(), 2); }
  const Byte* block(int64_t index) const {
    return static_cast<const Byte*>(weight) +
           std::min(index, blocks() - 1) * input_tiles() * tile_bytes;
  }
};

// The sums of up to 32 rows with a panel.
typedef float Sums[kGroupRows][2 * kBlock];

// Rows [first, end), held packed, with a place for the sums of each group of them. Of their inputs
// the parts [first_part, end_part) are multiplied, and added to the sums of the parts before.
struct RowGroups {
  int64_t first;
  int64_t end;
  int64_t first_part;
  int64_t end_part;
  const Byte* packed;
  const float* scales;  // of each row, one or more
  Sums* sums;
};

// What stands beside the outputs of a panel in an array of one number for each, gates first.
struct PanelOutputs {
  PanelOutputs(const Product& product, int64_t panel)
      : begin(panel * product.panel_outputs()),
        second(begin + (product.gated ? product.outputs : kBlock)),
        count(std::min<int64_t>(product.panel_outputs(), product.outputs - begin)),
        low_count(std::min(count, kBlock)),
        high_count(product.gated ? count : count - low_count) {}

  template <typename T>
  void load_both(const T* source, Vec (&vecs)[2]) const {
    vecs[0] = load(source + begin, low_count);
    vecs[1] = load(source + second, high_count);
  }

  int64_t begin;
  int64_t second;
  int count;
  int low_count;
  int high_count;
};

// `count` numbers, at most 32, and zeros after them.
inline __m512i load_words(const BFloat16* source, int64_t count) {
  const __mmask32 kept = count == 32 ? ~0u : (1u << count) - 1;
  return _mm512_maskz_loadu_epi16(kept, source);
}

inline __m512i broadcast_four_bytes(const Byte* source) {
  int32_t four;
  std::memcpy(&four, source, sizeof(four));
  return _mm512_set1_epi32(four);
}

// The largest of `count` magnitudes, which are ordered as their bits are; a NaN is the largest.
inline float largest_magnitude(const BFloat16* source, int64_t count) {
  const __m512i magnitude = _mm512_set1_epi16(0x7fff);
  __m512i largest = _mm512_setzero_si512();
  for (int64_t first = 0; first < count; first += 32) {
    const __m512i words = load_words(source + first, std::min<int64_t>(count - first, 32));
    largest = _mm512_max_epu16(largest, _mm512_and_si512(magnitude, words));
  }
  uint16_t words[32];
  std::memcpy(words, &largest, sizeof(words));
  return bit_cast<float>(uint32_t{*std::max_element(words, words + 32)} << 16);
}

// Nothing of a multiplication is to be fused with what follows: torch rounds in between.
inline Vec rounded(Vec vec) {
  asm("" : "+v"(vec));
  return vec;
}

// Adds the bias, gates where asked to, rounds, and stores what belongs to a row of the result.
// `value(row, block)` gives the sums of 16 outputs of a row.
template <typename Value>
void finish(const Product& product, int64_t first_row, int num_rows, int64_t panel,
            const Value& value) {
  const PanelOutputs outputs(product, panel);
  Vec biases[2] = {};
  if (product.bias != nullptr) outputs.load_both(product.bias, biases);
  for (int row = 0; row < num_rows; ++row) {
    BFloat16* const target = product.out + (first_row + row) * product.outputs + outputs.begin;
    const Vec low = value(row, 0) + biases[0], high = value(row, 1) + biases[1];
    if (product.gated) {
      store(target, silu(low) * high, outputs.count);
    } else {
      store(target, low, outputs.low_count);
      store(target + kBlock, high, outputs.high_count);
    }
  }
}

// Memory that keeps its size from call to call, aligned as tiles want it.
class Workspace {
 public:
  template <typename T>
  T* at_least(int64_t bytes) {
    if (bytes > static_cast<int64_t>(lines_.size() * sizeof(Line)))
      lines_.resize(tiles_of(bytes, sizeof(Line)));
    return reinterpret_cast<T*>(lines_.data());
  }

 private:
  struct Line {
    alignas(kLine) char bytes[kLine];
  };
  std::vector<Line> lines_;
};

thread_local Workspace rows_workspace, scales_workspace, sums_workspace, all_sums_workspace;

// Rows that are packed together: fewer than could be where the sums of so many would take too much
// memory while they wait.
inline int64_t rows_at_once(const Product& product) {
  const int64_t num_rows = std::min(tiles_of(product.num_rows, kBlock) * kBlock, kRowsAtOnce);
  const int64_t row_bytes = product.input_tiles() * kLine;
  const int64_t sums = product.panels() * tiles_of(num_rows, kGroupRows);
  if (num_rows * row_bytes <= kPackedRowsBytes ||
      sums * static_cast<int64_t>(sizeof(Sums)) <= kWaitingSumsBytes)
    return num_rows;
  return std::max<int64_t>(kPackedRowsBytes / row_bytes / kGroupRows, 1) * kGroupRows;
}

// All rows with all panels. An `Arithmetic` packs sixteen rows from one on (`pack_rows`), with
// `scales_per_row` numbers for each, and runs one panel for rows that are packed (`run`). It takes
// inputs in `parts`, those of a panel that the L1 cache has room for. Where packed rows are too
// long for the L2 cache, all panels run for some parts before the next ones, and sums wait in memory:
// fewer rows at once would read the weight more often.
template <typename Arithmetic>
void run_product(const Arithmetic& arithmetic, int num_threads) {
  const Product& product = arithmetic.product;
  const int64_t row_bytes = product.input_tiles() * kLine, per_row = arithmetic.scales_per_row();
  const int64_t packed_rows = rows_at_once(product);
  const int64_t parts = arithmetic.parts();
  const int64_t rounds = tiles_of(packed_rows * row_bytes, kPackedRowsBytes);
  const int64_t parts_at_once = tiles_of(parts, std::clamp<int64_t>(rounds, 1, parts));
  const int64_t groups = tiles_of(packed_rows, kGroupRows);
  const bool is_whole = parts_at_once >= parts;
  in_team(num_threads, [&] {
    arithmetic.open();
    Byte* packed;
    float* scales;
    Sums* all_sums;
    const auto reserve = [&] {
      packed = rows_workspace.at_least<Byte>(packed_rows * row_bytes);
      scales = scales_workspace.at_least<float>(packed_rows * per_row * sizeof(float));
      const int64_t waiting = is_whole ? 0 : product.panels() * groups;
      all_sums = all_sums_workspace.at_least<Sums>(waiting * sizeof(Sums));
    };
    const auto pack = [&](int64_t row, int64_t first) {
      arithmetic.pack_rows(row, packed + (row - first) * row_bytes,
                           scales + (row - first) * per_row);
    };
    // A thread packs a block sooner than it would have heard that another one has.
    const bool is_shared = packed_rows > kBlock;
    if (is_shared) {
#pragma omp single copyprivate(packed, scales, all_sums)
      reserve();
    } else {
      reserve();
    }
    Sums* const own_sums = sums_workspace.at_least<Sums>(groups * sizeof(Sums));
    for (int64_t first = 0; first < product.num_rows; first += packed_rows) {
      const int64_t end = std::min(first + packed_rows, product.num_rows);
      if (is_shared) {
#pragma omp for
        for (int64_t row = first; row < end; row += kBlock) pack(row, first);
      } else {
        pack(first, first);
      }
      for (int64_t part = 0; part < parts; part += parts_at_once) {
        const int64_t end_part = std::min(part + parts_at_once, parts);
        // A panel is the same thread's for all parts, which need not wait for one another.
#pragma omp for schedule(static) nowait
        for (int64_t panel = 0; panel < product.panels(); ++panel)
          arithmetic.run(RowGroups{first, end, part, end_part, packed, scales,
                                   is_whole ? own_sums : all_sums + panel * groups},
                         panel);
      }
#pragma omp barrier
    }
    arithmetic.close();
  });
}

}  // namespace

#endif  // __AVX512BW__
