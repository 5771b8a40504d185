// What cuGetProcAddress gives out: the function of libcuda.cpp that has the name, or name_v2.

// found: a CUdriverProcAddressQueryResult; may be null.
Status find_entry(const char* name, void** out, int version, int* found) {
  static void* self = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  // From this version on these names mean functions that take a context, and are not here.
  constexpr int kWithContext = 13000;
  const std::string word = name;
  const bool is_changed = word == "cuCtxGetDevice" || word == "cuCtxSynchronize";
  *out = nullptr;
  CHECK(version <= driver_version(), CUDA_ERROR_INVALID_VALUE);
  if (!is_changed || version < kWithContext) {
    *out = dlsym(self, (word + "_v2").c_str());
    if (*out == nullptr) *out = dlsym(self, name);
  }
  if (found != nullptr) {
    *found = *out != nullptr ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  }
  return 0;
}
