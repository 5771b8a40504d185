// A CUDA driver without a GPU, for tests only: device memory is memfd, a launch runs the kernel's PTX
// (ptx.h) or calls its host build (host_build.h). What the real driver refuses is refused here too,
// so that a mistake is an error in a test. How it is set up from outside: settings.h, and
// fake_cuda_*(). __init__.py puts the headers in.
//
// What it cannot show: anything about speed; streams (a launch has finished when it returns); with
// the host build, what a kernel does with its CTA's shape, shared memory and alignment, for that has
// its own threads. The host cannot touch device memory, but for what tests expose (tensors over the
// rank's own workspace) and while a kernel of the same process runs.
#include <dlfcn.h>
#include <elf.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {

#include "driver_constants.h"  // written by __init__.py from cuda.bindings: all the enumerators
#include "abi.h"
#include "settings.h"
#include "cubin.h"
#include "multiprocessor.h"
#include "memory.h"
#include "capture.h"
#include "host_build.h"
#include "ptx.h"
#include "entries.h"

constexpr int kMostDevices = 128;

struct Context {
  int device;
  Status sticky = 0;  // what every call returns from now on
};
struct Module {
  Cubin cubin;
  const PtxLibrary* ptx;  // null: the host build runs
};
struct Function {
  Module* module;
  std::string name;
  const Kernel* kernel;
  int allowed_shared = kSharedOfCta;  // of a launch, with what the kernel declares
};

std::mutex lock;
bool initialised = false;
std::set<Module*> modules;
std::map<Function*, std::unique_ptr<Function>> functions;
std::map<std::string, long> calls;
std::string failures;  // set by fake_cuda_fail; beside FAKE_CUDA_FAIL
Launch last_launch{};
uint64_t num_launches = 0;
std::vector<std::vector<Launch>> graphs;  // what was captured, for fake_cuda_replay
Context contexts[kMostDevices];
thread_local std::vector<Context*> context_stack;

Context* current() {
  return context_stack.empty() ? nullptr : context_stack.back();
}

enum Rule { kAlways, kWorks, kUnsafe };  // answers after a sticky error, does not, nor in captures

