// Paged causal attention on CPU cores: one call for a step of prefills and decodes, fp32 or bf16.
//
// Called from cpu_attention.py through ctypes; knows nothing of torch. A row's result is bitwise
// the same whatever shares its tile, its microbatch or its thread, decoded, in one chunk or in
// many; another arithmetic gives other bits.
//
// Online softmax: Milakov and Gimelshein, arXiv 1805.02867, tiled as in FlashAttention-2,
// arXiv 2307.08691.

#include <cstdint>
#include <vector>

#include "attention_step.h"
#include "attention_tiles.h"
#include "attention_vectors.h"
#include "exports.h"
#include "team.h"

namespace {

// How to compute; `Arithmetic` of library.py.
enum Arithmetic { kFloat32Vectors, kBFloat16Vectors, kDotProducts, kAmx };

template <typename Kernel>
void attend_step(const Step& step, int num_threads, const void* query, const void* key_pages,
                 const void* value_pages, void* out) {
  using T = typename Kernel::Element;
  const Tensors<T> tensors{static_cast<const T*>(query), key_pages, value_pages,
                           static_cast<T*>(out)};
  const std::vector<WorkItem> items =
      split(step, num_threads, Kernel::kMostLanes, Kernel::kLeastLanes);
  const int num_items = static_cast<int>(items.size());
  const Kernel kernel(step, tensors);
  in_team(num_threads, [&] {
    typename Kernel::Scratch scratch(step, items);
#pragma omp for schedule(dynamic, 1)
    for (int i = 0; i < num_items; ++i) {
      const bool last = i + num_threads >= num_items;
      kernel.run(items[i], last ? nullptr : &items[i + num_threads], scratch);
    }
  });
}

}  // namespace

// Whether this build and machine have the arithmetic. The first call for AMX asks for the
// process's permission to use it.
extern "C" int sglp_has_arithmetic(int arithmetic) {
  switch (arithmetic) {
    case kFloat32Vectors:
    case kBFloat16Vectors:
      return true;
#if defined(SGLP_HAS_DOT_PRODUCTS)
    case kDotProducts:
      return true;
#endif
#if defined(SGLP_HAS_AMX)
    case kAmx:
      return amx_permitted();
#endif
    default:
      return false;
  }
}

// The fastest arithmetic for bf16. Dot products are no faster than fp32 on Intel's cores. On Zen 4
// prompts take 0.4 of the time of fp32, and decodes, which wait for memory, as long.
extern "C" int sglp_best_bf16_arithmetic() {
#if defined(SGLP_HAS_DOT_PRODUCTS)
  if (sglp_has_arithmetic(kAmx)) return kAmx;
  if (__builtin_cpu_is("amd")) return kDotProducts;
#endif
  return kBFloat16Vectors;
}

// query [T, Hq, D] and out [T, Hq, Dv] of the arithmetic's type, which sglp_has_arithmetic has
// confirmed; pages [N, S, Hkv, D] and [N, S, Hkv, Dv] of the same, or with rows of codes.
// Contiguous, except for the rows of query, which lie query_row_stride elements apart. A row sees
// `window` keys at most, its own the last (0: all up to its own); softcap 0: none; sinks [Hq] or
// null. Of a chunk's pages those that none of its rows sees are not read.
extern "C" void sglp_paged_attention(int arithmetic, const void* query, int64_t query_row_stride,
                                     const void* key_pages, const void* value_pages, void* out,
                                     const int32_t* query_indptr, const int32_t* page_indptr,
                                     const int32_t* page_indices, const int32_t* kv_lengths,
                                     int num_chunks, int page_size, int num_query_heads,
                                     int num_kv_heads, int head_dim, int value_dim, float scale,
                                     int window, float softcap, const float* sinks, int kv_format,
                                     int num_threads) {
  const Step step{query_indptr,
                  page_indptr,
                  page_indices,
                  kv_lengths,
                  query_row_stride,
                  num_chunks,
                  page_size,
                  num_query_heads,
                  num_kv_heads,
                  head_dim,
                  value_dim,
                  scale,
                  window == 0 ? kNoWindow : window,
                  softcap,
                  sinks,
                  static_cast<KvFormat>(kv_format)};
  auto attend = attend_step<VectorAttention<float>>;
  if (arithmetic == kBFloat16Vectors) attend = attend_step<VectorAttention<BFloat16>>;
#if defined(SGLP_HAS_DOT_PRODUCTS)
  if (arithmetic == kDotProducts) attend = attend_step<TileAttention<DotProducts>>;
#endif
#if defined(SGLP_HAS_AMX)
  if (arithmetic == kAmx) attend = attend_step<TileAttention<AmxProducts>>;
#endif
  attend(step, num_threads, query, key_pages, value_pages, out);
}
