// What the driver's C interface looks like, as far as the stand-in has it.
using Status = int;
using Handle = unsigned long long;
using Address = unsigned long long;

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

// The last launch as Python reads it: keep in step with LastLaunch there.
constexpr size_t kMostArgsBytes = 32764;  // of a kernel, from sm_70 and CUDA 12.1 on
struct LaunchRecord {
  char name[64];
  uint32_t grid[3], block[3];
  uint32_t shared_bytes, num_attributes, pdl, args_bytes;
  uint64_t stream, count;
  uint8_t args[kMostArgsBytes];
};

#define CHECK(condition, error)     \
  do {                              \
    if (!(condition)) return error; \
  } while (false)
