// A CUDA driver without a GPU, for tests only: device memory is memfd, a launch runs the kernel's PTX
// (ptx.h) or calls its host build (host_build.h). What the real driver refuses is refused here too,
// where the product could make that mistake. How it is set up from outside: settings.h, and
// fake_cuda_*(). __init__.py puts the headers in.
//
// What it cannot show: anything about speed; streams (a launch has finished when it returns); with
// the host build, what a kernel does with its CTA's shape, shared memory and alignment, for that has
// its own threads; that the host touches device memory, where the tests have CPU tensors for a GPU's.
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
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace {

#include "driver_constants.h"  // written by __init__.py from cuda.bindings: what the text names
#include "abi.h"
#include "settings.h"
#include "cubin.h"
#include "multiprocessor.h"
#include "memory.h"
#include "capture.h"
#include "host_build.h"
#include "ptx.h"

constexpr int kMostDevices = 128;
constexpr int kSharedOfCta = 48 << 10;  // unless cuFuncSetAttribute has allowed more

struct Context {
  Status sticky = 0;  // what every call returns from now on

  int device() const;
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
std::map<Module*, std::unique_ptr<Module>> modules;
std::map<Function*, std::unique_ptr<Function>> functions;
std::map<std::string, long> calls;
std::string failures;  // set by fake_cuda_fail; beside FAKE_CUDA_FAIL
Launch last_launch{};
uint64_t num_launches = 0;
std::vector<std::vector<Launch>> graphs;  // what was captured, for fake_cuda_replay
Context contexts[kMostDevices];
thread_local std::vector<Context*> context_stack;

int Context::device() const {
  return static_cast<int>(this - contexts);
}
Context* current() {
  return context_stack.empty() ? nullptr : context_stack.back();
}
int current_device() {
  return current()->device();
}

enum Rule {
  kAlways = 1,  // answers after a sticky error, too
  kNeedsContext = 2,
  kUnsafe = 4,  // in captures
  kInitialises = 8,
};

void enter(const char* name, int rule) {
  const long call = ++calls[name];
  for (const std::string& spec : {option("FAKE_CUDA_FAIL", ""), failures}) {
    const Status failed = injected(spec, name, call);
    if (is_sticky(failed) && current() != nullptr) current()->sticky = failed;
    require(failed == 0, failed);
  }
  require(initialised || (rule & kInitialises) != 0, CUDA_ERROR_NOT_INITIALIZED);
  if ((rule & kAlways) == 0 && current() != nullptr) {
    require(current()->sticky == 0, current()->sticky);
  }
  require((rule & kNeedsContext) == 0 || current() != nullptr, CUDA_ERROR_INVALID_CONTEXT);
  if ((rule & kUnsafe) != 0) check_unsafe();
}

// The body with the lock held; whether it is refused.
template <typename Body>
Status guarded(Body body) noexcept {
  const std::lock_guard guard(lock);
  try {
    body();
  } catch (const Refused& refused) {
    return refused.status;
  }
  return 0;
}
// What every function of the driver is.
template <typename Body>
Status call(const char* name, int rule, Body body) {
  return guarded([&] {
    enter(name, rule);
    body();
  });
}

// ---- launches

// The arguments as the cubin lays them out.
std::vector<uint8_t> copy_args(const Function& function, void** params) {
  const Kernel& kernel = *function.kernel;
  if (function.module->ptx == nullptr) check_host_args(function.name, kernel);
  std::vector<uint8_t> args(kernel.args_bytes);
  for (size_t i = 0; i < kernel.parameters.size(); ++i) {
    const auto& [offset, size] = kernel.parameters[i];
    memcpy(args.data() + offset, params[i], size);
  }
  return args;
}

// Which of those that are known here the launch has; not both go together.
int attribute_of(const LaunchConfig& config) {
  int found = 0;
  for (unsigned i = 0; i < config.num_attributes; ++i) {
    const LaunchAttribute& one = config.attributes[i];
    int value;
    memcpy(&value, one.value, sizeof(value));
    const bool is_known = one.id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION ||
                          one.id == CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
    require(is_known && (value == 0 || (value == 1 && found == 0)), CUDA_ERROR_INVALID_VALUE);
    if (value == 1) found = one.id;
  }
  return found;
}

// As many CTAs of the launch as the device holds at once, of a shape that fits GPU and kernel.
uint32_t check_shape(const LaunchConfig& config, const Function& function, bool cooperative) {
  constexpr unsigned kMost[] = {0x7fffffff, 65535, 65535};
  uint64_t threads = 1, ctas = 1;
  for (int i = 0; i < 3; ++i) {
    require(config.block[i] >= 1 && config.block[i] <= 1024, CUDA_ERROR_INVALID_VALUE);
    require(config.grid[i] >= 1 && config.grid[i] <= kMost[i], CUDA_ERROR_INVALID_VALUE);
    threads *= config.block[i];
    ctas *= config.grid[i];
  }
  require(threads <= 1024, CUDA_ERROR_INVALID_VALUE);
  const Kernel& kernel = *function.kernel;
  require(config.shared_bytes + static_cast<size_t>(kernel.shared_bytes) <=
              static_cast<size_t>(function.allowed_shared),
          CUDA_ERROR_INVALID_VALUE);
  const int of_cta = static_cast<int>(threads);
  require(of_cta <= most_threads_of_cta(kernel), CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES);
  const int at_once = num_sms() * resident(kernel, of_cta, config.shared_bytes);
  require(!cooperative || ctas <= static_cast<uint64_t>(at_once),
          CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE);
  return static_cast<uint32_t>(at_once);
}

// One launch, or those of a graph: of one device, in the order of their stream.
Status run(const std::vector<Launch>& launches) {
  if (launches.empty()) return 0;
  Context& context = contexts[launches.front().device];
  if (context.sticky != 0) return context.sticky;
  Status failed = 0;
  try {
    if (launches.front().ptx == nullptr) {
      for (const Launch& launch : launches) run_on_host(launch);
    } else {
      std::unique_lock guard(lock);
      const std::vector<Range> ranges = reachable(context.device());
      guard.unlock();
      run_ptx(launches, ranges);
    }
  } catch (const Refused& refused) {
    failed = refused.status;
  }
  if (is_sticky(failed)) context.sticky = failed;
  return failed;
}

Function& known(Function* function) {
  require(functions.count(function) == 1, CUDA_ERROR_INVALID_HANDLE);
  return *function;
}

// Not known here, where a zero could be wrong: refused.
int value_of(const std::map<int, int>& attributes, int wanted) {
  const auto found = attributes.find(wanted);
  require(found != attributes.end(), CUDA_ERROR_INVALID_VALUE);
  return found->second;
}

std::map<int, int> device_attributes() {
  return {
      {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, capability() / 10},
      {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, capability() % 10},
      {CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, num_sms()},
      {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, most_shared_of_cta()},
      {CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, 1},
      {CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, number("FAKE_CUDA_VMM", 1) != 0},
      {CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED, option("FAKE_CUDA_FABRIC", "0") != "0"}};
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// ---- start, versions, devices

Status cuInit(unsigned) {
  return call("cuInit", kAlways | kInitialises, [&] {
    require(number("FAKE_CUDA_DEVICES", 4) > 0, CUDA_ERROR_NO_DEVICE);
    initialised = true;
  });
}

Status cuDriverGetVersion(int* version) {
  *version = static_cast<int>(number("FAKE_CUDA_DRIVER", 13000));
  return 0;
}

// found: a CUdriverProcAddressQueryResult; may be null.
Status cuGetProcAddress_v2(const char* name, void** out, int version, unsigned long long,
                           int* found) {
  static void* self = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  // From this version on these names mean functions that take a context, and are not here.
  constexpr int kWithContext = 13000;
  const std::string word = name;
  const bool is_changed = word == "cuCtxGetDevice" || word == "cuCtxSynchronize";
  *out = nullptr;
  if (version > number("FAKE_CUDA_DRIVER", 13000)) return CUDA_ERROR_INVALID_VALUE;
  if (!is_changed || version < kWithContext) {
    *out = dlsym(self, (word + "_v2").c_str());
    if (*out == nullptr) *out = dlsym(self, name);
  }
  if (found != nullptr) {
    *found = *out != nullptr ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  }
  return 0;
}

// NVRTC asks for tables of the driver's inner functions, and does without them.
Status cuGetExportTable(const void** table, const void*) {
  *table = nullptr;
  return CUDA_ERROR_NOT_FOUND;
}

Status cuDeviceGetCount(int* count) {
  return call("cuDeviceGetCount", kAlways,
              [&] { *count = static_cast<int>(number("FAKE_CUDA_DEVICES", 4)); });
}

Status cuDeviceGet(int* device, int ordinal) {
  return call("cuDeviceGet", kAlways, [&] {
    require_device(ordinal);
    *device = ordinal;
  });
}

Status cuDeviceGetName(char* name, int size, int) {
  return call("cuDeviceGetName", kAlways, [&] {
    const bool mig = number("FAKE_CUDA_MIG", 0) != 0;
    snprintf(name, static_cast<size_t>(size), "Fake GPU%s", mig ? " MIG 1g.10gb" : "");
  });
}

Status cuDeviceGetUuid_v2(char* uuid, int device) {
  return call("cuDeviceGetUuid", kAlways, [&] {
    memset(uuid, 0xAB, 16);
    // Devices are told apart by host too, where a test pretends that there are several.
    uuid[14] = static_cast<char>(host_number());
    uuid[15] = static_cast<char>(number("FAKE_CUDA_SHARED_UUID", 0) != 0 ? 0 : device);
  });
}

Status cuDeviceTotalMem_v2(size_t* bytes, int) {
  return call("cuDeviceTotalMem", kAlways, [&] { *bytes = total_bytes(); });
}

Status cuDeviceGetAttribute(int* value, int attribute, int) {
  return call("cuDeviceGetAttribute", kAlways,
              [&] { *value = value_of(device_attributes(), attribute); });
}

Status cuDeviceCanAccessPeer(int* can, int device, int peer) {
  return call("cuDeviceCanAccessPeer", kAlways, [&] {
    require_device(peer);
    *can = device != peer && has_p2p();
  });
}

Status cuDeviceGetP2PAttribute(int* value, int attribute, int device, int peer) {
  return call("cuDeviceGetP2PAttribute", kAlways, [&] {
    require(device != peer, CUDA_ERROR_INVALID_DEVICE);
    const bool atomics = has_p2p() && number("FAKE_CUDA_ATOMICS", 1) != 0;
    *value = attribute == CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED ? atomics : has_p2p();
  });
}

// ---- contexts

Status cuDevicePrimaryCtxRetain(Context** context, int device) {
  return call("cuDevicePrimaryCtxRetain", kAlways, [&] { *context = &contexts[device]; });
}
Status cuCtxPushCurrent_v2(Context* context) {
  return call("cuCtxPushCurrent", kAlways, [&] {
    require(context != nullptr, CUDA_ERROR_INVALID_CONTEXT);
    context_stack.push_back(context);
  });
}
Status cuCtxPopCurrent_v2(Context** context) {
  return call("cuCtxPopCurrent", kAlways | kNeedsContext, [&] {
    if (context != nullptr) *context = current();
    context_stack.pop_back();
  });
}
Status cuCtxGetCurrent(Context** context) {
  return call("cuCtxGetCurrent", kAlways, [&] { *context = current(); });
}
Status cuCtxGetDevice(int* device) {
  return call("cuCtxGetDevice", kAlways | kNeedsContext, [&] { *device = current_device(); });
}
Status cuCtxGetDevResource(Context* context, SmResource* resource, int type) {
  return call("cuCtxGetDevResource", kAlways, [&] {
    require(context != nullptr, CUDA_ERROR_INVALID_CONTEXT);
    require(type == CU_DEV_RESOURCE_TYPE_SM, CUDA_ERROR_INVALID_RESOURCE_TYPE);
    resource->type = type;
    // Where a green context or MPS leaves it fewer.
    resource->count = static_cast<unsigned>(number("FAKE_CUDA_CONTEXT_SMS", num_sms()));
  });
}
Status cuCtxSynchronize() {
  return call("cuCtxSynchronize", kNeedsContext | kUnsafe, [&] {
    break_captures([](const Stream& one) { return one.device == current_device(); });
  });
}

// ---- streams

Status cuStreamCreate(void** out, unsigned flags) {
  return call("cuStreamCreate", kNeedsContext,
              [&] { *out = make_stream(current_device(), flags); });
}
// The driver clamps a priority that is out of range.
Status cuStreamCreateWithPriority(void** out, unsigned flags, int) {
  return call("cuStreamCreateWithPriority", kNeedsContext,
              [&] { *out = make_stream(current_device(), flags); });
}
Status cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  return call("cuCtxGetStreamPriorityRange", kNeedsContext, [&] {
    *least = 0;
    *greatest = -5;
  });
}
Status cuStreamDestroy_v2(void* stream) {
  return call("cuStreamDestroy", 0,
              [&] { require(streams.erase(stream) == 1, CUDA_ERROR_INVALID_HANDLE); });
}
Status cuStreamSynchronize(void* handle) {
  return call("cuStreamSynchronize", kNeedsContext | kUnsafe, [&] {
    const auto stream = find_stream(handle, current_device());
    break_captures([&](const Stream& one) { return &one == stream.get(); });
  });
}

Status cuStreamIsCapturing(void* handle, int* status) {
  return call("cuStreamIsCapturing", kNeedsContext, [&] {
    const auto capture = find_stream(handle, current_device())->capture;
    *status = capture == nullptr ? CU_STREAM_CAPTURE_STATUS_NONE
              : capture->broken  ? CU_STREAM_CAPTURE_STATUS_INVALIDATED
                                 : CU_STREAM_CAPTURE_STATUS_ACTIVE;
  });
}
Status cuThreadExchangeStreamCaptureMode(int* mode) {
  return call("cuThreadExchangeStreamCaptureMode", 0, [&] { std::swap(thread_mode, *mode); });
}

Status cuStreamBeginCapture_v2(void* handle, int mode) {
  return call("cuStreamBeginCapture", kNeedsContext, [&] {
    require(!is_legacy(handle), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    const auto stream = find_stream(handle, current_device());
    require(stream->capture == nullptr, CUDA_ERROR_ILLEGAL_STATE);
    stream->capture = std::make_shared<Capture>(Capture{mode});
    stream->forked = false;
  });
}

// The graph is for fake_cuda_replay; its handle says no more than that there is one.
Status cuStreamEndCapture(void* handle, void** graph) {
  *graph = nullptr;
  return call("cuStreamEndCapture", kNeedsContext, [&] {
    const auto stream = find_stream(handle, current_device());
    require(stream->capture != nullptr && !stream->forked, CUDA_ERROR_ILLEGAL_STATE);
    const std::shared_ptr<Capture> ended = stream->capture;
    bool is_joined = true;
    for (auto& [_, one] : streams) {
      if (one->capture != ended) continue;
      is_joined = is_joined && (!one->forked || one->joined == one->done);
      one->capture = nullptr;
    }
    require(is_joined, CUDA_ERROR_STREAM_CAPTURE_UNJOINED);
    require(!ended->broken, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    graphs.push_back(ended->launches);
    *graph = &graphs;
  });
}

// ---- events. What they order has happened already, so they matter to captures only.

Status cuEventCreate(void** out, unsigned) {
  return call("cuEventCreate", kNeedsContext, [&] {
    auto made = std::make_unique<Event>();
    *out = made.get();
    events[*out] = std::move(made);
  });
}
Status cuEventDestroy_v2(void* event) {
  return call("cuEventDestroy", 0,
              [&] { require(events.erase(event) == 1, CUDA_ERROR_INVALID_HANDLE); });
}
Status cuEventRecord(void* event, void* handle) {
  return call("cuEventRecord", kNeedsContext, [&] {
    require(events.count(event) == 1, CUDA_ERROR_INVALID_HANDLE);
    const auto stream = find_stream(handle, current_device());
    *events[event] = Event{stream, stream->capture, stream->done};
  });
}
Status cuStreamWaitEvent(void* handle, void* event, unsigned) {
  return call("cuStreamWaitEvent", kNeedsContext, [&] {
    require(events.count(event) == 1, CUDA_ERROR_INVALID_HANDLE);
    const auto stream = find_stream(handle, current_device());
    const Event& waited = *events[event];
    const std::shared_ptr<Capture> capture = waited.capture.lock();
    if (capture == stream->capture && capture == nullptr) return;
    // A capture knows no work outside of it, and no other capture.
    require(capture != nullptr, CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
    require(!is_legacy(handle), CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
    if (stream->capture == nullptr) *stream = Stream{stream->device, capture, true, 1};
    require(stream->capture == capture, CUDA_ERROR_STREAM_CAPTURE_MERGE);
    if (!stream->forked) waited.stream->joined = waited.done;
  });
}

// ---- virtual memory

Status cuMemGetAllocationGranularity(size_t* bytes, const AllocationProp* prop, int) {
  return call("cuMemGetAllocationGranularity", 0, [&] {
    check_prop(*prop);
    *bytes = kGranularity;
  });
}

Status cuMemAddressReserve(Address* out, size_t size, size_t, Address, Handle) {
  return call("cuMemAddressReserve", kUnsafe, [&] {
    require(aligned(size), CUDA_ERROR_INVALID_VALUE);
    void* found = mmap(nullptr, size + kGranularity, PROT_NONE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    require(found != MAP_FAILED, CUDA_ERROR_OUT_OF_MEMORY);
    const size_t before = (kGranularity - address_of(found) % kGranularity) % kGranularity;
    *out = address_of(found) + before;
    if (before != 0) munmap(found, before);
    munmap(pointer(*out + size), kGranularity - before);
    reservations[*out] = size;
  });
}

Status cuMemAddressFree(Address address, size_t size) {
  return call("cuMemAddressFree", kUnsafe, [&] {
    const auto found = reservations.find(address);
    require(found != reservations.end() && found->second == size, CUDA_ERROR_INVALID_VALUE);
    require(!overlaps_mapping(address, size), CUDA_ERROR_INVALID_VALUE);
    reservations.erase(found);
    munmap(pointer(address), size);
  });
}

Status cuMemCreate(Handle* out, size_t size, const AllocationProp* prop, Handle) {
  return call("cuMemCreate", kUnsafe, [&] {
    check_prop(*prop);
    require(aligned(size), CUDA_ERROR_INVALID_VALUE);
    const int device = prop->location.id;
    require(used_bytes(device) + size <= total_bytes(), CUDA_ERROR_OUT_OF_MEMORY);
    const Memory made{size, host_number(), device, prop->handle_types, false};
    *out = hold(made, create_fd(size, device));
  });
}

Status cuMemRelease(Handle handle) {
  return call("cuMemRelease", kUnsafe, [&] {
    close(held(handle).fd);  // mappings keep the pages
    handles.erase(handle);
  });
}

Status cuMemMap(Address address, size_t size, size_t offset, Handle handle, Handle) {
  return call("cuMemMap", kUnsafe, [&] {
    const auto& [memory, fd] = held(handle);
    require(aligned(size) && aligned(address) && offset == 0, CUDA_ERROR_INVALID_VALUE);
    require(size <= memory->size && is_reserved(address, size), CUDA_ERROR_INVALID_VALUE);
    require(!overlaps_mapping(address, size), CUDA_ERROR_INVALID_VALUE);
    void* mapped = mmap(pointer(address), size, PROT_NONE, MAP_SHARED | MAP_FIXED, fd, 0);
    require(mapped != MAP_FAILED, CUDA_ERROR_OUT_OF_MEMORY);
    mappings[address] = Mapping{size, memory, {}};
  });
}

Status cuMemUnmap(Address address, size_t size) {
  return call("cuMemUnmap", kUnsafe, [&] {
    for (const Mapped* one : exactly(address, size)) mappings.erase(mappings.find(one->first));
    mmap(pointer(address), size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED,
         -1, 0);
  });
}

Status cuMemSetAccess(Address address, size_t size, const AccessDesc* access, size_t count) {
  return call("cuMemSetAccess", kUnsafe, [&] {
    const std::vector<Mapped*> mapped = exactly(address, size);
    std::set<int> readers;
    for (size_t i = 0; i < count; ++i) {
      require(access[i].location.type == CU_MEM_LOCATION_TYPE_DEVICE &&
                  access[i].flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
              CUDA_ERROR_INVALID_VALUE);
      const int device = access[i].location.id;
      require_device(device);
      for (const Mapped* one : mapped) {
        const Memory& memory = *one->second.memory;
        const bool is_peer = memory.host == host_number() && memory.device != device;
        // One of the statuses that the manual allows; which of them is for this it does not say.
        require(!is_peer || has_p2p(), CUDA_ERROR_INVALID_DEVICE);
      }
      readers.insert(device);
    }
    require(!readers.empty(), CUDA_ERROR_INVALID_VALUE);
    for (Mapped* one : mapped) one->second.readers.insert(readers.begin(), readers.end());
    mprotect(pointer(address), size, PROT_READ | PROT_WRITE);
  });
}

Status cuMemExportToShareableHandle(void* out, Handle handle, int type, Handle) {
  return call("cuMemExportToShareableHandle", kUnsafe, [&] {
    const auto& [memory, fd] = held(handle);
    require((memory->handle_types & type) != 0, CUDA_ERROR_INVALID_VALUE);
    if (type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) {
      const int copy = fcntl(fd, F_DUPFD_CLOEXEC, 0);
      require(copy >= 0, CUDA_ERROR_OPERATING_SYSTEM);
      memcpy(out, &copy, sizeof(copy));
      return;
    }
    struct stat status{};
    require(fstat(fd, &status) == 0, CUDA_ERROR_OPERATING_SYSTEM);
    const FabricBlob blob{status.st_ino, getpid(), fd, {}};
    memcpy(out, &blob, sizeof(blob));
  });
}

Status cuMemImportFromShareableHandle(Handle* out, void* shared, int type) {
  return call("cuMemImportFromShareableHandle", kUnsafe, [&] {
    FabricBlob blob{0, getpid(), static_cast<int>(address_of(shared)), {}};
    if (type == CU_MEM_HANDLE_TYPE_FABRIC) {
      memcpy(&blob, shared, sizeof(blob));
      require(option("FAKE_CUDA_FABRIC", "0") == "1", CUDA_ERROR_NOT_PERMITTED);
    }
    const std::string process = "/proc/" + std::to_string(blob.pid);
    *out = import_file(process + "/fd/" + std::to_string(blob.fd), blob.inode, type);
  });
}

// ---- other memory

Status cuMemGetInfo_v2(size_t* free_bytes, size_t* all_bytes) {
  return call("cuMemGetInfo", kNeedsContext, [&] {
    *all_bytes = total_bytes();
    *free_bytes = *all_bytes - used_bytes(current_device());
  });
}

Status cuMemAlloc_v2(Address* out, size_t size) {
  return call("cuMemAlloc", kNeedsContext | kUnsafe,
              [&] { *out = allocate(size, current_device()); });
}
Status cuMemHostAlloc(void** out, size_t size, unsigned) {
  return call("cuMemHostAlloc", kNeedsContext | kUnsafe,
              [&] { *out = pointer(allocate(size, kPinned)); });
}
Status cuMemFreeHost(void* address) {
  return call("cuMemFreeHost", kNeedsContext | kUnsafe, [&] {
    require(blocks.erase(address_of(address)) == 1, CUDA_ERROR_INVALID_VALUE);
    free(address);
  });
}
Status cuMemHostGetDevicePointer_v2(Address* out, void* address, unsigned) {
  return call("cuMemHostGetDevicePointer", 0, [&] {
    require(in_block(kPinned, address_of(address), 1), CUDA_ERROR_INVALID_VALUE);
    *out = address_of(address);
  });
}

Status cuMemsetD8_v2(Address address, unsigned char byte, size_t size) {
  return call("cuMemsetD8", kNeedsContext | kUnsafe, [&] {
    may_touch(current_device(), address, size);
    memset(pointer(address), byte, size);
  });
}
Status cuMemcpyDtoH_v2(void* target, Address source, size_t size) {
  return call("cuMemcpyDtoH", kNeedsContext | kUnsafe, [&] {
    may_touch(current_device(), source, size);
    memcpy(target, pointer(source), size);
  });
}
Status cuMemcpyHtoD_v2(Address target, const void* source, size_t size) {
  return call("cuMemcpyHtoD", kNeedsContext | kUnsafe, [&] {
    may_touch(current_device(), target, size);
    memcpy(pointer(target), source, size);
  });
}
// On a stream that captures nothing, into pinned memory: what else the driver allows is not here.
Status cuMemcpyDtoHAsync_v2(void* target, Address source, size_t size, void* handle) {
  return call("cuMemcpyDtoHAsync", kNeedsContext | kUnsafe, [&] {
    const auto stream = find_stream(handle, current_device());
    require(!is_legacy(handle) && stream->capture == nullptr, CUDA_ERROR_NOT_SUPPORTED);
    require(in_block(kPinned, address_of(target), size), CUDA_ERROR_INVALID_VALUE);
    may_touch(current_device(), source, size);
    memcpy(target, pointer(source), size);
  });
}

// ---- modules and launches

Status cuModuleLoadData(Module** out, const void* image) {
  return call("cuModuleLoadData", kNeedsContext | kUnsafe, [&] {
    const Cubin cubin(static_cast<const uint8_t*>(image));
    require(cubin.architecture == capability(), CUDA_ERROR_NO_BINARY_FOR_GPU);
    const PtxLibrary* ptx = find_ptx(static_cast<const char*>(image), cubin);
    auto made = std::make_unique<Module>(Module{cubin, ptx});
    *out = made.get();
    modules[*out] = std::move(made);
  });
}

Status cuModuleGetLoadingMode(int* mode) {
  return call("cuModuleGetLoadingMode", 0, [&] {
    const bool eager = option("CUDA_MODULE_LOADING", "LAZY") == "EAGER";
    *mode = eager ? CU_MODULE_EAGER_LOADING : CU_MODULE_LAZY_LOADING;
  });
}

Status cuModuleUnload(Module* module) {
  return call("cuModuleUnload", kUnsafe, [&] {
    require(modules.count(module) == 1, CUDA_ERROR_INVALID_HANDLE);
    std::erase_if(functions, [&](const auto& one) { return one.second->module == module; });
    modules.erase(module);
  });
}

Status cuModuleGetFunction(Function** out, Module* module, const char* name) {
  return call("cuModuleGetFunction", 0, [&] {
    require(modules.count(module) == 1, CUDA_ERROR_INVALID_HANDLE);
    const auto kernel = module->cubin.kernels.find(name);
    require(kernel != module->cubin.kernels.end(), CUDA_ERROR_NOT_FOUND);
    auto made = std::make_unique<Function>(Function{module, name, &kernel->second});
    *out = made.get();
    functions[*out] = std::move(made);
  });
}

Status cuFuncLoad(Function* function) {
  return call("cuFuncLoad", kUnsafe, [&] { known(function); });
}

Status cuFuncGetAttribute(int* value, int attribute, Function* function) {
  return call("cuFuncGetAttribute", 0, [&] {
    const Kernel& kernel = *known(function).kernel;
    const std::map<int, int> attributes = {
        {CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, most_threads_of_cta(kernel)},
        {CU_FUNC_ATTRIBUTE_NUM_REGS, kernel.registers},
        {CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, kernel.shared_bytes}};
    *value = value_of(attributes, attribute);
  });
}

Status cuFuncSetAttribute(Function* function, int attribute, int value) {
  return call("cuFuncSetAttribute", 0, [&] {
    require(attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, CUDA_ERROR_INVALID_VALUE);
    const int all = value + known(function).kernel->shared_bytes;
    require(value >= 0 && all <= most_shared_of_cta(), CUDA_ERROR_INVALID_VALUE);
    function->allowed_shared = std::max(all, kSharedOfCta);
  });
}

Status cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Function* function, int threads,
                                                   size_t dynamic_shared) {
  return call("cuOccupancyMaxActiveBlocksPerMultiprocessor", kNeedsContext, [&] {
    require(threads > 0 && threads <= 1024, CUDA_ERROR_INVALID_VALUE);
    *blocks = resident(*known(function).kernel, threads, dynamic_shared);
  });
}

Status cuLaunchKernelEx(const LaunchConfig* config, Function* function, void** params, void**) {
  std::vector<Launch> now;
  const Status failed = call("cuLaunchKernelEx", kNeedsContext, [&] {
    const int attribute = attribute_of(*config);
    Launch launch{known(function).name, function->module->ptx, current_device(), *config};
    launch.pdl = attribute == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    launch.resident_ctas =
        check_shape(*config, *function, attribute == CU_LAUNCH_ATTRIBUTE_COOPERATIVE);
    launch.args = copy_args(*function, params);
    const auto stream = find_stream(config->stream, launch.device);
    const auto capture = stream->capture;
    require(capture == nullptr || !capture->broken, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    ++num_launches;
    ++stream->done;
    last_launch = launch;
    (capture != nullptr ? capture->launches : now).push_back(launch);
  });
  return failed != 0 ? failed : run(now);
}

// ---- for the tests

// As FAKE_CUDA_FAIL, for the calls from now on; an empty string ends it.
void fake_cuda_fail(const char* spec) {
  const std::lock_guard guard(lock);
  failures = spec;
  calls.clear();
}

// What there is and what was called, as JSON; until the thread asks again.
const char* fake_cuda_state() {
  thread_local std::string text;
  const std::lock_guard guard(lock);
  const auto is_pinned = [](const auto& one) { return one.second.device == kPinned; };
  const long pinned = std::count_if(blocks.begin(), blocks.end(), is_pinned);
  size_t captured = 0;
  for (const std::vector<Launch>& graph : graphs) captured += graph.size();
  const auto& [grid, block, shared_bytes, stream, _, num_attributes] = last_launch.config;
  std::ostringstream out;
  out << "{\"live\": {\"handles\": " << handles.size() << ", \"mappings\": " << mappings.size()
      << ", \"reservations\": " << reservations.size() << ", \"host_allocations\": " << pinned
      << "}, \"modules\": " << modules.size() << ", \"captured\": " << captured << ", \"calls\": {";
  const char* between = "";
  for (const auto& [name, count] : calls) {
    out << std::exchange(between, ", ") << '"' << name << "\": " << count;
  }
  out << "}, \"launch\": {\"name\": \"" << last_launch.name << "\", \"grid\": [" << grid[0] << ", "
      << grid[1] << ", " << grid[2] << "], \"block\": [" << block[0] << ", " << block[1] << ", "
      << block[2] << "], \"shared_bytes\": " << shared_bytes
      << ", \"num_attributes\": " << num_attributes << ", \"pdl\": " << last_launch.pdl
      << ", \"stream\": " << address_of(stream) << ", \"count\": " << num_launches
      << ", \"args\": \"" << std::hex;
  for (const uint8_t byte : last_launch.args) out << byte / 16 << byte % 16;
  out << "\"}}";
  text = out.str();
  return text.c_str();
}

// Whether some device may touch this device memory: the host is about to have a tensor there, where a
// GPU's tensor would be.
Status fake_cuda_check_exposed(Address address, size_t size) {
  return guarded([&] {
    for (const Mapped* one : around(address, size)) {
      require(!one->second.readers.empty(), CUDA_ERROR_INVALID_VALUE);
    }
  });
}

// Runs what was launched in captures, in order, with the arguments of that time.
Status fake_cuda_replay() {
  for (const std::vector<Launch>& graph : graphs) {
    if (const Status failed = run(graph)) return failed;
  }
  return 0;
}
void fake_cuda_forget_capture() {
  const std::lock_guard guard(lock);
  graphs.clear();
}

}  // extern "C"
#pragma GCC visibility pop
