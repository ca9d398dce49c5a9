// The columns of one device as Python hands them over. Files are hostile: any value may be
// nonsense.
#pragma once

#include <cstddef>
#include <cstdint>

#include "words.h"

namespace fragdoctor {

// The trace of one device. Streams are ranks of the stream handles (0 = lowest). Pools are 0 for
// the default pool, 1, 2, ... for private ones, and -1 if the event does not say.
struct TraceView {
  std::size_t n = 0;
  const std::uint8_t* action = nullptr;
  const std::uint64_t* address = nullptr;
  const std::uint64_t* size = nullptr;
  const std::int32_t* stream = nullptr;
  const std::int32_t* pool = nullptr;

  Action action_at(std::size_t row) const { return static_cast<Action>(action[row]); }
};

// The segments of this device and their blocks, as listed in the snapshot.
struct FinalState {
  std::size_t n_segments = 0;
  const std::uint64_t* segment_address = nullptr;
  const std::uint64_t* segment_size = nullptr;
  const std::int32_t* segment_stream = nullptr;
  const std::int32_t* segment_pool = nullptr;
  const std::uint8_t* segment_kind = nullptr;  // SegmentType
  const std::uint8_t* segment_expandable = nullptr;
  std::size_t n_blocks = 0;
  const std::uint64_t* block_address = nullptr;
  const std::uint64_t* block_size = nullptr;
  const std::uint64_t* block_requested = nullptr;
  const std::uint8_t* block_state = nullptr;

  BlockState state_of(std::size_t block) const {
    return static_cast<BlockState>(block_state[block]);
  }
};

}  // namespace fragdoctor
