// The stack machine: containers are opened, filled, closed; the memo; interning of text.
// What a dict means is in fold_shapes.cpp, the tables that come out are in fold_tables.cpp.
#include "schema_fold.h"

#include <algorithm>
#include <limits>

#include "fold_dict.h"
#include "utf8.h"

namespace fragdoctor {

namespace {

constexpr size_t kBatch = 1000;  // the pickle module writes a larger dict in batches of this size

[[noreturn]] void refuse(const char* message, uint64_t offset) {
  throw ReadError(ErrorKind::refused, message,
                  "No genuine snapshot is written like this; nothing in it was executed.", offset);
}

bool is_hashable(const Value& value) {
  switch (value.tag) {
    case Tag::none: case Tag::boolean: case Tag::integer: case Tag::big_integer: case Tag::real:
    case Tag::string:
      return true;
    case Tag::pair: case Tag::opaque:
      return value.flag;
    default:
      return false;
  }
}

uint32_t height_of(const Value& value) {
  switch (value.tag) {
    case Tag::none: case Tag::boolean: case Tag::integer: case Tag::big_integer: case Tag::real:
    case Tag::string:
      return 0;
    case Tag::frame: case Tag::pair: case Tag::empty_list: case Tag::dict:
      return 1;
    case Tag::stack: return 2;
    default: return value.height;
  }
}

PairRecord pair_of(const Value& first, const Value& second) {
  return {static_cast<int64_t>(first.bits), static_cast<int64_t>(second.bits)};
}

ListKind kind_for(Tag item) {
  switch (item) {
    case Tag::frame: return ListKind::frames;
    case Tag::events: return ListKind::events;
    case Tag::blocks: return ListKind::blocks;
    case Tag::segments: return ListKind::segments;
    case Tag::annotations: return ListKind::annotations;
    case Tag::host_segments: return ListKind::host_segments;
    case Tag::history_entry: return ListKind::history;
    case Tag::empty_list: return ListKind::traces;
    default: return ListKind::mixed;
  }
}

}  // namespace

void SchemaFold::too_many_values() {
  throw ReadError(ErrorKind::limit, "The file holds more than 536,870,911 values of one kind.", "",
                  kNoOffset);
}

void EventColumns::make_room() {
  const size_t n = room_ == 0 ? 64 : room_ + room_ / 2;
  action.reserve(n);
  address.reserve(n);
  size_bytes.reserve(n);
  stream.reserve(n);
  time_us.reserve(n);
  stack.reserve(n);
  pool.reserve(n);
  compile_context.reserve(n);
  user_metadata.reserve(n);
  room_ = n;
}

SchemaFold::SchemaFold(const ReadLimits& limits, uint64_t seed)
    : limits_(limits), strings_(seed), frames_(seed), stacks_(seed), pairs_(seed), streams_(seed) {
  for (int i = 0; i < kNKeys; ++i) {
    key_of_[intern_text(kKeyNames[i], 0)] = static_cast<uint8_t>(i);
  }
  for (const char* name : kMoreFxNames) {
    key_of_[intern_text(name, 0)] = static_cast<uint8_t>(Key::fx);
  }
  for (const Word& word : kActions) action_of_[intern_text(word.text, 0)] = word.value;
  for (const Word& word : kStates) state_of_[intern_text(word.text, 0)] = word.value;
  for (const Word& word : kTypes) type_of_[intern_text(word.text, 0)] = word.value;
  streams_.intern(0);
  const uint32_t default_pool = pairs_.intern(PairRecord{0, 0});
  pair_out_.push_back(-1);
  pool_out(default_pool);
}

void ValueStack::grow() {
  constexpr size_t kMost = size_t{1} << 22;  // C++ writers put whole lists here, rows are one value
  if (size_ >= kMost) {
    throw ReadError(ErrorKind::limit,
                    "More than 4,194,304 values wait to be put into a container.",
                    "Genuine snapshots put values away as they are written.", kNoOffset);
  }
  values_.resize(size_ == 0 ? 64 : size_ * 2);
}

uint32_t SchemaFold::intern_text(std::string_view utf8, uint64_t offset) {
  const size_t before = strings_.size();
  const uint32_t id = strings_.intern(utf8.data(), utf8.size());
  if (id == before) {
    if (before >= kMemoMask) {
      throw ReadError(ErrorKind::limit, "The file holds more than 536,870,911 different strings.",
                      "", offset);
    }
    key_of_.push_back(static_cast<uint8_t>(Key::none));
    action_of_.push_back(kNoWord);
    state_of_.push_back(kNoWord);
    type_of_.push_back(kNoWord);
    string_out_.push_back(-1);
  }
  return id;
}

void SchemaFold::push_string(std::string_view utf8, uint64_t offset) {
  uint32_t id = 0;
  switch (check_utf8(utf8)) {
    case Utf8::valid:
      id = intern_text(utf8, offset);
      break;
    case Utf8::lone_surrogates:
      ++n_replaced_strings_;
      id = intern_text(replace_surrogates(utf8), offset);
      break;
    case Utf8::invalid:
      refuse("A string is not valid UTF-8.", offset);
  }
  push_tag(Tag::string).id = id;
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
    throw ReadError(ErrorKind::limit,
                    "Containers are nested more than " + std::to_string(limits_.max_depth) +
                        " deep.",
                    "Genuine snapshots nest 6 deep.", offset);
  }
  marks_.push_back(stack_.size());
}

