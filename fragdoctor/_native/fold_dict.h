// A dict that is being folded: its items on the stack, and the items under known keys.
#pragma once

#include <cstdint>
#include <limits>

#include "schema_fold.h"

namespace fragdoctor {

// In `memo` of an opaque dict: it was one full batch of a large dict, so more items may follow.
constexpr uint32_t kExtendable = 0xFFFFFFFF;

constexpr size_t kMaxRows = static_cast<size_t>(std::numeric_limits<int32_t>::max()) - 1;

constexpr uint64_t kMaxDevice = 32767;  // PyTorch's own DeviceIndex was 16 bits at most

inline Trouble wrong_type(Shape shape, Key key) { return {Fault::wrong_type, shape, key}; }

inline Value row_value(Tag tag, size_t row) {
  Value value;
  value.tag = tag;
  value.id = static_cast<uint32_t>(row);
  value.bits = 1;
  return value;
}

struct SchemaFold::DictView {
  uint64_t offset = 0;
  uint64_t mask = 0;           // bit(key) of the known keys
  const Value* slots[kNKeys];  // set if the mask has the bit; the last of equal keys
  const Value* items = nullptr;
  size_t n_pairs = 0;
  bool has_other_keys = false;
  bool has_odd_keys = false;  // keys that are not strings

  bool has_any(uint64_t keys) const { return (mask & keys) != 0; }
  const Value* get(Key key) const {
    return (mask & bit(key)) != 0 ? slots[static_cast<int>(key)] : nullptr;
  }
};

}  // namespace fragdoctor
