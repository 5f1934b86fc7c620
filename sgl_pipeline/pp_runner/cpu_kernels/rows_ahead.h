// Keys or values that lone rows of queries read soon, asked for in the order of memory.
//
// Used by attention by tiles. Knows nothing of what is computed with them.

#pragma once

#include <algorithm>
#include <cstdint>

#include "attention_step.h"

namespace {

// How far ahead of what is read tokens are asked for.
constexpr int kTokensAhead = 64;

// An item's keys or values from token kTokensAhead on, for all of its heads, then the first ones of
// the item after it. A token's heads lie side by side, and tokens of a page too: as the L2 cache
// reads on by itself in such an order, this is faster than asking head by head. One thread's.
class RowsAhead {
 public:
  // Of `pages` of numbers, with rows of `row_bytes` for each head. `following`: the item that this
  // thread is likely to compute next (null: none).
  void start(const Step& step, const void* pages, int64_t row_bytes, const WorkItem& item,
             const WorkItem* following) {
    step_ = &step;
    numbers_ = static_cast<const char*>(pages);
    row_bytes_ = row_bytes;
    token_bytes_ = step.num_kv_heads * row_bytes;
    following_ = following;
    take(item, item.first_key(step) + kTokensAhead, item.end_key(step));
  }

  // Asks for four lines, as far as the L2 cache. Calls are to be spread over the work: requests that
  // come at once do not all get there.
  void ask() {
    for (int line = 0; line < 4; ++line, byte_ += kLineBytes) {
      if (byte_ >= heads_bytes_ && !next_token()) return;
      __builtin_prefetch(token_ + byte_, 0, 2);
    }
  }

 private:
  static constexpr int kLineBytes = 64;

  void take(const WorkItem& item, int first_key, int end_key) {
    heads_ = numbers_ + item.head * row_bytes_;
    heads_bytes_ = item.num_heads * row_bytes_;
    tokens_left_ = end_key - first_key;
    pages_ = step_->page_indices + step_->page_indptr[item.chunk];
    next_key_ = first_key;
    byte_ = heads_bytes_;
  }

  bool next_token() {
    if (tokens_left_ <= 0 && following_ != nullptr) {
      const WorkItem& item = *following_;
      const int first = item.first_key(*step_);
      following_ = nullptr;
      take(item, first, std::min(first + kTokensAhead, item.end_key(*step_)));
    }
    if (tokens_left_ <= 0) return false;
    --tokens_left_;
    const int page = next_key_ / step_->page_size, place = next_key_ % step_->page_size;
    ++next_key_;
    token_ = heads_ + (int64_t{pages_[page]} * step_->page_size + place) * token_bytes_;
    byte_ = 0;
    return true;
  }

  const Step* step_;
  const char* numbers_;  // the pages'
  int64_t row_bytes_;    // of a head
  const char* heads_;    // the item's, of the first token in the pages
  int64_t token_bytes_;
  int64_t heads_bytes_;
  const WorkItem* following_;
  const int32_t* pages_;
  int next_key_;
  int tokens_left_;
  const char* token_;
  int64_t byte_;  // of the token's heads, the next that is asked for
};

}  // namespace
