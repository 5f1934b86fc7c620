// What a call of a product asks for: its rows, its result, and the shape of the weight.
//
// Included by the products of every instruction set. Knows nothing of the weight's numbers.

#pragma once

#include "blocks.h"
#include "vectors.h"

namespace {

// Of a group in products with weights of 4 bits and rows of 8, in steps of 32 inputs. Longer groups
// come in parts, and the parts decide the bits of a product: it is the same for every processor.
constexpr int64_t kMostInt4Steps = 16;

struct ProductCall {
  int64_t num_rows;
  int64_t inputs;
  int64_t outputs;
  bool gated;            // outputs are silu(gate) * up: a panel is a block of gates and its ups
  const BFloat16* rows;  // [num_rows, inputs]
  const BFloat16* bias;  // [outputs], gated [2 * outputs] with the gates first, or null
  BFloat16* out;         // [num_rows, outputs]

  // As Python calls the products.
  ProductCall(int64_t num_rows, int64_t inputs, int64_t outputs, int gated, const void* rows,
              const void* bias, void* out)
      : num_rows(num_rows),
        inputs(inputs),
        outputs(outputs),
        gated(gated != 0),
        rows(static_cast<const BFloat16*>(rows)),
        bias(static_cast<const BFloat16*>(bias)),
        out(static_cast<BFloat16*>(out)) {}

  int64_t blocks() const { return tiles_of(outputs, kBlock) * (gated ? 2 : 1); }
  int64_t panels() const { return tiles_of(blocks(), 2); }
  int panel_outputs() const { return gated ? kBlock : 2 * kBlock; }
};

}  // namespace
