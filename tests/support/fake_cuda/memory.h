// Device memory: memfd behind the virtual memory calls, the process's own behind cuMemAlloc. Nobody
// can touch a page that no device was granted access to. All functions expect the lock to be held.

constexpr size_t kGranularity = size_t{2} << 20;
constexpr int kPoison = 0xCC;  // fresh memory holds anything; here always this

struct Memory {  // lives while a handle or a mapping of it does
  size_t size;
  int host, device;  // where it is
  int handle_types;
  bool imported;
};
struct Held {
  std::shared_ptr<Memory> memory;
  int fd;
};
struct Mapping {
  size_t size;
  std::shared_ptr<Memory> memory;
  std::set<int> readers;  // devices that may touch it
};
constexpr int kPinned = -1;
struct Block {  // of cuMemAlloc or cuMemHostAlloc
  size_t size;
  int device;  // or kPinned: the host's, which every device may touch
};

std::map<Handle, Held> handles;
std::map<Address, size_t> reservations;
std::map<Address, Mapping> mappings;
std::map<Address, Block> blocks;

bool aligned(size_t value) {
  return value != 0 && value % kGranularity == 0;
}
void* pointer(Address address) {
  return reinterpret_cast<void*>(address);
}
Address address_of(const void* pointer) {
  return reinterpret_cast<Address>(pointer);
}

// The last of `ranges` that begins at the address or before it; the end if there is none.
template <typename Ranges>
auto before(Ranges& ranges, Address address) {
  const auto next = ranges.upper_bound(address);
  return next == ranges.begin() ? ranges.end() : std::prev(next);
}

bool is_reserved(Address address, size_t size) {
  const auto found = before(reservations, address);
  return found != reservations.end() && address + size <= found->first + found->second;
}

bool overlaps_mapping(Address address, size_t size) {
  const auto last = before(mappings, address + size - 1);
  return last != mappings.end() && last->first + last->second.size > address;
}

using Mapped = std::pair<const Address, Mapping>;

// The mappings that all of [address, address + size) lies in, without a gap.
std::vector<Mapped*> around(Address address, size_t size) {
  std::vector<Mapped*> found;
  Address at = address;
  for (auto next = before(mappings, address); at < address + size; ++next) {
    require(next != mappings.end() && next->first <= at, CUDA_ERROR_INVALID_VALUE);
    found.push_back(&*next);
    at = next->first + next->second.size;
  }
  require(at > address, CUDA_ERROR_INVALID_VALUE);
  return found;
}
// Those that make it up exactly.
std::vector<Mapped*> exactly(Address address, size_t size) {
  const std::vector<Mapped*> found = around(address, size);
  const auto& [last, mapping] = *found.back();
  require(found.front()->first == address && last + mapping.size == address + size,
          CUDA_ERROR_INVALID_VALUE);
  return found;
}

// Whether it lies in one block that this device may touch; kPinned: in one of the host.
bool in_block(int device, Address address, size_t size) {
  const auto found = before(blocks, address);
  if (found == blocks.end() || address + size > found->first + found->second.size) return false;
  return found->second.device == kPinned || found->second.device == device;
}

void may_touch(int device, Address address, size_t size) {
  if (in_block(device, address, size)) return;
  for (const Mapped* one : around(address, size)) {
    require(one->second.readers.count(device) != 0, CUDA_ERROR_INVALID_VALUE);
  }
}

Address allocate(size_t size, int device) {
  require(size != 0, CUDA_ERROR_INVALID_VALUE);
  void* made = aligned_alloc(4096, (size + 4095) / 4096 * 4096);
  require(made != nullptr, CUDA_ERROR_OUT_OF_MEMORY);
  memset(made, kPoison, size);
  blocks[address_of(made)] = Block{size, device};
  return address_of(made);
}

// Memory that kernels may touch, and what a report calls it.
struct Range {
  Address address;
  size_t size;
  std::string name;
};

