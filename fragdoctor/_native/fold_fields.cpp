// The fields of a dict: each is checked where a shape asks for it, and unknown keys are counted.
#include <algorithm>
#include <string>

#include "fold_dict.h"
#include "schema_fold.h"

namespace fragdoctor {

Value SchemaFold::opaque(const Trouble& trouble, uint64_t at, uint8_t height) {
  Value value;
  value.tag = Tag::opaque;
  value.trouble = trouble;
  value.bits = at;
  value.height = height;
  return value;
}

void SchemaFold::check_row(size_t n_rows) {
  if (n_rows >= kMaxRows) {
    throw ReadError(ErrorKind::limit, "The file holds more than 2,147,483,646 rows of one kind.",
                    "", kNoOffset);
  }
}

// A size: nonnegative and below 2^64.
bool SchemaFold::read_unsigned(const DictView& dict, Key key, bool required, uint64_t& out,
                               Trouble& t) const {
  const Value* value = dict.get(key);
  if (value == nullptr) {
    if (required) t = {Fault::missing, t.shape, key};
    return !required;
  }
  if (value->tag != Tag::integer) {
    t = {value->tag == Tag::big_integer ? Fault::too_large : Fault::wrong_type, t.shape, key};
    return false;
  }
  if (!value->flag && static_cast<int64_t>(value->bits) < 0) {
    t = {Fault::negative, t.shape, key};
    return false;
  }
  out = value->bits;
  return true;
}

// An address, a stream handle or a line: the C++ writer casts these to signed 64 bits.
bool SchemaFold::read_modular(const DictView& dict, Key key, bool required, uint64_t& out,
                              Trouble& t) const {
  const Value* value = dict.get(key);
  if (value == nullptr) {
    if (required) t = {Fault::missing, t.shape, key};
    return !required;
  }
  if (value->tag != Tag::integer) {
    t = {value->tag == Tag::big_integer ? Fault::too_large : Fault::wrong_type, t.shape, key};
    return false;
  }
  out = value->bits;
  return true;
}

bool SchemaFold::read_signed(const DictView& dict, Key key, bool required, int64_t& out,
                             Trouble& t) const {
  uint64_t value = static_cast<uint64_t>(out);
  if (!read_modular(dict, key, required, value, t)) return false;
  if (const Value* given = dict.get(key); given != nullptr && given->flag) {
    t = {Fault::too_large, t.shape, key};
    return false;
  }
  out = static_cast<int64_t>(value);
  return true;
}

bool SchemaFold::read_stack(const DictView& dict, int32_t& out, Trouble& t, uint64_t& at) {
  const Value* value = dict.get(Key::frames);
  if (value == nullptr || value->tag == Tag::none) return true;
  if (value->tag == Tag::stack) {
    out = stack_out(value->id);
    return true;
  }
  if (value->tag == Tag::empty_list) {
    out = stack_out(intern_stack(nullptr, 0));
    return true;
  }
  if (value->tag == Tag::opaque && value->trouble.shape != Shape::other) {
    t = value->trouble;
    at = value->bits;
  } else {
    t = wrong_type(t.shape, Key::frames);
  }
  return false;
}

bool SchemaFold::read_pool(const DictView& dict, Key key, int32_t& out, Trouble& t) {
  const Value* value = dict.get(key);
  if (value == nullptr || value->tag == Tag::none) return true;
  if (value->tag != Tag::pair) {
    t = wrong_type(t.shape, key);
    return false;
  }
  out = pool_out(value->id);
  return true;
}

bool SchemaFold::read_text(const DictView& dict, Key key, int32_t& out, Trouble& t) {
  const Value* value = dict.get(key);
  if (value == nullptr || value->tag == Tag::none) return true;
  if (value->tag != Tag::string) {
    t = wrong_type(t.shape, key);
    return false;
  }
  out = string_out(value->id);
  return true;
}

bool SchemaFold::read_time(const DictView& dict, int64_t& out, Trouble& t) const {
  uint64_t time = 0;
  const Value* value = dict.get(Key::time_us);
  if (value == nullptr) return true;
  if (!read_unsigned(dict, Key::time_us, true, time, t)) return false;
  if (value->flag) {
    t = {Fault::too_large, t.shape, Key::time_us};
    return false;
  }
  out = static_cast<int64_t>(time);
  return true;
}

// PyTorch 2.0 stores the requested size and the stack of a block in its history.
bool SchemaFold::read_history(const DictView& dict, uint64_t& requested, int32_t& stack, Trouble& t,
                              uint64_t& at) {
  const Value* history = dict.get(Key::history);
  if (history == nullptr || history->tag == Tag::empty_list || history->tag == Tag::none) {
    return true;
  }
  if (history->tag == Tag::history) {
    const Value* frames = dict.get(Key::frames);
    if (frames == nullptr || frames->tag == Tag::none)
      stack = static_cast<int32_t>(history->id) - 1;
    if (dict.get(Key::requested_size) == nullptr) requested = history->bits;
    return true;
  }
  if (history->tag == Tag::opaque && history->trouble.shape != Shape::other) {
    t = history->trouble;
    at = history->bits;
  } else {
    t = wrong_type(t.shape, Key::history);
  }
  return false;
}

bool SchemaFold::read_segment_type(const DictView& dict, uint8_t& type, Trouble& t) {
  const Value* name = dict.get(Key::segment_type);
  if (name == nullptr || name->tag == Tag::none) return true;
  if (name->tag != Tag::string) {
    t = wrong_type(t.shape, Key::segment_type);
    return false;
  }
  type = type_of_[name->id];
  if (type == kNoWord) {
    count_unknown_value("segments.segment_type=", name->id);
    type = static_cast<uint8_t>(SegmentType::unknown);
  }
  return true;
}

// Rows of one kind under a key: a finished list of rows, or an empty list.
bool SchemaFold::read_rows(const DictView& dict, Key key, Tag wanted, RowRange& rows, Trouble& t,
                           uint64_t& at) const {
  rows = {0, 0};
  const Value* value = dict.get(key);
  if (value == nullptr || value->tag == Tag::empty_list) return true;
  if (value->tag == wanted && value->kind != ListKind::empty) {
    rows = {value->id, value->bits};
    return true;
  }
  if (value->tag == Tag::opaque && value->trouble.shape != Shape::other) {
    t = value->trouble;
    at = value->bits;
  } else if (value->tag == Tag::opaque && value->trouble.fault == Fault::twice) {
    t = {Fault::twice, t.shape, key};
  } else {
    t = {Fault::not_recognised, t.shape, key};
  }
  return false;
}

void SchemaFold::count_keys(Shape shape, const DictView& dict) {
  const auto index = static_cast<int>(shape);
  keys_seen_[index] |= dict.mask;
  if (!dict.has_other_keys && (dict.mask & ~kKnownKeys[index]) == 0) return;
  if (shape == Shape::host_segment) return;
  for (size_t i = 0; i < dict.n_pairs; ++i) {
    const Value& key = dict.items[2 * i];
    uint32_t name = kNotAString;
    if (key.tag == Tag::string) {
      const auto known = static_cast<Key>(key_of_[key.id]);
      if (known != Key::none && (kKnownKeys[index] & bit(known)) != 0) continue;
      name = key.id;
    }
    const uint64_t path = static_cast<uint64_t>(index) << 32 | name;
    if (const auto found = unknown_keys_.find(path); found != unknown_keys_.end()) {
      ++found->second;
    } else if (unknown_keys_.size() < limits_.max_unknown_keys) {
      unknown_keys_.emplace(path, 1);
    } else {
      ++n_more_unknown_keys_;
    }
  }
}

void SchemaFold::count_unknown_value(const char* path, uint32_t string) {
  constexpr size_t kLongest = 100;  // a newer version's name is a word or two
  std::string name =
      path + std::string(strings_.begin_of(string), std::min(strings_.length_of(string), kLongest));
  while (!name.empty() && (static_cast<unsigned char>(name.back()) & 0x80) != 0 &&
         strings_.length_of(string) > kLongest) {
    name.pop_back();  // do not split a character
  }
  if (const auto found = unknown_values_.find(name); found != unknown_values_.end()) {
    ++found->second;
  } else if (unknown_values_.size() < limits_.max_unknown_keys) {
    unknown_values_.emplace(std::move(name), 1);
  } else {
    ++n_more_unknown_values_;
  }
}

}  // namespace fragdoctor
