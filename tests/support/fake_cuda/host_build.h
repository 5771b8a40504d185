// Kernels as the host library (FAKE_CUDA_KERNELS) has them: the same text, compiled by g++.

template <typename Function>
Function* host_function(const std::string& name) {
  void* library = dlopen(option("FAKE_CUDA_KERNELS", "/none").c_str(), RTLD_NOW | RTLD_LOCAL);
  void* found = library == nullptr ? nullptr : dlsym(library, name.c_str());
  require(found != nullptr, CUDA_ERROR_NOT_FOUND);
  return reinterpret_cast<Function*>(found);
}

// A host build that has its arguments otherwise than the cubin cannot run them.
void check_host_args(const std::string& name, const Kernel& kernel) {
  const std::string prefix = "moe_nvlink_";
  require(name.rfind(prefix, 0) == 0, CUDA_ERROR_NOT_FOUND);
  const std::string size_of = prefix + "sizeof_" + name.substr(prefix.size()) + "_args";
  const auto on_host = static_cast<size_t>(host_function<int()>(size_of)());
  if (on_host == kernel.args_bytes) return;
  fprintf(stderr, "fake_cuda: %s takes %zu bytes of arguments, its host build %zu\n", name.c_str(),
          kernel.args_bytes, on_host);
  throw Refused{CUDA_ERROR_INVALID_VALUE};
}

// More CTAs than FAKE_CUDA_MOST_CTAS would be more threads than a test machine has use for; the
// kernels must give the same result for every grid.
void run_on_host(const Launch& launch) {
  const int most = static_cast<int>(number("FAKE_CUDA_MOST_CTAS", 4));
  void* grid = host_function<void*(int)>("moe_nvlink_grid_create")(
      std::min(static_cast<int>(launch.config.grid[0]), most));
  require(grid != nullptr, CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES);
  host_function<void(const void*, void*)>(launch.name)(launch.args.data(), grid);
  host_function<void(void*)>("moe_nvlink_grid_destroy")(grid);
}