// The process's memory beside what the driver maps: where the tests have tensors of the CPU for a
// GPU's, and blocks. No mapping of the kernel's list is the driver's in part: other memory never
// lies at its own without a gap, or is of another file.
void find_pageable_memory(std::vector<Range>* found) {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    Address start, end;
    char access[5];
    if (sscanf(line.c_str(), "%llx-%llx %4s", &start, &end, access) != 3) continue;
    if (strncmp(access, "rw", 2) != 0 || is_reserved(start, 1)) continue;
    if (!found->empty() && found->back().address + found->back().size == start) {
      found->back().size += end - start;
    } else {
      found->push_back({start, end - start, "pageable host"});
    }
  }
}

bool reaches_pageable() {
  return number("FAKE_CUDA_PAGEABLE", 1) != 0;
}

// Everything that kernels on the device may touch.
std::vector<Range> reachable(int device) {
  std::vector<Range> found;
  if (reaches_pageable()) {
    find_pageable_memory(&found);
  } else {
    for (const auto& [start, block] : blocks) {
      if (!in_block(device, start, block.size)) continue;
      found.push_back({start, block.size, block.device == kPinned ? "pinned host" : "cuMemAlloc"});
    }
  }
  for (const auto& [address, mapping] : mappings) {
    if (mapping.readers.count(device) == 0) continue;
    const std::string owner = std::to_string(mapping.memory->device);
    found.push_back({address, mapping.size, "memory of device " + owner});
  }
  return found;
}

size_t used_bytes(int device) {
  std::set<Memory*> all;
  for (const auto& [_, held] : handles) all.insert(held.memory.get());
  for (const auto& [_, mapping] : mappings) all.insert(mapping.memory.get());
  size_t used = 0;
  for (const Memory* memory : all) {
    if (memory->device == device && !memory->imported) used += memory->size;
  }
  return used;
}

void check_prop(const AllocationProp& prop) {
  require(prop.type == CU_MEM_ALLOCATION_TYPE_PINNED, CUDA_ERROR_INVALID_VALUE);
  require(prop.location.type == CU_MEM_LOCATION_TYPE_DEVICE, CUDA_ERROR_INVALID_VALUE);
  require_device(prop.location.id);
  if ((prop.handle_types & CU_MEM_HANDLE_TYPE_FABRIC) != 0) {
    // Without an IMEX channel the attribute says yes and the allocation fails.
    const std::string fabric = option("FAKE_CUDA_FABRIC", "0");
    require(fabric != "0", CUDA_ERROR_NOT_SUPPORTED);
    require(fabric == "1", CUDA_ERROR_NOT_PERMITTED);
  }
}

Handle hold(const Memory& memory, int fd) {
  static Handle next_handle = 0x1000;
  handles[next_handle] = Held{std::make_shared<Memory>(memory), fd};
  return next_handle++;
}
const Held& held(Handle handle) {
  const auto found = handles.find(handle);
  require(found != handles.end(), CUDA_ERROR_INVALID_VALUE);
  return found->second;
}

// A memfd's name says where the memory is, also to another process.
constexpr char kMemfdName[] = "fake_cuda host %d device %d";

int create_fd(size_t size, int device) {
  char name[64];
  snprintf(name, sizeof(name), kMemfdName, host_number(), device);
  const int fd = memfd_create(name, MFD_CLOEXEC);
  require(fd >= 0 && ftruncate(fd, static_cast<off_t>(size)) == 0, CUDA_ERROR_OUT_OF_MEMORY);
  void* bytes = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  require(bytes != MAP_FAILED, CUDA_ERROR_OUT_OF_MEMORY);
  memset(bytes, kPoison, size);
  munmap(bytes, size);
  return fd;
}

// inode: what the memory must have; 0: any.
Handle import_file(const std::string& path, uint64_t inode, int type) {
  struct stat status{};
  char name[128] = {};
  const std::string pattern = std::string("/memfd:") + kMemfdName;
  int host, device;
  const bool is_ours = stat(path.c_str(), &status) == 0 &&
                       readlink(path.c_str(), name, sizeof(name) - 1) > 0 &&
                       sscanf(name, pattern.c_str(), &host, &device) == 2;
  require(is_ours && (inode == 0 || inode == status.st_ino), CUDA_ERROR_INVALID_VALUE);
  const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  require(fd >= 0, CUDA_ERROR_OPERATING_SYSTEM);
  return hold(Memory{static_cast<size_t>(status.st_size), host, device, type, true}, fd);
}
