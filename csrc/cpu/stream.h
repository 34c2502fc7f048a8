// Copies of rows that are not read again soon: stores that go around the cache spare the read that a cache line would
// otherwise be filled with.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace epmoe::cpu {

// Whether so many bytes leave a process's share of the cache anyway.
inline bool streams(int64_t nbytes) { return nbytes > (int64_t{2} << 20); }

inline void copy_row(char* to, const char* from, int64_t nbytes, bool stream) {
#if defined(__SSE2__)
  if (stream && reinterpret_cast<uintptr_t>(to) % 16 == 0 && nbytes % 16 == 0) {
    for (int64_t i = 0; i < nbytes; i += 16)
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + i), _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
    return;
  }
#endif
  std::memcpy(to, from, nbytes);
}

// Before another thread reads: streamed stores are not ordered by a release.
inline void finish_streaming() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

}  // namespace epmoe::cpu
