// Products of bf16 rows with a packed bf16 weight, on AMX tiles or with AVX-512's bf16 instruction.
//
// Called from compiled_linear.py through ctypes; knows nothing of torch. Where few rows meet a
// large weight the time is that of reading the weight, so it lies in memory in the order in which
// it is read, and is asked for ahead. Sums are fp32, over the inputs in ascending order for every
// row alike: a row's result is bitwise the same in any microbatch.
//
// Packed, a weight [out, in] is a row of blocks of 16 outputs: [out / 16, in / 2, 16, 2], both
// padded with zeros. 32 inputs of a block are one tile of 1 KiB; a pair of blocks is a panel. Of a
// gated product, blocks of gates and of ups take turns.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "amx.h"
#include "vectors.h"

#if defined(__AVX512BF16__)

namespace {

constexpr int kBlock = 16;  // outputs of a block, rows of a tile
constexpr int kTileInputs = 32;
constexpr int kTile = kBlock * kTileInputs;  // elements of a tile, of rows or of a weight
constexpr int kGroupRows = 2 * kBlock;       // rows that share the loads of a panel
// Packed rows stay in the L2 cache, beside their sums and what is prefetched.
constexpr int64_t kPackedRowsBytes = 1 << 20;
constexpr int64_t kRowsAtOnce = 256;
constexpr int64_t kTilesAtOnce = 16;  // of each block of a panel, in the L1 cache for all rows

int64_t tiles_of(int64_t size, int tile) { return (size + tile - 1) / tile; }

struct Product {
  int64_t num_rows;
  int64_t inputs;
  int64_t outputs;
  bool gated;              // outputs are silu(gate) * up: a panel is a block of gates and its ups
  const BFloat16* rows;    // [num_rows, inputs]
  const BFloat16* weight;  // packed
  const BFloat16* bias;    // [outputs], gated [2 * outputs] with the gates first, or null
  BFloat16* out;           // [num_rows, outputs]

  int64_t input_tiles() const { return tiles_of(inputs, kTileInputs); }
  int64_t blocks() const { return tiles_of(outputs, kBlock) * (gated ? 2 : 1); }
  int panel_outputs() const { return gated ? kBlock : 2 * kBlock; }
  int64_t panels() const { return tiles_of(blocks(), 2); }
  const BFloat16* block(int64_t index) const {
    return weight + std::min(index, blocks() - 1) * input_tiles() * kTile;
  }
};

// Sixteen rows from `first` on as tiles [inputs / 32, 16, 32], zeros where there are none.
void pack_rows(const Product& product, int64_t first, BFloat16* packed) {
  const int64_t whole_tiles = product.inputs / kTileInputs;
  const __mmask32 tail = (1u << product.inputs % kTileInputs) - 1;
  const BFloat16* source = product.rows + first * product.inputs;
  const int64_t num_rows = std::min<int64_t>(kBlock, product.num_rows - first);
  for (int64_t tile = 0; tile < product.input_tiles(); ++tile, source += kTileInputs)
    for (int64_t row = 0; row < kBlock; ++row, packed += kTileInputs) {
      const __mmask32 kept = row >= num_rows ? 0 : tile < whole_tiles ? ~0u : tail;
      _mm512_store_si512(packed, _mm512_maskz_loadu_epi16(kept, source + row * product.inputs));
    }
}

// Some tiles of two blocks of a weight, and those that will be wanted next: some lines of each of
// these are asked for, into the L2 cache. Asked for in the L1, they would push out what is in use.
struct Panel {
  const BFloat16* blocks[2];
  const BFloat16* next[2];
  int64_t tiles;
  int64_t row_tiles;  // of a packed row
  bool accumulate;    // to the sums of the tiles before
  int first_line;
  int end_line;

  // A quarter of the requests for a tile. They are to be spread over the work on it: those that
  // come at once do not all get as far as the L2.
  void prefetch(int64_t tile, int quarter) const {
    const int middle = (first_line + end_line) / 2;
    const int first = quarter < 2 ? first_line : middle, end = quarter < 2 ? middle : end_line;
    for (int line = first; line < end; ++line)
      __builtin_prefetch(next[quarter % 2] + tile * kTile + line * 32, 0, 2);
  }

