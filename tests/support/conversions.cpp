// Functions of the kernels' headers over arrays, exported, so that tests and benchmarks can compare
// them with torch's. kernel_texts.py puts this behind the text of the kernels, which has the headers.
#include "../../kernels/exchange/add_rows.h"
#include "../../kernels/exchange/combine_shared.h"
#include "../../kernels/include/moe_nvlink/args.h"
#include "../../kernels/include/moe_nvlink/divider.h"
#include "../../kernels/include/moe_nvlink/epoch_flags.h"
#include "../../kernels/include/moe_nvlink/number_formats.h"
#include "../../kernels/include/moe_nvlink/platform.h"
#include "../../kernels/include/moe_nvlink/quantise.h"

namespace {

// fn(tag) with the element type as tag: Bf16{}, Fp16{} or Fp32{}.
template <class Function>
void with_element(int element, const Function& function) {
  switch (static_cast<moe_nvlink::ElementCode>(element)) {
    case moe_nvlink::kElementBf16:
      return function(moe_nvlink::Bf16{});
    case moe_nvlink::kElementFp16:
      return function(moe_nvlink::Fp16{});
    case moe_nvlink::kElementFp32:
      return function(moe_nvlink::Fp32{});
  }
}

struct Rows {
  const char* source;  // [num_rows, hidden_size]
  char* rows;          // [num_rows, bytes of a quantised row]
  char* scales;        // [num_rows, bytes of a row's scales]
  int64_t num_rows;
  int hidden_size;
  float global_scale;
};

template <int Quantiser, class Element>
void quantise(const Rows& rows) {
  using namespace moe_nvlink;
  using Format = typename FormatOf<Quantiser>::Type;
  int scale_bytes = 0;
  if constexpr (Quantiser == kQuantiserFp8Token) {
    scale_bytes = sizeof(typename Format::Scale);
  } else if constexpr (Format::kBlock != 0) {
    scale_bytes = rows.hidden_size / Format::kBlock * sizeof(typename Format::Scale);
  }
  const Cta cta{0, 1, 0, nullptr, nullptr};
  for (int64_t i = 0; i < rows.num_rows; ++i) {
    const char* row = rows.source + i * rows.hidden_size * sizeof(typename Element::Storage);
    uint32_t amax = 0;
    // One thread whatever the build: num_threads is 1 here only in the product's.
    if constexpr (Quantiser == kQuantiserFp8Token) {
      for (int lane = 0; lane < Cta::num_threads; ++lane) {
        const uint32_t part = amax_of_lane<Element>(cta, lane, row, rows.hidden_size, true);
        amax = part > amax ? part : amax;
      }
    }
    const OneTarget target{rows.rows + i * (rows.hidden_size * Format::kBits / 8),
                           rows.scales + i * scale_bytes};
    for (int lane = 0; lane < Cta::num_threads; ++lane) {
      quantise_row<Quantiser, Element>(cta, lane, row, rows.hidden_size, true, amax,
                                       rows.global_scale, target);
    }
  }
}

template <int Format>
void sum_rows_of(int element, const moe_nvlink::PartialRow* rows, void* output, int top_k,
                 int hidden_size) {
  with_element(element, [&](auto tag) {
    using Term = typename moe_nvlink::TermOf<decltype(tag), Format>::Type;
    const moe_nvlink::SumTarget target{static_cast<char*>(output), 0, 1, false, {false, 0, 1.0f}};
    moe_nvlink::sum_present_rows<Term>(rows, top_k, target, hidden_size);
  });
}

}  // namespace

