// Words between processes outside of the rounds, 8 bytes each: who sees a word sees what its writer
// stored before it, and overwrites nothing that its writer had yet to read.
#pragma once
#include <atomic>
#include <cstdint>

namespace epmoe::cpu {

inline void post_word(int64_t* word, int64_t value) {
  std::atomic_ref(*word).store(value, std::memory_order_release);
}

inline int64_t read_word(int64_t* word) {
  return std::atomic_ref(*word).load(std::memory_order_acquire);
}

}  // namespace epmoe::cpu
