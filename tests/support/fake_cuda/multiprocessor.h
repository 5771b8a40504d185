// What an SM holds, by the rules of NVIDIA's cuda_occupancy.h (CUDA 13.0) for 9.0, 10.x and 12.0:
// registers are given to a warp 256 at a time, from the quarter of the SM that the warp is on.

struct Multiprocessor {
  int threads, ctas, shared_bytes;

  static Multiprocessor of(int major) {
    if (major == 12) return {1536, 24, 100 << 10};
    return {2048, 32, 228 << 10};
  }

  // CTAs of so many threads that it holds at once; 0 where not even one fits.
  int resident(const Kernel& kernel, int cta_threads, size_t dynamic_shared) const {
    if (cta_threads > most_threads(kernel)) return 0;
    const int warps = (cta_threads + 31) / 32;
    const size_t shared = rounded(kernel.shared_bytes + dynamic_shared + kReservedShared, 128);
    const int by_shared = static_cast<int>(static_cast<size_t>(shared_bytes) / shared);
    return std::min({ctas, threads / 32 / warps, warps_by_registers(kernel) / warps, by_shared});
  }

  // Of one CTA.
  static int most_threads(const Kernel& kernel) {
    return std::min({kernel.bound, 1024, warps_by_registers(kernel) * 32});
  }

 private:
  static size_t rounded(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

  static int warps_by_registers(const Kernel& kernel) {
    constexpr size_t kQuarters = 4, kRegisters = 65536;
    const size_t of_warp = rounded(static_cast<size_t>(std::max(kernel.registers, 1)) * 32, 256);
    return static_cast<int>(kRegisters / kQuarters / of_warp * kQuarters);
  }
};

// As many CTAs of a launch as the GPU holds at once.
uint32_t resident_ctas(const LaunchConfig& config, const Kernel& kernel, int num_sms,
                       const Multiprocessor& sm) {
  const unsigned threads = config.block[0] * config.block[1] * config.block[2];
  const int of_sm = sm.resident(kernel, static_cast<int>(threads), config.shared_bytes);
  return static_cast<uint32_t>(num_sms * of_sm);
}

// Whether a launch of this shape fits the GPU and the kernel.
Status check_shape(const LaunchConfig& config, const Kernel& kernel, int allowed_shared,
                   bool cooperative, int num_sms, const Multiprocessor& sm) {
  constexpr unsigned kBlock[] = {1024, 1024, 64}, kGrid[] = {0x7fffffff, 65535, 65535};
  uint64_t threads = 1, ctas = 1;
  for (int i = 0; i < 3; ++i) {
    CHECK(config.block[i] >= 1 && config.block[i] <= kBlock[i], CUDA_ERROR_INVALID_VALUE);
    CHECK(config.grid[i] >= 1 && config.grid[i] <= kGrid[i], CUDA_ERROR_INVALID_VALUE);
    threads *= config.block[i];
    ctas *= config.grid[i];
  }
  CHECK(threads <= 1024, CUDA_ERROR_INVALID_VALUE);
  const size_t shared = kernel.shared_bytes + static_cast<size_t>(config.shared_bytes);
  CHECK(shared <= static_cast<size_t>(allowed_shared), CUDA_ERROR_INVALID_VALUE);
  const int of_cta = static_cast<int>(threads);
  CHECK(of_cta <= Multiprocessor::most_threads(kernel), CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES);
  CHECK(!cooperative || ctas <= resident_ctas(config, kernel, num_sms, sm),
        CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE);
  return 0;
}