extern "C" {

// The sum of one token's rows [top_k], as combine makes it of whole registers. format and element:
// kCombine*, not Unquantised, and kElement*. hidden_size: a multiple of two registers' elements.
void moe_nvlink_sum_quantised_rows(int format, int element, const moe_nvlink::PartialRow* rows,
                                   void* output, int top_k, int hidden_size) {
  switch (static_cast<moe_nvlink::CombineCode>(format)) {
    case moe_nvlink::kCombineUnquantised:
      return;
    case moe_nvlink::kCombineFp8Block:
      return sum_rows_of<moe_nvlink::kCombineFp8Block>(element, rows, output, top_k, hidden_size);
    case moe_nvlink::kCombineNvfp4:
      return sum_rows_of<moe_nvlink::kCombineNvfp4>(element, rows, output, top_k, hidden_size);
    case moe_nvlink::kCombineFp8Tensor:
      return sum_rows_of<moe_nvlink::kCombineFp8Tensor>(element, rows, output, top_k, hidden_size);
  }
}

// The tag of a geometry in a cell, so that the tests can count what shares one.
uint32_t moe_nvlink_mask_tag(const moe_nvlink::DispatchArgs* args) {
  return moe_nvlink::mask_tag(*args);
}

uint32_t moe_nvlink_geometry_tag(const moe_nvlink::Geometry* geometry) {
  return moe_nvlink::geometry_tag(*geometry);
}

// The tag of combine's rows in a signal, for the same.
uint32_t moe_nvlink_combine_tag(const moe_nvlink::CombineArgs* args) {
  return moe_nvlink::combine_tag(*args);
}

// Element conversions, so that the tests can compare them with torch's.
void moe_nvlink_to_float(int element, const void* source, float* target, int64_t count) {
  with_element(element, [&](auto tag) {
    using Element = decltype(tag);
    const auto* values = static_cast<const typename Element::Storage*>(source);
    for (int64_t i = 0; i < count; ++i) target[i] = Element::to_float(values[i]);
  });
}

void moe_nvlink_from_float(int element, const float* source, void* target, int64_t count) {
  with_element(element, [&](auto tag) {
    using Element = decltype(tag);
    auto* values = static_cast<typename Element::Storage*>(target);
    for (int64_t i = 0; i < count; ++i) values[i] = Element::from_float(source[i]);
  });
}

// Quantised formats, one code to a byte, e4m3 or e2m1.
void moe_nvlink_e4m3_from_float(const float* source, uint8_t* target, int64_t count) {
  for (int64_t i = 0; i < count; ++i) target[i] = moe_nvlink::E4m3::from_float(source[i]);
}

void moe_nvlink_e4m3_to_float(const uint8_t* source, float* target, int64_t count) {
  for (int64_t i = 0; i < count; ++i) target[i] = moe_nvlink::E4m3::to_float(source[i]);
}

void moe_nvlink_e2m1_from_float(const float* source, uint8_t* target, int64_t count) {
  for (int64_t i = 0; i < count; ++i) target[i] = moe_nvlink::E2m1::from_float(source[i]);
}

void moe_nvlink_e2m1_to_float(const uint8_t* source, float* target, int64_t count) {
  for (int64_t i = 0; i < count; ++i) target[i] = moe_nvlink::E2m1::to_float(source[i]);
}

// target[i] = source[i] / divisor as Divider has it, to be compared with IEEE division.
void moe_nvlink_divide(const float* source, float divisor, float* target, int64_t count) {
  const moe_nvlink::Divider divider(divisor);
  for (int64_t i = 0; i < count; ++i) target[i] = divider.quotient(source[i]);
}

// What dispatch makes of `source` [num_rows, hidden_size] on its way: `rows` and `scales`, contiguous.
// quantiser: kQuantiser*, not None; element: kElement*; global_scale: null where there is none.
void moe_nvlink_quantise_rows(int quantiser, int element, const void* source,
                              const float* global_scale, void* rows, void* scales, int64_t num_rows,
                              int hidden_size) {
  const Rows all{static_cast<const char*>(source),
                 static_cast<char*>(rows),
                 static_cast<char*>(scales),
                 num_rows,
                 hidden_size,
                 global_scale == nullptr ? 1.0f : *global_scale};
  with_element(element, [&](auto tag) {
    using Element = decltype(tag);
    switch (static_cast<moe_nvlink::QuantiserCode>(quantiser)) {
      case moe_nvlink::kQuantiserNone:
        return;
      case moe_nvlink::kQuantiserFp8Block:
        return quantise<moe_nvlink::kQuantiserFp8Block, Element>(all);
      case moe_nvlink::kQuantiserFp8Token:
        return quantise<moe_nvlink::kQuantiserFp8Token, Element>(all);
      case moe_nvlink::kQuantiserFp8Tensor:
        return quantise<moe_nvlink::kQuantiserFp8Tensor, Element>(all);
      case moe_nvlink::kQuantiserMxfp8:
        return quantise<moe_nvlink::kQuantiserMxfp8, Element>(all);
      case moe_nvlink::kQuantiserNvfp4:
        return quantise<moe_nvlink::kQuantiserNvfp4, Element>(all);
      case moe_nvlink::kQuantiserFp8BlockPow2:
        return quantise<moe_nvlink::kQuantiserFp8BlockPow2, Element>(all);
    }
  });
}

}  // extern "C"
