// Words between processes outside of the rounds, 8 bytes each: who sees a word sees what its writer
// stored before it, and overwrites nothing that its writer had yet to read.
#pragma once
#include <errno.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

namespace epmoe::cpu {

inline void post_word(int64_t* word, int64_t value) {
  std::atomic_ref(*word).store(value, std::memory_order_release);
}

inline int64_t read_word(int64_t* word) {
  return std::atomic_ref(*word).load(std::memory_order_acquire);
}

// The words of a lobby (epmoe/exchange/lobby.py): a futex, then one of each seat. A rank says that
// it comes to a round by 2 * round, or by 2 * round + 1 if it brings tokens.
struct alignas(64) LobbyWord {
  int64_t value;
};
constexpr int64_t kNobody = -1;  // of a seat in which nobody sits
constexpr int64_t kLeft = -2;    // of a rank that has left the group

inline uint32_t* doorbell_of(LobbyWord* words) { return reinterpret_cast<uint32_t*>(words); }

inline void come(LobbyWord* words, int64_t seat, int64_t value) {
  post_word(&words[1 + seat].value, value);
  std::atomic_ref(*doorbell_of(words)).fetch_add(1, std::memory_order_release);
  syscall(SYS_futex, doorbell_of(words), FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}

enum class Lobby { kWaits, kHasBegun, kCannotBegin };

// A round has begun once a rank brings tokens to it, or has come to a later one, or all have come.
// It cannot begin once a rank has left.
inline Lobby look(LobbyWord* words, int64_t seats, int64_t round) {
  bool all_are_here = true;
  bool has_left = false;
  for (int64_t seat = 0; seat < seats; ++seat) {
    int64_t value = read_word(&words[1 + seat].value);
    if (value > 2 * round) return Lobby::kHasBegun;
    has_left |= value == kLeft;
    if (value != kNobody && value < 2 * round) all_are_here = false;
  }
  if (has_left) return Lobby::kCannotBegin;
  return all_are_here ? Lobby::kHasBegun : Lobby::kWaits;
}

// Whether a round has begun, or does within `longest_ns`. A signal ends the wait, as a rank that
// leaves does. It looks some times, then yields, then sleeps.
inline bool await_round(LobbyWord* words, int64_t seats, int64_t round, int64_t longest_ns) {
  constexpr int kLooks = 64;
  constexpr int kYields = 16;
  for (int looks = 0;; ++looks) {
    uint32_t before = std::atomic_ref(*doorbell_of(words)).load(std::memory_order_acquire);
    Lobby found = look(words, seats, round);
    if (found != Lobby::kWaits || !longest_ns) return found == Lobby::kHasBegun;
    if (looks < kLooks) continue;
    if (looks < kLooks + kYields) {
      sched_yield();
      continue;
    }
    timespec longest{longest_ns / 1'000'000'000, longest_ns % 1'000'000'000};
    auto woken = syscall(SYS_futex, doorbell_of(words), FUTEX_WAIT, before, &longest, nullptr, 0);
    if (woken != 0 && errno != EAGAIN) return look(words, seats, round) == Lobby::kHasBegun;
  }
}

}  // namespace epmoe::cpu
