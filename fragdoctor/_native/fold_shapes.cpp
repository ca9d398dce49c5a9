// What a finished dict is: its fields are checked, and it becomes a row or an id.
#include <algorithm>
#include <limits>
#include <string>

#include "fold_dict.h"
#include "schema_fold.h"

namespace fragdoctor {

namespace {

constexpr uint64_t kMaxDevice = 32767;  // PyTorch's own DeviceIndex was 16 bits at most
constexpr size_t kMaxRows = static_cast<size_t>(std::numeric_limits<int32_t>::max()) - 1;

Trouble wrong_type(Shape shape, Key key) { return {Fault::wrong_type, shape, key}; }

Value row_value(Tag tag, size_t row) {
  Value value;
  value.tag = tag;
  value.id = static_cast<uint32_t>(row);
  value.bits = 1;
  return value;
}

}  // namespace

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

// A size: not negative, below 2^64.
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
  constexpr size_t kLongest = 100;  // a name of a newer version is a word or two
  std::string name = path + std::string(strings_.begin_of(string),
                                        std::min(strings_.length_of(string), kLongest));
  while (!name.empty() && (static_cast<unsigned char>(name.back()) & 0x80) != 0 &&
         strings_.length_of(string) > kLongest) {
    name.pop_back();  // do not cut a character in two
  }
  if (const auto found = unknown_values_.find(name); found != unknown_values_.end()) {
    ++found->second;
  } else if (unknown_values_.size() < limits_.max_unknown_keys) {
    unknown_values_.emplace(std::move(name), 1);
  } else {
    ++n_more_unknown_values_;
  }
}