  // For the `part`-th of `parts` that share the work of asking.
  void share_prefetch(int part, int parts) {
    constexpr int kLines = kTile * 2 / 64;
    first_line = kLines * part / parts;
    end_line = kLines * (part + 1) / parts;
  }
};

// The sums of up to 32 rows with a panel: [32, 32].
typedef float Sums[kGroupRows][2 * kBlock];

#if defined(SGLP_HAS_AMX)

// Static, as the compiler does not know that the instruction reads all of it.
const TileConfiguration kTileConfiguration{
    1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};

void open_tiles() { _tile_loadconfig(&kTileConfiguration); }
void close_tiles() { _tile_release(); }

template <bool kSecondTile>
void multiply(const BFloat16* rows, const Panel& panel, Sums& sums) {
  const BFloat16* second = rows + panel.row_tiles * kTile;
  if (panel.accumulate) {
    asm volatile("" ::: "memory");  // GCC does not know that tile operations read memory
    _tile_loadd(0, &sums[0][0], sizeof(sums[0]));
    _tile_loadd(1, &sums[0][kBlock], sizeof(sums[0]));
    if (kSecondTile) _tile_loadd(2, &sums[kBlock][0], sizeof(sums[0]));
    if (kSecondTile) _tile_loadd(3, &sums[kBlock][kBlock], sizeof(sums[0]));
  } else {
    _tile_zero(0);
    _tile_zero(1);
    if (kSecondTile) _tile_zero(2);
    if (kSecondTile) _tile_zero(3);
  }
  // Rows only pass through: the hint keeps the panel's place in the L1 cache for the next rows.
  for (int64_t tile = 0; tile < panel.tiles; ++tile) {
    panel.prefetch(tile, 0);
    _tile_stream_loadd(4, rows + tile * kTile, 64);
    _tile_loadd(6, panel.blocks[0] + tile * kTile, 64);
    panel.prefetch(tile, 1);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, panel.blocks[1] + tile * kTile, 64);
    panel.prefetch(tile, 2);
    _tile_dpbf16ps(1, 4, 7);
    if (kSecondTile) _tile_stream_loadd(5, second + tile * kTile, 64);
    panel.prefetch(tile, 3);
    if (kSecondTile) _tile_dpbf16ps(2, 5, 6);
    if (kSecondTile) _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, &sums[0][0], sizeof(sums[0]));
  _tile_stored(1, &sums[0][kBlock], sizeof(sums[0]));
  if (kSecondTile) _tile_stored(2, &sums[kBlock][0], sizeof(sums[0]));
  if (kSecondTile) _tile_stored(3, &sums[kBlock][kBlock], sizeof(sums[0]));
}

void multiply_amx(const BFloat16* rows, int num_rows, const Panel& panel, Sums& sums) {
  if (num_rows > kBlock)
    multiply<true>(rows, panel, sums);
  else
    multiply<false>(rows, panel, sums);
}
#endif

inline __m512bh load_pairs(const BFloat16* source) {
  return bit_cast<__m512bh>(_mm512_loadu_si512(source));
}
inline __m512bh broadcast_pair(const BFloat16* source) {
  int32_t pair;
  std::memcpy(&pair, source, sizeof(pair));
  return bit_cast<__m512bh>(_mm512_set1_epi32(pair));
}

