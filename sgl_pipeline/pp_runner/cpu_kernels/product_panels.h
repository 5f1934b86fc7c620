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

#include "amx.h"
#include "blocks.h"
#include "exports.h"
#include "product_call.h"
#include "team.h"
#include "vectors.h"

#if defined(__AVX512BW__)

namespace {

constexpr int kTile = kBlock * kLine;  // bytes: a tile has as many lines, and of rows too
constexpr int kGroupRows = 2 * kBlock;  // rows that share the loads of a panel
// Of packed rows as many bytes stay in the L2 cache, beside sums and what is prefetched.
constexpr int64_t kPackedRowsBytes = 3 << 18;
constexpr int64_t kRowsAtOnce = 256;
// Sums that wait take no more, but for a single group of rows: the memory is kept for the next call.
constexpr int64_t kWaitingSumsBytes = 32 << 20;
constexpr int64_t kTilesAtOnce = 16;  // of each block of a panel, in the L1 cache for all rows
// A result of more rows and bytes goes past the caches, which it would leave before it is read.
constexpr int64_t kCachedRows = 64;
constexpr int64_t kCachedBytes = 1 << 20;

struct Product : ProductCall {
  int64_t tile_inputs;  // of a tile
  int64_t tile_bytes;   // of a tile of the weight, which may be smaller than what it expands to
  const void* weight;   // packed

  int64_t input_tiles() const { return tiles_of(inputs, tile_inputs); }
  // From sixteen packed rows to the next: an odd multiple of kTilesAtOnce, so that the same part of
  // all rows spreads over all sets of the L2 cache.
  int64_t row_tiles() const { return (tiles_of(input_tiles(), kTilesAtOnce) | 1) * kTilesAtOnce; }
  // Panels that one thread has to run one after the other: of a gated result that goes past the
  // caches each has half of a line.
  int64_t panels_together() const { return gated && passes_caches() ? 2 : 1; }
  bool passes_caches() const {
    return num_rows > kCachedRows && num_rows * outputs * int64_t{sizeof(BFloat16)} > kCachedBytes &&
           outputs % (2 * kBlock) == 0 && reinterpret_cast<uintptr_t>(out) % kLine == 0;
  }
  const Byte* block(int64_t index) const {
    return static_cast<const Byte*>(weight) +
           std::min(index, blocks() - 1) * input_tiles() * tile_bytes;
  }
};

// The sums of up to 32 rows with a panel.
typedef float Sums[kGroupRows][2 * kBlock];

// Half a line of a row's result, which waits for the other half.
typedef BFloat16 HalfLine[kBlock];

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
  const Sums* next_sums;  // those of the next panel, where they wait in memory; or null
  HalfLine* half_lines;   // of each row, from a panel of an even number to the next
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

// A panel's share of the rows of a result.
class ResultPanel {
 public:
  ResultPanel(const Product& product, const RowGroups& rows, int64_t panel)
      : product_(product),
        outputs_(product, panel),
        place_(place_of(product, panel)),
        half_lines_(rows.half_lines - rows.first) {
    if (product.bias != nullptr) outputs_.load_both(product.bias, biases_);
  }

  // Adds the bias to a row's sums of both blocks, gates where asked to, rounds, and stores.
  __attribute__((always_inline)) void put(int64_t row, Vec low, Vec high) const {
    BFloat16* const target = product_.out + row * product_.outputs + outputs_.begin;
    low += biases_[0];
    high += biases_[1];
    if (product_.gated) low = silu(low) * high;
    switch (place_) {
      case kCache:
        if (product_.gated) return store(target, low, outputs_.count);
        store(target, low, outputs_.low_count);
        return store(target + kBlock, high, outputs_.high_count);
      case kFirstHalf:
        return store(half_lines_[row], low);
      case kSecondHalf:
        return stream(target - kBlock, load(half_lines_[row]), low);
      case kWholeLine:
        return stream(target, low, high);
    }
  }

 private:
  // The second and third: a gated panel has half a line, and waits for its neighbor.
  enum Place { kCache, kFirstHalf, kSecondHalf, kWholeLine };

  static Place place_of(const Product& product, int64_t panel) {
    if (!product.passes_caches()) return kCache;
    return !product.gated ? kWholeLine : panel % 2 == 0 ? kFirstHalf : kSecondHalf;
  }

  // Past the caches, as a line that is written there is read from memory first.
  static void stream(BFloat16* target, Vec low, Vec high) {
    BFloat16 line[2 * kBlock];
    store(line, low);
    store(line + kBlock, high);
    __m512i words;
    std::memcpy(&words, line, sizeof(words));
    _mm512_stream_si512(reinterpret_cast<__m512i*>(target), words);
  }

  const Product& product_;
  const PanelOutputs outputs_;
  const Place place_;
  HalfLine* const half_lines_;
  Vec biases_[2] = {};
};

// Puts rows of the result. `value(row, block)` gives the sums of 16 outputs of a row.
template <typename Value>
void finish(const Product& product, const RowGroups& rows, int64_t first_row, int num_rows,
            int64_t panel, const Value& value) {
  const ResultPanel result(product, rows, panel);
  for (int row = 0; row < num_rows; ++row) result.put(first_row + row, value(row, 0), value(row, 1));
}

thread_local Workspace rows_workspace, scales_workspace, sums_workspace, all_sums_workspace,
    half_lines_workspace;

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
  const int64_t row_bytes = product.row_tiles() * kLine, per_row = arithmetic.scales_per_row();
  const int64_t packed_rows = rows_at_once(product);
  const int64_t parts = arithmetic.parts();
  const int64_t rounds = tiles_of(packed_rows * product.input_tiles() * kLine, kPackedRowsBytes);
  const int64_t parts_at_once = tiles_of(parts, std::clamp<int64_t>(rounds, 1, parts));
  const int64_t groups = tiles_of(packed_rows, kGroupRows);
  const int64_t together = product.panels_together();
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
    HalfLine* const half_lines =
        half_lines_workspace.at_least<HalfLine>(packed_rows * sizeof(HalfLine));
    const auto run = [&](int64_t panel, RowGroups rows) {
      rows.sums = is_whole ? own_sums : all_sums + panel * groups;
      if (!is_whole && panel + 1 < product.panels()) rows.next_sums = rows.sums + groups;
      arithmetic.run(rows, panel);
    };
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
        const RowGroups rows{first,  end,     part,    end_part,  packed,
                             scales, nullptr, nullptr, half_lines};
        // A panel is the same thread's for all parts, which need not wait for one another.
#pragma omp for schedule(static) nowait
        for (int64_t begin = 0; begin < product.panels(); begin += together) {
          const int64_t end_panel = std::min(begin + together, product.panels());
          for (int64_t panel = begin; panel < end_panel; ++panel) run(panel, rows);
        }
      }
      _mm_sfence();  // no order but this one holds for what goes past the caches
#pragma omp barrier
    }
    arithmetic.close();
  });
}

}  // namespace

#endif  // __AVX512BW__
