// Multiply-adds a second that the cores reach with nothing else to do: `peak THREADS` prints, in 1e9 a second, float32
// and then int8 ones (0 where the CPU has no VNNI). Registers only: what no kernel can exceed.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#if defined(__AVX512F__)
#define REGISTER "v"
constexpr int kLanes = 16;
#else
#define REGISTER "x"
constexpr int kLanes = 8;
#endif

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef int Ints __attribute__((vector_size(kLanes * 4)));

constexpr int kSums = 12;  // enough to hide the latency of two units
constexpr long kRounds = 20'000'000;

static void float_rounds() {
  Vec sums[kSums] = {}, a = {}, b = {};
  for (long i = 0; i < kRounds; ++i)
#pragma GCC unroll 12
    for (int j = 0; j < kSums; ++j)
      asm volatile("vfmadd231ps %2, %1, %0" : "+" REGISTER(sums[j]) : REGISTER(a), REGISTER(b));
}

static void int8_rounds() {
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
  Ints sums[kSums] = {}, a = {}, b = {};
  for (long i = 0; i < kRounds; ++i)
#pragma GCC unroll 12
    for (int j = 0; j < kSums; ++j)
#if defined(__AVX512VNNI__)
      asm volatile("vpdpbusd %2, %1, %0" : "+v"(sums[j]) : "v"(a), "v"(b));
#else
      asm volatile("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sums[j]) : "x"(a), "x"(b));
#endif
#endif
}

static double rate(int threads, void (*work)(), double macs_a_lane) {
  double best = 1e9;
  for (int repeat = 0; repeat < 5; ++repeat) {
    std::atomic<int> ready{0};
    std::vector<std::thread> team;
    const auto run = [&] {
      for (++ready; ready < threads;) {
      }
      work();
    };
    for (int i = 1; i < threads; ++i) team.emplace_back(run);
    const auto begin = std::chrono::steady_clock::now();
    run();
    for (auto& thread : team) thread.join();
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    best = seconds < best ? seconds : best;
  }
  return threads * macs_a_lane * kLanes * kSums * kRounds / best / 1e9;
}

int main(int, char** arguments) {
  const int threads = std::atoi(arguments[1]);
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
  const double int8 = rate(threads, int8_rounds, 4);
#else
  const double int8 = 0;
#endif
  std::printf("%.1f %.1f\n", rate(threads, float_rounds, 1), int8);
}
