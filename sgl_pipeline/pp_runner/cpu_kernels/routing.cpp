// The experts of rows: a router's product, its softmax, and the best of them, all in fp32.
//
// Called from compiled_router.py through ctypes; knows nothing of torch. A row's result depends on
// nothing but that row: each product is summed by itself, over vectors of inputs in ascending order,
// whatever rows and experts are multiplied beside it.

#include <algorithm>
#include <cstdint>

#include "blocks.h"
#include "exports.h"
#include "team.h"
#include "vectors.h"

namespace {

constexpr int kRows = 4;          // that pass the weight together
constexpr int kOutputs = 2;       // that they are multiplied by at once: 8 sums hide the time of one
constexpr int kBlockOutputs = 8;  // of a block of the packed weight, for a lone row all at once
constexpr int kBlockInputs = 16;  // of which a block has its outputs one after the other
constexpr int kInputBytes = kBlockOutputs * kBlockInputs * sizeof(float);
constexpr int kAhead = 2048;      // bytes

struct Router {
  int64_t size;     // of a row
  int num_experts;
  int num_outputs;  // those, and the gate of the shared expert where there is one
  int experts_per_token;
  bool normalized;
  const float* weight;
  const float* bias;  // [num_outputs], or null

  bool has_shared() const { return num_outputs > num_experts; }
  int64_t padded_size() const { return tiles_of(size, kBlockInputs) * kBlockInputs; }
  int blocks() const { return tiles_of(num_outputs, kBlockOutputs); }
  int padded_outputs() const { return blocks() * kBlockOutputs; }
};

// logits[row][output] of `kNumRows` rows and `kNumOutputs` outputs of a block.
template <int kNumRows, int kNumOutputs>
NOINLINE void multiply(const Router& router, const float* rows, const float* weight,
                       float* logits) {
  Vec sums[kNumRows][kNumOutputs] = {};
  const int64_t size = router.padded_size();
  for (int64_t input = 0; input < size; input += kBlockInputs) {
    const float* const block = weight + input * kBlockOutputs;
    for (int line = 0; kNumRows == 1 && line < kInputBytes; line += kLine)
      __builtin_prefetch(reinterpret_cast<const Byte*>(block) + kAhead + line);
#pragma GCC unroll 4
    for (int i = 0; i < kBlockInputs; i += kWidth) {
      Vec numbers[kNumOutputs];
#pragma GCC unroll 8
      for (int output = 0; output < kNumOutputs; ++output)
        numbers[output] = load(block + output * kBlockInputs + i);
#pragma GCC unroll 4
      for (int row = 0; row < kNumRows; ++row) {
        const Vec x = load(rows + row * size + input + i);
#pragma GCC unroll 8
        for (int output = 0; output < kNumOutputs; ++output)
          sums[row][output] += x * numbers[output];
      }
    }
  }
  for (int row = 0; row < kNumRows; ++row)
    for (int output = 0; output < kNumOutputs; ++output)
      logits[row * router.padded_outputs() + output] = total(sums[row][output]);
}

// The logits of `kNumRows` rows, `kNumOutputs` outputs at once.
template <int kNumRows, int kNumOutputs>
void multiply_all(const Router& router, const float* rows, float* logits) {
  for (int block = 0; block < router.blocks(); ++block) {
    const float* const weight = router.weight + block * kBlockOutputs * router.padded_size();
    for (int output = 0; output < kBlockOutputs; output += kNumOutputs)
      multiply<kNumRows, kNumOutputs>(router, rows, weight + output * kBlockInputs,
                                      logits + block * kBlockOutputs + output);
  }
}

// A row in fp32, with zeros up to the padded size.
template <typename T>
void widen_row(const Router& router, const T* row, float* target) {
  int64_t input = 0;
  for (; input + kWidth <= router.size; input += kWidth) store(target + input, load(row + input));
  for (; input < router.padded_size(); input += kWidth)
    store(target + input, load(row + input, std::max<int64_t>(0, router.size - input)));
}

// The shares of experts in place of their logits; all are NaN where one logit is.
void softmax(int num_experts, float* logits) {
  const float most = *std::max_element(logits, logits + num_experts);
  Vec sums{};
  for (int e = 0; e < num_experts; e += kWidth) {
    const int count = std::min(kWidth, num_experts - e);
    const Vec below = load(logits + e, count) - most;
    store(logits + e, below == below ? exp_nonpositive(below) : below, count);
    sums += load(logits + e, count);
  }
  const float sum = total(sums);
  for (int e = 0; e < num_experts; ++e) logits[e] /= sum;
}

// The experts of a row, best first, of equal ones the first, and their weights. Takes the chosen
// ones' shares away.
void choose(const Router& router, float* shares, int64_t* experts, float* weights) {
  constexpr float kChosen = -1.0f;
  float sum = 0.0f;
  for (int k = 0; k < router.experts_per_token; ++k) {
    int best = std::find_if(shares, shares + router.num_experts,
                            [](float share) { return share != kChosen; }) - shares;
    for (int e = best + 1; e < router.num_experts; ++e)
      if (shares[e] > shares[best]) best = e;
    experts[k] = best;
    sum += weights[k] = shares[best];
    shares[best] = kChosen;
  }
  if (!router.normalized) return;
  for (int k = 0; k < router.experts_per_token; ++k) weights[k] /= sum;
}

thread_local Workspace rows_workspace, logits_workspace;

template <typename T>
void route(const Router& router, int64_t num_rows, const T* rows, int64_t* experts, float* weights,
           float* shared_weights, int num_threads) {
  const int64_t size = router.padded_size(), outputs = router.padded_outputs();
  in_team(num_rows > kRows ? num_threads : 1, [&] {
    float* const group = rows_workspace.at_least<float>(kRows * size * sizeof(float));
    float* const logits = logits_workspace.at_least<float>(kRows * outputs * sizeof(float));
#pragma omp for
    for (int64_t first = 0; first < num_rows; first += kRows) {
      const int count = std::min<int64_t>(kRows, num_rows - first);
      for (int row = 0; row < count; ++row)
        widen_row(router, rows + (first + row) * router.size, group + row * size);
      if (count == kRows)
        multiply_all<kRows, kOutputs>(router, group, logits);
      else
        for (int row = 0; row < count; ++row)
          multiply_all<1, kBlockOutputs>(router, group + row * size, logits + row * outputs);
      for (int row = 0; row < count; ++row) {
        float* const own = logits + row * outputs;
        for (int i = 0; router.bias != nullptr && i < router.num_outputs; ++i)
          own[i] += router.bias[i];
        softmax(router.num_experts, own);
        const int64_t place = (first + row) * router.experts_per_token;
        choose(router, own, experts + place, weights + place);
        if (router.has_shared())
          shared_weights[first + row] = sigmoid(broadcast(own[router.num_experts]))[0];
      }
    }
  });
}

}  // namespace

// rows [num_rows, size] are bf16 or fp32; weight [outputs / 8, size / 16, 8, 16], padded with zeros;
// bias [num_outputs]; experts and weights [num_rows, experts_per_token]. The last output is the gate of
// the shared expert where there are more of them than experts: shared_weights [num_rows] then.
extern "C" void sglp_route(int is_bf16, int64_t num_rows, int64_t size, int num_experts,
                           int num_outputs, int experts_per_token, int normalized,
                           const void* rows, const float* weight, const float* bias,
                           int64_t* experts, float* weights, float* shared_weights,
                           int num_threads) {
  const Router router{size,   num_experts, num_outputs, experts_per_token, normalized != 0,
                      weight, bias};
  if (is_bf16)
    route(router, num_rows, static_cast<const BFloat16*>(rows), experts, weights, shared_weights,
          num_threads);
  else
    route(router, num_rows, static_cast<const float*>(rows), experts, weights, shared_weights,
          num_threads);
}
