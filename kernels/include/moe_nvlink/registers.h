// Registers of kRegisterFloats elements (platform.h), which a loop over arrays would not keep in
// registers: on the host vectors, on the GPU one element.
#pragma once

#include "copy.h"
#include "number_formats.h"
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
  MOE_NVLINK_HOST_ONLY(if constexpr (sizeof(Word) == 1 && !MOE_NVLINK_WIDE_REGISTERS) {
    return store_low_bytes(target, bits);
  } typedef Word Words __attribute__((vector_size(kRegisterFloats * sizeof(Word))));
                       const Words words = __builtin_convertvector(bits, Words);
                       std::memcpy(target, &words, sizeof(words));)
}

// Both halves of each element by themselves.
template <int Bits>
HD BitRegister halves_shifted_right(BitRegister bits) {
  MOE_NVLINK_DEVICE_ONLY(return bits >> Bits & (0xffffu >> Bits) * 0x10001u;)
  MOE_NVLINK_HOST_ONLY(
      typedef uint16_t Halves __attribute__((vector_size(4 * kRegisterFloats)));
      return reinterpret_cast<BitRegister>(reinterpret_cast<Halves>(bits) >> Bits);)
}

HD BitRegister larger_halves(BitRegister a, BitRegister b) {
  MOE_NVLINK_DEVICE_ONLY(return larger(a >> 16, b >> 16) << 16 | larger(a & 0xffffu, b & 0xffffu);)
  MOE_NVLINK_HOST_ONLY(typedef uint16_t Halves __attribute__((vector_size(4 * kRegisterFloats)));
                       return reinterpret_cast<BitRegister>(
                           larger(reinterpret_cast<Halves>(a), reinterpret_cast<Halves>(b)));)
}

// The low byte of each half.
HD void store_halves_as_bytes(char* target, BitRegister halves) {
  MOE_NVLINK_DEVICE_ONLY(store_word(reinterpret_cast<uint16_t*>(target),
                                    static_cast<uint16_t>((halves & 0xffu) | halves >> 8));)
  MOE_NVLINK_HOST_ONLY(typedef uint16_t Halves __attribute__((vector_size(4 * kRegisterFloats)));
                       typedef uint8_t Bytes __attribute__((vector_size(2 * kRegisterFloats)));
                       const Bytes bytes =
                           __builtin_convertvector(reinterpret_cast<Halves>(halves), Bytes);
                       std::memcpy(target, &bytes, sizeof(bytes));)
}

// 0, 1, 2, ..., a constant.
HD BitRegister numbers_of_elements() {
  BitRegister numbers{};
  MOE_NVLINK_HOST_ONLY(for (uint32_t i = 1; i < kRegisterFloats; ++i) numbers[i] = i;)
  return numbers;
}

HD uint32_t first_element(BitRegister bits) {
  MOE_NVLINK_DEVICE_ONLY(return bits;)
  MOE_NVLINK_HOST_ONLY(return bits[0];)
}

// The elements at even places (First = 0), or at odd ones (1), of `low` and after them of `high`.
template <uint32_t First>
HD BitRegister every_second(BitRegister low, BitRegister high) {
  MOE_NVLINK_DEVICE_ONLY(return First == 0 ? low : high;)
  MOE_NVLINK_HOST_ONLY(const BitRegister places = 2 * numbers_of_elements() + First;
                       return __builtin_shuffle(low, high, places);)
}

// The elements from `first` on, to the front.
HD FloatRegister elements_from(FloatRegister values, uint32_t first) {
  MOE_NVLINK_DEVICE_ONLY(return values;)
  MOE_NVLINK_HOST_ONLY(return __builtin_shuffle(values, numbers_of_elements() + first);)
}

// For a pair of registers, whose element `first` is that of a row: what its blocks of `Size` are
// multiplied by, element 0 of `factors` being of the row's first block.
template <int Size>
HD FloatRegister factors_of_pair(FloatRegister factors, uint32_t first) {
  MOE_NVLINK_DEVICE_ONLY(return factors;)
  MOE_NVLINK_HOST_ONLY(const BitRegister places = (2 * numbers_of_elements() + first) / Size;
                       return __builtin_shuffle(factors, places);)
}

// Two registers of elements of 2 bytes: the elements at even places and those at odd places. To
// take them apart needs a shift and a mask, while elements in their order would have to be widened
// and narrowed across the halves of a register.
struct RegisterPair {
  FloatRegister even;
  FloatRegister odd;
};

// Elements of a pair.
constexpr int kPairElements = 2 * kRegisterFloats;

template <class Element>
HD RegisterPair load_pair(const char* source) {
  const BitRegister low = load_register<uint32_t>(source);
  if constexpr (sizeof(typename Element::Storage) == 2) {
    // The upper half of a word is no part of its lower element, which takes no notice of it.
    return RegisterPair{Element::floats_of(low), Element::floats_of(low >> 16)};
  } else {
    const BitRegister high = load_register<uint32_t>(source + sizeof(low));
    return RegisterPair{Element::floats_of(every_second<0>(low, high)),
                        Element::floats_of(every_second<1>(low, high))};
  }
}

HD BitRegister magnitudes_of(FloatRegister values) {
  return bits_of_float(values) & 0x7fffffffu;
}

// The signs of a pair, that of an even element in bit 15 and that of an odd one in bit 31. Other bits may
// be set.
HD BitRegister signs_of_pair(const RegisterPair& pair) {
  return merged(0xffffu, bits_of_float(pair.even) >> 16, bits_of_float(pair.odd));
}

// The same of the pair that load_pair() has loaded from `source`.
template <class Element>
HD BitRegister signs_of_elements(const char* source, const RegisterPair& pair) {
  if constexpr (sizeof(typename Element::Storage) == 2) return load_register<uint32_t>(source);
  return signs_of_pair(pair);
}

// The largest of each Lanes neighbours of Registers registers, from element 0 on.
template <int Registers, int Lanes>
HD BitRegister largest_of_lanes(const BitRegister* all) {
  if constexpr (Lanes == 1) {
    return all[0];
  } else {
    constexpr int kHalf = Registers > 1 ? Registers / 2 : 1;
    BitRegister half[kHalf];
    for (int i = 0; i < kHalf; ++i) {
      const BitRegister& low = all[2 * i];
      const BitRegister& high = all[Registers > 1 ? 2 * i + 1 : 0];
      half[i] = larger(every_second<0>(low, high), every_second<1>(low, high));
    }
    return largest_of_lanes<kHalf, Lanes / 2>(half);
  }
}

}  // namespace moe_nvlink
