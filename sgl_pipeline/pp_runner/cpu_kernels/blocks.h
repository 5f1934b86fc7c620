// Blocks of packed weights, and the memory that products keep.
//
// Included by the products of every instruction set. Knows nothing of numbers or arithmetic.

#pragma once

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

namespace {

typedef unsigned char Byte;

constexpr int kBlock = 16;              // outputs of a block
constexpr int kLine = 64;               // bytes
constexpr int64_t kHugePage = 2 << 20;  // bytes

inline int64_t tiles_of(int64_t size, int64_t tile) { return (size + tile - 1) / tile; }

// Memory that keeps its size from call to call, aligned as tiles want it. A large one has huge pages:
// small ones lie anywhere, and share the sets of the L2 cache unequally.
class Workspace {
 public:
  template <typename T>
  T* at_least(int64_t bytes) {
    if (bytes > size_) grow(bytes);
    return static_cast<T*>(memory_.get());
  }

 private:
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };

  void grow(int64_t bytes) {
    const int64_t alignment = bytes > kHugePage / 4 ? kHugePage : kLine;
    const int64_t size = tiles_of(bytes, alignment) * alignment;
    memory_.reset();
    size_ = 0;
    memory_.reset(std::aligned_alloc(alignment, size));
    if (memory_ == nullptr) throw std::bad_alloc();
    size_ = size;
#if defined(__linux__)
    if (alignment == kHugePage) madvise(memory_.get(), size_, MADV_HUGEPAGE);
#endif
  }

  std::unique_ptr<void, Free> memory_;
  int64_t size_ = 0;
};

}  // namespace
