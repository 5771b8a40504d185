// What cuGetProcAddress gives out: since which version of CUDA a name has meant the function that is
// here (name, or name_v2), by cudaTypedefs.h of CUDA 13.0 (PFN_cuMemCreate_v10020).

const std::map<int, std::string> kEntries = {
    {2000,
     " cuInit cuDeviceGet cuDeviceGetAttribute cuDeviceGetCount cuDeviceGetName cuCtxGetDevice "
     "cuCtxSynchronize cuStreamCreate cuStreamSynchronize cuMemFreeHost cuModuleGetFunction "
     "cuModuleLoadData cuModuleUnload cuEventCreate cuEventRecord "},
    {2020, " cuDriverGetVersion cuFuncGetAttribute cuMemHostAlloc "},
    {3000, " cuGetExportTable "},
    {3020,
     " cuDeviceTotalMem cuMemAlloc cuMemFree cuMemGetInfo cuMemHostGetDevicePointer cuMemcpyDtoH "
     "cuMemcpyDtoHAsync cuMemcpyHtoD cuMemsetD8 cuStreamWaitEvent "},
    {4000,
     " cuCtxGetCurrent cuCtxPopCurrent cuCtxPushCurrent cuCtxSetCurrent cuDeviceCanAccessPeer "
     "cuStreamDestroy cuEventDestroy "},
    {4010, " cuDeviceGetPCIBusId "},
    {5050, " cuCtxGetStreamPriorityRange cuStreamCreateWithPriority "},
    {6000, " cuGetErrorName cuGetErrorString "},
    {6050, " cuOccupancyMaxActiveBlocksPerMultiprocessor "},
    {7000, " cuDevicePrimaryCtxRetain "},
    {8000, " cuDeviceGetP2PAttribute "},
    {9000, " cuFuncSetAttribute "},
    {10000, " cuStreamEndCapture cuStreamIsCapturing "},
    {10010, " cuStreamBeginCapture cuThreadExchangeStreamCaptureMode "},
    {10020,
     " cuMemAddressFree cuMemAddressReserve cuMemCreate cuMemExportToShareableHandle "
     "cuMemGetAllocationGranularity cuMemImportFromShareableHandle cuMemMap cuMemRelease "
     "cuMemSetAccess cuMemUnmap "},
    {11000, " cuDevicePrimaryCtxRelease "},
    {11040, " cuDeviceGetUuid "},
    {11060, " cuLaunchKernelEx "},
    {11070, " cuModuleGetLoadingMode "},
    {12000, " cuGetProcAddress "},
    {12040, " cuCtxGetDevResource cuFuncGetParamInfo cuFuncLoad "},
};
// From this version on these names mean functions that take a context, and are not here.
constexpr int kWithContext = 13000;
const std::string kChanged = " cuCtxGetDevice cuCtxSynchronize ";

// found: a CUdriverProcAddressQueryResult; may be null.
Status find_entry(const char* name, void** out, int version, int* found) {
  static void* self = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  const std::string word = std::string(" ") + name + " ";
  int unused;
  int& status = found != nullptr ? *found : unused;
  *out = nullptr;
  status = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  CHECK(version <= driver_version(), CUDA_ERROR_INVALID_VALUE);
  for (const auto& [since, names] : kEntries) {
    if (names.find(word) == std::string::npos || since > driver_version()) continue;
    status = CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT;
    if (version < since) continue;
    if (version >= kWithContext && kChanged.find(word) != std::string::npos) continue;
    *out = dlsym(self, (std::string(name) + "_v2").c_str());
    if (*out == nullptr) *out = dlsym(self, name);
    status = CU_GET_PROC_ADDRESS_SUCCESS;
  }
  return 0;
}