template <int kRows>
void multiply_rows(const BFloat16* rows, const Panel& panel,
                   float (*sums)[2 * kBlock]) {
  __m512 totals[kRows][2];
  for (int row = 0; row < kRows; ++row)
    for (int block = 0; block < 2; ++block)
      totals[row][block] = panel.accumulate ? _mm512_loadu_ps(&sums[row][block * kBlock])
                                            : _mm512_setzero_ps();
  for (int64_t tile = 0; tile < panel.tiles; ++tile) {
    for (int quarter = 0; quarter < 4; ++quarter) panel.prefetch(tile, quarter);
    const BFloat16* first = panel.blocks[0] + tile * kTile;
    const BFloat16* second = panel.blocks[1] + tile * kTile;
    for (int pair = 0; pair < kTileInputs / 2; ++pair) {
      const __m512bh weights[2] = {load_pairs(first + pair * 32), load_pairs(second + pair * 32)};
#pragma GCC unroll 12
      for (int row = 0; row < kRows; ++row) {
        const __m512bh x = broadcast_pair(rows + tile * kTile + row * kTileInputs + pair * 2);
        totals[row][0] = _mm512_dpbf16_ps(totals[row][0], x, weights[0]);
        totals[row][1] = _mm512_dpbf16_ps(totals[row][1], x, weights[1]);
      }
    }
  }
  for (int row = 0; row < kRows; ++row)
    for (int block = 0; block < 2; ++block)
      _mm512_storeu_ps(&sums[row][block * kBlock], totals[row][block]);
}

void multiply_avx512(const BFloat16* rows, int num_rows, Panel panel, Sums& sums) {
  for (int row = 0; row < num_rows; row += 8) {
    const BFloat16* first =
        rows + row / kBlock * panel.row_tiles * kTile + row % kBlock * kTileInputs;
    const int left = num_rows - row;
    if (left > 4)
      multiply_rows<8>(first, panel, &sums[row]);
    else if (left > 2)
      multiply_rows<4>(first, panel, &sums[row]);
    else
      multiply_rows<2>(first, panel, &sums[row]);
    panel.end_line = 0;
  }
}

// Adds the bias, gates where asked to, rounds, and stores what belongs to a row of the result.
void finish(const Product& product, int64_t first_row, int num_rows, int64_t panel,
            const Sums& sums) {
  const int64_t begin = panel * product.panel_outputs();
  const int count = std::min<int64_t>(product.panel_outputs(), product.outputs - begin);
  const int low_count = std::min(count, kBlock);
  const int high_count = product.gated ? count : count - low_count;
  Vec biases[2] = {};
  if (product.bias != nullptr) {
    const BFloat16* const bias = product.bias + begin;
    biases[0] = load(bias, low_count);
    biases[1] = load(bias + (product.gated ? product.outputs : kBlock), high_count);
  }
  const __mmask32 kept = count == 32 ? ~0u : (1u << count) - 1;
  for (int row = 0; row < num_rows; ++row) {
    BFloat16* const target = product.out + (first_row + row) * product.outputs + begin;
    const Vec low = load(&sums[row][0]) + biases[0], high = load(&sums[row][kBlock]) + biases[1];
    if (product.gated)
      store(target, silu(low) * high, count);
    else
      _mm512_mask_storeu_epi16(target, kept,
                               bit_cast<__m512i>(_mm512_cvtne2ps_pbh(bit_cast<__m512>(high),
                                                                     bit_cast<__m512>(low))));
  }
}

// Rows [first, end), held packed, with a place for the sums of each group of them.
struct RowGroups {
  int64_t first;
  int64_t end;
  const BFloat16* packed;
  Sums* sums;
};

// One panel for all rows, some of its tiles after the others.
template <typename Multiply>
void run(const Product& product, const RowGroups& rows, int64_t index, const Multiply& multiply) {
  const int groups = tiles_of(rows.end - rows.first, kGroupRows);
  const int64_t all_tiles = product.input_tiles();
  const int64_t tiles_at_once = groups > 1 ? kTilesAtOnce : all_tiles;
  for (int64_t first = 0; first < all_tiles; first += tiles_at_once) {
    const int64_t end = std::min(first + tiles_at_once, all_tiles);
    const int64_t next = end < all_tiles ? index : index + 1, next_tile = end % all_tiles;
    Panel panel{{product.block(2 * index) + first * kTile,
                 product.block(2 * index + 1) + first * kTile},
                {product.block(2 * next) + next_tile * kTile,
                 product.block(2 * next + 1) + next_tile * kTile},
                end - first,
                all_tiles,
                first > 0,
                0,
                0};
    for (int group = 0; group < groups; ++group) {
      const int64_t row = rows.first + int64_t{group} * kGroupRows;
      const int num_rows = std::min<int64_t>(kGroupRows, rows.end - row);
      panel.share_prefetch(group, groups);
      multiply(rows.packed + (row - rows.first) * all_tiles * kTileInputs + first * kTile,
               num_rows, panel, rows.sums[group]);
      if (end == all_tiles) finish(product, row, num_rows, index, rows.sums[group]);
    }
  }
}

