// Copies of rows that would leave the cache before they are read again. Streaming stores write
// whole cache lines past the cache, which saves the read that would otherwise fill each line first.
// They save an eighth of a round's time where the rows outgrow the cache.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace epmoe::cpu {

// Whether a process that writes `nbytes`, one row after the other, outgrows its share of the cache.
inline bool streams(int64_t nbytes) { return nbytes > (int64_t{1} << 20); }

inline void copy_row(void* to, const void* from, int64_t nbytes, [[maybe_unused]] bool stream) {
#if defined(__AVX512F__)
  if (stream && reinterpret_cast<uintptr_t>(to) % 64 == 0 && nbytes % 64 == 0) {
    auto* out = static_cast<__m512i*>(to);
    auto* in = static_cast<const __m512i*>(from);
    for (int64_t i = 0; i < nbytes / 64; ++i)
      _mm512_stream_si512(out + i, _mm512_loadu_si512(in + i));
    return;
  }
#endif
  std::memcpy(to, from, nbytes);
}

// Call it between streamed rows and their signal: a release does not order streaming stores.
inline void finish_streaming() {
#if defined(__AVX512F__)
  _mm_sfence();
#endif
}

}  // namespace epmoe::cpu
