#include "comm/slot_ring.h"

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace tpkernels {
#if defined(__x86_64__)
namespace {

// Above this, the peers that read the line are far. Near ones cost 2 to 7.
constexpr double kFarNanosecondsPerLine = 10;
// So many writes are streamed before one tries the caches again: twice as many each time that it
// finds them slow, so that a write that was slow for another reason (a new page, another process on
// this core) costs little, and trying costs far ranks little.
constexpr int kFirstBurst = 4, kLongestBurst = 256;
// Less is not timed: two looks at the clock take 50 ns, and a line of noise weighs much.
constexpr int64_t kLeastTimed = 4096;

void stream(std::byte* out, const void* in, int64_t bytes) {
  const char* const from = static_cast<const char*>(in);
  const int64_t whole = bytes / kLine * kLine;
  for (int64_t at = 0; at < whole; at += kLine) {
    __m128i line[kLine / sizeof(__m128i)];
    std::memcpy(line, from + at, sizeof line);
    __m128i* const to = reinterpret_cast<__m128i*>(out + at);
    for (size_t part = 0; part < kLine / sizeof(__m128i); ++part) {
      _mm_stream_si128(to + part, line[part]);
    }
  }
  copy_bytes(out + whole, from + whole, bytes - whole);
  // RAW: what publish() releases does not include streamed stores.
  _mm_sfence();
}

}  // namespace
#endif

void SlotRing::write_large(std::byte* out, const void* in, int64_t bytes) {
#if defined(__x86_64__)
  auto& streaming = operation_.streaming();
  if (streaming.writes > 0) {
    --streaming.writes;
    return stream(out, in, bytes);
  }
  if (bytes >= kLeastTimed) {
    const auto began = Clock::now();
    copy_bytes(out, in, bytes);
    const double nanoseconds = Seconds(Clock::now() - began).count() * 1e9;
    const bool far = nanoseconds > kFarNanosecondsPerLine * static_cast<double>(bytes / kLine);
    streaming.burst = far ? std::clamp(2 * streaming.burst, kFirstBurst, kLongestBurst) : 0;
    streaming.writes = streaming.burst;
    return;
  }
#endif
  copy_bytes(out, in, bytes);
}

}  // namespace tpkernels
