// The one place that knows CUDA from the host. platform_gpu.h and platform_host.h define the same
// names, one for each executor. Everything else in kernels/ is one text for both. Where an
// instruction must be spelled differently, that text uses MOE_NVLINK_DEVICE_ONLY(...) and
// MOE_NVLINK_HOST_ONLY(...).
#pragma once

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#include "platform_gpu.h"
#else
#include "platform_host.h"
#endif
