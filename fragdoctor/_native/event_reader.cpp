#include "event_reader.h"

#include <algorithm>
#include <cstring>

#include "little_endian.h"
#include "pickle_opcodes.h"
#include "utf8.h"

namespace fragdoctor {

namespace {

constexpr uint64_t kEventKeys = kKnownKeys[static_cast<int>(Shape::event)];
// Keys that every event of the frequent kinds has.
constexpr uint64_t kRequired = bit(Key::action) | bit(Key::addr) | bit(Key::size);
// The stack machine throws if a column is full; it takes over long before that.
constexpr size_t kMostRows = size_t{1} << 30;
constexpr size_t kMostMemo = size_t{1} << 28;

}  // namespace

// True if the next value is an item of a list that holds events or is still empty.
bool EventReader::applies() const {
  if (fold_.marks_.empty() || fold_.marks_.back() == 0) return false;
  if (fold_.marks_.size() + 2 > fold_.limits_.max_depth || fold_.limits_.max_depth < 4)
    return false;
  if (fold_.events_.action.size() >= kMostRows) return false;
  const size_t first_item = fold_.marks_.back();
  if (fold_.stack_[first_item - 1].tag != Tag::list) return false;
  if (fold_.stack_.size() > first_item) return fold_.stack_.back().tag == Tag::events;
  const ListKind kind = fold_.stack_[first_item - 1].kind;
  return kind == ListKind::events || kind == ListKind::empty;
}

const uint8_t* EventReader::read(const uint8_t* next, const uint8_t* end) {
  if (static_cast<size_t>(end - next) < kMostBytes || !applies()) return next;
  last_ = end - kMostBytes;
  const size_t first_row = fold_.events_.action.size();
  while (next <= last_ && *next == kEmptyDict && fold_.memo_.size() < kMostMemo &&
         fold_.events_.action.size() < kMostRows) {
    const size_t n_memo = fold_.memo_.size();
    next_ = next;
    if (!read_event()) {
      fold_.memo_.truncate(n_memo);
      break;
    }
    next = next_;
  }
  if (const size_t n = fold_.events_.action.size() - first_row; n != 0) {
    fold_.push_event_rows(first_row, n);
  }
  return next;
}

bool EventReader::read_event() {
  Event event;
  ++next_;
  const size_t n_memo = fold_.memo_.size();
  if (!read_memo(SchemaFold::pack(SchemaFold::MemoTag::used_up, 0))) return false;
  const bool is_memoized = fold_.memo_.size() != n_memo;
  if (*next_++ != kMark || !read_pairs(event)) return false;
  if ((event.mask & kRequired) != kRequired) return false;
  const uint32_t entry = SchemaFold::pack(SchemaFold::MemoTag::used_up, event.height);
  if (is_memoized) {
    fold_.memo_[n_memo] = entry;
  } else if (!read_memo(entry)) {
    return false;
  }
  add(event);
  return true;
}

bool EventReader::read_pairs(Event& event) {
  for (size_t place = 0; place < kMostKeys && next_ <= last_; ++place) {
    if (*next_ == kSetItems) {
      ++next_;
      return true;
    }
    const Key key = read_key(place);
    if (key == Key::none || (event.mask & bit(key)) != 0) return false;
    event.mask |= bit(key);
    if (!read_value(key, event)) return false;
  }
  return false;
}

// Memo entries never change once they are strings: the same opcode is the same key.
Key EventReader::read_key(size_t place) {
  KnownKey& known = keys_[place];
  const uint64_t bytes = load_64(next_);
  if ((bytes & known.mask) != known.bytes) {
    size_t length = 0;
    const uint32_t entry = peek_recalled(length);
    if (length == 0 || entry >> SchemaFold::kMemoShift != 0) return Key::none;
    const auto key = static_cast<Key>(fold_.key_of_[entry]);
    if (key == Key::none || (kEventKeys & bit(key)) == 0) return Key::none;
    const uint64_t mask = (uint64_t{1} << (8 * length)) - 1;
    known = {bytes & mask, mask, key, static_cast<uint8_t>(length)};
  }
  next_ += known.length;
  return known.key;
}

bool EventReader::read_value(Key key, Event& event) {
  uint32_t unused = 0;
  switch (key) {
    case Key::action: return read_action(event);
    case Key::addr: return read_integer(event.address);
    case Key::size: return read_unsigned(event.size_bytes);
    case Key::stream: return read_integer(event.stream);
    case Key::frames: return read_frames(event, event.stack);
    case Key::forward_frames: return read_frames(event, unused);
    case Key::time_us: return read_time(event);
    case Key::compile_context: return read_text(event.compile_context);
    case Key::user_metadata: return read_text(event.user_metadata);
    case Key::pool_id: return read_pool(event);
    case Key::internal_metadata:
    case Key::category: return read_text(unused);
    default: return false;
  }
}

bool EventReader::read_action(Event& event) {
  uint32_t string = kNothing;
  if (!read_text(string) || string == kNothing) return false;
  event.action = fold_.action_of_[string];
  return event.action <= static_cast<uint8_t>(Action::segment_unmap);
}

bool EventReader::read_integer(uint64_t& value) {
  const uint64_t bytes = load_64(next_ + 1);
  switch (*next_) {
    case kBinInt1:
      value = bytes & 0xFF;
      next_ += 2;
      return true;
    case kBinInt2:
      value = bytes & 0xFFFF;
      next_ += 3;
      return true;
    case kBinInt:
      value = static_cast<uint64_t>(int64_t{static_cast<int32_t>(bytes & 0xFFFFFFFF)});
      next_ += 5;
      return true;
    case kLong1: {
      const size_t n = bytes & 0xFF;
      if (n - 1 > 7) return false;
      value = static_cast<uint64_t>(sign_extended(load_64(next_ + 2), n));
      next_ += 2 + n;
      return true;
    }
    default: return false;
  }
}

bool EventReader::read_unsigned(uint64_t& value) {
  return read_integer(value) && static_cast<int64_t>(value) >= 0;
}

bool EventReader::read_time(Event& event) {
  uint64_t time_us = 0;
  if (!read_unsigned(time_us)) return false;
  event.time_us = static_cast<int64_t>(time_us);
  return true;
}

// The memo entry that the next opcode fetches; `length` is 0 if it fetches none.
uint32_t EventReader::peek_recalled(size_t& length) const {
  uint64_t index = 0;
  if (*next_ == kBinGet) {
    length = 2;
    index = next_[1];
  } else if (*next_ == kLongBinGet) {
    length = 5;
    index = load_32(next_ + 1);
  } else {
    return 0;
  }
  if (index < fold_.memo_.size()) return fold_.memo_[index];
  length = 0;
  return 0;
}

// Consumes the memo opcode that may stand here. Returns false if it is out of order.
bool EventReader::read_memo(uint32_t entry) {
  // The stack machine recognizes the writer by the first container in the memo.
  const bool is_string = entry >> SchemaFold::kMemoShift == 0;
  switch (*next_) {
    case kMemoize:
      if (!has_short_forms_) return false;
      next_ += 1;
      break;
    case kBinPut:
      if (next_[1] != fold_.memo_.size()) return false;
      next_ += 2;
      break;
    case kLongBinPut:
      if (load_32(next_ + 1) != fold_.memo_.size()) return false;
      next_ += 5;
      break;
    default: return true;
  }
  if (!is_string && *fold_.writer_ == '\0') return false;
  fold_.memo_.push_back(entry);
  return true;
}

bool EventReader::read_text(uint32_t& string) {
  switch (*next_) {
    case kNone: ++next_; return true;
    case kShortBinUnicode:
      if (!has_short_forms_) return false;
      next_ += 2;
      return read_new_text(next_[-1], string);
    case kBinUnicode: next_ += 5; return read_new_text(load_32(next_ - 4), string);
    default: break;
  }
  size_t length = 0;
  const uint32_t entry = peek_recalled(length);
  if (length == 0 || entry >> SchemaFold::kMemoShift != 0) return false;
  string = entry;
  next_ += length;
  return true;
}

bool EventReader::read_new_text(size_t n, uint32_t& string) {
  if (n > kMostText || n > fold_.limits_.max_string_bytes) return false;
  const uint64_t word = n >= 8 ? 0 : load_64(next_) & ((uint64_t{1} << (8 * n)) - 1);
  if (n < 8 && n == short_length_ && word == short_text_) {
    string = short_id_;
  } else {
    const std::string_view utf8(reinterpret_cast<const char*>(next_), n);
    if (check_utf8(utf8) != Utf8::valid) return false;
    string = fold_.intern_text(utf8, kNoOffset);
    if (n < 8) {
      short_text_ = word;
      short_length_ = n;
      short_id_ = string;
    }
  }
  next_ += n;
  return read_memo(SchemaFold::pack(SchemaFold::MemoTag::string, string));
}

bool EventReader::read_frames(Event& event, uint32_t& stack) {
  if (*next_ == kNone) {
    ++next_;
    return true;
  }
  if (*next_ == kEmptyList) return read_new_stack(event, stack);
  size_t length = 0;
  const uint32_t entry = peek_recalled(length);
  if (length == 0) return false;
  if (entry >> SchemaFold::kMemoShift == static_cast<uint32_t>(SchemaFold::MemoTag::stack)) {
    stack = entry & SchemaFold::kMemoMask;
    event.height = 3;
  } else if (entry == SchemaFold::pack(SchemaFold::MemoTag::empty_list, 0)) {
    stack = fold_.intern_stack(nullptr, 0);
    event.height = std::max<uint8_t>(event.height, 2);
  } else {
    return false;
  }
  next_ += length;
  return true;
}

bool EventReader::read_new_stack(Event& event, uint32_t& stack) {
  ++next_;
  const size_t n_memo = fold_.memo_.size();
  if (!read_memo(SchemaFold::pack(SchemaFold::MemoTag::used_up, 0))) return false;
  const bool is_memoized = fold_.memo_.size() != n_memo;
  frames_.truncate(0);
  if (!read_frame_ids()) return false;
  stack = fold_.intern_stack(frames_.data(), frames_.size());
  const bool is_empty = frames_.size() == 0;
  event.height = std::max<uint8_t>(event.height, is_empty ? 2 : 3);
  const uint32_t entry = is_empty ? SchemaFold::pack(SchemaFold::MemoTag::empty_list, 0)
                                  : SchemaFold::pack(SchemaFold::MemoTag::stack, stack);
  if (!is_memoized) return read_memo(entry);
  fold_.memo_[n_memo] = entry;
  return true;
}

// What fills a list: many items after a mark, one item, or nothing.
bool EventReader::read_frame_ids() {
  const bool is_marked = *next_ == kMark;
  if (is_marked) ++next_;
  while (next_ <= last_) {
    if (is_marked && *next_ == kAppends) {
      ++next_;
      return true;
    }
    size_t length = 0;
    const uint32_t entry = peek_recalled(length);
    if (!is_marked && (length == 0 || next_[length] != kAppend)) return true;
    if (length == 0 ||
        entry >> SchemaFold::kMemoShift != static_cast<uint32_t>(SchemaFold::MemoTag::frame)) {
      return false;
    }
    frames_.push_back(entry & SchemaFold::kMemoMask);
    next_ += length;
    if (!is_marked) {
      ++next_;
      return true;
    }
  }
  return false;
}

bool EventReader::read_pool(Event& event) {
  if (*next_ == kNone) {
    ++next_;
    return true;
  }
  event.height = std::max<uint8_t>(event.height, 2);
  size_t length = 0;
  const uint32_t entry = peek_recalled(length);
  if (length == 0) return read_new_pool(event);
  if (entry >> SchemaFold::kMemoShift != static_cast<uint32_t>(SchemaFold::MemoTag::pair)) {
    return false;
  }
  event.pool = (entry & SchemaFold::kMemoMask) / 2;
  next_ += length;
  return true;
}

bool EventReader::read_new_pool(Event& event) {
  uint64_t first = 0;
  uint64_t second = 0;
  if (!read_integer(first) || !read_integer(second) || *next_ != kTuple2) return false;
  ++next_;
  event.pool = fold_.intern_pair({static_cast<int64_t>(first), static_cast<int64_t>(second)});
  return read_memo(SchemaFold::pack(SchemaFold::MemoTag::pair, uint64_t{event.pool} * 2 + 1));
}

void EventReader::add(const Event& event) {
  EventRow row;
  row.action = event.action;
  row.address = event.address;
  row.size_bytes = event.size_bytes;
  row.time_us = event.time_us;
  // IDs come in order of use: a name that no row uses is not handed out.
  if (event.stack != kNothing) row.stack = fold_.stack_out(event.stack);
  if (event.pool != kNothing) row.pool = fold_.pool_out(event.pool);
  if (event.compile_context != kNothing) {
    row.compile_context = fold_.string_out(event.compile_context);
  }
  if (event.user_metadata != kNothing) row.user_metadata = fold_.string_out(event.user_metadata);
  row.stream = fold_.stream_id(event.stream);
  fold_.events_.push_back(row);
  fold_.keys_seen_[static_cast<int>(Shape::event)] |= event.mask;
  fold_.actions_seen_ |= 1u << event.action;
}

}  // namespace fragdoctor
