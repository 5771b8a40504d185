// What a cubin of NVRTC 13 (an ELF64 file, ABI 8) says about itself and its kernels. Numbers of
// attributes are those that `cuobjdump -elf` shows by name; a test compares the result with
// `cuobjdump -res-usage`.

// Every CTA has this much shared memory for itself besides its own; cubins count it in.
constexpr int kReservedShared = 1024;

// Of a CTA, unless cuFuncSetAttribute has allowed more.
constexpr int kSharedOfCta = 48 << 10;

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
  // False: this is not such a file.
  bool read(const uint8_t* image) {
    const auto* header = reinterpret_cast<const Elf64_Ehdr*>(image);
    constexpr int kCudaMachine = 190, kAbi = 8;
    if (image == nullptr || memcmp(image, ELFMAG, SELFMAG) != 0 ||
        header->e_machine != kCudaMachine || header->e_ident[EI_ABIVERSION] != kAbi) {
      return false;
    }
    image_ = image;
    sections_ = reinterpret_cast<const Elf64_Shdr*>(image + header->e_shoff);
    num_sections_ = header->e_shnum;
    names_ = text_of(sections_[header->e_shstrndx]);
    architecture_ = static_cast<int>(header->e_flags >> 8 & 0xff);
    size_ = header->e_phoff + size_t{header->e_phnum} * header->e_phentsize;  // what comes last
    for (int i = 0; i < num_sections_; ++i) read_symbols(sections_[i]);
    for (int i = 0; i < num_sections_; ++i) read_section(sections_[i]);
    return true;
  }

  // Of the file: whoever loads an image does not say.
  size_t size() const { return size_; }

  // sm_90a runs on 9.0 only; sm_90 and families (sm_100f) on what is newer of the same major, too.
  bool runs_on(int major, int minor) const {
    if (exact_) return architecture_ == major * 10 + minor;
    return architecture_ / 10 == major && architecture_ % 10 <= minor;
  }

  // " a b": of messages.
  std::string kernel_names() const {
    std::string names;
    for (const auto& [name, _] : kernels_) names += " " + name;
    return names;
  }

  const Kernel* kernel(const std::string& name) const {
    const auto found = kernels_.find(name);
    return found == kernels_.end() ? nullptr : &found->second;
  }

 private:
  enum Format { kFlag = 1, kByte = 2, kHalf = 3, kSized = 4 };
  enum Attribute {
    kMaxThreads = 0x05,
    kExactArchitecture = 0x09,  // of .nv.compat: 1 in what was compiled for sm_90a, not for sm_90
    kParameter = 0x17,
    kParametersBytes = 0x19,
    kRegisters = 0x2f,
    kParameterV2 = 0x45,
  };

  const char* text_of(const Elf64_Shdr& section) const {
    return reinterpret_cast<const char*>(image_ + section.sh_offset);
  }

  void read_symbols(const Elf64_Shdr& section) {
    if (section.sh_type != SHT_SYMTAB) return;
    const auto* symbols = reinterpret_cast<const Elf64_Sym*>(image_ + section.sh_offset);
    const char* texts = text_of(sections_[section.sh_link]);
    for (size_t i = 0; i < section.sh_size / sizeof(Elf64_Sym); ++i) {
      symbols_.push_back(texts + symbols[i].st_name);
      const bool is_entry = (symbols[i].st_other & 0x10) != 0;
      if (ELF64_ST_TYPE(symbols[i].st_info) == STT_FUNC && is_entry) kernels_[symbols_.back()];
    }
  }

  void read_section(const Elf64_Shdr& section) {
    const std::string name = names_ + section.sh_name;
    const std::string info = ".nv.info", shared = ".nv.shared.";
    if (name == info || name == ".nv.compat") read_attributes(section, nullptr);
    if (name.rfind(info + ".", 0) == 0) {
      const auto of = kernels_.find(name.substr(info.size() + 1));
      if (of != kernels_.end()) read_attributes(section, &of->second);
    }
    const auto of = kernels_.find(name.rfind(shared, 0) == 0 ? name.substr(shared.size()) : "");
    if (of != kernels_.end()) {
      of->second.shared_bytes = static_cast<int>(section.sh_size) - kReservedShared;
    }
  }

  // kernel: whose they are; null for those of the whole file.
  void read_attributes(const Elf64_Shdr& section, Kernel* kernel) {
    const uint8_t* at = image_ + section.sh_offset;
    const uint8_t* end = at + section.sh_size;
    const bool is_compat = std::string(names_ + section.sh_name) == ".nv.compat";
    while (at + 4 <= end) {
      const int format = at[0], attribute = at[1];
      const int value = at[2] | at[3] << 8;
      const uint8_t* payload = at + 4;
      at = payload + (format == kSized ? value : 0);
      if (is_compat) {
        if (format == kByte && attribute == kExactArchitecture) exact_ = (value & 0xff) == 1;
      } else if (kernel == nullptr) {
        if (attribute != kRegisters) continue;
        const auto of = kernels_.find(symbols_[word(payload)]);
        if (of != kernels_.end()) of->second.registers = static_cast<int>(word(payload + 4));
      } else if (attribute == kMaxThreads) {
        kernel->bound = static_cast<int>(word(payload) * word(payload + 4) * word(payload + 8));
      } else if (attribute == kParametersBytes) {
        kernel->args_bytes = static_cast<size_t>(value);
      } else if (attribute == kParameter || attribute == kParameterV2) {
        const size_t ordinal = word(payload + 4) & 0xffff, offset = word(payload + 4) >> 16;
        const size_t size = attribute == kParameter ? word(payload + 8) >> 18 : word(payload + 8);
        if (kernel->parameters.size() <= ordinal) kernel->parameters.resize(ordinal + 1);
        kernel->parameters[ordinal] = Parameter{offset, size};
      }
    }
  }

  static uint32_t word(const uint8_t* at) {
    uint32_t value;
    memcpy(&value, at, sizeof(value));
    return value;
  }

  const uint8_t* image_ = nullptr;  // while it is read
  size_t size_ = 0;
  const Elf64_Shdr* sections_ = nullptr;
  int num_sections_ = 0;
  const char* names_ = nullptr;
  std::vector<std::string> symbols_;
  int architecture_ = 0;  // 90, 100, 103, 120
  bool exact_ = false;
  std::map<std::string, Kernel> kernels_;
};
