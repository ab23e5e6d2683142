#include "team.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <system_error>
#include <thread>

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;

// A helper waits this long for the next job before it sleeps: the gaps between a step's jobs are shorter.
constexpr auto kHelperSpin = microseconds(100);
// Whoever waits for a piece of work that another holds: longer than a piece takes, shorter than a time slice.
constexpr auto kJoinSpin = microseconds(60);

constexpr auto kWindow = microseconds(20'000);     // helpers are judged by what they did in such a time,
constexpr auto kTrial = microseconds(10'000);      // or in this, after a time without them: a few time slices
constexpr auto kEvidence = microseconds(500);      // work of them, at least, that a judgement needs
constexpr auto kShortestRest = microseconds(25'000);
constexpr auto kLongestRest = microseconds(400'000);

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Whether helpers pay: without them the bringer of a job would do their work as well, but would not wait for them.
class Judge {
 public:
  bool wants_helpers(Clock::time_point now) {
    if (!resting_) return true;
    if (now < rest_until_) return false;
    resting_ = false;
    begin(now, kTrial);
    return true;
  }

  // After a job with helpers: how long they worked on it, and how long the bringer waited for them.
  void note(Clock::time_point now, Clock::duration worked, Clock::duration waited) {
    worked_ += worked > waited ? worked - waited : Clock::duration::zero();
    waited_ += waited;
    if (now < window_end_ || worked_ + waited_ < kEvidence) return;
    if (waited_ * 2 > worked_) {
      rest_ = std::min<Clock::duration>(rest_ * 2, kLongestRest);
      resting_ = true;
      rest_until_ = now + rest_;
    } else {
      rest_ = kShortestRest / 2;
      begin(now, kWindow);
    }
  }

 private:
  void begin(Clock::time_point now, Clock::duration length) {
    worked_ = waited_ = Clock::duration::zero();
    window_end_ = now + length;
  }

  bool resting_ = false;
  Clock::time_point window_end_{}, rest_until_{};
  Clock::duration worked_{}, waited_{}, rest_ = kShortestRest / 2;
};

class Team {
 public:
  void run(int threads, void (*task)(void*, int), void* context) {
    const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
    if (!lock || !judge_.wants_helpers(Clock::now())) return task(context, 0);
    hire(threads - 1);
    task_ = task;
    context_ = context;
    limit_ = static_cast<uint32_t>(std::min(threads - 1, 255));
    left_.store(0, std::memory_order_relaxed);
    worked_.store(0, std::memory_order_relaxed);
    waited_ = Clock::duration::zero();
    state_.store(((state_.load(std::memory_order_relaxed) >> kJobShift) + 1) << kJobShift | kOpen);
    if (asleep_.load()) state_.notify_all();
    task(context, 0);
    const uint32_t joined = state_.fetch_and(~kOpen, std::memory_order_acq_rel) & kJoined;
    if (joined == 0) return;
    const auto all_left = [&] { return left_.load(std::memory_order_acquire) == joined; };
    waited_ += spin_then(all_left, [&] {
      for (uint32_t left; (left = left_.load(std::memory_order_acquire)) != joined;) left_.wait(left);
    });
    judge_.note(Clock::now(), Clock::duration(worked_.load(std::memory_order_relaxed)) / joined, waited_);
  }

  void wait_for_count(const int64_t* count, int64_t target, int worker) {
    const auto ready = [&] { return __atomic_load_n(count, __ATOMIC_ACQUIRE) >= target; };
    if (ready()) return;
    // A thread that sleeps leaves its core to the one it waits for.
    const Clock::duration waited = spin_then(ready, [&] {
      while (!ready()) std::this_thread::sleep_for(microseconds(20));
    });
    if (worker == 0) waited_ += waited;
  }

 private:
  // Of state_: how many joined the job, whether more may, and its number.
  static constexpr uint32_t kJoined = 0xff, kOpen = 0x100, kJobShift = 9;

  template <typename Ready, typename Sleep>
  static Clock::duration spin_then(const Ready& ready, const Sleep& sleep) {
    if (ready()) return {};
    const auto begin = Clock::now();
    while (!ready()) {
      for (int i = 0; i < 16 && !ready(); ++i) relax();
      if (Clock::now() - begin > kJoinSpin) sleep();
    }
    return Clock::now() - begin;
  }

  void hire(int helpers) {
    if (hired_ >= helpers) return;
    sigset_t all, before;
    sigfillset(&all);  // signals are for the threads that were there before
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
      for (; hired_ < helpers; ++hired_) std::thread([this] { help(); }).detach();
    } catch (const std::system_error&) {  // no more threads to be had: fewer do the work
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  [[noreturn]] void help() {
    uint32_t seen = 0;
    for (;;) {
      uint32_t state = next_job(seen);
      seen = state >> kJobShift;
      while ((state & kOpen) && state >> kJobShift == seen && (state & kJoined) < limit_) {
        if (!state_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel)) continue;
        const auto begin = Clock::now();
        task_(context_, static_cast<int>((state & kJoined) + 1));
        worked_.fetch_add((Clock::now() - begin).count(), std::memory_order_relaxed);
        left_.fetch_add(1, std::memory_order_release);
        left_.notify_one();
        break;
      }
    }
  }

  // The state once there is an open job other than `seen`.
  uint32_t next_job(uint32_t seen) {
    const auto fresh = [&](uint32_t state) { return (state & kOpen) && state >> kJobShift != seen; };
    const auto begin = Clock::now();
    for (;;) {
      uint32_t state = state_.load(std::memory_order_acquire);
      for (int i = 0; i < 16 && !fresh(state); ++i) {
        relax();
        state = state_.load(std::memory_order_acquire);
      }
      if (fresh(state)) return state;
      if (Clock::now() - begin < kHelperSpin) continue;
      asleep_.fetch_add(1);
      while (state = state_.load(), !fresh(state)) state_.wait(state);
      asleep_.fetch_sub(1);
      return state;
    }
  }

  std::mutex mutex_;
  int hired_ = 0;
  Judge judge_;
  void (*task_)(void*, int) = nullptr;
  void* context_ = nullptr;
  std::atomic<uint32_t> limit_{0};
  Clock::duration waited_{};
  alignas(64) std::atomic<uint32_t> state_{0};
  alignas(64) std::atomic<uint32_t> left_{0};
  std::atomic<int64_t> worked_{0};
  alignas(64) std::atomic<int> asleep_{0};
};

std::atomic<Team*> the_team{nullptr};

// Never destroyed: helpers sleep on it while the process ends. A forked child has none of its parent's threads.
Team& current_team() {
  if (Team* found = the_team.load(std::memory_order_acquire)) return *found;
  static std::once_flag once;
  std::call_once(once, [] { pthread_atfork(nullptr, nullptr, [] { the_team.store(nullptr); }); });
  Team *made = new Team, *none = nullptr;
  if (the_team.compare_exchange_strong(none, made)) return *made;
  delete made;
  return *none;
}

}  // namespace

void run_team(int threads, void (*task)(void*, int), void* context) { current_team().run(threads, task, context); }

void wait_for(const int64_t* count, int64_t target, int worker) {
  current_team().wait_for_count(count, target, worker);
}
