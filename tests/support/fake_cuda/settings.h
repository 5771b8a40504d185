// How the stand-in is set up from outside: the FAKE_CUDA_* variables, read at every call, and
// failures on demand.

std::string option(const char* name, const char* fallback) {
  const char* value = getenv(name);
  return value != nullptr && *value != 0 ? value : fallback;
}
long number(const char* name, long fallback) {
  const std::string text = option(name, "");
  return text.empty() ? fallback : strtol(text.c_str(), nullptr, 0);
}
int num_devices() {
  return static_cast<int>(number("FAKE_CUDA_DEVICES", 4));
}
bool is_device(int device) {
  return device >= 0 && device < num_devices();
}
int host_number() {
  return static_cast<int>(number("FAKE_CUDA_HOST", 0));
}
int driver_version() {
  return static_cast<int>(number("FAKE_CUDA_DRIVER", 13000));
}
int num_sms() {
  return static_cast<int>(number("FAKE_CUDA_SMS", 4));
}
// That a context may use, where a green context or MPS leaves it fewer.
int num_context_sms() {
  return static_cast<int>(number("FAKE_CUDA_CONTEXT_SMS", num_sms()));
}
bool has_p2p() {
  return number("FAKE_CUDA_P2P", 1) != 0;
}
size_t total_bytes() {
  return static_cast<size_t>(number("FAKE_CUDA_MEMORY", long{8} << 30));
}
void capability(int* major, int* minor) {
  const std::string text = option("FAKE_CUDA_CAPABILITY", "9.0");
  *major = atoi(text.c_str());
  *minor = atoi(text.c_str() + text.find('.') + 1);
}

// "cuMemMap:2:CUDA_ERROR_OUT_OF_MEMORY,..."; KILL ends the process instead.
Status injected(const std::string& spec, const std::string& name, long call) {
  size_t at = 0;
  while (at < spec.size()) {
    const size_t end = std::min(spec.find(',', at), spec.size());
    const std::string one = spec.substr(at, end - at);
    at = end + 1;
    const size_t first = one.find(':'), second = one.find(':', first + 1);
    if (second == std::string::npos || one.substr(0, first) != name) continue;
    if (strtol(one.c_str() + first + 1, nullptr, 10) != call) continue;
    const std::string what = one.substr(second + 1);
    if (what == "KILL") kill(getpid(), SIGKILL);
    for (const auto& [text, value] : kResults) {
      if (what == text) return value;
    }
    abort();  // a misspelt name would be a test that tests nothing
  }
  return 0;
}

// After these, says cuda.h, any further work returns the same error until the process ends.
bool is_sticky(Status error) {
  switch (error) {
    case CUDA_ERROR_ILLEGAL_ADDRESS:
    case CUDA_ERROR_LAUNCH_TIMEOUT:
    case CUDA_ERROR_ASSERT:
    case CUDA_ERROR_HARDWARE_STACK_ERROR:
    case CUDA_ERROR_ILLEGAL_INSTRUCTION:
    case CUDA_ERROR_MISALIGNED_ADDRESS:
    case CUDA_ERROR_INVALID_ADDRESS_SPACE:
    case CUDA_ERROR_INVALID_PC:
    case CUDA_ERROR_LAUNCH_FAILED:
      return true;
    default:
      return false;
  }
}
