// The kernels that a step calls, as they are defined in this directory's sources.
//
// Included by each of them, so that the compiler holds the definitions to it, and by
// recorded_calls.cpp, which calls them all.

#pragma once

#include <cstdint>

extern "C" {

void sglp_paged_attention(int arithmetic, const void* query, int64_t query_row_stride,
                          const void* key_pages, const void* value_pages, void* out,
                          const int32_t* query_indptr, const int32_t* page_indptr,
                          const int32_t* page_indices, const int32_t* kv_lengths, int num_chunks,
                          int page_size, int num_query_heads, int num_kv_heads, int head_dim,
                          float scale, int kv_format, int num_threads);
void sglp_rms_norm(int is_bf16, int64_t num_rows, int size, const void* rows, const void* added,
                   const void* weight, float epsilon, void* sums, void* normed, int num_threads);
void sglp_add(int is_bf16, int64_t num_rows, int size, const void* rows, const void* added,
              void* sums, int num_threads);
void sglp_place_heads(int is_bf16, int64_t num_rows, int num_query_heads, int num_kv_heads,
                      int head_dim, int rotated_dims, int interleaved, int kv_format,
                      const void* qkv, const void* query_norm, const void* key_norm, float epsilon,
                      const float* cosine, const float* sine, const int64_t* slots, void* query,
                      void* key_pages, void* value_pages, int num_threads);
void sglp_gate(int is_bf16, int64_t num_rows, int size, const void* gate_up, void* gated,
               int num_threads);
void sglp_reorder(int64_t num_rows, int size, const void* rows, const int64_t* order,
                  void* reordered, int num_threads);
void sglp_product(int64_t num_rows, int64_t inputs, int64_t outputs, int gated, const void* rows,
                  const void* weight, const void* bias, void* out, int num_threads);
void sglp_int8_product(int64_t num_rows, int64_t inputs, int64_t outputs, int gated,
                       const void* rows, const void* weight, const void* scales,
                       const void* corrections, const void* bias, void* out, int num_threads);
void sglp_int4_product(int64_t num_rows, int64_t inputs, int64_t outputs, int gated,
                       int64_t group_steps, const void* rows, const void* weight,
                       const void* scales, const void* zeros, const void* bias, void* out,
                       int num_threads);
void sglp_expanded_product(int is_fp8, int64_t num_rows, int64_t inputs, int64_t outputs,
                           int gated, int64_t group_tiles, int64_t row_group_tiles,
                           const void* rows, const void* weight, const void* scales,
                           const void* zeros, const void* bias, void* out, int num_threads);
}
