// What a finished dict is: its fields are checked, and it becomes a row or an ID.
#include "fold_dict.h"
#include "schema_fold.h"

namespace fragdoctor {

Value SchemaFold::fold_event(const DictView& dict) {
  Trouble t{Fault::none, Shape::event, Key::none};
  uint64_t at = dict.offset;
  const Value* action = dict.get(Key::action);
  if (action->tag != Tag::string) return opaque(wrong_type(Shape::event, Key::action), at, 0);
  uint8_t code = action_of_[action->id];
  if (code == kNoWord) {
    count_unknown_value("events.action=", action->id);
    code = static_cast<uint8_t>(Action::other);
  }
  const Action what = static_cast<Action>(code);
  const bool has_address = what <= Action::segment_unmap;
  const bool has_size = has_address || what == Action::oom;
  uint64_t address = 0;
  uint64_t size = 0;
  uint64_t stream = 0;
  uint64_t device_free = 0;
  int64_t time = -1;
  int32_t stack = -1;
  int32_t pool = -1;
  int32_t context = -1;
  int32_t metadata = -1;
  if (!read_modular(dict, Key::addr, has_address, address, t) ||
      !read_unsigned(dict, Key::size, has_size, size, t) ||
      !read_modular(dict, Key::stream, false, stream, t) || !read_time(dict, time, t) ||
      !read_stack(dict, stack, t, at) || !read_pool(dict, Key::pool_id, pool, t) ||
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
  event.address = what == Action::oom ? 0 : address;
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
  if (!read_unsigned(dict, Key::real_size, true, requested, t) || !read_stack(dict, stack, t, at)) {
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
  if (!read_history(dict, requested, stack, t, at)) return opaque(t, at, 0);
  uint8_t state = state_of_[state_name->id];
  if (state == kNoWord) {
    count_unknown_value("blocks.state=", state_name->id);
    state = static_cast<uint8_t>(BlockState::other);
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

// Blocks without an address follow one another from the start of their segment.
void SchemaFold::derive_addresses(const RowRange& blocks, uint64_t address) {
  uint64_t next = address;
  for (uint64_t row = blocks.first; row < blocks.first + blocks.count; ++row) {
    if ((blocks_.state[row] & kNoAddress) != 0) {
      blocks_.address[row] = next;
      blocks_.state[row] = static_cast<uint8_t>(blocks_.state[row] & ~kNoAddress);
    }
    next += blocks_.size_bytes[row];
  }
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
  uint8_t type = static_cast<uint8_t>(SegmentType::unknown);
  if (!read_segment_type(dict, type, t)) return opaque(t, at, 0);
  const Value* expandable = dict.get(Key::is_expandable);
  if (expandable != nullptr && expandable->tag != Tag::boolean) {
    return opaque(wrong_type(Shape::segment, Key::is_expandable), at, 0);
  }
  derive_addresses(blocks, address);
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

}  // namespace fragdoctor
