// What every host library exports beside its kernels: threads to launch on, and the sizes of the
// structs that the executors and the kernels share, which Python compares with its mirrors.
#include <new>
#include <system_error>

#include "../include/moe_nvlink/args.h"
#include "grid.h"

extern "C" {

// A grid of num_blocks CTAs, or null when the threads cannot be had.
moe_nvlink::host::Grid* moe_nvlink_grid_create(int num_blocks) {
  try {
    return new moe_nvlink::host::Grid(num_blocks);
  } catch (const std::system_error&) {
    return nullptr;
  }
}

void moe_nvlink_grid_destroy(moe_nvlink::host::Grid* grid) {
  delete grid;
}

// What a wait calls meanwhile (signals.h): in the main thread, and in others; null: nothing.
void moe_nvlink_serve_signals_by(int (*main)(), int (*others)()) {
  moe_nvlink::host::serve_signals.store(main, std::memory_order_relaxed);
  moe_nvlink::host::is_given_up.store(others, std::memory_order_relaxed);
}

int moe_nvlink_sizeof_local_control() {
  return sizeof(moe_nvlink::LocalControl);
}
int moe_nvlink_sizeof_exchange_counters() {
  return sizeof(moe_nvlink::ExchangeCounters);
}

}  // extern "C"
