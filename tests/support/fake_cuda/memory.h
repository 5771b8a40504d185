// Device memory: memfd behind the virtual memory calls, anonymous pages behind cuMemAlloc. The host
// cannot touch a page of it, except while a copy or a kernel runs on a device that may, and where a
// test has asked for it (fake_cuda_expose). All functions expect the lock to be held.

constexpr size_t kGranularity = size_t{2} << 20;
const size_t kPage = static_cast<size_t>(sysconf(_SC_PAGESIZE));
constexpr int kPoison = 0xCC;  // fresh device memory holds anything; here always this

struct Memory {  // lives while a handle or a mapping of it does
  int fd;        // -1 when no handle is left: the mappings keep the pages
  size_t size;
  int host, device;  // where it is
  int handle_types;
  bool imported;
  int handles = 1;
  int mappings = 0;
};
struct Mapping {
  size_t size;
  Memory* memory;         // null: cuMemAlloc's
  std::set<int> readers;  // devices that may touch it
  bool exposed = false;   // to the host, for good
  int users = 0;          // copies and kernels that run
};

std::map<Handle, Memory*> handles;
std::map<Address, size_t> reservations, host_memory;
std::map<Address, Mapping> mappings, allocations;

bool aligned(size_t value) {
  return value % kGranularity == 0;
}
void* pointer(Address address) {
  return reinterpret_cast<void*>(address);
}
Address address_of(void* pointer) {
  return reinterpret_cast<Address>(pointer);
}

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

// The mappings or the allocation that all of [address, address + size) lies in, or nothing.
std::vector<std::pair<Address, Mapping*>> around(Address address, size_t size) {
  for (auto* ranges : {&mappings, &allocations}) {
    std::vector<std::pair<Address, Mapping*>> found;
    Address at = address;
    while (at < address + size) {
      auto next = ranges->upper_bound(at);
      if (next == ranges->begin()) break;
      --next;
      if (at >= next->first + next->second.size) break;
      found.emplace_back(next->first, &next->second);
      at = next->first + next->second.size;
    }
    if (at >= address + size) return found;
  }
  return {};
}

Status may_touch(int device, Address address, size_t size) {
  if (inside_one(host_memory, address, size)) return 0;
  const auto found = around(address, size);
  CHECK(!found.empty(), CUDA_ERROR_INVALID_VALUE);
  for (const auto& [_, mapping] : found) {
    CHECK(mapping->readers.count(device) != 0, CUDA_ERROR_INVALID_VALUE);
  }
  return 0;
}

void protect(Address address, const Mapping& mapping) {
  const bool open = mapping.exposed || mapping.users > 0;
  mprotect(pointer(address), mapping.size, open ? PROT_READ | PROT_WRITE : PROT_NONE);
}

// Opens what a device may touch; gives the addresses for `leave`.
std::vector<Address> use(int device) {
  std::vector<Address> opened;
  for (auto* ranges : {&mappings, &allocations}) {
    for (auto& [address, mapping] : *ranges) {
      if (mapping.readers.count(device) == 0) continue;
      opened.push_back(address);
      if (++mapping.users == 1) protect(address, mapping);
    }
  }
  return opened;
}
void leave(const std::vector<Address>& opened) {
  for (auto* ranges : {&mappings, &allocations}) {
    for (const Address address : opened) {
      const auto found = ranges->find(address);  // it may have been unmapped meanwhile
      if (found == ranges->end() || found->second.users == 0) continue;
      if (--found->second.users == 0) protect(address, found->second);
    }
  }
}

// What cuMemAlloc maps: a page before and one after, which nobody may touch.
size_t with_guards(size_t size) {
  return (size + kPage - 1) / kPage * kPage + 2 * kPage;
}

// Memory that kernels may touch, and what a report calls it.
struct Range {
  Address address;
  size_t size;
  std::string name;
};

// What the device reaches of the driver's own memory.
std::vector<Range> driver_memory(int device) {
  std::vector<Range> found;
  for (const auto& [address, mapping] : mappings) {
    if (mapping.readers.count(device) == 0) continue;
    const Memory& memory = *mapping.memory;
    const bool is_peer = memory.device != device || memory.host != host_number();
    const std::string owner = (is_peer ? "peer's device " : "own device ");
    found.push_back({address, mapping.size, owner + std::to_string(memory.device)});
  }
  for (const auto& [address, mapping] : allocations) {
    if (mapping.readers.count(device) != 0) found.push_back({address, mapping.size, "cuMemAlloc"});
  }
  return found;
}

bool is_drivers(Address address) {
  for (const auto& [start, size] : reservations) {
    if (address >= start && address < start + size) return true;
  }
  for (const auto& [start, mapping] : allocations) {
    if (address + kPage >= start && address < start + mapping.size + kPage) return true;
  }
  return false;
}

// The process's memory beside the driver's: where the tests have tensors of the CPU for a GPU's. No
// mapping of the kernel's list is the driver's in part: other memory never lies at its own without
// a gap, or is of another file.
std::vector<Range> pageable_memory() {
  std::vector<Range> found;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    Address start, end;
    char access[5];
    if (sscanf(line.c_str(), "%llx-%llx %4s", &start, &end, access) != 3) continue;
    if (strncmp(access, "rw", 2) != 0 || is_drivers(start)) continue;
    if (!found.empty() && found.back().address + found.back().size == start) {
      found.back().size += end - start;
    } else {
      found.push_back({start, end - start, "pageable host"});
    }
  }
  return found;
}

bool reaches_pageable() {
  return number("FAKE_CUDA_PAGEABLE", 1) != 0;
}

// Everything that kernels on the device may touch.
std::vector<Range> reachable(int device) {
  std::vector<Range> found = driver_memory(device);
  if (reaches_pageable()) {
    const std::vector<Range> pageable = pageable_memory();  // what is pinned is a part of it
    found.insert(found.end(), pageable.begin(), pageable.end());
  } else {
    for (const auto& [start, size] : host_memory) found.push_back({start, size, "pinned host"});
  }
  return found;
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

Status adopt(const Memory& memory, Handle* out) {
  static Handle next_handle = 0x1000;
  *out = next_handle++;
  handles[*out] = new Memory(memory);
  return 0;
}

// A memfd's name says where the memory is, also to another process.
constexpr char kMemfdName[] = "fake_cuda host %d device %d";

int create_fd(size_t size, int device) {
  char name[64];
  snprintf(name, sizeof(name), kMemfdName, host_number(), device);
  const int fd = memfd_create(name, MFD_CLOEXEC);
  if (fd < 0) return -1;
  void* bytes = MAP_FAILED;
  if (ftruncate(fd, static_cast<off_t>(size)) == 0) {
    bytes = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  }
  if (bytes == MAP_FAILED) {
    close(fd);
    return -1;
  }
  memset(bytes, kPoison, size);
  munmap(bytes, size);
  return fd;
}

// Takes the descriptor. inode: what the memory must have; 0: any.
Status import_fd(int fd, uint64_t inode, int type, Handle* out) {
  struct stat status{};
  char link[64], name[128] = {};
  snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
  const std::string pattern = std::string("/memfd:") + kMemfdName;
  int host, device;
  if (fd < 0 || fstat(fd, &status) != 0 || readlink(link, name, sizeof(name) - 1) < 0 ||
      sscanf(name, pattern.c_str(), &host, &device) != 2 ||
      (inode != 0 && inode != status.st_ino)) {
    if (fd >= 0) close(fd);
    return CUDA_ERROR_INVALID_VALUE;
  }
  return adopt(Memory{fd, static_cast<size_t>(status.st_size), host, device, type, true}, out);
}
