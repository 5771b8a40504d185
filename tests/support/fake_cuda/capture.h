// Streams and their captures. There is nothing asynchronous about a stream here: what is put on it
// has happened when the call returns, or waits for fake_cuda_replay where the stream captures.
// All functions expect the lock to be held.

struct PtxLibrary;
struct Launch {
  std::string name;
  const PtxLibrary* ptx;  // null: the host build runs
  int device;
  LaunchConfig config;  // its pointers are the caller's and may be gone
  uint32_t pdl;
  uint32_t resident_ctas;     // as many as the device holds of it at once
  std::vector<uint8_t> args;  // the driver's own copy: the caller may change its struct
};
struct Capture {
  int mode;
  std::thread::id thread;
  bool broken = false;  // by a call that may not be made meanwhile
  std::vector<Launch> launches;
};
struct Stream {
  int device;
  bool blocking;  // waits for the legacy stream, which therefore conflicts with its capture
  std::shared_ptr<Capture> capture;
  bool forked = false;  // into the capture of another stream, by an event
  uint64_t done = 0;    // what has been put on it in the capture
  uint64_t joined = 0;  // how much of that an event of the capture's own stream covers
};
// What was on a stream when the event was recorded.
struct Event {
  int device;
  void* stream = nullptr;
  std::weak_ptr<Capture> capture;
  uint64_t done = 0;
};

std::map<void*, std::unique_ptr<Stream>> streams;
std::map<void*, std::unique_ptr<Event>> events;
thread_local int thread_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

Status make_stream(int device, unsigned flags, void** out) {
  CHECK(flags <= CU_STREAM_NON_BLOCKING, CUDA_ERROR_INVALID_VALUE);
  auto made = std::make_unique<Stream>();
  made->device = device;
  made->blocking = flags == 0;
  *out = made.get();
  streams[*out] = std::move(made);
  return 0;
}

bool is_legacy(void* stream) {
  return address_of(stream) <= 1;  // null and CU_STREAM_LEGACY
}

// Breaks the captures that `conflicts` says a call has to do with; whether there were any.
template <typename Conflicts>
bool breaks_captures(Conflicts conflicts) {
  bool any = false;
  for (auto& [_, stream] : streams) {
    if (stream->capture == nullptr || !conflicts(*stream)) continue;
    stream->capture->broken = any = true;
  }
  return any;
}

// Calls that are "potentially unsafe" during a capture, as cuThreadExchangeStreamCaptureMode has it.
// The manual has no list of them. Here: all that allocate, free, map, load, copy or wait.
Status check_unsafe() {
  const bool any = breaks_captures([](const Stream& stream) {
    if (thread_mode == CU_STREAM_CAPTURE_MODE_RELAXED) return false;
    if (stream.capture->thread == std::this_thread::get_id()) {
      return stream.capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED;
    }
    return thread_mode == CU_STREAM_CAPTURE_MODE_GLOBAL &&
           stream.capture->mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
  });
  return any ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : 0;
}

// The legacy stream waits for the blocking ones of its device, and so conflicts in every mode.
bool captured_beside_legacy(const Stream& stream, int device) {
  return stream.capture != nullptr && stream.blocking && stream.device == device;
}
Status check_legacy(int device) {
  const bool any =
      breaks_captures([&](const Stream& one) { return captured_beside_legacy(one, device); });
  return any ? CUDA_ERROR_STREAM_CAPTURE_IMPLICIT : 0;
}

// So does what waits for a whole device.
Status check_wait(int device) {
  const bool any = breaks_captures([&](const Stream& one) { return one.device == device; });
  return any ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : check_unsafe();
}

// A stream of the device's context; null for its legacy stream.
Status find_stream(void* handle, int device, Stream** out) {
  *out = nullptr;
  if (is_legacy(handle)) return 0;
  const auto found = streams.find(handle);
  CHECK(found != streams.end() && found->second->device == device, CUDA_ERROR_INVALID_HANDLE);
  *out = found->second.get();
  return 0;
}
