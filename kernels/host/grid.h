// A grid on CPU threads: how the host executes a kernel text. Block b of a launch runs on thread b.
// All blocks run at the same time, so a block may wait for another one (a GPU promises that only
// for the blocks that fit on it). This executor cannot show warps, shared-memory banks, PTX scopes
// narrower than the process, PDL, NVLink ordering and latency. On x86 only the thread sanitizer
// shows a missing acquire.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "../include/moe_nvlink/platform.h"
#include "barrier.h"

namespace moe_nvlink::host {

class Grid {
 public:
  explicit Grid(int num_blocks) : num_blocks_(num_blocks < 1 ? 1 : num_blocks) {
    for (int block = 0; block < num_blocks_; ++block) {
      barriers_.push_back(std::make_unique<Barrier>(Cta::num_threads));
    }
    for (int warp = 0; warp * Cta::kWarpThreads < num_workers(); ++warp) {
      warp_barriers_.push_back(std::make_unique<Barrier>(Cta::kWarpThreads));
    }
    for (int worker = 1; worker < num_workers(); ++worker) {
      workers_.emplace_back([this, worker] { work(worker); });
    }
  }

  ~Grid() {
    stopping_ = true;
    start_.fetch_add(1, std::memory_order_release);
    start_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }

  Grid(const Grid&) = delete;
  Grid& operator=(const Grid&) = delete;

  // Runs body(cta, shared) in every thread of every block; returns when all are done. The caller's
  // thread is the grid's first, so a grid of one thread costs no hand-over.
  template <class Shared, class Body>
  void run(const Body& body) {
    std::vector<Shared> shared(static_cast<size_t>(num_blocks_));
    launch([&](int worker) {
      const int block = worker / Cta::num_threads;
      body(Cta{block, num_blocks_, worker % Cta::num_threads, barriers_[block].get(),
               warp_barriers_[worker / Cta::kWarpThreads].get()},
           shared[block]);
    });
  }

 private:
  int num_workers() const { return num_blocks_ * Cta::num_threads; }

  void launch(const std::function<void(int)>& job) {
    given_up_.store(false, std::memory_order_relaxed);
    GivenUp* const outer = given_up;  // of a launch in whose wait a signal's handler launches
    given_up = &given_up_;
    has_launched = true;
    run_all(job);
    given_up = outer;
  }

  void run_all(const std::function<void(int)>& job) {
    if (num_workers() == 1) return job(0);
    job_ = &job;
    running_.store(num_workers() - 1, std::memory_order_relaxed);
    start_.fetch_add(1, std::memory_order_release);
    start_.notify_all();
    job(0);
    for (int left = running_.load(std::memory_order_acquire); left != 0;
         left = running_.load(std::memory_order_acquire)) {
      // Not for ever: if the other workers wait for peers, only this one can serve signals.
      sleep_while_equal(&running_, left, kSignalsNs);
      serve();
    }
  }

  void work(int worker) {
    for (unsigned seen = 0;; ++seen) {
      start_.wait(seen, std::memory_order_acquire);
      if (stopping_) return;
      given_up = &given_up_;
      (*job_)(worker);
      if (running_.fetch_sub(1, std::memory_order_acq_rel) == 1) wake_one(&running_);
    }
  }

  const int num_blocks_;
  std::vector<std::unique_ptr<Barrier>> barriers_;
  std::vector<std::unique_ptr<Barrier>> warp_barriers_;
  std::vector<std::thread> workers_;
  std::atomic<unsigned> start_{0};
  std::atomic<int> running_{0};
  GivenUp given_up_{false};
  const std::function<void(int)>* job_ = nullptr;
  bool stopping_ = false;
};

}  // namespace moe_nvlink::host
