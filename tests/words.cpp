// Two threads pass parts through one staging, as ranks do in moves of experts: a part is there when
// its word is, and is overwritten only once it has been copied. Prints how many were wrong.
#include "cpu/words.h"

#include <cstdio>
#include <thread>

using epmoe::cpu::post_word;
using epmoe::cpu::read_word;

constexpr int kParts = 20'000, kInts = 100;
int64_t staging[kInts];
alignas(64) int64_t pushed;
alignas(64) int64_t copied;

void await(int64_t& word, int64_t value) {
  while (read_word(&word) < value) std::this_thread::yield();
}

int main() {
  std::thread source([] {
    for (int64_t n = 1; n <= kParts; ++n) {
      await(copied, n - 1);
      for (int64_t& part : staging) part = n;
      post_word(&pushed, n);
    }
  });
  int wrong = 0;
  for (int64_t n = 1; n <= kParts; ++n) {
    await(pushed, n);
    for (int64_t part : staging) wrong += part != n;
    post_word(&copied, n);
  }
  source.join();
  std::printf("%d\n", wrong);
}
