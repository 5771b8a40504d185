// What watched_ranks.py calls in a library of the product's kernels, which come before this.

#include <atomic>
#include <cstdint>

namespace moe_nvlink {

// In the place of experts and products: all that has come is read, and numbers are written.
struct ExpertsArgs {
  uint64_t read[16], read_bytes[16];
  uint64_t rows, count;
  uint64_t source;  // as many numbers; 0: all are `value`
  float value;
};

inline std::atomic<uint64_t> sum_of_bytes{0};  // so that the compiler leaves the reading in

struct Step {
  void (*kernel)(const void*, host::Grid*);
  const void* args;
};

}  // namespace moe_nvlink

extern "C" {

void moe_nvlink_experts(const moe_nvlink::ExpertsArgs* args, moe_nvlink::host::Grid*) {
  uint64_t sum = 0;
  for (int i = 0; i < 16; ++i) {
    const auto* bytes = reinterpret_cast<const unsigned char*>(args->read[i]);
    for (uint64_t byte = 0; byte < args->read_bytes[i]; ++byte) sum += bytes[byte];
  }
  moe_nvlink::sum_of_bytes.fetch_add(sum, std::memory_order_relaxed);
  auto* rows = reinterpret_cast<float*>(args->rows);
  const auto* source = reinterpret_cast<const float*>(args->source);
  for (uint64_t i = 0; i < args->count; ++i) rows[i] = source ? source[i] : args->value;
}

void moe_nvlink_run_steps(const moe_nvlink::Step* steps, int count, moe_nvlink::host::Grid* grid) {
  for (int i = 0; i < count; ++i) steps[i].kernel(steps[i].args, grid);
}

}  // extern "C"
