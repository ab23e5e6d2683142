// Threads that work on one job together, and that a busy neighbour cannot hold up for long.
//
// A job is a function that every thread runs once and that takes pieces of work from a counter until none is left. The
// thread that brings the job begins at once; helpers join if they come in time, and only those that joined are waited
// for. So a helper whose core is taken costs the piece it holds, not half the job. Helpers spin for a moment between
// jobs, since a step brings a hundred of them, then sleep.
//
// While helpers cost more time than they save, jobs go without them; from time to time they are tried again.
#pragma once

#include <stdint.h>

// Runs task(context, worker) on this thread as worker 0, and on up to threads - 1 helpers as workers from 1 on. Without
// helpers while another thread's job runs. The task must not throw.
void run_team(int threads, void (*task)(void* context, int worker), void* context);

// Waits in a task until *count, which other workers raise, has reached `target`.
void wait_for(const int64_t* count, int64_t target, int worker);

template <typename Body>
static inline void team(int threads, const Body& body) {
  if (threads <= 1) {
    body(0);
    return;
  }
  run_team(
      threads, [](void* context, int worker) { (*static_cast<const Body*>(context))(worker); },
      const_cast<void*>(static_cast<const void*>(&body)));
}

constexpr int64_t kMaxShares = 64;

// Pieces of work in shares, one for each worker: it takes its own first, which is what it had in the job before and has
// in its cache, and then what others have left.
struct Shares {
  int64_t next[kMaxShares], end[kMaxShares], count;
};

// `count` shares, kMaxShares at most; begin(s): the first piece of share s, and of share `count` the end of all.
template <typename Begin>
static inline Shares shares_of(int64_t count, const Begin& begin) {
  Shares shares;
  shares.count = count;
  for (int64_t s = 0; s < count; ++s) {
    shares.next[s] = begin(s);
    shares.end[s] = begin(s + 1);
  }
  return shares;
}

// Up to `step` pieces of a share. turn: 0 at first; of the worker who takes. Returns the first, or -1 when none is
// left.
static inline int64_t take(Shares& shares, int worker, int64_t step, int64_t& turn, int64_t& end) {
  for (; turn < shares.count; ++turn) {
    const int64_t share = (worker + turn) % shares.count;
    const int64_t first = __atomic_fetch_add(&shares.next[share], step, __ATOMIC_RELAXED);
    if (first >= shares.end[share]) continue;
    end = first + step < shares.end[share] ? first + step : shares.end[share];
    return first;
  }
  return -1;
}

// Even shares of `count` pieces for `threads`.
static inline Shares even_shares(int threads, int64_t count) {
  const int64_t shares = threads < kMaxShares ? threads : kMaxShares;
  return shares_of(shares, [&](int64_t s) { return count * s / shares; });
}

// body(i) for each i below `count`; threads take `step` of them at a time, from their shares.
template <typename Body>
static inline void team_for(int threads, int64_t count, int64_t step, const Body& body) {
  if (count <= step) threads = 1;
  Shares shares = even_shares(threads, count);
  team(threads, [&](int worker) {
    int64_t turn = 0, end;
    for (int64_t i; (i = take(shares, worker, step, turn, end)) >= 0;)
      for (; i < end; ++i) body(i);
  });
}
