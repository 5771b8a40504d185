// Kernels as the software GPU (tests/support/ptx) runs them: the PTX that the cubin was made of, every
// CTA and thread of the launch, each access held to the memory that the device reaches.
//
// The folder FAKE_CUDA_PTX, which ptx.py fills, has the cubins that may be loaded; beside NAME.cubin
// lies NAME.so, its PTX as C++, which brings the machine that runs it. A launch, or the launches of a
// graph together, get a machine of their own with one rank: within a graph, programmatic launches
// overlap; any other launch has ended when it returns, so that streams never run at once. Other ranks
// are other machines, in other processes or threads. They have memory in common: ordered accesses are
// the processor's, time is real, and a machine whose threads all poll gives its processor away.
//
// What this cannot show: races between ranks, for a machine knows its own threads only (tests/ptx has
// all ranks in one machine); reorderings that this processor does not make.

struct PtxKernel {  // as struct Kernel of runtime/machine.h
  const char* name;
  const void *run, *sites, *resume_lines;
  uint32_t num_sites, register_bytes, num_registers, param_bytes, shared_bytes;
};
struct PtxVariable {  // as struct ModuleMemory of runtime/generated.h
  const char* name;
  const void* memory;
  uint64_t size;
};
struct PtxLibrary {
  std::string cubin;  // the file's content
  void* handle;

  // Of the library or of the machine's, which it depends on.
  template <typename Symbol>
  Symbol* get(const char* name) const {
    auto* found = reinterpret_cast<Symbol*>(dlsym(handle, name));
    if (found == nullptr) fprintf(stderr, "fake_cuda: the software GPU has no %s\n", name);
    require(found != nullptr, CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND);
    return found;
  }
  // A function of the machine, as runtime/machine.cpp exports it.
  template <typename Result, typename... Arguments>
  Result call(const char* name, Arguments... arguments) const {
    return get<Result(Arguments...)>(name)(arguments...);
  }
  const PtxKernel* kernel(const std::string& name) const {
    const auto* kernels = get<const PtxKernel>("kernels");
    const auto* end = kernels + *get<const uint32_t>("num_kernels");
    const auto* found = std::find_if(kernels, end, [&](auto& one) { return name == one.name; });
    return found == end ? nullptr : found;
  }
};

std::string content_of(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// The library of a cubin, loaded for good; null without FAKE_CUDA_PTX. Expects the lock to be held.
const PtxLibrary* find_ptx(const char* image, const Cubin& cubin) {
  static std::map<std::filesystem::path, PtxLibrary> libraries;
  const std::string folder = option("FAKE_CUDA_PTX", "");
  if (folder.empty()) return nullptr;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    std::filesystem::path path = entry.path();
    if (path.extension() != ".cubin") continue;
    PtxLibrary& library = libraries[path];
    if (library.cubin.empty()) library.cubin = content_of(path);
    // Whoever loads an image does not say how long it is; no cubin begins with another one.
    if (!std::equal(library.cubin.begin(), library.cubin.end(), image)) continue;
    library.handle = dlopen(path.replace_extension(".so").c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library.handle == nullptr) fprintf(stderr, "fake_cuda: %s\n", dlerror());
    require(library.handle != nullptr, CUDA_ERROR_SHARED_OBJECT_INIT_FAILED);
    return &library;
  }
  std::string names;
  for (const auto& [name, _] : cubin.kernels) names += " " + name;
  fprintf(stderr,
          "fake_cuda: %s has no PTX of the cubin with%s; add its text to what the test gives to "
          "tests.support.fake_cuda.ptx.prepare\n",
          folder.c_str(), names.c_str());
  throw Refused{CUDA_ERROR_FILE_NOT_FOUND};
}

// What a driver calls a fault. A GPU does not notice all of them; a kernel may do none of them.
Status status_of(const std::string& fault) {
  if (fault == "OutOfBounds") return CUDA_ERROR_ILLEGAL_ADDRESS;
  if (fault == "Misaligned") return CUDA_ERROR_MISALIGNED_ADDRESS;
  if (fault == "Deadlock") return CUDA_ERROR_LAUNCH_TIMEOUT;
  return CUDA_ERROR_LAUNCH_FAILED;
}

// Runs launches of one device to their end, in the order of their stream. `ranges`: what they may
// touch, besides variables of their modules.
void run_ptx(const std::vector<Launch>& launches, const std::vector<Range>& ranges) {
  static std::atomic<uint64_t> seed = 1;
  const PtxLibrary& gpu = *launches.front().ptx;
  const auto destroy = [&](void* machine) { gpu.call<void>("ptx_destroy", machine); };
  const std::unique_ptr<void, decltype(destroy)> owner(
      gpu.call<void*>("ptx_create", 1, uint64_t{seed++}, 1), destroy);
  void* machine = owner.get();
  const uint64_t patience = 1'000'000'000ULL * number("FAKE_CUDA_PATIENCE_S", 150);
  gpu.call<void>("ptx_limit_wait", machine, patience);
  for (const Range& one : ranges) {
    gpu.call<void>("ptx_allocate", machine, 0, one.address, one.size, one.name.c_str());
  }
  for (const Launch& launch : launches) {
    gpu.call<void>("ptx_limit_ctas", machine, launch.resident_ctas);
    if (!reaches_pageable()) {  // where they lie
      const auto* one = launch.ptx->get<const PtxVariable>("variables");
      for (; one->name != nullptr; ++one) {
        gpu.call<void>("ptx_allocate", machine, 0, address_of(one->memory), one->size, one->name);
      }
    }
    const LaunchConfig& config = launch.config;
    gpu.call<void>("ptx_launch", machine, 0, launch.ptx->kernel(launch.name), &config.grid[0],
                   &config.block[0], launch.args.data(), launch.args.size(), config.shared_bytes,
                   int{launch.pdl});
  }
  const char* fault = gpu.call<const char*>("ptx_run", machine);
  if (fault == nullptr) return;
  fprintf(stderr, "fake_cuda: device %d: %s: %s\n", launches.front().device, fault,
          gpu.call<const char*>("ptx_message", machine));
  throw Refused{status_of(fault)};
}
