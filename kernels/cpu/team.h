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

// body(i) for each i below `count`; threads take `step` of them at a time.
template <typename Body>
static inline void team_for(int threads, int64_t count, int64_t step, const Body& body) {
  int64_t next = 0;
  team(count <= step ? 1 : threads, [&](int) {
    for (;;) {
      const int64_t first = __atomic_fetch_add(&next, step, __ATOMIC_RELAXED);
      if (first >= count) return;
      for (int64_t i = first; i < (first + step < count ? first + step : count); ++i) body(i);
    }
  });
}
