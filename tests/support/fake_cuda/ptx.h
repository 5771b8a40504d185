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
struct PtxMachine;

struct PtxLibrary {
  std::string cubin;  // the file's content
  void* handle;

  // Of the library or of the machine's, which it depends on.
  template <typename Symbol>
  Symbol* get(const char* name) const {
    return reinterpret_cast<Symbol*>(dlsym(handle, name));
  }
  const PtxKernel* kernel(const std::string& name) const {
    const auto* kernels = get<const PtxKernel>("kernels");
    for (uint32_t i = 0; i < *get<const uint32_t>("num_kernels"); ++i) {
      if (name == kernels[i].name) return &kernels[i];
    }
    return nullptr;
  }
};

std::string content_of(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// The library of a cubin, loaded for good; null without FAKE_CUDA_PTX. Expects the lock to be held.
Status find_ptx(const void* image, const Cubin& cubin, const PtxLibrary** out) {
  static std::vector<std::unique_ptr<PtxLibrary>> libraries;
  *out = nullptr;
  const std::string folder = option("FAKE_CUDA_PTX", "");
  if (folder.empty()) return 0;
  const std::string content(static_cast<const char*>(image), cubin.size());
  for (const auto& one : libraries) {
    if (one->cubin == content) *out = one.get();
  }
  if (*out != nullptr) return 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    std::filesystem::path path = entry.path();
    if (path.extension() != ".cubin" || content_of(path) != content) continue;
    void* handle = dlopen(path.replace_extension(".so").c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) fprintf(stderr, "fake_cuda: %s\n", dlerror());
    CHECK(handle != nullptr, CUDA_ERROR_SHARED_OBJECT_INIT_FAILED);
    libraries.push_back(std::make_unique<PtxLibrary>(PtxLibrary{content, handle}));
    *out = libraries.back().get();
    return 0;
  }
  fprintf(stderr,
          "fake_cuda: %s has no PTX of the cubin with%s; add its text to what the test gives to "
          "tests.support.fake_cuda.ptx.prepare\n",
          folder.c_str(), cubin.kernel_names().c_str());
  return CUDA_ERROR_FILE_NOT_FOUND;
}

// What a driver calls a fault. A GPU does not notice all of them; a kernel may do none of them.
Status status_of(const std::string& fault) {
  if (fault == "OutOfBounds") return CUDA_ERROR_ILLEGAL_ADDRESS;
  if (fault == "Misaligned") return CUDA_ERROR_MISALIGNED_ADDRESS;
  if (fault == "Deadlock") return CUDA_ERROR_LAUNCH_TIMEOUT;
  return CUDA_ERROR_LAUNCH_FAILED;
}

// Functions of the machine, by the names that runtime/machine.cpp exports.
struct PtxFunctions {
  PtxMachine* (*create)(int ranks, uint64_t seed, int in_processes);
  void (*destroy)(PtxMachine*);
  void (*limit_ctas)(PtxMachine*, uint32_t most);
  void (*limit_wait)(PtxMachine*, uint64_t ns);
  void (*allocate)(PtxMachine*, int rank, uint64_t address, uint64_t size, const char* name);
  void (*launch)(PtxMachine*, int rank, const PtxKernel*, const uint32_t* grid,
                 const uint32_t* block, const void* args, uint64_t args_bytes,
                 uint32_t shared_bytes, int pdl);
  const char* (*run)(PtxMachine*);
  const char* (*message)(const PtxMachine*);

  explicit PtxFunctions(const PtxLibrary& library) {
    find(library, "ptx_create", &create);
    find(library, "ptx_destroy", &destroy);
    find(library, "ptx_limit_ctas", &limit_ctas);
    find(library, "ptx_limit_wait", &limit_wait);
    find(library, "ptx_allocate", &allocate);
    find(library, "ptx_launch", &launch);
    find(library, "ptx_run", &run);
    find(library, "ptx_message", &message);
  }

 private:
  template <typename Function>
  static void find(const PtxLibrary& library, const char* name, Function* out) {
    *out = reinterpret_cast<Function>(library.get<void>(name));
    if (*out != nullptr) return;
    fprintf(stderr, "fake_cuda: the software GPU has no %s; ptx.h and runtime/machine.cpp differ\n",
            name);
    abort();
  }
};

// Runs launches of one device to their end, in the order of their stream. `ranges`: what they may
// touch, besides variables of their modules.
Status run_ptx(const std::vector<Launch>& launches, const std::vector<Range>& ranges) {
  static std::atomic<uint64_t> seed = 1;
  const PtxFunctions gpu(*launches.front().ptx);
  const auto deleter = [&](PtxMachine* machine) { gpu.destroy(machine); };
  const std::unique_ptr<PtxMachine, decltype(deleter)> machine(gpu.create(1, seed++, 1), deleter);
  gpu.limit_wait(machine.get(), 1'000'000'000ULL * number("FAKE_CUDA_PATIENCE_S", 150));
  for (const Range& one : ranges) {
    gpu.allocate(machine.get(), 0, one.address, one.size, one.name.c_str());
  }
  for (const Launch& launch : launches) {
    gpu.limit_ctas(machine.get(), launch.resident_ctas);
    if (!reaches_pageable()) {  // where they lie
      const auto* one = launch.ptx->get<const PtxVariable>("variables");
      for (; one->name != nullptr; ++one) {
        gpu.allocate(machine.get(), 0, reinterpret_cast<Address>(one->memory), one->size,
                     one->name);
      }
    }
    const LaunchConfig& config = launch.config;
    gpu.launch(machine.get(), 0, launch.ptx->kernel(launch.name), config.grid, config.block,
               launch.args.data(), launch.args.size(), config.shared_bytes, launch.pdl);
  }
  const char* fault = gpu.run(machine.get());
  if (fault == nullptr) return 0;
  fprintf(stderr, "fake_cuda: device %d: %s: %s\n", launches.front().device, fault,
          gpu.message(machine.get()));
  return status_of(fault);
}
