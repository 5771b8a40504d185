// The exported functions of the host library beside the kernels themselves.
#include <new>
#include <system_error>

#include "../include/moe_nvlink/args.h"
#include "../include/moe_nvlink/epoch_flags.h"
#include "../include/moe_nvlink/numeric.h"
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

// Sizes, compared with the Python mirrors when the library is loaded.
int moe_nvlink_sizeof_dispatch_args() {
  return sizeof(moe_nvlink::DispatchArgs);
}
int moe_nvlink_sizeof_combine_args() {
  return sizeof(moe_nvlink::CombineArgs);
}
int moe_nvlink_sizeof_local_control() {
  return sizeof(moe_nvlink::LocalControl);
}
int moe_nvlink_sizeof_exchange_counters() {
  return sizeof(moe_nvlink::ExchangeCounters);
}

// The tag of a geometry in a cell, so that the tests can count what shares one.
uint32_t moe_nvlink_geometry_tag(const moe_nvlink::Geometry* geometry) {
  return moe_nvlink::geometry_tag(*geometry);
}

// Element conversions over arrays, so that the tests can compare them with torch's.
void moe_nvlink_to_float(int element, const void* source, float* target, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const auto* halves = static_cast<const uint16_t*>(source);
    target[i] = element == moe_nvlink::kElementBf16 ? moe_nvlink::Bf16::to_float(halves[i])
                                                    : moe_nvlink::Fp16::to_float(halves[i]);
  }
}

void moe_nvlink_from_float(int element, const float* source, void* target, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    auto* halves = static_cast<uint16_t*>(target);
    halves[i] = element == moe_nvlink::kElementBf16 ? moe_nvlink::Bf16::from_float(source[i])
                                                    : moe_nvlink::Fp16::from_float(source[i]);
  }
}

}  // extern "C"
