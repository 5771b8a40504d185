// What an SM holds, by the rules of NVIDIA's cuda_occupancy.h (CUDA 13.0) for 9.0, 10.x and 12.0:
// registers are given to a warp 256 at a time, from the quarter of the SM that the warp is on.

struct Multiprocessor {
  int threads, ctas, shared_bytes;
};
Multiprocessor multiprocessor() {
  if (capability() / 10 == 12) return {1536, 24, 100 << 10};
  return {2048, 32, 228 << 10};
}

int most_shared_of_cta() {
  return multiprocessor().shared_bytes - kReservedShared;
}

int warps_by_registers(const Kernel& kernel) {
  constexpr int kOfQuarter = 65536 / 4;
  const int of_warp = (std::max(kernel.registers, 1) * 32 + 255) / 256 * 256;
  return kOfQuarter / of_warp * 4;
}

int most_threads_of_cta(const Kernel& kernel) {
  return std::min({kernel.bound, 1024, warps_by_registers(kernel) * 32});
}

// CTAs of so many threads that an SM holds at once; 0 where not even one fits.
int resident(const Kernel& kernel, int cta_threads, size_t dynamic_shared) {
  if (cta_threads > most_threads_of_cta(kernel)) return 0;
  const Multiprocessor sm = multiprocessor();
  const int warps = (cta_threads + 31) / 32;
  const int shared = kernel.shared_bytes + static_cast<int>(dynamic_shared) + kReservedShared;
  return std::min({sm.ctas, sm.threads / 32 / warps, warps_by_registers(kernel) / warps,
                   sm.shared_bytes / ((shared + 127) / 128 * 128)});
}
