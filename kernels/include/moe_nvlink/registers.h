// Registers of kRegisterFloats elements (platform.h), which a loop over arrays would not keep in
// registers: on the host vectors, on the GPU one element.
#pragma once

#include "copy.h"
#include "platform.h"

namespace moe_nvlink {

// kRegisterFloats words, each in the low bits of its element.
template <class Word>
HD BitRegister load_register(const char* source) {
  MOE_NVLINK_DEVICE_ONLY(return load_word(reinterpret_cast<const Word*>(source));)
  MOE_NVLINK_HOST_ONLY(typedef Word Words
                       __attribute__((vector_size(kRegisterFloats * sizeof(Word))));
                       Words words; std::memcpy(&words, source, sizeof(words));
                       return __builtin_convertvector(words, BitRegister);)
}

template <class Word>
HD void store_register(char* target, BitRegister bits) {
  MOE_NVLINK_DEVICE_ONLY(store_word(reinterpret_cast<Word*>(target), static_cast<Word>(bits));)
  MOE_NVLINK_HOST_ONLY(typedef Word Words
                       __attribute__((vector_size(kRegisterFloats * sizeof(Word))));
                       const Words words = __builtin_convertvector(bits, Words);
                       std::memcpy(target, &words, sizeof(words));)
}

// Two registers of elements of 2 bytes: the elements at even places and those at odd places. To
// take them apart needs a shift and a mask, while elements in their order would have to be widened
// and narrowed across the halves of a register.
struct RegisterPair {
  FloatRegister even;
  FloatRegister odd;
};

}  // namespace moe_nvlink