Value SchemaFold::fold_event(const DictView& dict) {
  Trouble t{Fault::none, Shape::event, Key::none};
  uint64_t at = dict.offset;
  const Value* action = dict.get(Key::action);
  if (action->tag != Tag::string) return opaque(wrong_type(Shape::event, Key::action), at, 0);
  uint8_t code = action_of_[action->id];
  if (code == kNoWord) {
    count_unknown_value("events.action=", action->id);
    code = kActionOther;
  }
  const bool has_size = code <= kActionSegmentUnmap || code == kActionOom;
  uint64_t address = 0;
  uint64_t size = 0;
  uint64_t stream = 0;
  uint64_t device_free = 0;
  int64_t time = -1;
  int32_t stack = -1;
  int32_t pool = -1;
  int32_t context = -1;
  int32_t metadata = -1;
  if (!read_modular(dict, Key::addr, code <= kActionSegmentUnmap, address, t) ||
      !read_unsigned(dict, Key::size, has_size, size, t) ||
      !read_modular(dict, Key::stream, false, stream, t) ||
      !read_time(dict, time, t) || !read_stack(dict, stack, t, at) ||
      !read_pool(dict, Key::pool_id, pool, t) ||
      !read_text(dict, Key::compile_context, context, t) ||
      !read_text(dict, Key::user_metadata, metadata, t) ||
      !read_unsigned(dict, Key::device_free, false, device_free, t)) {
    return opaque(t, at, 0);
  }
  const size_t row = events_.action.size();
  check_row(row);
  if (dict.get(Key::device_free) != nullptr) {
    oom_rows_.push_back(static_cast<int64_t>(row));
    oom_free_bytes_.push_back(device_free);
  }
  EventRow event;
  event.action = code;
  event.address = code == kActionOom ? 0 : address;
  event.size_bytes = size;
  event.stream = stream_id(stream);
  event.time_us = time;
  event.stack = stack;
  event.pool = pool;
  event.compile_context = context;
  event.user_metadata = metadata;
  events_.push_back(event);
  actions_seen_ |= 1u << code;
  count_keys(Shape::event, dict);
  return row_value(Tag::events, row);
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

Value SchemaFold::fold_frame(const DictView& dict) {
  Trouble t{Fault::none, Shape::frame, Key::none};
  FrameRecord frame{0, 0, 0};
  for (const Key key : {Key::filename, Key::name}) {
    const Value* text = dict.get(key);
    if (text == nullptr) return opaque({Fault::missing, Shape::frame, key}, dict.offset, 0);
    if (text->tag != Tag::string) return opaque(wrong_type(Shape::frame, key), dict.offset, 0);
    (key == Key::filename ? frame.filename : frame.name) = text->id;
  }
  if (!read_modular(dict, Key::line, true, frame.line, t)) return opaque(t, dict.offset, 0);
  Value value;
  value.tag = Tag::frame;
  value.id = frames_.intern(frame);
  if (value.id >= kMaxIds) check_row(kMaxRows);
  count_keys(Shape::frame, dict);
  return value;
}

Value SchemaFold::fold_history_entry(const DictView& dict) {
  Trouble t{Fault::none, Shape::history, Key::none};
  uint64_t at = dict.offset;
  uint64_t requested = 0;
  int32_t stack = -1;
  if (!read_unsigned(dict, Key::real_size, true, requested, t) ||
      !read_stack(dict, stack, t, at)) {
    return opaque(t, at, 0);
  }
  count_keys(Shape::history, dict);
  Value value;
  value.tag = Tag::history_entry;
  value.id = static_cast<uint32_t>(stack + 1);
  value.bits = requested;
  return value;
}

Value SchemaFold::fold_block(const DictView& dict) {
  Trouble t{Fault::none, Shape::block, Key::none};
  uint64_t at = dict.offset;
  uint64_t address = 0;
  uint64_t size = 0;
  uint64_t requested = 0;
  int32_t stack = -1;
  const Value* state_name = dict.get(Key::state);
  if (state_name->tag != Tag::string) return opaque(wrong_type(Shape::block, Key::state), at, 0);
  if (!read_unsigned(dict, Key::size, true, size, t) ||
      !read_modular(dict, Key::address, false, address, t) ||
      !read_unsigned(dict, Key::requested_size, false, requested, t) ||
      !read_stack(dict, stack, t, at)) {
    return opaque(t, at, 0);
  }
  if (const Value* history = dict.get(Key::history); history != nullptr) {
    if (history->tag == Tag::history) {
      const Value* frames = dict.get(Key::frames);
      if (frames == nullptr || frames->tag == Tag::none) {
        stack = static_cast<int32_t>(history->id) - 1;
      }
      if (dict.get(Key::requested_size) == nullptr) requested = history->bits;
    } else if (history->tag == Tag::opaque && history->trouble.shape != Shape::other) {
      return opaque(history->trouble, history->bits, 0);
    } else if (history->tag != Tag::empty_list && history->tag != Tag::none) {
      return opaque(wrong_type(Shape::block, Key::history), at, 0);
    }
  }
  uint8_t state = state_of_[state_name->id];
  if (state == kNoWord) {
    count_unknown_value("blocks.state=", state_name->id);
    state = kStateOther;
  }
  const size_t row = blocks_.state.size();
  check_row(row);
  const bool has_address = dict.get(Key::address) != nullptr;
  blocks_.address.push_back(address);
  blocks_.size_bytes.push_back(size);
  blocks_.requested_bytes.push_back(requested);
  blocks_.state.push_back(has_address ? state : static_cast<uint8_t>(state | kNoAddress));
  blocks_.stack.push_back(stack);
  count_keys(Shape::block, dict);
  return row_value(Tag::blocks, row);
}

// Rows of one kind under a key: a finished list of them, or an empty list.
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

Value SchemaFold::fold_segment(const DictView& dict) {
  Trouble t{Fault::none, Shape::segment, Key::none};
  uint64_t at = dict.offset;
  uint64_t device = 0;
  uint64_t address = 0;
  uint64_t total = 0;
  uint64_t allocated = 0;
  uint64_t active = 0;
  uint64_t requested = 0;
  uint64_t stream = 0;
  int32_t pool = -1;
  int32_t stack = -1;
  RowRange blocks{0, 0};
  if (!read_unsigned(dict, Key::device, false, device, t) ||
      !read_modular(dict, Key::address, true, address, t) ||
      !read_unsigned(dict, Key::total_size, true, total, t) ||
      !read_unsigned(dict, Key::allocated_size, false, allocated, t) ||
      !read_unsigned(dict, Key::active_size, false, active, t) ||
      !read_unsigned(dict, Key::requested_size, false, requested, t) ||
      !read_modular(dict, Key::stream, false, stream, t) ||
      !read_pool(dict, Key::segment_pool_id, pool, t) || !read_stack(dict, stack, t, at) ||
      !read_rows(dict, Key::blocks, Tag::blocks, blocks, t, at)) {
    return opaque(t, at, 0);
  }
  if (device > kMaxDevice) return opaque({Fault::too_large, Shape::segment, Key::device}, at, 0);
  uint8_t type = kTypeUnknown;
  if (const Value* name = dict.get(Key::segment_type); name != nullptr && name->tag != Tag::none) {
    if (name->tag != Tag::string) return opaque(wrong_type(Shape::segment, Key::segment_type), at, 0);
    type = type_of_[name->id];
    if (type == kNoWord) {
      count_unknown_value("segments.segment_type=", name->id);
      type = kTypeUnknown;
    }
  }
  const Value* expandable = dict.get(Key::is_expandable);
  if (expandable != nullptr && expandable->tag != Tag::boolean) {
    return opaque(wrong_type(Shape::segment, Key::is_expandable), at, 0);
  }
  uint64_t next = address;
  for (uint64_t row = blocks.first; row < blocks.first + blocks.count; ++row) {
    if ((blocks_.state[row] & kNoAddress) != 0) {
      blocks_.address[row] = next;
      blocks_.state[row] = static_cast<uint8_t>(blocks_.state[row] & ~kNoAddress);
    }
    next += blocks_.size_bytes[row];
  }
  const size_t row = segments_.address.size();
  check_row(row);
  segments_.device.push_back(static_cast<int32_t>(device));
  segments_.address.push_back(address);
  segments_.total_bytes.push_back(total);
  segments_.allocated_bytes.push_back(allocated);
  segments_.active_bytes.push_back(active);
  segments_.requested_bytes.push_back(requested);
  segments_.stream.push_back(stream_id(stream));
  segments_.kind.push_back(type);
  segments_.pool.push_back(pool);
  segments_.is_expandable.push_back(expandable != nullptr && expandable->flag ? 1 : 0);
  segments_.stack.push_back(stack);
  segments_.first_block.push_back(blocks.first);
  segments_.n_blocks.push_back(blocks.count);
  count_keys(Shape::segment, dict);
  return row_value(Tag::segments, row);
}

Value SchemaFold::fold_annotation(const DictView& dict) {
  Trouble t{Fault::none, Shape::annotation, Key::none};
  int64_t device = 0;
  int64_t time = 0;
  const Value* name = dict.get(Key::name);
  const Value* stage = dict.get(Key::stage);
  if (name == nullptr) return opaque({Fault::missing, t.shape, Key::name}, dict.offset, 0);
  if (name->tag != Tag::string) return opaque(wrong_type(t.shape, Key::name), dict.offset, 0);
  if (stage->tag != Tag::string) return opaque(wrong_type(t.shape, Key::stage), dict.offset, 0);
  if (!read_signed(dict, Key::device, true, device, t) ||
      !read_signed(dict, Key::time_us, true, time, t)) {
    return opaque(t, dict.offset, 0);
  }
  const size_t row = annotations_.device.size();
  check_row(row);
  annotations_.device.push_back(device);
  annotations_.time_us.push_back(time);
  annotations_.name.push_back(string_out(name->id));
  annotations_.stage.push_back(string_out(stage->id));
  count_keys(Shape::annotation, dict);
  return row_value(Tag::annotations, row);
}

// Not verified against a writer (2.15), so that anything unusual only counts as "not said".
Value SchemaFold::fold_host_segment(const DictView& dict) {
  Trouble t{Fault::none, Shape::host_segment, Key::none};
  uint64_t address = 0;
  uint64_t size = 0;
  uint8_t flags = 0;
  if (dict.get(Key::address) != nullptr && read_modular(dict, Key::address, true, address, t)) {
    flags |= kHasAddress;
  }
  const Key size_key = dict.get(Key::total_size) != nullptr ? Key::total_size : Key::size;
  if (dict.get(size_key) != nullptr && read_unsigned(dict, size_key, true, size, t)) {
    flags |= kHasSize;
  }
  const Value* allocated = dict.get(Key::allocated);
  if (allocated != nullptr && allocated->tag == Tag::boolean) {
    flags = static_cast<uint8_t>(flags | kHasAllocated | (allocated->flag ? kAllocated : 0));
  }
  const size_t row = host_segments_.flags.size();
  check_row(row);
  host_segments_.address.push_back(address);
  host_segments_.size_bytes.push_back(size);
  host_segments_.flags.push_back(flags);
  return row_value(Tag::host_segments, row);
}

// A small dict of scalars, and of dicts of scalars: what the allocator settings are.
Value SchemaFold::fold_plain(const DictView& dict) {
  if (dict.has_odd_keys) {
    return opaque({Fault::not_recognised, Shape::other, Key::none}, dict.offset, 0);
  }
  size_t start = plain_.size();
  for (size_t i = 0; i < dict.n_pairs; ++i) {
    const Value& value = dict.items[2 * i + 1];
    if (value.tag == Tag::plain_dict) start = std::min<size_t>(start, value.id);
  }
  for (size_t i = 0; i < dict.n_pairs; ++i) {
    plain_.push_back({dict.items[2 * i].id, dict.items[2 * i + 1]});
  }
  if (plain_.size() >= kMaxIds) check_row(kMaxRows);
  Value value;
  value.tag = Tag::plain_dict;
  value.id = static_cast<uint32_t>(start);
  value.bits = uint64_t{plain_.size()} << 32 | dict.n_pairs;
  return value;
}

Value SchemaFold::fold_top(const DictView& dict) {
  Trouble t{Fault::none, Shape::top, Key::none};
  uint64_t at = dict.offset;
  Top top;
  top.serial = top_.serial + 1;
  RowRange traces{0, 0};
  if (!read_rows(dict, Key::segments, Tag::segments, top.segments, t, at) ||
      !read_rows(dict, Key::device_traces, Tag::traces, traces, t, at) ||
      !read_rows(dict, Key::external_annotations, Tag::annotations, top.annotations, t, at)) {
    return opaque(t, at, 0);
  }
  if (traces.count > kMaxDevice) {
    return opaque({Fault::too_large, Shape::top, Key::device_traces}, at, 0);
  }
  for (uint64_t i = 0; i < traces.count; ++i) {
    top.traces.push_back(waiting_traces_[traces.first + i]);
  }
  if (const Value* settings = dict.get(Key::allocator_settings); settings != nullptr) {
    if (settings->tag != Tag::plain_dict) {
      return opaque(wrong_type(Shape::top, Key::allocator_settings), at, 0);
    }
    top.has_settings = true;
    const auto end = static_cast<ptrdiff_t>(settings->bits >> 32);
    top.settings_start = settings->id;
    top.settings.assign(plain_.begin() + static_cast<ptrdiff_t>(settings->id),
                        plain_.begin() + end);
    top.n_settings = settings->bits & 0xFFFFFFFF;
  }
  read_host(dict, top);
  count_keys(Shape::top, dict);
  top_ = std::move(top);
  Value value;
  value.tag = Tag::top;
  value.id = top_.serial;
  return value;
}

void SchemaFold::read_host(const DictView& dict, Top& top) {
  if (const Value* host = dict.get(Key::host_segments); host != nullptr) {
    if (host->kind != ListKind::empty &&
        (host->tag == Tag::host_segments || host->tag == Tag::segments)) {
      top.host_segments = {host->id, host->bits};
      top.host_are_segments = host->tag == Tag::segments;
    } else if (host->tag != Tag::empty_list) {
      count_unknown_value("host_segments", intern_text("", 0));
    }
  }
  if (const Value* host = dict.get(Key::host_traces); host != nullptr) {
    if (host->tag == Tag::traces) {
      for (uint64_t i = 0; i < host->bits; ++i) {
        top.n_host_events += waiting_traces_[host->id + i].count;
      }
    } else if (host->tag == Tag::events && host->kind != ListKind::empty) {
      top.n_host_events = host->bits;
    } else if (host->tag != Tag::empty_list) {
      count_unknown_value("host_traces", intern_text("", 0));
    }
  }
}

}  // namespace fragdoctor
