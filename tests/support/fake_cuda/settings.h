// How the stand-in is set up from outside: the FAKE_CUDA_* variables, read at every call, and
// failures on demand.

std::string option(const char* name, const char* fallback) {
  const char* value = getenv(name);
  return value != nullptr && *value != 0 ? value : fallback;
}
long number(const char* name, long fallback) {
  return strtol(option(name, std::to_string(fallback).c_str()).c_str(), nullptr, 0);
}
void require_device(int device) {
  require(device >= 0 && device < number("FAKE_CUDA_DEVICES", 4), CUDA_ERROR_INVALID_DEVICE);
}
int host_number() {
  return static_cast<int>(number("FAKE_CUDA_HOST", 0));
}
int num_sms() {
  return static_cast<int>(number("FAKE_CUDA_SMS", 4));
}
bool has_p2p() {
  return number("FAKE_CUDA_P2P", 1) != 0;
}
size_t total_bytes() {
  return static_cast<size_t>(number("FAKE_CUDA_MEMORY", long{8} << 30));
}
// 90 for "9.0".
int capability() {
  std::string text = option("FAKE_CUDA_CAPABILITY", "9.0");
  text.erase(text.find('.'), 1);
  return atoi(text.c_str());
}

// "cuMemMap:2:CUDA_ERROR_OUT_OF_MEMORY,..."; KILL ends the process instead.
Status injected(const std::string& spec, const std::string& name, long call) {
  static const std::regex pattern("(\\w+):(\\d+):(\\w+)");
  for (std::sregex_iterator one(spec.begin(), spec.end(), pattern), end; one != end; ++one) {
    if ((*one)[1] != name || (*one)[2] != std::to_string(call)) continue;
    if ((*one)[3] == "KILL") kill(getpid(), SIGKILL);
    return kResults.at((*one)[3]);  // ends here: a misspelt name would be a test of nothing
  }
  return 0;
}

// What a kernel can leave. After these, says cuda.h, any further work returns the same error until the
// process ends; and so it does after others, which nothing here gives.
bool is_sticky(Status error) {
  return error == CUDA_ERROR_ILLEGAL_ADDRESS || error == CUDA_ERROR_MISALIGNED_ADDRESS ||
         error == CUDA_ERROR_LAUNCH_TIMEOUT || error == CUDA_ERROR_LAUNCH_FAILED;
}
