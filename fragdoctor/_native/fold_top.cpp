// What accompanies segments and traces: annotations, host segments, settings, and the top level.
#include <algorithm>
#include <utility>

#include "fold_dict.h"
#include "schema_fold.h"

namespace fragdoctor {

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

// Not verified against a writer (2.15), so anything unusual just counts as "not stated".
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

// A small dict of scalars and of dicts of scalars, such as the allocator settings.
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
        top.host_traces.push_back(waiting_traces_[host->id + i]);
      }
    } else if (host->tag == Tag::events && host->kind != ListKind::empty) {
      top.host_traces.push_back({host->id, host->bits});
    } else if (host->tag != Tag::empty_list) {
      count_unknown_value("host_traces", intern_text("", 0));
    }
  }
}

}  // namespace fragdoctor