// What every call begins with.
Status enter(const char* name, Rule rule) {
  const std::lock_guard guard(lock);
  const long call = ++calls[name];
  for (const std::string& spec : {option("FAKE_CUDA_FAIL", ""), failures}) {
    const Status failed = injected(spec, name, call);
    if (is_sticky(failed) && current() != nullptr) current()->sticky = failed;
    if (failed != 0) return failed;
  }
  CHECK(initialised, CUDA_ERROR_NOT_INITIALIZED);
  if (rule != kAlways && current() != nullptr && current()->sticky != 0) return current()->sticky;
  return rule == kUnsafe ? check_unsafe() : 0;
}
#define BEGIN(name, rule)                                        \
  do {                                                           \
    if (const Status failed = enter(#name, rule)) return failed; \
  } while (false)
#define ASK(name) BEGIN(name, kAlways)
#define ENTER(name) BEGIN(name, kWorks)
#define ENTER_UNSAFE(name) BEGIN(name, kUnsafe)
#define REQUIRE_CONTEXT() CHECK(current() != nullptr, CUDA_ERROR_INVALID_CONTEXT)

// ---- launches

// The arguments as the cubin lays them out.
Status copy_args(const Function& function, void** params, std::vector<uint8_t>* args) {
  const Kernel& kernel = *function.kernel;
  if (function.module->ptx == nullptr) {
    if (const Status bad = check_host_args(function.name, kernel)) return bad;
  }
  CHECK(kernel.args_bytes <= kMostArgsBytes, CUDA_ERROR_INVALID_VALUE);
  args->resize(kernel.args_bytes);
  for (size_t i = 0; i < kernel.parameters.size(); ++i) {
    CHECK(params[i] != nullptr, CUDA_ERROR_INVALID_VALUE);
    const Parameter& one = kernel.parameters[i];
    memcpy(args->data() + one.offset, params[i], one.size);
  }
  return 0;
}

// Those that are known to go together; a real driver may take more.
Status read_attributes(const LaunchConfig& config, bool* pdl, bool* cooperative) {
  *pdl = *cooperative = false;
  for (unsigned i = 0; i < config.num_attributes; ++i) {
    const LaunchAttribute& one = config.attributes[i];
    int value;
    memcpy(&value, one.value, sizeof(value));
    CHECK(value == 0 || value == 1, CUDA_ERROR_INVALID_VALUE);
    if (one.id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION) {
      *pdl = value != 0;
    } else if (one.id == CU_LAUNCH_ATTRIBUTE_COOPERATIVE) {
      *cooperative = value != 0;
    } else {
      return CUDA_ERROR_INVALID_VALUE;
    }
  }
  CHECK(!*pdl || !*cooperative, CUDA_ERROR_INVALID_VALUE);
  return 0;
}

// One launch, or those of a graph: of one device, in the order of their stream.
Status run(const std::vector<Launch>& launches) {
  if (launches.empty()) return 0;
  const int device = launches.front().device;
  const bool runs_ptx = launches.front().ptx != nullptr;
  if (contexts[device].sticky != 0) return contexts[device].sticky;
  std::vector<Address> opened;
  std::vector<Range> ranges;
  {
    const std::lock_guard guard(lock);
    opened = use(device);
    // Reads /proc/self/maps: a millisecond, and bench_launch.py times launches on the host.
    if (runs_ptx) ranges = reachable(device);
  }
  Status failed = 0;
  if (runs_ptx) {
    failed = run_ptx(launches, ranges);
  } else {
    for (const Launch& launch : launches) {
      if (failed == 0) failed = run_on_host(launch);
    }
  }
  const std::lock_guard guard(lock);
  leave(opened);
  if (is_sticky(failed)) contexts[device].sticky = failed;
  return failed;
}

// A copy that the host waits for, of [address, address + size): on the legacy stream.
template <typename Copy>
Status copy_now(Address address, size_t size, Copy copy) {
  REQUIRE_CONTEXT();
  const std::lock_guard guard(lock);
  const int device = current()->device;
  if (const Status bad = check_legacy(device)) return bad;
  if (const Status bad = check_unsafe()) return bad;
  if (const Status bad = may_touch(device, address, size)) return bad;
  const std::vector<Address> opened = use(device);
  copy();
  leave(opened);
  return 0;
}

Multiprocessor multiprocessor() {
  int major, minor;
  capability(&major, &minor);
  return Multiprocessor::of(major);
}

// -1: not known here, where a zero could be wrong.
int attribute_value(int attribute) {
  int major, minor;
  capability(&major, &minor);
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
      return major;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
      return minor;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
      return num_sms();
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE:
      return 32;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
      return 1024;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR:
      return multiprocessor().threads;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
      return multiprocessor().shared_bytes - kReservedShared;
    case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY:
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH:
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
      return 1;
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
      return static_cast<int>(number("FAKE_CUDA_VMM", 1));
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED:
      return option("FAKE_CUDA_FABRIC", "0") != "0";
    default:
      return -1;
  }
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// ---- start, versions, devices

Status cuInit(unsigned flags) {
  const Status failed = enter("cuInit", kAlways);
  if (failed != 0 && failed != CUDA_ERROR_NOT_INITIALIZED) return failed;
  CHECK(flags == 0, CUDA_ERROR_INVALID_VALUE);
  CHECK(num_devices() > 0, CUDA_ERROR_NO_DEVICE);
  const std::lock_guard guard(lock);
  for (int device = 0; device < kMostDevices; ++device) contexts[device].device = device;
  initialised = true;
  return 0;
}

Status cuDriverGetVersion(int* version) {
  *version = driver_version();
  return 0;
}

Status cuGetProcAddress_v2(const char* name, void** out, int version, unsigned long long,
                           int* found) {
  return find_entry(name, out, version, found);
}

// NVRTC asks for tables of the driver's inner functions, and does without them.
Status cuGetExportTable(const void** table, const void*) {
  *table = nullptr;
  return CUDA_ERROR_NOT_FOUND;
}

Status cuDeviceGetCount(int* count) {
  ASK(cuDeviceGetCount);
  *count = num_devices();
  return 0;
}

Status cuDeviceGet(int* device, int ordinal) {
  ASK(cuDeviceGet);
  CHECK(is_device(ordinal), CUDA_ERROR_INVALID_DEVICE);
  *device = ordinal;
  return 0;
}

Status cuDeviceGetName(char* name, int size, int device) {
  ASK(cuDeviceGetName);
  CHECK(is_device(device), CUDA_ERROR_INVALID_DEVICE);
  const bool mig = number("FAKE_CUDA_MIG", 0) != 0;
  snprintf(name, static_cast<size_t>(size), "Fake GPU%s", mig ? " MIG 1g.10gb" : "");
  return 0;
}

Status cuDeviceGetUuid_v2(char* uuid, int device) {
  ASK(cuDeviceGetUuid);
  CHECK(is_device(device), CUDA_ERROR_INVALID_DEVICE);
  memset(uuid, 0xAB, 16);
  // Devices are told apart by host too, where a test pretends that there are several.
  uuid[14] = static_cast<char>(host_number());
  uuid[15] = static_cast<char>(number("FAKE_CUDA_SHARED_UUID", 0) != 0 ? 0 : device);
  return 0;
}

Status cuDeviceTotalMem_v2(size_t* bytes, int device) {
  ASK(cuDeviceTotalMem);
  CHECK(is_device(device), CUDA_ERROR_INVALID_DEVICE);
  *bytes = total_bytes();
  return 0;
}

Status cuDeviceGetAttribute(int* value, int attribute, int device) {
  ASK(cuDeviceGetAttribute);
  CHECK(is_device(device), CUDA_ERROR_INVALID_DEVICE);
  *value = attribute_value(attribute);
  return *value < 0 ? CUDA_ERROR_INVALID_VALUE : 0;
}

Status cuDeviceCanAccessPeer(int* can, int device, int peer) {
  ASK(cuDeviceCanAccessPeer);
  CHECK(is_device(device) && is_device(peer), CUDA_ERROR_INVALID_DEVICE);
  *can = device != peer && has_p2p();
  return 0;
}

Status cuDeviceGetP2PAttribute(int* value, int attribute, int device, int peer) {
  ASK(cuDeviceGetP2PAttribute);
  CHECK(is_device(device) && is_device(peer) && device != peer, CUDA_ERROR_INVALID_DEVICE);
  const bool atomics = has_p2p() && number("FAKE_CUDA_ATOMICS", 1) != 0;
  *value = attribute == CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED ? atomics : has_p2p();
  return 0;
}

// ---- contexts

Status cuDevicePrimaryCtxRetain(Context** context, int device) {
  ASK(cuDevicePrimaryCtxRetain);
  CHECK(is_device(device), CUDA_ERROR_INVALID_DEVICE);
  *context = &contexts[device];
  return 0;
}

Status cuCtxPushCurrent_v2(Context* context) {
  ASK(cuCtxPushCurrent);
  CHECK(context != nullptr, CUDA_ERROR_INVALID_CONTEXT);
  context_stack.push_back(context);
  return 0;
}
Status cuCtxPopCurrent_v2(Context** context) {
  ASK(cuCtxPopCurrent);
  CHECK(!context_stack.empty(), CUDA_ERROR_INVALID_CONTEXT);
  if (context != nullptr) *context = context_stack.back();
  context_stack.pop_back();
  return 0;
}
Status cuCtxGetCurrent(Context** context) {
  ASK(cuCtxGetCurrent);
  *context = current();
  return 0;
}
Status cuCtxGetDevice(int* device) {
  ASK(cuCtxGetDevice);
  REQUIRE_CONTEXT();
  *device = current()->device;
  return 0;
}
// Of the struct's bytes only these two are set; bindings give it zeroed.
struct SmResource {
  int type;
  unsigned char padding[92];
  unsigned count;
};
Status cuCtxGetDevResource(Context* context, SmResource* resource, int type) {
  ASK(cuCtxGetDevResource);
  CHECK(context != nullptr, CUDA_ERROR_INVALID_CONTEXT);
  CHECK(type == CU_DEV_RESOURCE_TYPE_SM, CUDA_ERROR_INVALID_RESOURCE_TYPE);
  resource->type = type;
  resource->count = static_cast<unsigned>(num_context_sms());
  return 0;
}
Status cuCtxSynchronize() {
  ENTER(cuCtxSynchronize);
  REQUIRE_CONTEXT();
  const std::lock_guard guard(lock);
  return check_wait(current()->device);
}

// ---- streams

Status cuStreamCreate(void** out, unsigned flags) {
  ENTER(cuStreamCreate);
  REQUIRE_CONTEXT();
  const std::lock_guard guard(lock);
  return make_stream(current()->device, flags, out);
}
// The driver clamps a priority that is out of range.
Status cuStreamCreateWithPriority(void** out, unsigned flags, int) {
  ENTER(cuStreamCreateWithPriority);
  REQUIRE_CONTEXT();
  const std::lock_guard guard(lock);
  return make_stream(current()->device, flags, out);
}
Status cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  ENTER(cuCtxGetStreamPriorityRange);
  REQUIRE_CONTEXT();
  *least = 0;
  *greatest = -5;
  return 0;
}
Status cuStreamDestroy_v2(void* stream) {
  ENTER(cuStreamDestroy);
  const std::lock_guard guard(lock);
  return streams.erase(stream) == 1 ? 0 : CUDA_ERROR_INVALID_HANDLE;
}

Status cuStreamSynchronize(void* handle) {
  ENTER(cuStreamSynchronize);
  REQUIRE_CONTEXT();
  const std::lock_guard guard(lock);
  Stream* stream;
  if (const Status bad = find_stream(handle, current()->device, &stream)) return bad;
  if (stream == nullptr) {
    if (const Status bad = check_legacy(current()->device)) return bad;
  } else if (breaks_captures([&](const Stream& one) { return &one == stream; })) {
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  }
  return check_unsafe();
}

Status cuStreamIsCapturing(void* handle, int* status) {
  ENTER(cuStreamIsCapturing);
  REQUIRE_CONTEXT();
  const std::lock_guard guard(lock);
  const int device = current()->device;
  Stream* stream;
  if (const Status bad = find_stream(handle, device, &stream)) return bad;
  *status = CU_STREAM_CAPTURE_STATUS_NONE;
  if (stream == nullptr) {  // the one use of the legacy stream that breaks no capture
    for (const auto& [_, one] : streams) {
      CHECK(!captured_beside_legacy(*one, device), CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
    }
  } else if (stream->capture != nullptr) {
    *status = stream->capture->broken ? CU_STREAM_CAPTURE_STATUS_INVALIDATED
                                      : CU_STREAM_CAPTURE_STATUS_ACTIVE;
  }
  return 0;
}

Status cuThreadExchangeStreamCaptureMode(int* mode) {
  ENTER(cuThreadExchangeStreamCaptureMode);
  CHECK(*mode >= 0 && *mode <= CU_STREAM_CAPTURE_MODE_RELAXED, CUDA_ERROR_INVALID_VALUE);
  std::swap(thread_mode, *mode);
  return 0;
}

Status cuStreamBeginCapture_v2(void* handle, int mode) {
  ENTER(cuStreamBeginCapture);
  REQUIRE_CONTEXT();
  CHECK(mode >= 0 && mode <= CU_STREAM_CAPTURE_MODE_RELAXED, CUDA_ERROR_INVALID_VALUE);
  const std::lock_guard guard(lock);
  Stream* stream;
  if (const Status bad = find_stream(handle, current()->device, &stream)) return bad;
  CHECK(stream != nullptr, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  CHECK(stream->capture == nullptr, CUDA_ERROR_ILLEGAL_STATE);
  stream->capture = std::make_shared<Capture>(Capture{mode, std::this_thread::get_id(), false, {}});
  stream->forked = false;
  return 0;
}

// The graph is for fake_cuda_replay; its handle says no more than that there is one.
Status cuStreamEndCapture(void* handle, void** graph) {
  ENTER(cuStreamEndCapture);
  REQUIRE_CONTEXT();
  *graph = nullptr;
  const std::lock_guard guard(lock);
  Stream* stream;
  if (const Status bad = find_stream(handle, current()->device, &stream)) return bad;
  CHECK(stream != nullptr && stream->capture != nullptr, CUDA_ERROR_ILLEGAL_STATE);
  CHECK(!stream->forked, CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
  CHECK(stream->capture->mode == CU_STREAM_CAPTURE_MODE_RELAXED ||
            stream->capture->thread == std::this_thread::get_id(),
        CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
  const std::shared_ptr<Capture> ended = std::move(stream->capture);
  bool is_joined = true;
  for (auto& [_, one] : streams) {
    if (one->capture != ended) continue;
    is_joined = is_joined && one->joined == one->done;
    one->capture = nullptr;
  }
  CHECK(is_joined, CUDA_ERROR_STREAM_CAPTURE_UNJOINED);
  CHECK(!ended->broken, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  graphs.push_back(ended->launches);
  *graph = &graphs;
  return 0;
}

// ---- events. What they order has happened already, so they matter to captures only.

Status cuEventCreate(void** out, unsigned) {
  ENTER(cuEventCreate);
  REQUIRE_CONTEXT();
  const std::lock_guard guard(lock);
  auto made = std::make_unique<Event>();
  made->device = current()->device;
  *out = made.get();
  events[*out] = std::move(made);
  return 0;
}
Status cuEventDestroy_v2(void* event) {
  ENTER(cuEventDestroy);
  const std::lock_guard guard(lock);
  return events.erase(event) == 1 ? 0 : CUDA_ERROR_INVALID_HANDLE;
}
Status cuEventRecord(void* event, void* handle) {
  ENTER(cuEventRecord);
  REQUIRE_CONTEXT();
  const std::lock_guard guard(lock);
  CHECK(events.count(event) == 1, CUDA_ERROR_INVALID_HANDLE);
  Stream* stream;
  if (const Status bad = find_stream(handle, current()->device, &stream)) return bad;
  if (stream == nullptr) {
    if (const Status bad = check_legacy(current()->device)) return bad;
  }
  Event& recorded = *events[event];
  recorded.stream = stream == nullptr ? nullptr : handle;
  recorded.capture = stream == nullptr ? nullptr : stream->capture;
  recorded.done = stream == nullptr ? 0 : stream->done;
  return 0;
}
Status cuStreamWaitEvent(void* handle, void* event, unsigned) {
  ENTER(cuStreamWaitEvent);
  REQUIRE_CONTEXT();
  const std::lock_guard guard(lock);
  CHECK(events.count(event) == 1, CUDA_ERROR_INVALID_HANDLE);
  Stream* stream;
  if (const Status bad = find_stream(handle, current()->device, &stream)) return bad;
  const Event& waited = *events[event];
  const std::shared_ptr<Capture> capture = waited.capture.lock();
  const std::shared_ptr<Capture> mine = stream == nullptr ? nullptr : stream->capture;
  // A capture knows no work outside of it, and no other capture.
  CHECK(capture != nullptr || mine == nullptr, CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
  if (capture == nullptr) return 0;
  CHECK(stream != nullptr, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
  CHECK(mine == nullptr || mine == capture, CUDA_ERROR_STREAM_CAPTURE_MERGE);
  if (mine == nullptr) {
    stream->capture = capture;
    stream->forked = true;
    stream->done = 1;
    stream->joined = 0;
  }
  const auto other = streams.find(waited.stream);
  if (other != streams.end() && other->second->forked && !stream->forked) {
    other->second->joined = waited.done;
  }
  return 0;
}

// ---- virtual memory

Status cuMemGetAllocationGranularity(size_t* bytes, const AllocationProp* prop, int) {
  ENTER(cuMemGetAllocationGranularity);
  if (const Status bad = check_prop(prop)) return bad;
  *bytes = kGranularity;
  return 0;
}

Status cuMemAddressReserve(Address* out, size_t size, size_t alignment, Address, Handle flags) {
  ENTER_UNSAFE(cuMemAddressReserve);
  CHECK(size != 0 && aligned(size) && flags == 0, CUDA_ERROR_INVALID_VALUE);
  CHECK((alignment & (alignment - 1)) == 0, CUDA_ERROR_INVALID_VALUE);
  const size_t unit = std::max(alignment, kGranularity);
  void* found =
      mmap(nullptr, size + unit, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  CHECK(found != MAP_FAILED, CUDA_ERROR_OUT_OF_MEMORY);
  const Address start = (address_of(found) + unit - 1) / unit * unit;
  if (start > address_of(found)) munmap(found, start - address_of(found));
  munmap(pointer(start + size), address_of(found) + unit - start);
  const std::lock_guard guard(lock);
  reservations[start] = size;
  *out = start;
  return 0;
}

Status cuMemAddressFree(Address address, size_t size) {
  ENTER_UNSAFE(cuMemAddressFree);
  const std::lock_guard guard(lock);
  const auto found = reservations.find(address);
  CHECK(found != reservations.end() && found->second == size, CUDA_ERROR_INVALID_VALUE);
  CHECK(!overlaps_mapping(address, size), CUDA_ERROR_INVALID_VALUE);
  reservations.erase(found);
  munmap(pointer(address), size);
  return 0;
}

Status cuMemCreate(Handle* out, size_t size, const AllocationProp* prop, Handle flags) {
  ENTER_UNSAFE(cuMemCreate);
  if (const Status bad = check_prop(prop)) return bad;
  CHECK(size != 0 && aligned(size) && flags == 0, CUDA_ERROR_INVALID_VALUE);
  const std::lock_guard guard(lock);
  CHECK(used_bytes(prop->location.id) + size <= total_bytes(), CUDA_ERROR_OUT_OF_MEMORY);
  const int device = prop->location.id;
  const int fd = create_fd(size, device);
  CHECK(fd >= 0, CUDA_ERROR_OUT_OF_MEMORY);
  return adopt(Memory{fd, size, host_number(), device, prop->handle_types, false}, out);
}

Status cuMemRelease(Handle handle) {
  ENTER_UNSAFE(cuMemRelease);
  const std::lock_guard guard(lock);
  const auto found = handles.find(handle);
  CHECK(found != handles.end(), CUDA_ERROR_INVALID_VALUE);
  --found->second->handles;
  drop_if_unused(found->second);
  handles.erase(found);
  return 0;
}

Status cuMemMap(Address address, size_t size, size_t offset, Handle handle, Handle flags) {
  ENTER_UNSAFE(cuMemMap);
  const std::lock_guard guard(lock);
  const auto found = handles.find(handle);
  CHECK(found != handles.end() && flags == 0 && offset == 0, CUDA_ERROR_INVALID_VALUE);
  CHECK(size != 0 && aligned(size) && aligned(address), CUDA_ERROR_INVALID_VALUE);
  CHECK(size <= found->second->size, CUDA_ERROR_INVALID_VALUE);
  CHECK(inside_one(reservations, address, size), CUDA_ERROR_INVALID_VALUE);
  CHECK(!overlaps_mapping(address, size), CUDA_ERROR_INVALID_VALUE);
  void* mapped =
      mmap(pointer(address), size, PROT_NONE, MAP_SHARED | MAP_FIXED, found->second->fd, 0);
  CHECK(mapped != MAP_FAILED, CUDA_ERROR_OUT_OF_MEMORY);
  ++found->second->mappings;
  mappings[address] = Mapping{size, found->second, {}};
  return 0;
}

Status cuMemUnmap(Address address, size_t size) {
  ENTER_UNSAFE(cuMemUnmap);
  const std::lock_guard guard(lock);
  const std::vector<Mapping*> found = exactly(address, size);
  CHECK(!found.empty(), CUDA_ERROR_INVALID_VALUE);
  mmap(pointer(address), size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED,
       -1, 0);
  for (Mapping* mapping : found) {
    --mapping->memory->mappings;
    drop_if_unused(mapping->memory);
  }
  mappings.erase(mappings.find(address), mappings.lower_bound(address + size));
  return 0;
}

Status cuMemSetAccess(Address address, size_t size, const AccessDesc* access, size_t count) {
  ENTER_UNSAFE(cuMemSetAccess);
  const std::lock_guard guard(lock);
  const std::vector<Mapping*> found = exactly(address, size);
  CHECK(!found.empty() && count > 0, CUDA_ERROR_INVALID_VALUE);
  for (size_t i = 0; i < count; ++i) {
    const int device = access[i].location.id;
    CHECK(access[i].location.type == CU_MEM_LOCATION_TYPE_DEVICE, CUDA_ERROR_INVALID_VALUE);
    CHECK(is_device(device), CUDA_ERROR_INVALID_DEVICE);
    CHECK(access[i].flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE, CUDA_ERROR_INVALID_VALUE);
    for (const Mapping* mapping : found) {
      const Memory& memory = *mapping->memory;
      const bool is_peer = memory.host == host_number() && memory.device != device;
      // One of the statuses that the manual allows; which of them is for this it does not say.
      CHECK(!is_peer || has_p2p(), CUDA_ERROR_INVALID_DEVICE);
    }
  }
  for (size_t i = 0; i < count; ++i) {
    for (Mapping* mapping : found) mapping->readers.insert(access[i].location.id);
  }
  return 0;
}

Status cuMemExportToShareableHandle(void* out, Handle handle, int type, Handle flags) {
  ENTER_UNSAFE(cuMemExportToShareableHandle);
  const std::lock_guard guard(lock);
  const auto found = handles.find(handle);
  CHECK(found != handles.end() && flags == 0, CUDA_ERROR_INVALID_VALUE);
  const Memory& memory = *found->second;
  CHECK((memory.handle_types & type) == type && type != 0, CUDA_ERROR_INVALID_VALUE);
  if (type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) {
    const int fd = fcntl(memory.fd, F_DUPFD_CLOEXEC, 0);
    CHECK(fd >= 0, CUDA_ERROR_OPERATING_SYSTEM);
    *static_cast<int*>(out) = fd;
    return 0;
  }
  CHECK(type == CU_MEM_HANDLE_TYPE_FABRIC, CUDA_ERROR_INVALID_VALUE);
  struct stat status{};
  CHECK(fstat(memory.fd, &status) == 0, CUDA_ERROR_OPERATING_SYSTEM);
  const int domain = static_cast<int>(number("FAKE_CUDA_DOMAIN", 0));
  const FabricBlob blob{kMagic,    memory.size,   status.st_ino, getpid(),
                        memory.fd, memory.device, domain,        {}};
  memcpy(out, &blob, sizeof(blob));
  return 0;
}

Status cuMemImportFromShareableHandle(Handle* out, void* shared, int type) {
  ENTER_UNSAFE(cuMemImportFromShareableHandle);
  const std::lock_guard guard(lock);
  if (type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) {
    const int theirs = static_cast<int>(reinterpret_cast<intptr_t>(shared));
    return import_fd(fcntl(theirs, F_DUPFD_CLOEXEC, 0), 0, type, out);
  }
  CHECK(type == CU_MEM_HANDLE_TYPE_FABRIC && shared != nullptr, CUDA_ERROR_INVALID_VALUE);
  FabricBlob blob;
  memcpy(&blob, shared, sizeof(blob));
  CHECK(blob.magic == kMagic, CUDA_ERROR_INVALID_VALUE);
  CHECK(option("FAKE_CUDA_FABRIC", "0") == "1", CUDA_ERROR_NOT_PERMITTED);
  CHECK(blob.domain == number("FAKE_CUDA_DOMAIN", 0), CUDA_ERROR_NOT_PERMITTED);
  char path[64];
  snprintf(path, sizeof(path), "/proc/%d/fd/%d", blob.pid, blob.fd);
  return import_fd(open(path, O_RDWR | O_CLOEXEC), blob.inode, type, out);
}

// ---- other memory

Status cuMemGetInfo_v2(size_t* free_bytes, size_t* all_bytes) {
  ENTER(cuMemGetInfo);
  REQUIRE_CONTEXT();
  const std::lock_guard guard(lock);
  *all_bytes = total_bytes();
  *free_bytes = *all_bytes - used_bytes(current()->device);
  return 0;
}

Status cuMemAlloc_v2(Address* out, size_t size) {
  ENTER_UNSAFE(cuMemAlloc);
  REQUIRE_CONTEXT();
  CHECK(size != 0, CUDA_ERROR_INVALID_VALUE);
  void* made = mmap(nullptr, with_guards(size), PROT_NONE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  CHECK(made != MAP_FAILED, CUDA_ERROR_OUT_OF_MEMORY);
  *out = address_of(made) + kPage;
  mprotect(pointer(*out), size, PROT_READ | PROT_WRITE);
  memset(pointer(*out), kPoison, size);
  const std::lock_guard guard(lock);
  allocations[*out] = Mapping{size, nullptr, {current()->device}};
  protect(*out, allocations[*out]);
  return 0;
}
Status cuMemFree_v2(Address address) {
  ENTER_UNSAFE(cuMemFree);
  const std::lock_guard guard(lock);
  const auto found = allocations.find(address);
  CHECK(found != allocations.end(), CUDA_ERROR_INVALID_VALUE);
  munmap(pointer(address - kPage), with_guards(found->second.size));
  allocations.erase(found);
  return 0;
}

Status cuMemHostAlloc(void** out, size_t size, unsigned) {
  ENTER_UNSAFE(cuMemHostAlloc);
  REQUIRE_CONTEXT();
  CHECK(size != 0, CUDA_ERROR_INVALID_VALUE);
  *out = aligned_alloc(4096, (size + 4095) / 4096 * 4096);
  CHECK(*out != nullptr, CUDA_ERROR_OUT_OF_MEMORY);
  memset(*out, kPoison, size);
  const std::lock_guard guard(lock);
  host_memory[address_of(*out)] = size;
  return 0;
}
Status cuMemFreeHost(void* address) {
  ENTER_UNSAFE(cuMemFreeHost);
  REQUIRE_CONTEXT();
  const std::lock_guard guard(lock);
  CHECK(host_memory.erase(address_of(address)) == 1, CUDA_ERROR_INVALID_VALUE);
  free(address);
  return 0;
}
Status cuMemHostGetDevicePointer_v2(Address* out, void* address, unsigned flags) {
  ENTER(cuMemHostGetDevicePointer);
  const std::lock_guard guard(lock);
  CHECK(flags == 0 && inside_one(host_memory, address_of(address), 1), CUDA_ERROR_INVALID_VALUE);
  *out = address_of(address);
  return 0;
}

Status cuMemsetD8_v2(Address address, unsigned char byte, size_t size) {
  ENTER(cuMemsetD8);
  return copy_now(address, size, [=] { memset(pointer(address), byte, size); });
}
Status cuMemcpyDtoH_v2(void* target, Address source, size_t size) {
  ENTER(cuMemcpyDtoH);
  return copy_now(source, size, [=] { memcpy(target, pointer(source), size); });
}
// On a stream that captures nothing, into pinned memory: what else the driver allows is not here.
Status cuMemcpyDtoHAsync_v2(void* target, Address source, size_t size, void* handle) {
  ENTER(cuMemcpyDtoHAsync);
  REQUIRE_CONTEXT();
  const std::lock_guard guard(lock);
  const int device = current()->device;
  Stream* stream;
  if (const Status bad = find_stream(handle, device, &stream)) return bad;
  CHECK(stream != nullptr && stream->capture == nullptr, CUDA_ERROR_NOT_SUPPORTED);
  CHECK(inside_one(host_memory, address_of(target), size), CUDA_ERROR_INVALID_VALUE);
  if (const Status bad = check_unsafe()) return bad;
  if (const Status bad = may_touch(device, source, size)) return bad;
  const std::vector<Address> opened = use(device);
  memcpy(target, pointer(source), size);
  leave(opened);
  return 0;
}
Status cuMemcpyHtoD_v2(Address target, const void* source, size_t size) {
  ENTER(cuMemcpyHtoD);
  return copy_now(target, size, [=] { memcpy(pointer(target), source, size); });
}

// ---- modules and launches

Status cuModuleLoadData(Module** out, const void* image) {
  ENTER_UNSAFE(cuModuleLoadData);
  REQUIRE_CONTEXT();
  auto made = std::make_unique<Module>();
  CHECK(made->cubin.read(static_cast<const uint8_t*>(image)), CUDA_ERROR_INVALID_IMAGE);
  int major, minor;
  capability(&major, &minor);
  CHECK(made->cubin.runs_on(major, minor), CUDA_ERROR_NO_BINARY_FOR_GPU);
  const std::lock_guard guard(lock);
  if (const Status bad = find_ptx(image, made->cubin, &made->ptx)) return bad;
  *out = made.release();
  modules.insert(*out);
  return 0;
}

Status cuModuleGetLoadingMode(int* mode) {
  ENTER(cuModuleGetLoadingMode);
  const bool eager = option("CUDA_MODULE_LOADING", "LAZY") == "EAGER";
  *mode = eager ? CU_MODULE_EAGER_LOADING : CU_MODULE_LAZY_LOADING;
  return 0;
}

Status cuModuleUnload(Module* module) {
  ENTER_UNSAFE(cuModuleUnload);
  const std::lock_guard guard(lock);
  CHECK(modules.erase(module) == 1, CUDA_ERROR_INVALID_HANDLE);
  for (auto one = functions.begin(); one != functions.end();) {
    one = one->second->module == module ? functions.erase(one) : std::next(one);
  }
  delete module;
  return 0;
}

Status cuModuleGetFunction(Function** out, Module* module, const char* name) {
  ENTER(cuModuleGetFunction);
  const std::lock_guard guard(lock);
  CHECK(modules.count(module) == 1, CUDA_ERROR_INVALID_HANDLE);
  const Kernel* kernel = module->cubin.kernel(name);
  CHECK(kernel != nullptr, CUDA_ERROR_NOT_FOUND);
  auto made = std::make_unique<Function>(Function{module, name, kernel});
  *out = made.get();
  functions[*out] = std::move(made);
  return 0;
}

Status cuFuncLoad(Function* function) {
  ENTER_UNSAFE(cuFuncLoad);
  const std::lock_guard guard(lock);
  return functions.count(function) == 1 ? 0 : CUDA_ERROR_INVALID_HANDLE;
}

Status cuFuncGetAttribute(int* value, int attribute, Function* function) {
  ENTER(cuFuncGetAttribute);
  const std::lock_guard guard(lock);
  CHECK(functions.count(function) == 1, CUDA_ERROR_INVALID_HANDLE);
  switch (attribute) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
      *value = Multiprocessor::most_threads(*function->kernel);
      return 0;
    case CU_FUNC_ATTRIBUTE_NUM_REGS:
      *value = function->kernel->registers;
      return 0;
    case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES:
      *value = function->kernel->shared_bytes;
      return 0;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}

Status cuFuncSetAttribute(Function* function, int attribute, int value) {
  ENTER(cuFuncSetAttribute);
  const std::lock_guard guard(lock);
  CHECK(functions.count(function) == 1, CUDA_ERROR_INVALID_HANDLE);
  CHECK(attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, CUDA_ERROR_INVALID_VALUE);
  const int all = value + function->kernel->shared_bytes;
  CHECK(value >= 0 && all <= multiprocessor().shared_bytes - kReservedShared,
        CUDA_ERROR_INVALID_VALUE);
  function->allowed_shared = std::max(all, kSharedOfCta);
  return 0;
}

Status cuFuncGetParamInfo(Function* function, size_t index, size_t* offset, size_t* size) {
  ENTER(cuFuncGetParamInfo);
  const std::lock_guard guard(lock);
  CHECK(functions.count(function) == 1, CUDA_ERROR_INVALID_HANDLE);
  CHECK(index < function->kernel->parameters.size(), CUDA_ERROR_INVALID_VALUE);
  *offset = function->kernel->parameters[index].offset;
  if (size != nullptr) *size = function->kernel->parameters[index].size;
  return 0;
}

Status cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Function* function, int threads,
                                                   size_t dynamic_shared) {
  ENTER(cuOccupancyMaxActiveBlocksPerMultiprocessor);
  REQUIRE_CONTEXT();
  const std::lock_guard guard(lock);
  CHECK(functions.count(function) == 1, CUDA_ERROR_INVALID_HANDLE);
  CHECK(threads > 0 && threads <= 1024, CUDA_ERROR_INVALID_VALUE);
  *blocks = multiprocessor().resident(*function->kernel, threads, dynamic_shared);
  return 0;
}

Status cuLaunchKernelEx(const LaunchConfig* config, Function* function, void** params,
                        void** extra) {
  ENTER(cuLaunchKernelEx);
  REQUIRE_CONTEXT();
  CHECK(params != nullptr && extra == nullptr, CUDA_ERROR_INVALID_VALUE);
  Launch launch{"", nullptr, current()->device, *config, 0, 0, {}};
  {
    const std::lock_guard guard(lock);
    CHECK(functions.count(function) == 1, CUDA_ERROR_INVALID_HANDLE);
    launch.name = function->name;
    launch.ptx = function->module->ptx;
    bool pdl, cooperative;
    if (const Status bad = read_attributes(*config, &pdl, &cooperative)) return bad;
    launch.pdl = pdl;
    if (const Status bad = check_shape(*config, *function->kernel, function->allowed_shared,
                                       cooperative, num_sms(), multiprocessor())) {
      return bad;
    }
    launch.resident_ctas = resident_ctas(*config, *function->kernel, num_sms(), multiprocessor());
    if (const Status bad = copy_args(*function, params, &launch.args)) return bad;
    Stream* stream;
    if (const Status bad = find_stream(config->stream, launch.device, &stream)) return bad;
    if (stream == nullptr) {
      if (const Status bad = check_legacy(launch.device)) return bad;
    }
    const bool captures = stream != nullptr && stream->capture != nullptr;
    CHECK(!captures || !stream->capture->broken, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    ++num_launches;
    last_launch = launch;
    if (captures) {
      ++stream->done;
      stream->capture->launches.push_back(launch);
      return 0;
    }
  }
  return run({launch});
}

// ---- for the tests

// As FAKE_CUDA_FAIL, for the calls from now on; an empty string ends it.
void fake_cuda_fail(const char* spec) {
  const std::lock_guard guard(lock);
  failures = spec;
  calls.clear();
}

// Things that must be gone when everything has been closed; -1 for a name that does not exist.
long fake_cuda_live(const char* name) {
  const std::lock_guard guard(lock);
  const std::string what = name;
  if (what == "handles") return static_cast<long>(handles.size());
  if (what == "mappings") return static_cast<long>(mappings.size());
  if (what == "reservations") return static_cast<long>(reservations.size());
  if (what == "host_allocations") return static_cast<long>(host_memory.size());
  if (what == "allocations") return static_cast<long>(allocations.size());
  if (what == "modules") return static_cast<long>(modules.size());
  return -1;
}

// "name:count,..." of the calls since the library was loaded or fake_cuda_fail was called.
void fake_cuda_calls(char* out, size_t size) {
  const std::lock_guard guard(lock);
  std::string text;
  for (const auto& [name, count] : calls) text += name + ":" + std::to_string(count) + ",";
  snprintf(out, size, "%s", text.c_str());
}

const LaunchRecord* fake_cuda_last_launch() {
  static LaunchRecord record;
  const std::lock_guard guard(lock);
  const LaunchConfig& config = last_launch.config;
  record = {};
  snprintf(record.name, sizeof(record.name), "%s", last_launch.name.c_str());
  std::copy(config.grid, config.grid + 3, record.grid);
  std::copy(config.block, config.block + 3, record.block);
  record.shared_bytes = config.shared_bytes;
  record.num_attributes = config.num_attributes;
  record.pdl = last_launch.pdl;
  record.args_bytes = static_cast<uint32_t>(last_launch.args.size());
  record.stream = address_of(config.stream);
  record.count = num_launches;
  std::copy(last_launch.args.begin(), last_launch.args.end(), record.args);
  return &record;
}

// CTAs of such a kernel on an SM of that compute capability.
int fake_cuda_resident(int major, int threads, int registers, int shared_bytes) {
  Kernel kernel;
  kernel.registers = registers;
  kernel.shared_bytes = shared_bytes;
  return Multiprocessor::of(major).resident(kernel, threads, 0);
}

// Lets the host touch this device memory until it is unmapped: it is about to have a tensor there,
// where a GPU's tensor would be.
Status fake_cuda_expose(Address address, size_t size) {
  const std::lock_guard guard(lock);
  const auto found = around(address, size);
  CHECK(!found.empty(), CUDA_ERROR_INVALID_VALUE);
  for (const auto& [at, mapping] : found) {
    CHECK(!mapping->readers.empty(), CUDA_ERROR_INVALID_VALUE);
    mapping->exposed = true;
    protect(at, *mapping);
  }
  return 0;
}

// Runs what was launched in captures, in order, with the arguments of that time.
Status fake_cuda_replay() {
  for (const std::vector<Launch>& graph : graphs) {
    if (const Status failed = run(graph)) return failed;
  }
  return 0;
}
long fake_cuda_captured() {
  const std::lock_guard guard(lock);
  size_t launches = 0;
  for (const std::vector<Launch>& graph : graphs) launches += graph.size();
  return static_cast<long>(launches);
}
void fake_cuda_forget_capture() {
  const std::lock_guard guard(lock);
  graphs.clear();
}

}  // extern "C"
#pragma GCC visibility pop
