// Kernels as the host library (FAKE_CUDA_KERNELS) has them: the same text, compiled by g++.

void* host_symbol(const std::string& name) {
  const std::string path = option("FAKE_CUDA_KERNELS", "");
  if (path.empty()) return nullptr;
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  return library == nullptr ? nullptr : dlsym(library, name.c_str());
}

// Of the struct that the host build of a kernel takes; 0: there is no such kernel.
size_t host_args_bytes(const std::string& kernel) {
  const std::string prefix = "moe_nvlink_";
  if (kernel.rfind(prefix, 0) != 0) return 0;
  const std::string name = kernel.substr(prefix.size());
  void* size = host_symbol(prefix + "sizeof_" + name + "_args");
  return size == nullptr ? 0 : static_cast<size_t>(reinterpret_cast<int (*)()>(size)());
}

// A host build that has its arguments otherwise than the cubin cannot run them.
Status check_host_args(const std::string& name, const Kernel& kernel) {
  const size_t on_host = host_args_bytes(name);
  CHECK(on_host != 0, CUDA_ERROR_NOT_FOUND);
  if (on_host != kernel.args_bytes) {
    fprintf(stderr, "fake_cuda: %s takes %zu bytes of arguments, its host build %zu\n",
            name.c_str(), kernel.args_bytes, on_host);
    return CUDA_ERROR_INVALID_VALUE;
  }
  return 0;
}

// More CTAs than FAKE_CUDA_MOST_CTAS would be more threads than a test machine has use for; the
// kernels must give the same result for every grid.
Status run_on_host(const Launch& launch) {
  const int most = static_cast<int>(number("FAKE_CUDA_MOST_CTAS", 4));
  const auto create = reinterpret_cast<void* (*)(int)>(host_symbol("moe_nvlink_grid_create"));
  const auto destroy = reinterpret_cast<void (*)(void*)>(host_symbol("moe_nvlink_grid_destroy"));
  const auto kernel = reinterpret_cast<void (*)(const void*, void*)>(host_symbol(launch.name));
  CHECK(create != nullptr && destroy != nullptr && kernel != nullptr, CUDA_ERROR_NOT_FOUND);
  void* grid = create(std::min(static_cast<int>(launch.config.grid[0]), most));
  CHECK(grid != nullptr, CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES);
  kernel(launch.args.data(), grid);
  destroy(grid);
  return 0;
}
