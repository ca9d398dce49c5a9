// The end of a file: what is on top becomes the tables that are handed out.
#include <algorithm>
#include <string>

#include "fold_dict.h"
#include "schema_fold.h"

namespace fragdoctor {

namespace {

// Keeps the rows of the ranges, in order. Usually these are all rows, and nothing is copied.
template <class T>
void keep(Column<T>& column, const std::vector<RowRange>& ranges) {
  uint64_t next = 0;
  bool is_prefix = true;
  for (const RowRange& range : ranges) {
    is_prefix = is_prefix && (range.count == 0 || range.first == next);
    next += range.count;
  }
  if (is_prefix) {
    column.truncate(next);
  } else {
    Column<T> kept;
    for (const RowRange& range : ranges) {
      if (range.count != 0) kept.append(column.data() + range.first, range.count);
    }
    column = std::move(kept);
  }
  column.shrink_to_fit();
}

template <class T>
void keep(RepeatedColumn<T>& column, const std::vector<RowRange>& ranges) {
  if (column.is_spread()) keep(column.values(), ranges);
  uint64_t n = 0;
  for (const RowRange& range : ranges) n += range.count;
  column.resize(n);
}

std::string quoted(Key key) { return std::string("'") + kKeyNames[static_cast<int>(key)] + "'"; }

}  // namespace

void EventColumns::make_room() {
  const size_t n = room_ == 0 ? 64 : room_ + room_ / 2;
  action.reserve(n);
  address.reserve(n);
  size_bytes.reserve(n);
  stream.reserve(n);
  time_us.reserve(n);
  stack.reserve(n);
  pool.reserve(n);
  room_ = n;
}

void SchemaFold::raise(const Trouble& trouble, uint64_t offset) const {
  const std::string noun = kShapeNouns[static_cast<int>(trouble.shape)];
  const std::string key = trouble.key == Key::none ? "a value" : quoted(trouble.key);
  const char* hint = "No version of PyTorch writes this; the file was changed or made by hand.";
  switch (trouble.fault) {
    case Fault::wrong_type:
      throw ReadError(ErrorKind::refused, "The type of " + key + " in " + noun + " is wrong.", hint,
                      offset);
    case Fault::negative:
      throw ReadError(ErrorKind::refused, "The number " + key + " in " + noun + " is negative.",
                      hint, offset);
    case Fault::too_large:
      throw ReadError(ErrorKind::refused, "The number " + key + " in " + noun + " is too large.",
                      hint, offset);
    case Fault::missing:
      throw ReadError(ErrorKind::refused, "The key " + key + " is missing in " + noun + ".", hint,
                      offset);
    case Fault::twice:
      throw ReadError(ErrorKind::refused, "The same list stands in the file twice, as " + key + ".",
                      hint, offset);
    default:
      throw ReadError(
          ErrorKind::not_a_snapshot,
          "This is not a memory snapshot: " +
              (trouble.key == Key::none ? std::string("it lacks 'segments' and 'device_traces'")
                                        : key + " in " + noun + " is something else") +
              ".",
          "Write one with torch.cuda.memory._dump_snapshot(\"snapshot.pickle\").", offset);
  }
}

SnapshotTables SchemaFold::finish(uint64_t offset) {
  if (stack_.size() != 1 || !marks_.empty()) {
    throw ReadError(ErrorKind::refused,
                    stack_.empty() ? "The file ends without a value."
                                   : "The file ends with values that belong to nothing.",
                    "No genuine snapshot is written like this.", offset);
  }
  Value result = stack_.back();
  close(result);
  SnapshotTables out;
  if (result.tag == Tag::segments && result.kind != ListKind::empty) {
    out.is_list = true;
    top_ = Top();
    top_.segments = {result.id, result.bits};
  } else if (result.tag == Tag::empty_list) {
    out.is_list = true;
    top_ = Top();
  } else if (result.tag != Tag::top || result.id != top_.serial) {
    const bool has_reason = result.tag == Tag::opaque && result.trouble.shape != Shape::other;
    raise(has_reason ? result.trouble : Trouble{Fault::not_recognised, Shape::top, Key::none},
          has_reason ? result.bits : offset);
  }
  memo_ = Column<uint32_t>();
  waiting_frames_ = Column<uint32_t>();
  waiting_traces_ = Column<RowRange>();
  gather_host(out);
  gather_events(out);
  gather_segments(out);
  gather_stacks(out);
  gather_settings(out);
  gather_rest(out);
  return out;
}

void SchemaFold::gather_events(SnapshotTables& out) {
  const std::vector<RowRange>& ranges = top_.traces;
  out.event_offsets.push_back(0);
  int64_t next = 0;
  for (const RowRange& range : ranges) {
    for (size_t i = 0; i < oom_rows_.size(); ++i) {
      const auto row = static_cast<uint64_t>(oom_rows_[i]);
      if (row < range.first || row >= range.first + range.count) continue;
      out.oom_rows.push_back(next + static_cast<int64_t>(row - range.first));
      out.oom_free_bytes.push_back(oom_free_bytes_[i]);
    }
    next += static_cast<int64_t>(range.count);
    out.event_offsets.push_back(next);
  }
  keep(events_.action, ranges);
  keep(events_.address, ranges);
  keep(events_.size_bytes, ranges);
  keep(events_.stream, ranges);
  keep(events_.time_us, ranges);
  keep(events_.stack, ranges);
  keep(events_.pool, ranges);
  keep(events_.compile_context, ranges);
  keep(events_.user_metadata, ranges);
  out.events = std::move(events_);
}

void SchemaFold::gather_segments(SnapshotTables& out) {
  const RowRange wanted = top_.segments;
  std::vector<RowRange> blocks;
  segments_.block_offsets.push_back(0);
  int64_t next = 0;
  for (uint64_t i = wanted.first; i < wanted.first + wanted.count; ++i) {
    const RowRange range{segments_.first_block[i], segments_.n_blocks[i]};
    if (!blocks.empty() && blocks.back().first + blocks.back().count == range.first) {
      blocks.back().count += range.count;
    } else if (range.count != 0) {
      blocks.push_back(range);
    }
    for (uint64_t j = 0; j < range.count; ++j) {
      blocks_.segment.push_back(static_cast<int32_t>(i - wanted.first));
    }
    next += static_cast<int64_t>(range.count);
    segments_.block_offsets.push_back(next);
  }
  keep(blocks_.address, blocks);
  keep(blocks_.size_bytes, blocks);
  keep(blocks_.requested_bytes, blocks);
  keep(blocks_.state, blocks);
  keep(blocks_.stack, blocks);
  out.blocks = std::move(blocks_);
  const std::vector<RowRange> rows{wanted};
  keep(segments_.device, rows);
  keep(segments_.address, rows);
  keep(segments_.total_bytes, rows);
  keep(segments_.allocated_bytes, rows);
  keep(segments_.active_bytes, rows);
  keep(segments_.requested_bytes, rows);
  keep(segments_.stream, rows);
  keep(segments_.kind, rows);
  keep(segments_.pool, rows);
  keep(segments_.is_expandable, rows);
  keep(segments_.stack, rows);
  out.segments = std::move(segments_);
}

void SchemaFold::gather_stacks(SnapshotTables& out) {
  Column<int32_t> frame_out;
  frame_out.assign(frames_.size(), -1);
  int32_t n_frames = 0;
  out.stack_offsets.push_back(0);
  for (size_t i = 0; i < stacks_used_.size(); ++i) {
    const uint32_t* frames = stacks_.begin_of(stacks_used_[i]);
    const size_t n = stacks_.length_of(stacks_used_[i]);
    for (size_t j = 0; j < n; ++j) {
      int32_t& id = frame_out[frames[j]];
      if (id < 0) {
        id = n_frames++;
        const FrameRecord& frame = frames_[frames[j]];
        out.frame_filename.push_back(string_out(frame.filename));
        out.frame_line.push_back(frame.line);
        out.frame_name.push_back(string_out(frame.name));
      }
      out.stack_frames.push_back(id);
    }
    out.stack_offsets.push_back(static_cast<int64_t>(out.stack_frames.size()));
  }
}

void SchemaFold::gather_settings(SnapshotTables& out) {
  out.has_settings = top_.has_settings;
  const std::vector<PlainEntry>& all = top_.settings;
  struct Level {
    size_t next;
    size_t end;
  };
  std::vector<Level> levels{{all.size() - top_.n_settings, all.size()}};
  while (!levels.empty()) {
    Level& level = levels.back();
    if (level.next == level.end) {
      levels.pop_back();
      if (!levels.empty()) out.settings.push_back({Setting::Type::dict_end, "", "", 0, 0.0});
      continue;
    }
    const PlainEntry& entry = all[level.next++];
    Setting setting{Setting::Type::none, text_of(entry.key), "", 0, 0.0};
    const Value& value = entry.value;
    switch (value.tag) {
      case Tag::none: break;
      case Tag::boolean:
        setting.type = Setting::Type::boolean;
        setting.integer = value.flag ? 1 : 0;
        break;
      case Tag::integer:
        setting.type = value.flag ? Setting::Type::large_integer : Setting::Type::integer;
        setting.integer = static_cast<int64_t>(value.bits);
        break;
      case Tag::real:
        setting.type = Setting::Type::real;
        std::memcpy(&setting.real, &value.bits, sizeof setting.real);
        break;
      case Tag::string:
        setting.type = Setting::Type::string;
        setting.text = text_of(value.id);
        break;
      case Tag::plain_dict: {
        setting.type = Setting::Type::dict_begin;
        out.settings.push_back(std::move(setting));
        const size_t end = static_cast<size_t>(value.bits >> 32) - top_.settings_start;
        levels.push_back({end - static_cast<size_t>(value.bits & 0xFFFFFFFF), end});
        continue;
      }
      default:  // a list or a tuple: not a known setting
        count_unknown_value("allocator_settings.", entry.key);
        continue;
    }
    out.settings.push_back(std::move(setting));
  }
}

void SchemaFold::gather_host(SnapshotTables& out) {
  out.host_event_offsets.push_back(0);
  for (const RowRange& trace : top_.host_traces) {
    for (uint64_t i = trace.first; i < trace.first + trace.count; ++i) {
      out.host_events.push_back({events_.action[i], events_.address[i], events_.size_bytes[i],
                                 events_.stream[i], events_.time_us[i], events_.stack[i],
                                 events_.pool[i], events_.compile_context[i],
                                 events_.user_metadata[i]});
    }
  }
  out.host_event_offsets.push_back(static_cast<int64_t>(out.host_events.action.size()));
  const RowRange range = top_.host_segments;
  for (uint64_t i = range.first; i < range.first + range.count; ++i) {
    if (top_.host_are_segments) {
      out.host_segments.address.push_back(segments_.address[i]);
      out.host_segments.size_bytes.push_back(segments_.total_bytes[i]);
      out.host_segments.flags.push_back(kHasAddress | kHasSize);
    } else {
      out.host_segments.address.push_back(host_segments_.address[i]);
      out.host_segments.size_bytes.push_back(host_segments_.size_bytes[i]);
      out.host_segments.flags.push_back(host_segments_.flags[i]);
    }
  }
}

void SchemaFold::gather_rest(SnapshotTables& out) {
  const std::vector<RowRange> rows{top_.annotations};
  keep(annotations_.device, rows);
  keep(annotations_.time_us, rows);
  keep(annotations_.name, rows);
  keep(annotations_.stage, rows);
  out.annotations = std::move(annotations_);
  for (size_t i = 0; i < streams_.size(); ++i) {
    out.streams.push_back(streams_[static_cast<uint32_t>(i)]);
  }
  for (size_t i = 0; i < pairs_used_.size(); ++i) {
    out.pools.push_back(pairs_[pairs_used_[i]].first);
    out.pools.push_back(pairs_[pairs_used_[i]].second);
  }
  out.strings.reserve(strings_used_.size());
  for (size_t i = 0; i < strings_used_.size(); ++i)
    out.strings.push_back(text_of(strings_used_[i]));
  for (const auto& [path, times] : unknown_keys_) {
    const auto name = static_cast<uint32_t>(path & 0xFFFFFFFF);
    out.unknown_keys.emplace_back(
        kShapePaths[path >> 32] + (name == kNotAString ? "(not a string)" : text_of(name)), times);
  }
  if (n_more_unknown_keys_ != 0) out.unknown_keys.emplace_back("(others)", n_more_unknown_keys_);
  for (const auto& [name, times] : unknown_values_) out.unknown_values.emplace_back(name, times);
  if (n_more_unknown_values_ != 0) {
    out.unknown_values.emplace_back("(others)", n_more_unknown_values_);
  }
  std::sort(out.unknown_keys.begin(), out.unknown_keys.end());
  std::sort(out.unknown_values.begin(), out.unknown_values.end());
  out.n_replaced_strings = n_replaced_strings_;
  std::copy(std::begin(keys_seen_), std::end(keys_seen_), std::begin(out.keys_seen));
  out.actions_seen = actions_seen_;
  out.writer = writer_;
}

}  // namespace fragdoctor
