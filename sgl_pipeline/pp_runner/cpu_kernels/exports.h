// The functions that Python calls, as this directory's sources define them.
//
// signatures.py reads this file and makes the calls from it: of a parameter it takes the name and
// the type, and whether the pointer may be null (SGLP_OR_NULL). The sources include it, so that the
// compiler holds their definitions to it; recorded_calls.cpp does too, which calls the kernels.

#pragma once

#include <cstdint>

#define SGLP_OR_NULL

extern "C" {

// What this build and machine have, and where threads run. No profile shows these calls.
int sglp_has_arithmetic(int arithmetic);
int sglp_best_bf16_arithmetic();
int sglp_has_products();
int sglp_has_bf16_instructions();
int sglp_has_int8_products();
int sglp_most_int4_tiles();
int sglp_most_expanded_tiles();
int sglp_bind_threads(int num_threads, int num_cores, const int* cores);

// Recorded calls.
int sglp_kernel_number(const void* name);
void sglp_run_calls(int64_t num_calls, const int32_t* numbers, const int64_t* begins,
                    const int64_t* words, int num_threads);

// The kernels that a step calls: each has num_rows or num_chunks, the length of the step.
void sglp_paged_attention(int arithmetic, const void* query, int64_t query_row_stride,
                          const void* key_pages, const void* value_pages, void* out,
                          const int32_t* query_indptr, const int32_t* page_indptr,
                          const int32_t* page_indices, const int32_t* kv_lengths, int num_chunks,
                          int page_size, int num_query_heads, int num_kv_heads, int head_dim,
                          int value_dim, float scale, int window, float softcap,
                          const float* SGLP_OR_NULL sinks, int kv_format, int num_threads);
void sglp_rms_norm(int is_bf16, int64_t num_rows, int size, const void* rows,
                   const void* SGLP_OR_NULL added, const void* weight, float weight_offset,
                   float epsilon, void* SGLP_OR_NULL sums, void* normed, int num_threads);
void sglp_add(int is_bf16, int64_t num_rows, int size, const void* rows, const void* added,
              void* sums, int num_threads);
void sglp_place_heads(int is_bf16, int64_t num_rows, int num_query_heads, int num_kv_heads,
                      int head_dim, int rotated_dims, int interleaved, int kv_format,
                      const void* qkv, const void* SGLP_OR_NULL query_norm,
                      const void* SGLP_OR_NULL key_norm, float weight_offset, float epsilon,
                      const float* cosine, const float* sine, const int64_t* slots, void* query,
                      void* key_pages, void* value_pages, int num_threads);
void sglp_gate(int is_bf16, int64_t num_rows, int size, const void* gate_up, void* gated,
               int num_threads);
void sglp_clamped_gate(int is_bf16, int64_t num_rows, int size, float alpha, float limit,
                       const void* gate_up, void* gated, int num_threads);
void sglp_output_gate(int is_bf16, int64_t num_rows, int size, const void* rows, const void* gate,
                      void* gated, int num_threads);
void sglp_reorder(int64_t num_rows, int size, const void* rows, const int64_t* order,
                  void* reordered, int num_threads);
void sglp_route(int is_bf16, int64_t num_rows, int64_t size, int num_experts, int num_outputs,
                int experts_per_token, int normalized, const void* rows, const float* weight,
                const float* SGLP_OR_NULL bias, int64_t* experts, float* weights,
                float* shared_weights, int num_threads);
void sglp_gated_delta(int is_bf16, const int32_t* run_indptr, int num_chunks,
                      const int32_t* row_indptr, int num_key_heads, int num_value_heads,
                      int key_dim, int value_dim, int conv_width, const int64_t* read_slots,
                      const int64_t* write_slots, const void* starts_anew, const void* qkv,
                      const void* z, const void* b, const void* a, const void* conv,
                      const float* a_log, const float* dt_bias, const void* norm, float epsilon,
                      float* recurrent_states, void* conv_states, void* out, int num_threads);
void sglp_product(int64_t num_rows, int64_t inputs, int64_t outputs, int gated, const void* rows,
                  const void* weight, const void* SGLP_OR_NULL bias, void* out, int num_threads);
void sglp_int8_product(int64_t num_rows, int64_t inputs, int64_t outputs, int gated,
                       const void* rows, const void* weight, const void* scales,
                       const void* corrections, const void* SGLP_OR_NULL bias, void* out,
                       int num_threads);
void sglp_int4_product(int64_t num_rows, int64_t inputs, int64_t outputs, int gated,
                       int64_t group_steps, const void* rows, const void* weight,
                       const void* scales, const void* zeros, const void* SGLP_OR_NULL bias,
                       void* out, int num_threads);
void sglp_mxfp4_product(int64_t num_rows, int64_t inputs, int64_t outputs, int gated,
                        const void* rows, const void* weight, const void* exponents,
                        const void* SGLP_OR_NULL bias, void* out, int num_threads);
void sglp_expanded_product(int is_fp8, int64_t num_rows, int64_t inputs, int64_t outputs,
                           int gated, int64_t group_tiles, int64_t row_group_tiles,
                           const void* rows, const void* weight, const void* scales,
                           const void* SGLP_OR_NULL zeros, const void* SGLP_OR_NULL bias,
                           void* out, int num_threads);
}
