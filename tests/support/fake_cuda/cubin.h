// What a cubin of NVRTC 13 (an ELF64 file, ABI 8) says about itself and its kernels. Numbers of
// attributes are those that `cuobjdump -elf` shows by name; a test compares the result with
// `cuobjdump -res-usage`.

// Every CTA has this much shared memory for itself besides its own; cubins count it in.
constexpr int kReservedShared = 1024;

struct Parameter {
  size_t offset = 0, size = 0;
};
struct Kernel {
  int registers = 0;      // of a thread
  int shared_bytes = 0;   // static, without kReservedShared
  int bound = 1024;       // threads of a CTA by __launch_bounds__
  size_t args_bytes = 0;  // all parameters
  std::vector<Parameter> parameters;
};

class Cubin {
 public:
  explicit Cubin(const uint8_t* image) : image_(image) {
    const auto* header = reinterpret_cast<const Elf64_Ehdr*>(image);
    constexpr int kCudaMachine = 190, kAbi = 8;
    require(memcmp(image, ELFMAG, SELFMAG) == 0 && header->e_machine == kCudaMachine &&
                header->e_ident[EI_ABIVERSION] == kAbi,
            CUDA_ERROR_INVALID_IMAGE);
    architecture = static_cast<int>(header->e_flags >> 8 & 0xff);
    const auto all = at<Elf64_Shdr>(header->e_shoff);
    const std::vector<Elf64_Shdr> sections(all, all + header->e_shnum);
    for (const Elf64_Shdr& section : sections) {
      if (section.sh_type != SHT_SYMTAB) continue;
      const char* texts = at<char>(sections[section.sh_link].sh_offset);
      const auto symbol = at<Elf64_Sym>(section.sh_offset);
      for (size_t i = 0; i < section.sh_size / sizeof(Elf64_Sym); ++i) {
        symbols_.push_back(texts + symbol[i].st_name);
        const bool is_entry = (symbol[i].st_other & 0x10) != 0;
        if (ELF64_ST_TYPE(symbol[i].st_info) == STT_FUNC && is_entry) kernels[symbols_.back()];
      }
    }
    const char* names = at<char>(sections[header->e_shstrndx].sh_offset);
    for (const Elf64_Shdr& section : sections) read(section, names + section.sh_name);
  }

  int architecture;  // 90, 100, 103, 120: what is compiled for sm_90a runs on nothing else
  std::map<std::string, Kernel> kernels;

 private:
  enum Attribute {
    kMaxThreads = 0x05,
    kParameter = 0x17,
    kParametersBytes = 0x19,
    kRegisters = 0x2f,
    kParameterV2 = 0x45,  // of arguments of more than 4096 bytes
  };

  template <typename Type>
  const Type* at(size_t offset) const {
    return reinterpret_cast<const Type*>(image_ + offset);
  }

  // .nv.info is about all kernels, .nv.info.NAME and .nv.shared.NAME about one.
  void read(const Elf64_Shdr& section, const std::string& name) {
    const size_t dot = name.rfind('.');
    const auto of = kernels.find(dot == std::string::npos ? name : name.substr(dot + 1));
    if (name == ".nv.info") {
      read_attributes(section, nullptr);
    } else if (of != kernels.end() && name.rfind(".nv.info.", 0) == 0) {
      read_attributes(section, &of->second);
    } else if (of != kernels.end() && name.rfind(".nv.shared.", 0) == 0) {
      of->second.shared_bytes = static_cast<int>(section.sh_size) - kReservedShared;
    }
  }

  // kernel: whose they are; null for those of the whole file.
  void read_attributes(const Elf64_Shdr& section, Kernel* kernel) {
    constexpr int kSized = 4;  // a format: as many bytes as `value` says follow
    const uint8_t* next = at<uint8_t>(section.sh_offset);
    const uint8_t* end = next + section.sh_size;
    while (next + 4 <= end) {
      const int format = next[0], attribute = next[1], value = next[2] | next[3] << 8;
      uint32_t words[3] = {};
      const size_t size = format == kSized ? static_cast<size_t>(value) : 0;
      memcpy(words, next + 4, std::min(size, sizeof(words)));
      next += 4 + size;
      if (kernel == nullptr) {
        const auto of = kernels.find(attribute == kRegisters ? symbols_[words[0]] : "");
        if (of != kernels.end()) of->second.registers = static_cast<int>(words[1]);
      } else if (attribute == kMaxThreads) {
        kernel->bound = static_cast<int>(words[0] * words[1] * words[2]);
      } else if (attribute == kParametersBytes) {
        kernel->args_bytes = static_cast<size_t>(value);
      } else if (attribute == kParameter || attribute == kParameterV2) {
        const size_t ordinal = words[1] & 0xffff;
        const size_t bytes = attribute == kParameter ? words[2] >> 18 : words[2];
        if (kernel->parameters.size() <= ordinal) kernel->parameters.resize(ordinal + 1);
        kernel->parameters[ordinal] = Parameter{words[1] >> 16, bytes};
      }
    }
  }

  const uint8_t* image_;  // while it is read
  std::vector<std::string> symbols_;
};
