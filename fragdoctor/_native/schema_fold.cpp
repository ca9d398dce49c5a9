// The stack machine: values are pushed, containers opened, dicts closed. Lists and tuples are in
// fold_lists.cpp, and the memo is in fold_memo.cpp. The meaning of dicts is in fold_shapes.cpp, and
// the resulting tables are in fold_tables.cpp.
#include "schema_fold.h"

#include <algorithm>

#include "fold_dict.h"

namespace fragdoctor {

namespace {

constexpr size_t kBatch = 1000;  // the pickle module writes a larger dict in batches of this size

}  // namespace

SchemaFold::SchemaFold(const ReadLimits& limits, uint64_t seed)
    : limits_(limits), strings_(seed), frames_(seed), stacks_(seed), pairs_(seed), streams_(seed) {
  for (int i = 0; i < kNKeys; ++i) {
    key_of_[intern_text(kKeyNames[i], 0)] = static_cast<uint8_t>(i);
  }
  for (const char* name : kMoreFxNames) {
    key_of_[intern_text(name, 0)] = static_cast<uint8_t>(Key::fx);
  }
  uint8_t n = 0;
  for (const char* name : ACTION_NAMES) action_of_[intern_text(name, 0)] = n++;
  n = 0;
  for (const char* name : STATE_NAMES) state_of_[intern_text(name, 0)] = n++;
  state_of_[intern_text(kAwaitingFree, 0)] = static_cast<uint8_t>(BlockState::pending_free);
  n = 0;
  for (const char* name : TYPE_NAMES) type_of_[intern_text(name, 0)] = n++;
  streams_.intern(0);
  const uint32_t default_pool = pairs_.intern(PairRecord{0, 0});
  pair_out_.push_back(-1);
  pool_out(default_pool);
}

void ValueStack::grow() {
  constexpr size_t kMost = size_t{1} << 22;  // C++ writers put whole lists here; rows are one value
  if (size_ >= kMost) {
    throw ReadError(ErrorKind::limit, "More than 4,194,304 values wait to be put into a container.",
                    "Genuine snapshots put values away as they are written.", kNoOffset);
  }
  values_.resize(size_ == 0 ? 64 : size_ * 2);
}

void SchemaFold::push_large_integer(uint64_t value) {
  Value& pushed = push_tag(Tag::integer);
  pushed.bits = value;
  pushed.flag = true;
}

void SchemaFold::push_real(double value) {
  Value& pushed = push_tag(Tag::real);
  std::memcpy(&pushed.bits, &value, sizeof value);
}

void SchemaFold::mark(uint64_t offset) {
  if (marks_.size() >= limits_.max_depth) {
    throw ReadError(
        ErrorKind::limit,
        "Containers are nested more than " + std::to_string(limits_.max_depth) + " deep.",
        "Genuine snapshots nest 6 deep.", offset);
  }
  marks_.push_back(stack_.size());
}

size_t SchemaFold::pop_mark(uint64_t offset) {
  if (marks_.empty())
    refuse("A container is filled, but nothing marks where its items begin.", offset);
  const size_t at = marks_.back();
  marks_.pop_back();
  return at;
}

void SchemaFold::check_height(uint32_t height, uint64_t offset) const {
  if (height > limits_.max_depth) {
    throw ReadError(
        ErrorKind::limit,
        "Containers are nested more than " + std::to_string(limits_.max_depth) + " deep.",
        "Genuine snapshots nest 6 deep.", offset);
  }
}

void SchemaFold::set_items(uint64_t offset) {
  const size_t first_item = pop_mark(offset);
  if (first_item == 0) refuse("Items are put into a dict, but there is none.", offset);
  fold_dict(first_item - 1, first_item, offset);
}

void SchemaFold::set_item(uint64_t offset) {
  const size_t floor = marks_.empty() ? 0 : marks_.back();
  if (stack_.size() < floor + 3) refuse("An item is put into a dict, but there is none.", offset);
  fold_dict(stack_.size() - 3, stack_.size() - 2, offset);
}

void SchemaFold::check_target(const Value& target, bool is_batch, uint64_t offset) {
  if (target.tag == Tag::dict || is_batch) return;
  const bool was_dict =
      target.tag == Tag::plain_dict || target.tag == Tag::opaque || target.tag >= Tag::frame;
  refuse(was_dict ? "A dict is extended after use."
                  : "Keys and values are put into something that is not a dict.",
         offset);
}

void SchemaFold::fold_dict(size_t dict_at, size_t first_item, uint64_t offset) {
  const size_t n_items = stack_.size() - first_item;
  if (n_items % 2 != 0) refuse("A dict gets a key without a value.", offset);
  const Value& target = stack_[dict_at];
  const bool is_batch = target.tag == Tag::opaque && target.memo == kExtendable;
  check_target(target, is_batch, offset);
  if (n_items == 0) {
    stack_.shrink(first_item);
    return;
  }
  const uint32_t memo = is_batch ? 0 : target.memo;
  const Floors floors = close_from(first_item);
  DictView dict;
  dict.offset = offset;
  dict.items = &stack_[first_item];
  dict.n_pairs = n_items / 2;
  const uint32_t height = view_items(dict);
  check_height(height + 1, offset);
  Value folded;
  if (is_batch || dict.n_pairs >= kBatch) {
    folded = opaque({Fault::not_recognised, Shape::other, Key::none}, offset, 0);
    folded.memo = kExtendable;
  } else {
    folded = fold_shape(dict);
  }
  if (folded.tag != Tag::plain_dict) plain_.resize(floors.plain);
  waiting_traces_.truncate(floors.traces);
  folded.height = static_cast<uint8_t>(height + 1);
  if (memo != 0) memo_[memo - 1] = memo_form(folded);
  stack_.shrink(first_item);
  stack_[dict_at] = folded;
  merge_run();
}

// Finds the known keys among the items; returns how deeply the values are nested.
uint32_t SchemaFold::view_items(DictView& dict) const {
  uint32_t height = 0;
  for (size_t i = 0; i < dict.n_pairs; ++i) {
    const Value& key = dict.items[2 * i];
    const Value& value = dict.items[2 * i + 1];
    if (value.tag > Tag::string) height = std::max(height, height_of(value));
    if (key.tag == Tag::string) {
      const auto known = static_cast<Key>(key_of_[key.id]);
      if (known != Key::none) {
        dict.mask |= bit(known);
        dict.slots[static_cast<int>(known)] = &value;
      } else {
        dict.has_other_keys = true;
      }
    } else {
      if (!is_hashable(key)) refuse("A list or a dict is the key of a dict.", dict.offset);
      height = std::max(height, height_of(key));
      dict.has_other_keys = true;
      dict.has_odd_keys = true;
    }
  }
  return height;
}

// The most distinctive keys come first: an event also has a `size`.
Value SchemaFold::fold_shape(const DictView& dict) {
  if (top_.serial != 0) {
    if (const Value* snapshot = wrapped_snapshot(dict); snapshot != nullptr) return *snapshot;
  }
  if (dict.has_any(bit(Key::action))) return fold_event(dict);
  if (dict.has_any(bit(Key::filename))) return fold_frame(dict);
  if (dict.has_any(bit(Key::blocks))) return fold_segment(dict);
  if (dict.has_any(bit(Key::state))) return fold_block(dict);
  if (dict.has_any(bit(Key::real_size))) return fold_history_entry(dict);
  if (dict.has_any(bit(Key::stage))) return fold_annotation(dict);
  if (dict.has_any(bit(Key::segments) | bit(Key::device_traces))) return fold_top(dict);
  if (dict.has_any(bit(Key::address) | bit(Key::total_size) | bit(Key::size))) {
    return fold_host_segment(dict);
  }
  return fold_plain(dict);
}

// The snapshot that a user's own dict holds among other things; null if it holds none.
const Value* SchemaFold::wrapped_snapshot(const DictView& dict) const {
  if (dict.has_any(bit(Key::segments) | bit(Key::device_traces))) return nullptr;
  const Value* found = nullptr;
  for (size_t i = 0; i < dict.n_pairs; ++i) {
    const Value& value = dict.items[2 * i + 1];
    if (value.tag != Tag::top) continue;
    if (found != nullptr) {
      throw ReadError(ErrorKind::not_a_snapshot,
                      "This is not a memory snapshot: it holds several of them.",
                      "Save each in a file of its own.", dict.offset);
    }
    found = &value;
  }
  return found;
}

}  // namespace fragdoctor
