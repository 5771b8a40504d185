// The host library's kernels and conversions in a program that an emulator of aarch64 runs.
// aarch64.py puts this after the library's text, starts the program, and writes one call to a line:
// a name and unsigned words. The program answers each call with a line of its own. Words that are
// addresses lie in the file that this program and Python both map.
#include <fcntl.h>
#include <sys/mman.h>

#include <cstdio>
#include <map>
#include <string>
#include <thread>
#include <vector>

namespace {

using Words = std::vector<uint64_t>;

template <class Type>
Type* pointer(uint64_t address) {
  return reinterpret_cast<Type*>(address);
}

// A launch on every rank at once, each a thread with a grid of its own.
// words: CTAs of a rank, then the address of each rank's arguments.
template <class Args>
void launch(void (*kernel)(const Args*, moe_nvlink::host::Grid*), const Words& words) {
  std::vector<std::thread> ranks;
  for (size_t i = 1; i < words.size(); ++i) {
    ranks.emplace_back([&, i] {
      moe_nvlink::host::Grid grid(static_cast<int>(words[0]));
      kernel(pointer<const Args>(words[i]), &grid);
    });
  }
  for (std::thread& rank : ranks) rank.join();
}

// quantiser, element, source, global scale, rows, scales, number of rows, hidden size
void quantise_rows(const Words& words) {
  moe_nvlink_quantise_rows(static_cast<int>(words[0]), static_cast<int>(words[1]),
                           pointer<const void>(words[2]), pointer<const float>(words[3]),
                           pointer<void>(words[4]), pointer<void>(words[5]),
                           static_cast<int64_t>(words[6]), static_cast<int>(words[7]));
}

// element, source, target, count
void to_float(const Words& words) {
  moe_nvlink_to_float(static_cast<int>(words[0]), pointer<const void>(words[1]),
                      pointer<float>(words[2]), static_cast<int64_t>(words[3]));
}

void from_float(const Words& words) {
  moe_nvlink_from_float(static_cast<int>(words[0]), pointer<const float>(words[1]),
                        pointer<void>(words[2]), static_cast<int64_t>(words[3]));
}

// format, element, partial rows, output, top_k, hidden size
void sum_quantised_rows(const Words& words) {
  moe_nvlink_sum_quantised_rows(static_cast<int>(words[0]), static_cast<int>(words[1]),
                                pointer<const moe_nvlink::PartialRow>(words[2]),
                                pointer<void>(words[3]), static_cast<int>(words[4]),
                                static_cast<int>(words[5]));
}

const std::map<std::string, void (*)(const Words&)> kCalls = {
    {"dispatch", [](const Words& words) { launch(moe_nvlink_dispatch, words); }},
    {"combine", [](const Words& words) { launch(moe_nvlink_combine, words); }},
    {"small_dispatch", [](const Words& words) { launch(moe_nvlink_small_dispatch, words); }},
    {"small_combine", [](const Words& words) { launch(moe_nvlink_small_combine, words); }},
    {"head_gather", [](const Words& words) { launch(moe_nvlink_head_gather, words); }},
    {"head_argmax", [](const Words& words) { launch(moe_nvlink_head_argmax, words); }},
    {"head_collect", [](const Words& words) { launch(moe_nvlink_head_collect, words); }},
    {"quantise_rows", quantise_rows},
    {"to_float", to_float},
    {"from_float", from_float},
    {"sum_quantised_rows", sum_quantised_rows},
};

}  // namespace

// arguments: the file, its bytes
int main(int, char** arguments) {
  const size_t bytes = std::stoul(arguments[2]);
  const int file = open(arguments[1], O_RDWR);
  void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (base == MAP_FAILED) return 1;
  std::printf("%lu\n", reinterpret_cast<uint64_t>(base));
  std::fflush(stdout);
  char name[32];
  for (int count; std::scanf("%31s %d", name, &count) == 2;) {
    Words words(static_cast<size_t>(count));
    for (uint64_t& word : words) {
      if (std::scanf("%lu", &word) != 1) return 1;
    }
    kCalls.at(name)(words);
    std::puts("done");
    std::fflush(stdout);
  }
  return 0;
}
