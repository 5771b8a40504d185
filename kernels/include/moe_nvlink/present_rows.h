// The sum of a token's partial rows without the absent rows, and what follows every sum (Finish).
// Only the host uses this sum, because there combine spends its time on arithmetic; Finish and
// SumTarget serve GPUs too. The sum has the bits of combine's tree over all k; only
// NaN may have other bits. An absent row would add -0.0, which changes nothing, so a node of the
// tree with one empty side equals its other side. The sum goes through registers, one or two of
// kRegisterFloats elements at a time. The few shapes that the tree of two, three and four rows can
// have are written out.
#pragma once

#include "args.h"
#include "combine_formats.h"
#include "config.h"
#include "copy.h"
#include "decode.h"
#include "number_formats.h"
#include "platform.h"
#include "registers.h"

namespace moe_nvlink {

HD RegisterPair operator+(const RegisterPair& a, const RegisterPair& b) {
  return RegisterPair{a.even + b.even, a.odd + b.odd};
}

HD RegisterPair& operator+=(RegisterPair& sum, const RegisterPair& term) {
  return sum = sum + term;
}

HD RegisterPair& operator*=(RegisterPair& sum, float factor) {
  sum.even *= factor;
  sum.odd *= factor;
  return sum;
}

// A register of elements that `from`, a function of the place, finds in `low` (0, 1, ...) and `high`.
template <class Places>
HD FloatRegister picked(FloatRegister low, FloatRegister high, const Places& from) {
  MOE_NVLINK_DEVICE_ONLY(return from(0) == 0 ? low : high;)
  MOE_NVLINK_HOST_ONLY(BitRegister places; for (int i = 0; i < kRegisterFloats; ++i) {
    places[i] = static_cast<uint32_t>(from(i));
  } return __builtin_shuffle(low, high, places);)
}

// Two registers of elements in their order, as a pair; and of a pair, one after the other.
HD RegisterPair taken_apart(FloatRegister low, FloatRegister high) {
  return RegisterPair{picked(low, high, [](int i) { return 2 * i; }),
                      picked(low, high, [](int i) { return 2 * i + 1; })};
}

struct OrderedPair {
  FloatRegister low;
  FloatRegister high;
};

HD OrderedPair in_order(const RegisterPair& pair) {
  constexpr int kHalf = kRegisterFloats / 2;
  const auto place = [](int i) { return i / 2 + i % 2 * kRegisterFloats; };
  return OrderedPair{picked(pair.even, pair.odd, place),
                     picked(pair.even, pair.odd, [&](int i) { return place(i) + kHalf; })};
}

// ---- Terms: kElements of one row's elements, from `element` on, a multiple of kElements. The sum
// of terms is stored as elements of the activation's type; `stored` are such elements.

template <class Element, int ElementBytes>
struct UnquantisedTerm;

// One register, in the order of the elements.
template <class Element>
struct UnquantisedTerm<Element, 4> {
  static constexpr int kElements = kRegisterFloats;
  using Sum = FloatRegister;
  HD static Sum absent() { return -FloatRegister{}; }
  HD static Sum load(const PartialRow& from, int element) { return stored(from.row, element); }
  HD static Sum stored(const char* row, int element) {
    return Element::floats_of(load_register<uint32_t>(row + element * 4));
  }
  MOE_NVLINK_INLINE HD static void store(char* row, int element, const Sum& sum, bool streamed) {
    const BitRegister words = Element::rounded(bits_of_float(sum));
    char* target = row + element * 4;
    if (streamed) return stream_register(target, words);
    store_register<uint32_t>(target, words);
  }
};

template <class Element>
struct UnquantisedTerm<Element, 2> {
  static constexpr int kElements = 2 * kRegisterFloats;
  using Sum = RegisterPair;
  HD static Sum absent() { return Sum{-FloatRegister{}, -FloatRegister{}}; }
  HD static Sum load(const PartialRow& from, int element) { return stored(from.row, element); }
  HD static Sum stored(const char* row, int element) {
    const BitRegister words = load_register<uint32_t>(row + element * 2);
    return Sum{Element::floats_of(words & 0xffffu), Element::floats_of(words >> 16)};
  }
  MOE_NVLINK_INLINE HD static void store(char* row, int element, const Sum& sum, bool streamed) {
    const BitRegister words =
        Element::rounded(bits_of_float(sum.even)) | Element::rounded(bits_of_float(sum.odd)) << 16;
    char* target = row + element * 2;
    if (streamed) return stream_register(target, words);
    store_register<uint32_t>(target, words);
  }
};

// Of quantised rows, whatever the activation's type is: codes are taken apart as well.
template <class Element, int ElementBytes = sizeof(typename Element::Storage)>
struct PairTerm : UnquantisedTerm<Element, 2> {};

template <class Element>
struct PairTerm<Element, 4> {
  using Half = UnquantisedTerm<Element, 4>;
  static constexpr int kElements = 2 * kRegisterFloats;
  using Sum = RegisterPair;
  HD static Sum absent() { return Sum{Half::absent(), Half::absent()}; }
  HD static Sum stored(const char* row, int element) {
    return taken_apart(Half::stored(row, element), Half::stored(row, element + kRegisterFloats));
  }
  HD static void store(char* row, int element, const Sum& sum, bool streamed) {
    const OrderedPair ordered = in_order(sum);
    Half::store(row, element, ordered.low, streamed);
    Half::store(row, element + kRegisterFloats, ordered.high, streamed);
  }
};

template <class Element>
struct Fp8BlockTerm : PairTerm<Element> {
  MOE_NVLINK_INLINE HD static RegisterPair load(const PartialRow& from, int element) {
    const float scale = load_word(reinterpret_cast<const float*>(from.scales) + element / 128);
    return e4m3_values(from.row + element, scale);
  }
};

template <class Element>
struct Nvfp4Term : PairTerm<Element> {
  MOE_NVLINK_INLINE HD static RegisterPair load(const PartialRow& from, int element) {
    const float row_scale = load_word(reinterpret_cast<const float*>(from.row_scale));
    return e2m1_values(from.row + element / 2, e4m3_of_16(from.scales + element / 16) * row_scale);
  }
};

template <class Element>
struct Fp8TensorTerm : PairTerm<Element> {
  MOE_NVLINK_INLINE HD static RegisterPair load(const PartialRow& from, int element) {
    return e4m3_values(from.row + element, 1.0f);
  }
};

template <class Element, int Format>
struct TermOf;
template <class Element>
struct TermOf<Element, kCombineUnquantised> {
  using Type = UnquantisedTerm<Element, sizeof(typename Element::Storage)>;
};
template <class Element>
struct TermOf<Element, kCombineFp8Block> {
  using Type = Fp8BlockTerm<Element>;
};
template <class Element>
struct TermOf<Element, kCombineNvfp4> {
  using Type = Nvfp4Term<Element>;
};
template <class Element>
struct TermOf<Element, kCombineFp8Tensor> {
  using Type = Fp8TensorTerm<Element>;
};

// ---- Shapes: which sums are made of the rows.

// ((r0 + r1) + r2) + r3, of the first Count.
template <int Count>
struct Chain {
  template <class Term>
  MOE_NVLINK_INLINE HD static typename Term::Sum sum(const PartialRow* rows, int element) {
    typename Term::Sum total = Term::load(rows[0], element);
    if constexpr (Count > 1) total += Term::load(rows[1], element);
    if constexpr (Count > 2) total += Term::load(rows[2], element);
    if constexpr (Count > 3) total += Term::load(rows[3], element);
    return total;
  }
};

// The whole tree over Count rows, a power of two, of which some may be absent.
template <int Count>
struct Tree {
  template <class Term>
  MOE_NVLINK_INLINE HD static typename Term::Sum sum(const PartialRow* rows, int element) {
    return Tree<Count / 2>::template sum<Term>(rows, element) +
           Tree<Count / 2>::template sum<Term>(rows + Count / 2, element);
  }
};
template <>
struct Tree<1> {
  template <class Term>
  MOE_NVLINK_INLINE HD static typename Term::Sum sum(const PartialRow* rows, int element) {
    if (rows->row == nullptr) return Term::absent();
    return Term::load(*rows, element);
  }
};

// The tree over kMaxTopK rows, a quarter of it at a time.
struct Forest {
  static constexpr int kQuarter = kMaxTopK / 4;
  template <class Term>
  HD static typename Term::Sum sum(const PartialRow* rows, int element) {
    typename Term::Sum quarters[4];
    MOE_NVLINK_ROLLED
    for (int i = 0; i < 4; ++i) {
      quarters[i] = Tree<kQuarter>::template sum<Term>(rows + i * kQuarter, element);
    }
    return (quarters[0] + quarters[1]) + (quarters[2] + quarters[3]);
  }
};

// What follows the tree: scale * sum + add, in fp32, two roundings of its own. It is the same for
// all rows of a launch, so on a GPU it takes no registers of a thread.
struct Finish {
  bool adds;
  uint64_t distance;  // from where a sum is stored to what is added to it
  float scale;
  HD bool is_needed() const { return adds || scale != 1.0f; }
  // The elements that are added to the sums which are stored from `output` on; or null.
  HD const char* added_to(const char* output) const {
    if (!adds) return nullptr;
    return reinterpret_cast<const char*>(reinterpret_cast<uint64_t>(output) + distance);
  }
};

HD Finish finish_of(const CombineArgs& args) {
  return Finish{args.add != 0, args.add - args.output, args.scale};
}

// Where a sum goes. This is thread `thread` of the `threads` that share the row.
struct SumTarget {
  char* output;
  int thread;
  int threads;
  bool streamed;  // of are_streamed()
  Finish finish;
};

// This thread's elements of [0, whole), a multiple of the term's kElements.
template <class Term, class Shape>
HD void sum_rows(const PartialRow* rows, const SumTarget& target, int whole) {
  const int step = target.threads * Term::kElements;
  const Finish finish = target.finish;
  const bool is_needed = finish.is_needed();
  const char* added = finish.added_to(target.output);
  for (int element = target.thread * Term::kElements; element < whole; element += step) {
    typename Term::Sum sum = Shape::template sum<Term>(rows, element);
    if (is_needed) {
      sum *= finish.scale;
      sum += added == nullptr ? Term::absent() : Term::stored(added, element);
    }
    Term::store(target.output, element, sum, target.streamed);
  }
}

// Brings rows[0..2] into the order of Chain<3>: the two whose numbers k part lower in the tree
// first.
HD void order_three(PartialRow* rows, const int* k) {
  if ((k[0] ^ k[1]) < (k[1] ^ k[2])) return;
  const PartialRow first = rows[0];
  rows[0] = rows[1];
  rows[1] = rows[2];
  rows[2] = first;
}

// The same of four for Chain<4>. False if they are two pairs: they stay as they are, for Tree<4>.
HD bool order_four(PartialRow* rows, const int* k) {
  const int left = k[0] ^ k[1];
  const int middle = k[1] ^ k[2];
  const int right = k[2] ^ k[3];
  if (middle > left && middle > right) return false;
  if (left > right) {  // the first one parts from all others at the top
    const PartialRow first = rows[0];
    order_three(rows + 1, k + 1);
    for (int i = 0; i < 3; ++i) rows[i] = rows[i + 1];
    rows[3] = first;
  } else {
    order_three(rows, k);
  }
  return true;
}

// The same of any rows.
template <class Term>
HD void sum_many_rows(const PartialRow* rows, int top_k, const SumTarget& target, int whole) {
  PartialRow all[kMaxTopK];
  for (int i = 0; i < kMaxTopK; ++i) all[i] = i < top_k ? rows[i] : PartialRow{};
  if (top_k <= 8) return sum_rows<Term, Tree<8>>(all, target, whole);
  sum_rows<Term, Forest>(all, target, whole);
}

// Adds a token's top_k rows up. If all are absent, the sum is -0.0.
template <class Term>
HD void sum_present_rows(const PartialRow* rows, int top_k, const SumTarget& target, int whole) {
  PartialRow present[4];
  int k[4];
  int count = 0;
  for (int i = 0; i < top_k; ++i) {
    if (rows[i].row == nullptr) continue;
    if (count < 4) {
      present[count] = rows[i];
      k[count] = i;
    }
    ++count;
  }
  if (count == 0) return sum_rows<Term, Tree<1>>(rows, target, whole);
  if (count == 1) return sum_rows<Term, Chain<1>>(present, target, whole);
  if (count == 2) return sum_rows<Term, Chain<2>>(present, target, whole);
  if (count == 3) {
    order_three(present, k);
    return sum_rows<Term, Chain<3>>(present, target, whole);
  }
  if (count == 4 && order_four(present, k)) {
    return sum_rows<Term, Chain<4>>(present, target, whole);
  }
  if (count == 4) return sum_rows<Term, Tree<4>>(present, target, whole);
  sum_many_rows<Term>(rows, top_k, target, whole);
}

}  // namespace moe_nvlink
