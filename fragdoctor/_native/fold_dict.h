// A dict that is being folded: its items on the stack, and those under keys that are known.
#pragma once

#include <cstdint>

#include "schema_fold.h"

namespace fragdoctor {

// In `memo` of an opaque dict: it was one full batch of a large dict, so more may follow.
constexpr uint32_t kExtendable = 0xFFFFFFFF;

struct SchemaFold::DictView {
  uint64_t offset = 0;
  uint64_t mask = 0;  // bit(key) of the known keys
  const Value* slots[kNKeys];  // set where the mask has the bit; of equal keys the last
  const Value* items = nullptr;
  size_t n_pairs = 0;
  bool has_other_keys = false;
  bool has_odd_keys = false;  // keys that are no strings

  const Value* get(Key key) const {
    return (mask & bit(key)) != 0 ? slots[static_cast<int>(key)] : nullptr;
  }
};

}  // namespace fragdoctor
