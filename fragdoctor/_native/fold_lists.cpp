// Lists and tuples: items are added while the file fills a list; what kind of list it was is
// decided when it is used.
#include <algorithm>

#include "schema_fold.h"

namespace fragdoctor {

namespace {

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
  // The device traces are a list of lists of events; some may be empty.
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
      // Anything that waits above belongs to items that have just been used.
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
    case ListKind::history:  // only the newest entry, which is the first, is useful
      break;
    case ListKind::events:
    case ListKind::blocks:
    case ListKind::segments:
    case ListKind::annotations:
    case ListKind::host_segments:
      fits = list.id + list.bits == item.id;
      list.bits += item.bits;
      break;
    default: fits = false;
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

// Rows that follow one another in a list form one value: the C++ writer puts a million of them
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
  // A memoized "before" needs no update: rows are never recalled.
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

// Closes all items of a container, and returns from where on their waiting contents are dead.
SchemaFold::Floors SchemaFold::close_from(size_t first_item) {
  Floors floors{plain_.size(), waiting_traces_.size()};
  for (size_t i = first_item; i < stack_.size(); ++i) {
    Value& item = stack_[i];
    if (item.tag < Tag::dict) continue;  // mostly scalars
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

}  // namespace fragdoctor