size_t SchemaFold::pop_mark(uint64_t offset) {
  if (marks_.empty()) refuse("A container is filled, but nothing marks where its items begin.", offset);
  const size_t at = marks_.back();
  marks_.pop_back();
  return at;
}

void SchemaFold::check_height(uint32_t height, uint64_t offset) const {
  if (height > limits_.max_depth) {
    throw ReadError(ErrorKind::limit,
                    "Containers are nested more than " + std::to_string(limits_.max_depth) +
                        " deep.",
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

void SchemaFold::fold_dict(size_t dict_at, size_t first_item, uint64_t offset) {
  const size_t n_items = stack_.size() - first_item;
  if (n_items % 2 != 0) refuse("A dict gets a key without a value.", offset);
  const Tag target = stack_[dict_at].tag;
  const bool is_batch = target == Tag::opaque && stack_[dict_at].memo == kExtendable;
  if (target != Tag::dict && !is_batch) {
    refuse(target == Tag::plain_dict || target == Tag::opaque || target >= Tag::frame
               ? "A dict is extended after use."
               : "Keys and values are put into something that is not a dict.",
           offset);
  }
  if (n_items == 0) {
    stack_.shrink(first_item);
    return;
  }
  DictView dict;
  dict.offset = offset;
  dict.items = &stack_[first_item];
  dict.n_pairs = n_items / 2;
  uint32_t height = 0;
  const Floors floors = close_from(first_item);
  for (size_t i = first_item; i < stack_.size(); i += 2) {
    const Value& key = stack_[i];
    const Value& value = stack_[i + 1];
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
      if (!is_hashable(key)) refuse("A list or a dict is the key of a dict.", offset);
      height = std::max(height, height_of(key));
      dict.has_other_keys = true;
      dict.has_odd_keys = true;
    }
  }
  check_height(height + 1, offset);
  Value folded;
  const uint32_t memo = is_batch ? 0 : stack_[dict_at].memo;
  if (is_batch || dict.n_pairs >= kBatch) {
    folded = opaque({Fault::not_recognised, Shape::other, Key::none}, offset,
                    static_cast<uint8_t>(height + 1));
    folded.memo = kExtendable;
  } else if ((dict.mask & bit(Key::action)) != 0) {
    folded = fold_event(dict);
  } else if ((dict.mask & bit(Key::filename)) != 0) {
    folded = fold_frame(dict);
  } else if ((dict.mask & bit(Key::blocks)) != 0) {
    folded = fold_segment(dict);
  } else if ((dict.mask & bit(Key::state)) != 0) {
    folded = fold_block(dict);
  } else if ((dict.mask & bit(Key::real_size)) != 0) {
    folded = fold_history_entry(dict);
  } else if ((dict.mask & bit(Key::stage)) != 0) {
    folded = fold_annotation(dict);
  } else if ((dict.mask & (bit(Key::segments) | bit(Key::device_traces))) != 0) {
    folded = fold_top(dict);
  } else if ((dict.mask & (bit(Key::address) | bit(Key::total_size) | bit(Key::size))) != 0) {
    folded = fold_host_segment(dict);
  } else {
    folded = fold_plain(dict);
  }
  if (folded.tag != Tag::plain_dict) plain_.resize(floors.plain);
  waiting_traces_.truncate(floors.traces);
  folded.height = static_cast<uint8_t>(height + 1);
  if (memo != 0) memo_[memo - 1] = memo_form(folded);
  stack_.shrink(first_item);
  stack_[dict_at] = folded;
  merge_run();
}

// Rows that follow one another in a list are one value: the C++ writer puts a million of them
// between one MARK and its APPENDS.
void SchemaFold::merge_run() {
  if (marks_.empty() || marks_.back() == 0 || stack_.size() < marks_.back() + 2) return;
  if (stack_[marks_.back() - 1].tag != Tag::list) return;
  Value& last = stack_.back();
  Value& before = stack_[stack_.size() - 2];
  if (last.tag != before.tag || before.kind != ListKind::empty) return;
  if (last.tag != Tag::events && last.tag != Tag::blocks && last.tag != Tag::segments &&
      last.tag != Tag::annotations && last.tag != Tag::host_segments) {
    return;
  }
  // A memoised "before" needs no update: rows are never recalled.
  if (before.id + before.bits != last.id) return;
  before.bits += last.bits;
  before.height = std::max(before.height, last.height);
  stack_.pop_back();
}

void SchemaFold::push_event_rows(size_t first, size_t count) {
  Value& rows = push_tag(Tag::events);
  rows.id = static_cast<uint32_t>(first);
  rows.bits = count;
  rows.height = 3;  // list of frames, frame
  merge_run();
}

void SchemaFold::append_items(uint64_t offset) {
  const size_t first_item = pop_mark(offset);
  if (first_item == 0) refuse("Items are put into a list, but there is none.", offset);
  extend_list(first_item - 1, first_item, offset);
}

void SchemaFold::append_item(uint64_t offset) {
  const size_t floor = marks_.empty() ? 0 : marks_.back();
  if (stack_.size() < floor + 2) refuse("An item is put into a list, but there is none.", offset);
  extend_list(stack_.size() - 2, stack_.size() - 1, offset);
}

void SchemaFold::extend_list(size_t list_at, size_t first_item, uint64_t offset) {
  const Tag target = stack_[list_at].tag;
  if (target != Tag::list) {
    const bool was_list = target == Tag::empty_list || target == Tag::pair ||
                          target == Tag::stack || stack_[list_at].kind != ListKind::empty;
    refuse(was_list ? "A list is extended after use."
                    : "Items are put into something that is not a list.",
           offset);
  }
  const size_t n_items = stack_.size() - first_item;
  if (n_items == 2 && stack_[list_at].kind == ListKind::empty &&
      stack_[first_item].tag == Tag::integer && stack_[first_item + 1].tag == Tag::integer &&
      !stack_[first_item].flag && !stack_[first_item + 1].flag) {
    Value& list = stack_[list_at];
    list.kind = ListKind::pair;
    list.id = intern_pair(pair_of(stack_[first_item], stack_[first_item + 1]));
    list.height = 1;
    stack_.shrink(first_item);
    return;
  }
  const Floors floors = close_from(first_item);
  for (size_t i = first_item; i < stack_.size(); ++i) {
    add_to_list(stack_[list_at], stack_[i], offset);
  }
  check_height(stack_[list_at].height, offset);
  plain_.resize(floors.plain);
  stack_.shrink(first_item);
}

void SchemaFold::add_to_list(Value& list, const Value& item, uint64_t offset) {
  const uint32_t height = height_of(item) + 1;
  if (height > list.height) list.height = static_cast<uint8_t>(height);
  if (list.kind == ListKind::mixed) return;
  // The device traces are a list of lists of events, of which some may be empty.
  ListKind kind = kind_for(item.tag);
  if (item.kind != ListKind::empty && item.tag != Tag::stack && item.tag != Tag::empty_list) {
    kind = item.tag == Tag::events ? ListKind::traces : ListKind::mixed;
  }
  if (list.kind == ListKind::empty) {
    list.kind = kind;
    list.id = item.id;
    list.bits = 0;
    if (kind == ListKind::frames) {
      list.id = static_cast<uint32_t>(waiting_frames_.size());
      ++n_open_stacks_;
    }
    if (kind == ListKind::traces) list.id = static_cast<uint32_t>(waiting_traces_.size());
    if (kind == ListKind::history) {
      list.bits = item.bits;
      return;
    }
  }
  bool fits = list.kind == kind && kind != ListKind::mixed;
  switch (fits ? kind : ListKind::mixed) {
    case ListKind::frames:
      // Whatever waits above belongs to items that have just been used.
      waiting_frames_.truncate(list.id + list.bits);
      waiting_frames_.push_back(item.id);
      ++list.bits;
      if (waiting_frames_.size() >= kMemoMask) pack(MemoTag::stack, waiting_frames_.size());
      break;
    case ListKind::traces:
      waiting_traces_.truncate(list.id + list.bits);
      waiting_traces_.push_back(item.tag == Tag::events ? RowRange{item.id, item.bits}
                                                        : RowRange{0, 0});
      ++list.bits;
      break;
    case ListKind::history:  // only the newest entry, which is the first, is of use
      break;
    case ListKind::events: case ListKind::blocks: case ListKind::segments:
    case ListKind::annotations: case ListKind::host_segments:
      fits = list.id + list.bits == item.id;
      list.bits += item.bits;
      break;
    default:
      fits = false;
  }
  if (fits) return;
  if (list.kind == ListKind::frames) stack_is_done();
  list.trouble = item.tag == Tag::opaque && item.trouble.fault != Fault::none
                     ? item.trouble
                     : Trouble{Fault::mixed_list, Shape::other, Key::none};
  list.bits = item.tag == Tag::opaque && item.trouble.fault != Fault::none ? item.bits : offset;
  list.kind = ListKind::mixed;
}

void SchemaFold::stack_is_done() {
  if (--n_open_stacks_ == 0) waiting_frames_.truncate(0);
}

// Closes all items of a container, and says from where on what they hold aside is dead then.
SchemaFold::Floors SchemaFold::close_from(size_t first_item) {
  Floors floors{plain_.size(), waiting_traces_.size()};
  for (size_t i = first_item; i < stack_.size(); ++i) {
    Value& item = stack_[i];
    if (item.tag < Tag::dict) continue;  // scalars, most of all
    close(item);
    if (item.tag == Tag::plain_dict) floors.plain = std::min<size_t>(floors.plain, item.id);
    if (item.tag == Tag::traces) floors.traces = std::min<size_t>(floors.traces, item.id);
  }
  return floors;
}

void SchemaFold::close(Value& value) {
  if (value.tag == Tag::list) close_list(value);
  if (value.tag == Tag::dict) {
    Value closed;
    closed.tag = Tag::plain_dict;
    closed.id = static_cast<uint32_t>(plain_.size());
    closed.bits = uint64_t{plain_.size()} << 32;
    closed.height = 1;
    if (value.memo != 0) memo_[value.memo - 1] = memo_form(closed);
    value = closed;
  }
}

void SchemaFold::close_list(Value& list) {
  Value closed;
  closed.height = list.height;
  closed.kind = list.kind;
  closed.id = list.id;
  closed.bits = list.bits;
  switch (list.kind) {
    case ListKind::empty: closed.tag = Tag::empty_list; break;
    case ListKind::frames:
      closed.tag = Tag::stack;
      closed.id = intern_stack(&waiting_frames_[list.id], list.bits);
      stack_is_done();
      break;
    case ListKind::events: closed.tag = Tag::events; break;
    case ListKind::traces: closed.tag = Tag::traces; break;
    case ListKind::blocks: closed.tag = Tag::blocks; break;
    case ListKind::segments: closed.tag = Tag::segments; break;
    case ListKind::history: closed.tag = Tag::history; break;
    case ListKind::annotations: closed.tag = Tag::annotations; break;
    case ListKind::host_segments: closed.tag = Tag::host_segments; break;
    case ListKind::pair: closed.tag = Tag::pair; break;
    case ListKind::mixed:
      closed.tag = Tag::opaque;
      closed.trouble = list.trouble;
      break;
  }
  if (list.memo != 0) memo_[list.memo - 1] = memo_form(closed);
  list = closed;
}

void SchemaFold::make_tuple(size_t n, uint64_t offset) {
  const size_t floor = marks_.empty() ? 0 : marks_.back();
  if (stack_.size() < floor + n) refuse("A tuple takes more items than there are.", offset);
  tuple_at(stack_.size() - n, offset);
}

void SchemaFold::make_tuple_from_mark(uint64_t offset) { tuple_at(pop_mark(offset), offset); }

void SchemaFold::tuple_at(size_t first_item, uint64_t offset) {
  Value tuple;
  const Floors floors = close_from(first_item);
  const size_t n = stack_.size() - first_item;
  if (n == 2 && stack_[first_item].tag == Tag::integer &&
      stack_[first_item + 1].tag == Tag::integer && !stack_[first_item].flag &&
      !stack_[first_item + 1].flag) {
    tuple.tag = Tag::pair;
    tuple.id = intern_pair(pair_of(stack_[first_item], stack_[first_item + 1]));
    tuple.flag = true;
    tuple.height = 1;
  } else {
    tuple = opaque({Fault::not_recognised, Shape::other, Key::none}, offset, 0);
    tuple.flag = true;
    uint32_t height = 0;
    for (size_t i = first_item; i < stack_.size(); ++i) {
      tuple.flag = tuple.flag && is_hashable(stack_[i]);
      height = std::max(height, height_of(stack_[i]));
    }
    check_height(height + 1, offset);
    tuple.height = static_cast<uint8_t>(height + 1);
  }
  stack_.shrink(first_item);
  plain_.resize(floors.plain);
  waiting_traces_.truncate(floors.traces);
  push_tag(tuple.tag) = tuple;
}

uint32_t SchemaFold::intern_other_pair(const PairRecord& pair) {
  last_pair_ = pairs_.intern(pair);
  if (last_pair_ == pair_out_.size()) pair_out_.push_back(-1);
  return last_pair_;
}

uint32_t SchemaFold::intern_stack(const uint32_t* frames, size_t n) {
  const uint32_t stack = stacks_.intern(frames, n);
  if (stack == stack_out_.size()) stack_out_.push_back(-1);
  return stack;
}

uint32_t SchemaFold::memo_form(const Value& value) const {
  switch (value.tag) {
    case Tag::string: return pack(MemoTag::string, value.id);
    case Tag::frame: return pack(MemoTag::frame, value.id);
    case Tag::stack: return pack(MemoTag::stack, value.id);
    case Tag::pair: return pack(MemoTag::pair, uint64_t{value.id} * 2 + (value.flag ? 1 : 0));
    case Tag::empty_list: return pack(MemoTag::empty_list, 0);
    case Tag::opaque:
      return pack(MemoTag::opaque, uint64_t{value.height} * 2 + (value.flag ? 1 : 0));
    default: return pack(MemoTag::used_up, height_of(value));
  }
}

void SchemaFold::memoize_other(uint64_t index, uint64_t offset) {
  const size_t floor = marks_.empty() ? 0 : marks_.back();
  if (stack_.size() <= floor) refuse("There is nothing to put into the memo.", offset);
  if (index != memo_.size()) refuse("The indices of the memo are out of order.", offset);
  if (memo_.size() >= kMemoMask) {
    throw ReadError(ErrorKind::limit, "The memo holds more than 536,870,911 entries.", "", offset);
  }
  Value& value = stack_.back();
  switch (value.tag) {
    case Tag::none: case Tag::boolean: case Tag::integer: case Tag::big_integer: case Tag::real:
      refuse("A number is put into the memo.", offset);
    case Tag::list: case Tag::dict:
      if (value.memo != 0) refuse("A container is put into the memo twice.", offset);
      if (*writer_ == '\0') {
        const bool is_fresh = value.tag == Tag::dict || value.kind == ListKind::empty;
        writer_ = is_fresh ? "python" : "c++";
      }
      value.memo = static_cast<uint32_t>(memo_.size()) + 1;
      memo_.push_back(pack(MemoTag::open, stack_.size() - 1));
      return;
    default:
      if (*writer_ == '\0' && value.tag >= Tag::frame && value.tag != Tag::opaque) writer_ = "c++";
      memo_.push_back(memo_form(value));
  }
}

void SchemaFold::recall_other(uint64_t index, uint64_t offset) {
  if (index >= memo_.size()) refuse("The memo is asked for an entry that it does not have.", offset);
  uint32_t entry = memo_[index];
  if (static_cast<MemoTag>(entry >> kMemoShift) == MemoTag::open) {
    // A container right below a mark is being filled. Any other is finished: were it filled later
    // on after all, that would be refused as an extension after use.
    const size_t at = entry & kMemoMask;
    for (const size_t mark : marks_) {
      if (mark == at + 1) refuse("A container is put inside itself.", offset);
    }
    close(stack_[at]);
    entry = memo_[index];
  }
  const uint32_t id = entry & kMemoMask;
  switch (static_cast<MemoTag>(entry >> kMemoShift)) {
    case MemoTag::string: push_tag(Tag::string).id = id; break;
    case MemoTag::frame: push_tag(Tag::frame).id = id; break;
    case MemoTag::stack: push_tag(Tag::stack).id = id; break;
    case MemoTag::empty_list: push_tag(Tag::empty_list); break;
    case MemoTag::pair: {
      Value& pair = push_tag(Tag::pair);
      pair.id = id / 2;
      pair.flag = id % 2 != 0;
      break;
    }
    case MemoTag::opaque: {
      Value& again = push_tag(Tag::opaque);
      again.height = static_cast<uint8_t>(id / 2);
      again.flag = id % 2 != 0;
      again.trouble = {Fault::not_recognised, Shape::other, Key::none};
      again.bits = offset;
      break;
    }
    default: {
      Value& again = push_tag(Tag::opaque);
      again.height = static_cast<uint8_t>(id);
      again.trouble = {Fault::twice, Shape::other, Key::none};
      again.bits = offset;
    }
  }
}

std::string SchemaFold::text_of(uint32_t string) const {
  return std::string(strings_.begin_of(string), strings_.length_of(string));
}

std::string SchemaFold::top_strings() const {
  if (stack_.size() < 2) return "";
  const Value& module = stack_[stack_.size() - 2];
  const Value& name = stack_.back();
  if (module.tag != Tag::string || name.tag != Tag::string) return "";
  return text_of(module.id) + "." + text_of(name.id);
}

}  // namespace fragdoctor