bool use_amx() {
#if defined(SGLP_HAS_AMX)
  return amx_permitted();
#else
  return false;
#endif
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
    alignas(64) char bytes[64];
  };
  std::vector<Line> lines_;
};

thread_local Workspace rows_workspace, sums_workspace;

void run_product(const Product& product, int num_threads) {
  const int64_t row_bytes = product.input_tiles() * kTileInputs * 2;
  const int64_t rows_that_fit = kPackedRowsBytes / row_bytes / kGroupRows * kGroupRows;
  const int64_t rows_at_once =
      std::clamp<int64_t>(rows_that_fit, 2 * kGroupRows, kRowsAtOnce);
  const int64_t packed_rows =
      std::min(tiles_of(product.num_rows, kBlock) * kBlock, rows_at_once);
  BFloat16* const packed = rows_workspace.at_least<BFloat16>(packed_rows * row_bytes);
  const int64_t sums_bytes = tiles_of(packed_rows, kGroupRows) * sizeof(Sums);
  const bool amx = use_amx();
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
  {
#if defined(SGLP_HAS_AMX)
    if (amx) open_tiles();
#endif
    Sums* const sums = sums_workspace.at_least<Sums>(sums_bytes);
    for (int64_t first = 0; first < product.num_rows; first += rows_at_once) {
      const int64_t end = std::min(first + rows_at_once, product.num_rows);
#pragma omp for
      for (int64_t row = first; row < end; row += kBlock)
        pack_rows(product, row, packed + (row - first) * row_bytes / 2);
#pragma omp for
      for (int64_t panel = 0; panel < product.panels(); ++panel) {
        const RowGroups rows{first, end, packed, sums};
#if defined(SGLP_HAS_AMX)
        if (amx) {
          run(product, rows, panel, multiply_amx);
          continue;
        }
#endif
        run(product, rows, panel, multiply_avx512);
      }
    }
#if defined(SGLP_HAS_AMX)
    if (amx) close_tiles();
#endif
  }
}

}  // namespace

extern "C" int sglp_has_products() { return 1; }

// Fills every `block_step`-th block of `packed`.
extern "C" void sglp_pack_weight(int64_t outputs, int64_t inputs, const void* weight, void* packed,
                                 int64_t block_step) {
  const int64_t block_size = tiles_of(inputs, kTileInputs) * kTile;
  const auto* source = static_cast<const BFloat16*>(weight);
  for (int64_t block = 0; block < tiles_of(outputs, kBlock); ++block) {
    BFloat16* target = static_cast<BFloat16*>(packed) + block * block_step * block_size;
    for (int64_t pair = 0; pair < block_size / (2 * kBlock); ++pair)
      for (int64_t output = block * kBlock; output < (block + 1) * kBlock; ++output)
        for (int64_t input = 2 * pair; input < 2 * pair + 2; ++input) {
          const bool inside = output < outputs && input < inputs;
          *target++ = inside ? source[output * inputs + input] : BFloat16{0};
        }
  }
}

extern "C" void sglp_product(int64_t num_rows, int64_t inputs, int64_t outputs, int gated,
                             const void* rows, const void* weight, const void* bias, void* out,
                             int num_threads) {
  const Product product{num_rows,
                        inputs,
                        outputs,
                        gated != 0,
                        static_cast<const BFloat16*>(rows),
                        static_cast<const BFloat16*>(weight),
                        static_cast<const BFloat16*>(bias),
                        static_cast<BFloat16*>(out)};
  run_product(product, num_threads);
}

#else

extern "C" int sglp_has_products() { return 0; }
extern "C" void sglp_pack_weight(int64_t, int64_t, const void*, void*, int64_t) {}
extern "C" void sglp_product(int64_t, int64_t, int64_t, int, const void*, const void*, const void*,
                             void*, int) {}

#endif
