// Streams and their captures. There is nothing asynchronous about a stream here: what is put on it
// has happened when the call returns, or waits for fake_cuda_replay where the stream captures.
// All functions expect the lock to be held.

struct PtxLibrary;
struct Launch {
  std::string name;
  const PtxLibrary* ptx;  // null: the host build runs
  int device;
  LaunchConfig config;  // its pointers are the caller's and may be gone
  bool pdl;
  uint32_t resident_ctas;     // as many as the device holds of it at once
  std::vector<uint8_t> args;  // the driver's own copy: the caller may change its struct
};
struct Capture {
  int mode;             // as torch has it, thread-local ones are here as global ones are
  bool broken = false;  // by a call that may not be made meanwhile
  std::vector<Launch> launches;
};
struct Stream {
  int device;
  std::shared_ptr<Capture> capture;
  bool forked = false;  // into the capture of another stream, by an event
  uint64_t done = 0;    // what has been put on it in the capture
  uint64_t joined = 0;  // how much of that an event of the capture's own stream covers
};
// What was on a stream when the event was recorded.
struct Event {
  std::shared_ptr<Stream> stream;
  std::weak_ptr<Capture> capture;
  uint64_t done = 0;
};

std::map<void*, std::shared_ptr<Stream>> streams;
std::map<void*, std::unique_ptr<Event>> events;
thread_local int thread_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

// The product needs streams that do not wait for the legacy one: there are no others here.
void* make_stream(int device, unsigned flags) {
  require(flags == CU_STREAM_NON_BLOCKING, CUDA_ERROR_NOT_SUPPORTED);
  const auto made = std::make_shared<Stream>(Stream{device});
  streams[made.get()] = made;
  return made.get();
}

bool is_legacy(void* stream) {
  return address_of(stream) <= 1;  // null and CU_STREAM_LEGACY
}

// Of the device's context; its legacy stream is always another one, for nothing stays on it.
std::shared_ptr<Stream> find_stream(void* handle, int device) {
  if (is_legacy(handle)) return std::make_shared<Stream>(Stream{device});
  const auto found = streams.find(handle);
  require(found != streams.end() && found->second->device == device, CUDA_ERROR_INVALID_HANDLE);
  return found->second;
}

// Breaks the captures that `conflicts` says a call has to do with, and refuses the call.
template <typename Conflicts>
void break_captures(Conflicts conflicts) {
  bool any = false;
  for (auto& [_, stream] : streams) {
    if (stream->capture == nullptr || !conflicts(*stream)) continue;
    stream->capture->broken = any = true;
  }
  require(!any, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
}

// Calls that are "potentially unsafe" during a capture, as cuThreadExchangeStreamCaptureMode has it.
// The manual has no list of them. Here: all that allocate, free, map, load, copy or wait.
void check_unsafe() {
  break_captures([](const Stream& stream) {
    return thread_mode != CU_STREAM_CAPTURE_MODE_RELAXED &&
           stream.capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED;
  });
}
