// The undone trace as held by Python.
#pragma once

#include <cstdint>

#include "bind_arrays.h"
#include "undone.h"

namespace fragdoctor {

// Keeps the columns that it was made from.
class NativeTrace {
 public:
  NativeTrace(InColumn<std::uint8_t> action, InColumn<std::uint64_t> address,
              InColumn<std::uint64_t> size, InColumn<std::int32_t> stream,
              InColumn<std::int32_t> pool, InColumn<std::uint64_t> segment_address,
              InColumn<std::uint64_t> segment_size, InColumn<std::int32_t> segment_stream,
              InColumn<std::int32_t> segment_pool, InColumn<std::uint8_t> segment_kind,
              InColumn<std::uint8_t> segment_expandable, InColumn<std::uint64_t> block_address,
              InColumn<std::uint64_t> block_size, InColumn<std::uint64_t> block_requested,
              InColumn<std::uint8_t> block_state, const Config& config);

 private:
  nanobind::object kept_;

 public:
  Settings settings;
  TraceView trace;
  FinalState end;
  UndoneTrace undone;
};

}  // namespace fragdoctor
