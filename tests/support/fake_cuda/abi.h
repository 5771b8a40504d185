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
// Of the struct's bytes only these two are set; bindings give it zeroed.
struct SmResource {
  int type;
  unsigned char padding[92];
  unsigned count;
};
static_assert(sizeof(AllocationProp) == 32 && sizeof(AccessDesc) == 12);
static_assert(sizeof(LaunchAttribute) == 72 && sizeof(LaunchConfig) == 56);

struct FabricBlob {  // 64 bytes, opaque to the caller
  uint64_t inode;
  int32_t pid, fd;
  uint8_t rest[48];
};
static_assert(sizeof(FabricBlob) == 64);

// What `call` makes the status of the driver's function.
struct Refused {
  Status status;
};
void require(bool holds, Status status) {
  if (!holds) throw Refused{status};
}
