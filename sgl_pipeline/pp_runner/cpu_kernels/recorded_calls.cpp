// Runs kernels one after the other, as they were called before, on one team of threads.
//
// Between two kernels the threads wait for each other and do nothing else: no team ends, and no
// Python runs.

#include <cstring>
#include <type_traits>
#include <utility>

#include "exports.h"
#include "team.h"

namespace {

// A recorded argument: a number or a pointer, in eight bytes.
template <typename T>
T argument(int64_t word) {
  if constexpr (std::is_pointer_v<T>) {
    return reinterpret_cast<T>(word);
  } else if constexpr (std::is_same_v<T, float>) {
    float number;
    std::memcpy(&number, &word, sizeof(number));  // the lower half
    return number;
  } else {
    return static_cast<T>(word);
  }
}

template <auto kKernel, typename... Arguments, std::size_t... kPlaces>
void call(const int64_t* words, std::index_sequence<kPlaces...>) {
  kKernel(argument<Arguments>(words[kPlaces])...);
}

template <auto kKernel, typename = decltype(kKernel)>
struct Recorded;

template <auto kKernel, typename... Arguments>
struct Recorded<kKernel, void (*)(Arguments...)> {
  static void run(const int64_t* words) {
    call<kKernel, Arguments...>(words, std::index_sequence_for<Arguments...>{});
  }
};

struct Kernel {
  const char* name;
  void (*run)(const int64_t* words);
};

constexpr Kernel kKernels[] = {
    {"paged_attention", Recorded<sglp_paged_attention>::run},
    {"rms_norm", Recorded<sglp_rms_norm>::run},
    {"add", Recorded<sglp_add>::run},
    {"place_heads", Recorded<sglp_place_heads>::run},
    {"gate", Recorded<sglp_gate>::run},
    {"clamped_gate", Recorded<sglp_clamped_gate>::run},
    {"output_gate", Recorded<sglp_output_gate>::run},
    {"reorder", Recorded<sglp_reorder>::run},
    {"route", Recorded<sglp_route>::run},
    {"gated_delta", Recorded<sglp_gated_delta>::run},
    {"product", Recorded<sglp_product>::run},
    {"int8_product", Recorded<sglp_int8_product>::run},
    {"int4_product", Recorded<sglp_int4_product>::run},
    {"mxfp4_product", Recorded<sglp_mxfp4_product>::run},
    {"expanded_product", Recorded<sglp_expanded_product>::run},
};

}  // namespace

// The number of a kernel in recorded calls, by its name without the prefix; -1: there is none.
extern "C" int sglp_kernel_number(const void* name) {
  int number = 0;
  for (const Kernel& kernel : kKernels) {
    if (std::strcmp(kernel.name, static_cast<const char*>(name)) == 0) return number;
    ++number;
  }
  return -1;
}

// Call i is that of kernel numbers[i], with the words from begins[i] on as arguments.
extern "C" void sglp_run_calls(int64_t num_calls, const int32_t* numbers, const int64_t* begins,
                               const int64_t* words, int num_threads) {
  in_team(num_threads, [&] {
    for (int64_t i = 0; i < num_calls; ++i) kKernels[numbers[i]].run(words + begins[i]);
  });
}
