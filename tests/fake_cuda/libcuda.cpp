// A CUDA driver without a GPU, for tests only: device memory is memfd, a launch calls the host build
// of the kernel. What the real driver refuses is refused here too (misaligned or overlapping maps,
// unknown handles, memory that nobody was given access to), so that a mistake is an error in a test.
// How it is set up from outside: the FAKE_CUDA_* variables, read at every call, and fake_cuda_*().
// What it cannot show: streams (a launch has finished when it returns), and anything about speed.
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "driver_constants.h"  // written by __init__.py from cuda.bindings: all the enumerators

using Status = int;
using Handle = unsigned long long;
using Address = unsigned long long;

namespace {

constexpr size_t kGranularity = size_t{2} << 20;
constexpr int kMostDevices = 128;
constexpr int kPoison = 0xCC;  // fresh device memory holds anything; here always this

// ---- what the C ABI of the driver looks like

struct Location {
  int type;
  int id;
};
struct AllocationProp {
  int type;
  int handle_types;
  Location location;
  void* win32;
  unsigned char flags[8];
};
struct AccessDesc {
  Location location;
  int flags;
};
struct LaunchAttribute {
  int id;
  int pad;
  unsigned char value[64];
};
struct LaunchConfig {
  unsigned grid[3];
  unsigned block[3];
  unsigned shared_bytes;
  void* stream;
  LaunchAttribute* attributes;
  unsigned num_attributes;
};
static_assert(sizeof(AllocationProp) == 32 && sizeof(AccessDesc) == 12);
static_assert(sizeof(LaunchAttribute) == 72 && sizeof(LaunchConfig) == 56);

struct FabricBlob {  // 64 bytes, opaque to the caller
  uint64_t magic, size, inode;
  int32_t pid, fd, device, domain;
  uint8_t rest[24];
};
static_assert(sizeof(FabricBlob) == 64);
constexpr uint64_t kMagic = 0x66616b6563756461;

// ---- state

struct Memory {  // lives while a handle or a mapping of it does
  int fd;        // -1 when no handle is left: the mappings keep the pages
  size_t size;
  int device;
  int handle_types;
  bool imported;
  int handles = 1;
  int mappings = 0;
};
struct Mapping {
  size_t size;
  Memory* memory;
  std::set<int> readers;  // devices that may touch it
};
struct Context {
  int device;
};
struct Module {
  std::vector<uint8_t> image;
};
struct Function {
  Module* module;
  std::string name;
};
struct Launch {  // the last one is readable from Python: keep in step with LastLaunch there
  char name[64];
  uint32_t grid[3], block[3];
  uint32_t shared_bytes, num_attributes, pdl, args_bytes;
  uint64_t stream, count;
  uint8_t args[4096];
};

std::mutex lock;
bool initialised = false;
Handle next_handle = 0x1000;
std::map<Handle, Memory*> handles;
std::map<Address, size_t> reservations, host_memory, plain_memory;
std::map<Address, Mapping> mappings;
std::set<Module*> modules;
std::map<Function*, std::unique_ptr<Function>> functions;
std::map<std::string, long> calls;
std::string failures;  // set by fake_cuda_fail; beside FAKE_CUDA_FAIL
Launch last_launch{};
std::vector<Launch> captured;
Context contexts[kMostDevices];
thread_local std::vector<Context*> context_stack;

std::string option(const char* name, const char* fallback) {
  const char* value = getenv(name);
  return value != nullptr && *value != 0 ? value : fallback;
}
long number(const char* name, long fallback) {
  const std::string text = option(name, "");
  return text.empty() ? fallback : strtol(text.c_str(), nullptr, 0);
}
int num_devices() {
  return static_cast<int>(number("FAKE_CUDA_DEVICES", 4));
}
bool capturing() {
  return number("FAKE_CUDA_CAPTURING", 0) != 0;
}

// ---- failures on demand: "cuMemMap:2:CUDA_ERROR_OUT_OF_MEMORY,..."; KILL ends the process instead

Status injected(const std::string& spec, const std::string& name, long call) {
  size_t at = 0;
  while (at < spec.size()) {
    const size_t end = std::min(spec.find(',', at), spec.size());
    const std::string one = spec.substr(at, end - at);
    at = end + 1;
    const size_t first = one.find(':'), second = one.find(':', first + 1);
    if (second == std::string::npos || one.substr(0, first) != name) continue;
    if (strtol(one.c_str() + first + 1, nullptr, 10) != call) continue;
    const std::string what = one.substr(second + 1);
    if (what == "KILL") kill(getpid(), SIGKILL);
    for (const auto& [text, value] : kResults) {
      if (what == text) return value;
    }
    abort();  // a misspelt name would be a test that tests nothing
  }
  return 0;
}

Status enter(const char* name) {
  const std::lock_guard guard(lock);
  const long call = ++calls[name];
  for (const std::string& spec : {option("FAKE_CUDA_FAIL", ""), failures}) {
    if (const Status failed = injected(spec, name, call)) return failed;
  }
  return initialised ? 0 : CUDA_ERROR_NOT_INITIALIZED;
}
#define ENTER(name)                                        \
  do {                                                     \
    if (const Status failed = enter(#name)) return failed; \
  } while (false)
#define CHECK(condition, error)     \
  do {                              \
    if (!(condition)) return error; \
  } while (false)

Context* current() {
  return context_stack.empty() ? nullptr : context_stack.back();
}
bool is_device(int device) {
  return device >= 0 && device < num_devices();
}
bool aligned(size_t value) {
  return value % kGranularity == 0;
}
void* pointer(Address address) {
  return reinterpret_cast<void*>(address);
}
Address address_of(void* pointer) {
  return reinterpret_cast<Address>(pointer);
}

// All functions below this line expect the lock to be held where they look at the state.

bool inside_one(const std::map<Address, size_t>& ranges, Address address, size_t size) {
  auto next = ranges.upper_bound(address);
  if (next == ranges.begin()) return false;
  --next;
  return address + size <= next->first + next->second;
}

bool overlaps_mapping(Address address, size_t size) {
  const auto next = mappings.lower_bound(address);
  if (next != mappings.end() && next->first < address + size) return true;
  return next != mappings.begin() &&
         std::prev(next)->first + std::prev(next)->second.size > address;
}

// The mappings that make up [address, address + size) exactly, or nothing.
std::vector<Mapping*> exactly(Address address, size_t size) {
  std::vector<Mapping*> found;
  Address at = address;
  while (at < address + size) {
    const auto one = mappings.find(at);
    if (one == mappings.end()) return {};
    found.push_back(&one->second);
    at += one->second.size;
  }
  return at == address + size ? found : std::vector<Mapping*>{};
}

Status may_touch(Address address, size_t size) {
  CHECK(current() != nullptr, CUDA_ERROR_INVALID_CONTEXT);
  if (inside_one(host_memory, address, size) || inside_one(plain_memory, address, size)) return 0;
  CHECK(inside_one(reservations, address, size), CUDA_ERROR_INVALID_VALUE);
  for (Address at = address; at < address + size;) {
    auto next = mappings.upper_bound(at);
    CHECK(next != mappings.begin(), CUDA_ERROR_ILLEGAL_ADDRESS);
    --next;
    CHECK(at < next->first + next->second.size, CUDA_ERROR_ILLEGAL_ADDRESS);
    CHECK(next->second.readers.count(current()->device) != 0, CUDA_ERROR_ILLEGAL_ADDRESS);
    at = next->first + next->second.size;
  }
  return 0;
}

size_t used_bytes(int device) {
  size_t used = 0;
  std::set<Memory*> all;
  for (const auto& [_, memory] : handles) all.insert(memory);
  for (const auto& [_, mapping] : mappings) all.insert(mapping.memory);
  for (const Memory* memory : all) {
    if (memory->device == device && !memory->imported) used += memory->size;
  }
  return used;
}
size_t total_bytes() {
  return static_cast<size_t>(number("FAKE_CUDA_MEMORY", long{8} << 30));
}

void drop_if_unused(Memory* memory) {
  if (memory->handles == 0 && memory->fd >= 0) {
    close(memory->fd);
    memory->fd = -1;
  }
  if (memory->handles == 0 && memory->mappings == 0) delete memory;
}

Status check_prop(const AllocationProp* prop) {
  CHECK(prop != nullptr && prop->type == CU_MEM_ALLOCATION_TYPE_PINNED, CUDA_ERROR_INVALID_VALUE);
  CHECK(prop->location.type == CU_MEM_LOCATION_TYPE_DEVICE, CUDA_ERROR_INVALID_VALUE);
  CHECK(is_device(prop->location.id), CUDA_ERROR_INVALID_DEVICE);
  const int known = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR | CU_MEM_HANDLE_TYPE_FABRIC;
  CHECK((prop->handle_types & ~known) == 0, CUDA_ERROR_INVALID_VALUE);
  if ((prop->handle_types & CU_MEM_HANDLE_TYPE_FABRIC) != 0) {
    // Without an IMEX channel the attribute says yes and the allocation fails.
    const std::string fabric = option("FAKE_CUDA_FABRIC", "0");
    CHECK(fabric != "0", CUDA_ERROR_NOT_SUPPORTED);
    CHECK(fabric == "1", CUDA_ERROR_NOT_PERMITTED);
  }
  return 0;
}

Status adopt(int fd, size_t size, int device, int handle_types, bool imported, Handle* out) {
  *out = next_handle++;
  handles[*out] = new Memory{fd, size, device, handle_types, imported};
  return 0;
}

Status import_fd(int fd, int device, uint64_t inode, int type, Handle* out) {
  struct stat status{};
  if (fd < 0 || fstat(fd, &status) != 0 || !aligned(status.st_size) || status.st_size == 0 ||
      (inode != 0 && inode != status.st_ino)) {
    if (fd >= 0) close(fd);
    return CUDA_ERROR_INVALID_VALUE;
  }
  return adopt(fd, static_cast<size_t>(status.st_size), device, type, true, out);
}

// ---- launches

void* host_symbol(const std::string& name) {
  const std::string path = option("FAKE_CUDA_KERNELS", "");
  if (path.empty()) return nullptr;
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  return library == nullptr ? nullptr : dlsym(library, name.c_str());
}

size_t args_bytes(const std::string& kernel) {
  const std::string prefix = "moe_nvlink_";
  if (kernel.rfind(prefix, 0) != 0) return 0;
  std::string name = kernel.substr(prefix.size());
  if (name.rfind("head_", 0) == 0) name = "head";  // the kernels of a shared LM head have one struct
  void* size = host_symbol(prefix + "sizeof_" + name + "_args");
  return size == nullptr ? 0 : static_cast<size_t>(reinterpret_cast<int (*)()>(size)());
}

// More CTAs than this would be more threads than a test machine has use for; the kernels must give
// the same result for every grid.
Status run(const Launch& launch) {
  const int most = static_cast<int>(number("FAKE_CUDA_MOST_CTAS", 4));
  const auto create = reinterpret_cast<void* (*)(int)>(host_symbol("moe_nvlink_grid_create"));
  const auto destroy = reinterpret_cast<void (*)(void*)>(host_symbol("moe_nvlink_grid_destroy"));
  const auto kernel = reinterpret_cast<void (*)(const void*, void*)>(host_symbol(launch.name));
  CHECK(create != nullptr && destroy != nullptr && kernel != nullptr, CUDA_ERROR_NOT_FOUND);
  void* grid = create(std::min(static_cast<int>(launch.grid[0]), most));
  CHECK(grid != nullptr, CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES);
  kernel(launch.args, grid);
  destroy(grid);
  return 0;
}

size_t image_bytes(const uint8_t* image) {  // an ELF64 file ends with one of its header tables
  uint64_t programs, sections;
  uint16_t sizes[5];
  memcpy(&programs, image + 32, 8);
  memcpy(&sections, image + 40, 8);
  memcpy(sizes, image + 54, 10);
  return std::max(programs + uint64_t{sizes[0]} * sizes[1],
                  sections + uint64_t{sizes[2]} * sizes[3]);
}

void capability(int* major, int* minor) {
  const std::string text = option("FAKE_CUDA_CAPABILITY", "9.0");
  *major = atoi(text.c_str());
  *minor = atoi(text.c_str() + text.find('.') + 1);
}

int attribute_value(int attribute) {
  int major, minor;
  capability(&major, &minor);
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
      return major;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
      return minor;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
      return number("FAKE_CUDA_SMS", 4);
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE:
      return 32;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
      return 1024;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR:
      return 2048;
    case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY:
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH:
      return 1;
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
      return number("FAKE_CUDA_VMM", 1);
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
      return 1;
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED:
      return option("FAKE_CUDA_FABRIC", "0") != "0";
    default:
      return 0;
  }
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// ---- start, versions, devices

Status cuInit(unsigned flags) {
  const Status failed = enter("cuInit");
  if (failed != 0 && failed != CUDA_ERROR_NOT_INITIALIZED) return failed;
  CHECK(flags == 0, CUDA_ERROR_INVALID_VALUE);
  CHECK(num_devices() > 0, CUDA_ERROR_NO_DEVICE);
  const std::lock_guard guard(lock);
  for (int device = 0; device < kMostDevices; ++device) contexts[device].device = device;
  initialised = true;
  return 0;
}

Status cuDriverGetVersion(int* version) {
  *version = static_cast<int>(number("FAKE_CUDA_DRIVER", 13000));
  return 0;
}

Status cuGetErrorName(Status error, const char** out) {
  for (const auto& [text, value] : kResults) {
    *out = text;
    if (value == error) return 0;
  }
  *out = nullptr;
  return CUDA_ERROR_INVALID_VALUE;
}
Status cuGetErrorString(Status error, const char** out) {
  return cuGetErrorName(error, out);
}

Status cuGetProcAddress_v2(const char* name, void** out, int, unsigned long long, int* found) {
  static void* self = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  *out = dlsym(self, (std::string(name) + "_v2").c_str());
  if (*out == nullptr) *out = dlsym(self, name);
  if (found != nullptr) *found = *out == nullptr ? 1 : 0;
  return *out == nullptr ? CUDA_ERROR_NOT_FOUND : 0;
}

// NVRTC asks for tables of the driver's inner functions, and does without them.
Status cuGetExportTable(const void** table, const void*) {
  *table = nullptr;
  return CUDA_ERROR_NOT_FOUND;
}

Status cuDeviceGetCount(int* count) {
  ENTER(cuDeviceGetCount);
  *count = num_devices();
  return 0;
}

Status cuDeviceGet(int* device, int ordinal) {
  ENTER(cuDeviceGet);
  CHECK(is_device(ordinal), CUDA_ERROR_INVALID_DEVICE);
  *device = ordinal;
  return 0;
}

Status cuDeviceGetName(char* name, int size, int device) {
  ENTER(cuDeviceGetName);
  CHECK(is_device(device), CUDA_ERROR_INVALID_DEVICE);
  const bool mig = number("FAKE_CUDA_MIG", 0) != 0;
  snprintf(name, static_cast<size_t>(size), "Fake GPU%s", mig ? " MIG 1g.10gb" : "");
  return 0;
}

Status cuDeviceGetUuid_v2(char* uuid, int device) {
  ENTER(cuDeviceGetUuid);
  CHECK(is_device(device), CUDA_ERROR_INVALID_DEVICE);
  memset(uuid, 0xAB, 16);
  // Devices are told apart by host too, where a test pretends that there are several.
  uuid[14] = static_cast<char>(number("FAKE_CUDA_HOST", 0));
  uuid[15] = static_cast<char>(number("FAKE_CUDA_SHARED_UUID", 0) != 0 ? 0 : device);
  return 0;
}

Status cuDeviceTotalMem_v2(size_t* bytes, int device) {
  ENTER(cuDeviceTotalMem);
  CHECK(is_device(device), CUDA_ERROR_INVALID_DEVICE);
  *bytes = total_bytes();
  return 0;
}

Status cuDeviceGetAttribute(int* value, int attribute, int device) {
  ENTER(cuDeviceGetAttribute);
  CHECK(is_device(device), CUDA_ERROR_INVALID_DEVICE);
  *value = attribute_value(attribute);
  return 0;
}

Status cuDeviceGetPCIBusId(char* id, int size, int device) {
  ENTER(cuDeviceGetPCIBusId);
  CHECK(is_device(device), CUDA_ERROR_INVALID_DEVICE);
  snprintf(id, static_cast<size_t>(size), "0000:%02x:00.0", device + 1);
  return 0;
}

Status cuDeviceCanAccessPeer(int* can, int device, int peer) {
  ENTER(cuDeviceCanAccessPeer);
  CHECK(is_device(device) && is_device(peer), CUDA_ERROR_INVALID_DEVICE);
  *can = device != peer && number("FAKE_CUDA_P2P", 1) != 0;
  return 0;
}

Status cuDeviceGetP2PAttribute(int* value, int attribute, int device, int peer) {
  ENTER(cuDeviceGetP2PAttribute);
  CHECK(is_device(device) && is_device(peer) && device != peer, CUDA_ERROR_INVALID_DEVICE);
  const bool access = number("FAKE_CUDA_P2P", 1) != 0;
  const bool atomics = access && number("FAKE_CUDA_ATOMICS", 1) != 0;
  *value = attribute == CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED ? atomics : access;
  return 0;
}

// ---- contexts

Status cuDevicePrimaryCtxRetain(Context** context, int device) {
  ENTER(cuDevicePrimaryCtxRetain);
  CHECK(is_device(device), CUDA_ERROR_INVALID_DEVICE);
  *context = &contexts[device];
  return 0;
}
Status cuDevicePrimaryCtxRelease_v2(int) {
  ENTER(cuDevicePrimaryCtxRelease);
  return 0;
}

Status cuCtxPushCurrent_v2(Context* context) {
  ENTER(cuCtxPushCurrent);
  CHECK(context != nullptr, CUDA_ERROR_INVALID_CONTEXT);
  context_stack.push_back(context);
  return 0;
}
Status cuCtxPopCurrent_v2(Context** context) {
  ENTER(cuCtxPopCurrent);
  CHECK(!context_stack.empty(), CUDA_ERROR_INVALID_CONTEXT);
  if (context != nullptr) *context = context_stack.back();
  context_stack.pop_back();
  return 0;
}
Status cuCtxSetCurrent(Context* context) {
  ENTER(cuCtxSetCurrent);
  if (!context_stack.empty()) context_stack.pop_back();
  if (context != nullptr) context_stack.push_back(context);
  return 0;
}
Status cuCtxGetCurrent(Context** context) {
  ENTER(cuCtxGetCurrent);
  *context = current();
  return 0;
}
Status cuCtxGetDevice(int* device) {
  ENTER(cuCtxGetDevice);
  CHECK(current() != nullptr, CUDA_ERROR_INVALID_CONTEXT);
  *device = current()->device;
  return 0;
}
// Waiting and synchronous copies break a capture, as cudaStreamCaptureModeGlobal has it.
Status cuCtxSynchronize() {
  ENTER(cuCtxSynchronize);
  CHECK(current() != nullptr, CUDA_ERROR_INVALID_CONTEXT);
  CHECK(!capturing(), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  return 0;
}

Status cuStreamSynchronize(void*) {
  ENTER(cuStreamSynchronize);
  CHECK(current() != nullptr, CUDA_ERROR_INVALID_CONTEXT);
  CHECK(!capturing(), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  return 0;
}
Status cuStreamIsCapturing(void*, int* status) {
  ENTER(cuStreamIsCapturing);
  CHECK(current() != nullptr, CUDA_ERROR_INVALID_CONTEXT);
  *status = capturing() ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
  return 0;
}

Status cuThreadExchangeStreamCaptureMode(int* mode) {
  ENTER(cuThreadExchangeStreamCaptureMode);
  thread_local int mine = CU_STREAM_CAPTURE_MODE_GLOBAL;
  std::swap(mine, *mode);
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
  ENTER(cuMemAddressReserve);
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
  ENTER(cuMemAddressFree);
  const std::lock_guard guard(lock);
  const auto found = reservations.find(address);
  CHECK(found != reservations.end() && found->second == size, CUDA_ERROR_INVALID_VALUE);
  CHECK(!overlaps_mapping(address, size), CUDA_ERROR_INVALID_VALUE);
  reservations.erase(found);
  munmap(pointer(address), size);
  return 0;
}

Status cuMemCreate(Handle* out, size_t size, const AllocationProp* prop, Handle flags) {
  ENTER(cuMemCreate);
  if (const Status bad = check_prop(prop)) return bad;
  CHECK(size != 0 && aligned(size) && flags == 0, CUDA_ERROR_INVALID_VALUE);
  const std::lock_guard guard(lock);
  CHECK(used_bytes(prop->location.id) + size <= total_bytes(), CUDA_ERROR_OUT_OF_MEMORY);
  const int fd = memfd_create("fake_cuda", MFD_CLOEXEC);
  CHECK(fd >= 0, CUDA_ERROR_OPERATING_SYSTEM);
  void* bytes = MAP_FAILED;
  if (ftruncate(fd, static_cast<off_t>(size)) == 0) {
    bytes = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  }
  if (bytes == MAP_FAILED) {
    close(fd);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  memset(bytes, kPoison, size);
  munmap(bytes, size);
  return adopt(fd, size, prop->location.id, prop->handle_types, false, out);
}

Status cuMemRelease(Handle handle) {
  ENTER(cuMemRelease);
  const std::lock_guard guard(lock);
  const auto found = handles.find(handle);
  CHECK(found != handles.end(), CUDA_ERROR_INVALID_VALUE);
  --found->second->handles;
  drop_if_unused(found->second);
  handles.erase(found);
  return 0;
}

Status cuMemMap(Address address, size_t size, size_t offset, Handle handle, Handle flags) {
  ENTER(cuMemMap);
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
  ENTER(cuMemUnmap);
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
  ENTER(cuMemSetAccess);
  const std::lock_guard guard(lock);
  const std::vector<Mapping*> found = exactly(address, size);
  CHECK(!found.empty() && count > 0, CUDA_ERROR_INVALID_VALUE);
  for (size_t i = 0; i < count; ++i) {
    CHECK(access[i].location.type == CU_MEM_LOCATION_TYPE_DEVICE, CUDA_ERROR_INVALID_VALUE);
    CHECK(is_device(access[i].location.id), CUDA_ERROR_INVALID_DEVICE);
    CHECK(access[i].flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE, CUDA_ERROR_INVALID_VALUE);
    for (Mapping* mapping : found) mapping->readers.insert(access[i].location.id);
  }
  return mprotect(pointer(address), size, PROT_READ | PROT_WRITE) == 0 ? 0 : CUDA_ERROR_UNKNOWN;
}

Status cuMemExportToShareableHandle(void* out, Handle handle, int type, Handle flags) {
  ENTER(cuMemExportToShareableHandle);
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
  ENTER(cuMemImportFromShareableHandle);
  const std::lock_guard guard(lock);
  if (type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) {
    const int theirs = static_cast<int>(reinterpret_cast<intptr_t>(shared));
    return import_fd(fcntl(theirs, F_DUPFD_CLOEXEC, 0), -1, 0, type, out);
  }
  CHECK(type == CU_MEM_HANDLE_TYPE_FABRIC && shared != nullptr, CUDA_ERROR_INVALID_VALUE);
  FabricBlob blob;
  memcpy(&blob, shared, sizeof(blob));
  CHECK(blob.magic == kMagic, CUDA_ERROR_INVALID_VALUE);
  CHECK(option("FAKE_CUDA_FABRIC", "0") == "1", CUDA_ERROR_NOT_PERMITTED);
  CHECK(blob.domain == number("FAKE_CUDA_DOMAIN", 0), CUDA_ERROR_NOT_PERMITTED);
  char path[64];
  snprintf(path, sizeof(path), "/proc/%d/fd/%d", blob.pid, blob.fd);
  return import_fd(open(path, O_RDWR | O_CLOEXEC), blob.device, blob.inode, type, out);
}

// ---- other memory

Status cuMemGetInfo_v2(size_t* free_bytes, size_t* all_bytes) {
  ENTER(cuMemGetInfo);
  CHECK(current() != nullptr, CUDA_ERROR_INVALID_CONTEXT);
  const std::lock_guard guard(lock);
  *all_bytes = total_bytes();
  *free_bytes = *all_bytes - used_bytes(current()->device);
  return 0;
}

Status cuMemAlloc_v2(Address* out, size_t size) {
  ENTER(cuMemAlloc);
  CHECK(current() != nullptr, CUDA_ERROR_INVALID_CONTEXT);
  CHECK(size != 0, CUDA_ERROR_INVALID_VALUE);
  CHECK(!capturing(), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  void* found = aligned_alloc(256, (size + 255) / 256 * 256);
  CHECK(found != nullptr, CUDA_ERROR_OUT_OF_MEMORY);
  memset(found, kPoison, size);
  const std::lock_guard guard(lock);
  plain_memory[address_of(found)] = size;
  *out = address_of(found);
  return 0;
}
Status cuMemFree_v2(Address address) {
  ENTER(cuMemFree);
  const std::lock_guard guard(lock);
  CHECK(plain_memory.erase(address) == 1, CUDA_ERROR_INVALID_VALUE);
  free(pointer(address));
  return 0;
}

Status cuMemHostAlloc(void** out, size_t size, unsigned) {
  ENTER(cuMemHostAlloc);
  CHECK(current() != nullptr, CUDA_ERROR_INVALID_CONTEXT);
  CHECK(size != 0, CUDA_ERROR_INVALID_VALUE);
  *out = aligned_alloc(4096, (size + 4095) / 4096 * 4096);
  CHECK(*out != nullptr, CUDA_ERROR_OUT_OF_MEMORY);
  memset(*out, kPoison, size);
  const std::lock_guard guard(lock);
  host_memory[address_of(*out)] = size;
  return 0;
}
Status cuMemFreeHost(void* address) {
  ENTER(cuMemFreeHost);
  CHECK(current() != nullptr, CUDA_ERROR_INVALID_CONTEXT);
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

static Status fill(Address address, unsigned char byte, size_t size) {
  {
    const std::lock_guard guard(lock);
    if (const Status bad = may_touch(address, size)) return bad;
  }
  memset(pointer(address), byte, size);
  return 0;
}
Status cuMemsetD8_v2(Address address, unsigned char byte, size_t size) {
  ENTER(cuMemsetD8);
  CHECK(!capturing(), CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
  return fill(address, byte, size);
}
Status cuMemsetD8Async(Address address, unsigned char byte, size_t size, void*) {
  ENTER(cuMemsetD8Async);
  return fill(address, byte, size);
}

Status cuMemcpyDtoH_v2(void* target, Address source, size_t size) {
  ENTER(cuMemcpyDtoH);
  CHECK(!capturing(), CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
  {
    const std::lock_guard guard(lock);
    if (const Status bad = may_touch(source, size)) return bad;
  }
  memcpy(target, pointer(source), size);
  return 0;
}
Status cuMemcpyHtoD_v2(Address target, const void* source, size_t size) {
  ENTER(cuMemcpyHtoD);
  CHECK(!capturing(), CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
  {
    const std::lock_guard guard(lock);
    if (const Status bad = may_touch(target, size)) return bad;
  }
  memcpy(pointer(target), source, size);
  return 0;
}

// ---- modules and launches

Status cuModuleLoadData(Module** out, const void* image) {
  ENTER(cuModuleLoadData);
  CHECK(current() != nullptr, CUDA_ERROR_INVALID_CONTEXT);
  const auto* bytes = static_cast<const uint8_t*>(image);
  CHECK(bytes != nullptr && memcmp(bytes,
                                   "\x7f"
                                   "ELF",
                                   4) == 0,
        CUDA_ERROR_INVALID_IMAGE);
  int major, minor;
  capability(&major, &minor);
  CHECK(bytes[49] == major * 10 + minor, CUDA_ERROR_NO_BINARY_FOR_GPU);  // e_flags: the SM version
  const std::lock_guard guard(lock);
  *out = new Module{{bytes, bytes + image_bytes(bytes)}};
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
  ENTER(cuModuleUnload);
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
  const std::string symbol = std::string(1, '\0') + name + std::string(1, '\0');
  const auto& image = module->image;
  CHECK(std::search(image.begin(), image.end(), symbol.begin(), symbol.end(),
                    [](uint8_t a, char b) { return a == static_cast<uint8_t>(b); }) != image.end(),
        CUDA_ERROR_NOT_FOUND);
  auto made = std::make_unique<Function>(Function{module, name});
  *out = made.get();
  functions[*out] = std::move(made);
  return 0;
}

Status cuFuncLoad(Function* function) {
  ENTER(cuFuncLoad);
  const std::lock_guard guard(lock);
  return functions.count(function) == 1 ? 0 : CUDA_ERROR_INVALID_HANDLE;
}

Status cuFuncGetAttribute(int* value, int attribute, Function* function) {
  ENTER(cuFuncGetAttribute);
  const std::lock_guard guard(lock);
  CHECK(functions.count(function) == 1, CUDA_ERROR_INVALID_HANDLE);
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK
               ? static_cast<int>(number("FAKE_CUDA_MAX_THREADS", 1024))
               : 0;
  return 0;
}

Status cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Function* function, int threads,
                                                   size_t) {
  ENTER(cuOccupancyMaxActiveBlocksPerMultiprocessor);
  CHECK(current() != nullptr, CUDA_ERROR_INVALID_CONTEXT);
  const std::lock_guard guard(lock);
  CHECK(functions.count(function) == 1, CUDA_ERROR_INVALID_HANDLE);
  CHECK(threads > 0 && threads <= 1024, CUDA_ERROR_INVALID_VALUE);
  *blocks = std::min(32, 2048 / threads);
  return 0;
}

Status cuLaunchKernelEx(const LaunchConfig* config, Function* function, void** params,
                        void** extra) {
  ENTER(cuLaunchKernelEx);
  CHECK(current() != nullptr, CUDA_ERROR_INVALID_CONTEXT);
  CHECK(params != nullptr && extra == nullptr, CUDA_ERROR_INVALID_VALUE);
  Launch launch{};
  {
    const std::lock_guard guard(lock);
    CHECK(functions.count(function) == 1, CUDA_ERROR_INVALID_HANDLE);
    snprintf(launch.name, sizeof(launch.name), "%s", function->name.c_str());
  }
  unsigned threads = 1, blocks = 1;
  for (int i = 0; i < 3; ++i) {
    threads *= launch.block[i] = config->block[i];
    blocks *= launch.grid[i] = config->grid[i];
  }
  CHECK(blocks > 0 && threads > 0 && threads <= 1024, CUDA_ERROR_INVALID_VALUE);
  launch.shared_bytes = config->shared_bytes;
  launch.stream = address_of(config->stream);
  launch.num_attributes = config->num_attributes;
  for (unsigned i = 0; i < config->num_attributes; ++i) {
    const LaunchAttribute& one = config->attributes[i];
    if (one.id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION) {
      memcpy(&launch.pdl, one.value, sizeof(int));
    }
  }
  const size_t size = args_bytes(launch.name);
  CHECK(size != 0 && size <= sizeof(launch.args), CUDA_ERROR_NOT_FOUND);
  launch.args_bytes = static_cast<uint32_t>(size);
  memcpy(launch.args, params[0], size);  // the driver's own copy: the caller may change its struct
  {
    const std::lock_guard guard(lock);
    launch.count = last_launch.count + 1;
    last_launch = launch;
    if (capturing()) {
      captured.push_back(launch);
      return 0;
    }
  }
  return run(launch);
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
  if (what == "allocations") return static_cast<long>(plain_memory.size());
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

const Launch* fake_cuda_last_launch() {
  return &last_launch;
}

// Runs what was launched during the capture, in order, with the arguments of that time.
Status fake_cuda_replay() {
  for (const Launch& launch : captured) {
    if (const Status failed = run(launch)) return failed;
  }
  return 0;
}
long fake_cuda_captured() {
  const std::lock_guard guard(lock);
  return static_cast<long>(captured.size());
}
void fake_cuda_forget_capture() {
  const std::lock_guard guard(lock);
  captured.clear();
}

}  // extern "C"
#pragma GCC visibility pop
