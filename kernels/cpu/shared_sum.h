// Sums and gathers over processes of one machine, through memory that all of them have mapped.
#pragma once

#include <string.h>
#include <time.h>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <atomic>
#include <optional>
#include <thread>

#include "checks.h"

namespace {

constexpr int64_t kSumLine = 64;                 // bytes; `LINE` in kernels/shared_sum.py
constexpr int64_t kSumBlock = 4096;              // elements that stay in the first cache while all terms are added
constexpr int64_t kSumLookNs[] = {1000, 32000};  // how long to look before sleeping, at least and at most

// The head of a rank's memory; all zero at first. number: of the last piece it has brought. sleepers: who sleeps until
// it brings the next. given_up: what it has brought is of no use. look_ns: how long it looks for others before it
// sleeps, which no other rank reads.
struct SumLine {
  std::atomic<uint32_t> number, sleepers, given_up;
  uint32_t look_ns;
};
static_assert(sizeof(SumLine) <= kSumLine && std::atomic<uint32_t>::is_always_lock_free);

int64_t nanoseconds() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000LL + t.tv_nsec;
}

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void sleep_while(std::atomic<uint32_t>& number, uint32_t seen, int64_t ns) {
#if defined(__linux__)
  const timespec limit{ns / 1000000000, ns % 1000000000};
  syscall(SYS_futex, &number, FUTEX_WAIT, seen, &limit, nullptr, 0);
#else
  std::this_thread::yield();
#endif
}

void bring(SumLine& mine, uint32_t number) {
  mine.number.store(number);
#if defined(__linux__)
  if (mine.sleepers.load()) syscall(SYS_futex, &mine.number, FUTEX_WAKE, 1 << 30, nullptr, nullptr, 0);
#endif
}

// Until the rank has brought piece `number`; false if it has not by then. To look again and again takes a core that the
// other may need, so a rank does it for longer where that has sufficed and for less where it has not.
bool wait_for(SumLine& other, uint32_t number, SumLine& mine, int64_t wait_ns) {
  const auto there = [&] { return static_cast<int32_t>(other.number.load(std::memory_order_acquire) - number) >= 0; };
  if (there()) return true;
  const int64_t start = nanoseconds();
  const int64_t look_ns = std::clamp<int64_t>(mine.look_ns, kSumLookNs[0], kSumLookNs[1]);
  do {
    for (int i = 0; i < 8; ++i) {
      if (there()) {
        mine.look_ns = static_cast<uint32_t>(2 * look_ns);
        return true;
      }
      relax();
    }
  } while (nanoseconds() - start < look_ns);
  mine.look_ns = static_cast<uint32_t>(look_ns / 2);
  while (!there()) {
    const int64_t left = wait_ns - (nanoseconds() - start);
    if (left <= 0) return false;
    other.sleepers.fetch_add(1);
    const uint32_t seen = other.number.load();
    if (static_cast<int32_t>(seen - number) < 0) sleep_while(other.number, seen, left);
    other.sleepers.fetch_sub(1);
  }
  return true;
}

// What all ranks have brought of a piece: a slot for each, `stride` numbers apart. late: a rank that has not come, or
// -1.
struct Brought {
  const float* terms;
  int64_t stride, late;
};

// memory: a SumLine for each rank, then two halves with a slot for each; pieces take the halves in turn. So a slot is
// written again only when all have read it: a rank brings piece n + 1 after it has read piece n. number: of this piece,
// one more than that before. With a late rank, after `wait` seconds, the call may be made again. reads: whether this
// rank makes something of what the others have brought. If not, one that has given up since, perhaps in the next step,
// is no concern of this one.
Brought bring_all(const Tensor& x, const Tensor& memory, int64_t rank, int64_t size, int64_t number, double wait,
                  bool reads) {
  check_float(x, "x");
  TORCH_CHECK_VALUE(x.is_contiguous(), "x must be contiguous");
  check_index(memory, "memory", at::kByte, 1);
  const int64_t slot = (memory.numel() - size * kSumLine) / (2 * size) / kSumLine * kSumLine / 4;
  const int64_t n = x.numel();
  TORCH_CHECK_VALUE(rank >= 0 && rank < size && n <= slot, "no memory for ", n, " numbers of rank ", rank, " of ",
                    size);
  char* const base = static_cast<char*>(memory.mutable_data_ptr());
  const auto line = [&](int64_t r) -> SumLine& { return *reinterpret_cast<SumLine*>(base + r * kSumLine); };
  const uint32_t piece = static_cast<uint32_t>(number);
  float* const half = reinterpret_cast<float*>(base + size * kSumLine) + (piece & 1) * size * slot;
  if (line(rank).number.load() != piece) {
    memcpy(half + rank * slot, x.const_data_ptr<float>(), 4 * n);
    bring(line(rank), piece);
  }
  for (int64_t r = 0; r < size; ++r) {
    if (r == rank) continue;
    if (!wait_for(line(r), piece, line(rank), static_cast<int64_t>(wait * 1e9))) return {half, slot, r};
    TORCH_CHECK(!reads || !line(r).given_up.load(), "rank ", r, " has given up");
  }
  return {half, slot, -1};
}

// x becomes the sum of all ranks' x, added in the order of ranks. Returns -1, or a late rank, and then x is as it was.
int64_t shared_sum(const Tensor& x, const Tensor& memory, int64_t rank, int64_t size, int64_t number, double wait) {
  const Brought all = bring_all(x, memory, rank, size, number, wait, true);
  if (all.late >= 0) return all.late;
  float* const out = x.mutable_data_ptr<float>();
  const int64_t n = x.numel();
  for (int64_t first = 0; first < n; first += kSumBlock) {
    const int64_t count = std::min(kSumBlock, n - first);
    memcpy(out + first, all.terms + first, 4 * count);
    for (int64_t r = 1; r < size; ++r) {
      const float* const term = all.terms + r * all.stride + first;
      for (int64_t i = 0; i < count; ++i) out[first + i] += term[i];
    }
  }
  return -1;
}

// out: [size, at least n], all ranks' x; none where a rank wants nothing of it. Returns as shared_sum does.
int64_t shared_gather(const Tensor& x, const Tensor& memory, int64_t rank, int64_t size, int64_t number, double wait,
                      const std::optional<Tensor>& out) {
  const int64_t n = x.numel();
  if (out) {
    check_float(*out, "out");
    TORCH_CHECK_VALUE(out->dim() == 2 && out->size(0) == size && out->size(1) >= n && out->stride(1) == 1,
                      "out must be [", size, ", ", n, "] with its rows in one piece, got shape ", out->sizes());
  }
  const Brought all = bring_all(x, memory, rank, size, number, wait, out.has_value());
  if (all.late >= 0 || !out) return all.late;
  for (int64_t r = 0; r < size; ++r)
    memcpy(out->mutable_data_ptr<float>() + r * out->stride(0), all.terms + r * all.stride, 4 * n);
  return -1;
}

}  // namespace
