// The contents of a snapshot file as columns: the result of the readers.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "columns.h"
#include "vocabulary.h"

namespace fragdoctor {

struct EventRow {
  uint8_t action = 0;
  uint64_t address = 0, size_bytes = 0;
  int32_t stream = 0;
  int64_t time_us = -1;
  int32_t stack = -1, pool = -1, compile_context = -1, user_metadata = -1;
};

struct EventColumns {
  Column<uint8_t> action;
  Column<uint64_t> address, size_bytes;
  Column<int32_t> stream;
  Column<int64_t> time_us;
  Column<int32_t> stack, pool;
  RepeatedColumn<int32_t> compile_context, user_metadata;

  void push_back(const EventRow& row) {
    if (action.size() == room_) make_room();
    action.push_back_unchecked(row.action);
    address.push_back_unchecked(row.address);
    size_bytes.push_back_unchecked(row.size_bytes);
    stream.push_back_unchecked(row.stream);
    time_us.push_back_unchecked(row.time_us);
    stack.push_back_unchecked(row.stack);
    pool.push_back_unchecked(row.pool);
    compile_context.push_back(row.compile_context);
    user_metadata.push_back(row.user_metadata);
  }

 private:
  void make_room();

  size_t room_ = 0;  // rows that the columns have room for, other than the repeated ones
};

struct BlockColumns {
  Column<uint64_t> address, size_bytes, requested_bytes;
  Column<uint8_t> state;
  Column<int32_t> stack, segment;
};

struct SegmentColumns {
  Column<int32_t> device;
  Column<uint64_t> address, total_bytes, allocated_bytes, active_bytes, requested_bytes;
  Column<int32_t> stream;
  Column<uint8_t> kind;
  Column<int32_t> pool;
  Column<uint8_t> is_expandable;
  Column<int32_t> stack;
  Column<uint64_t> first_block, n_blocks;
  Column<int64_t> block_offsets;
};

struct AnnotationColumns {
  Column<int64_t> device, time_us;
  Column<int32_t> name, stage;
};

struct HostSegmentColumns {
  Column<uint64_t> address, size_bytes;
  Column<uint8_t> flags;  // 1: has address, 2: has size, 4: has allocated, 8: allocated
};

// A settings value, for the binding: a scalar, or a dict of scalars.
struct Setting {
  enum class Type : uint8_t {
    none,
    boolean,
    integer,
    large_integer,
    real,
    string,
    dict_begin,
    dict_end
  };
  Type type;
  std::string key;
  std::string text;
  int64_t integer;
  double real;
};

// The contents of the file, ready to be handed to numpy.
struct SnapshotTables {
  std::vector<std::string> strings;
  Column<int32_t> frame_filename, frame_name;
  Column<uint64_t> frame_line;
  Column<int64_t> stack_offsets;
  Column<int32_t> stack_frames;
  Column<uint64_t> streams;
  Column<int64_t> pools;
  SegmentColumns segments;
  BlockColumns blocks;
  EventColumns events;
  Column<int64_t> event_offsets;
  Column<int64_t> oom_rows;
  Column<uint64_t> oom_free_bytes;
  AnnotationColumns annotations;
  HostSegmentColumns host_segments;
  EventColumns host_events;
  Column<int64_t> host_event_offsets;
  bool has_settings = false;
  std::vector<Setting> settings;
  std::vector<std::pair<std::string, uint64_t>> unknown_keys, unknown_values;
  uint64_t n_replaced_strings = 0;
  bool is_list = false;
  uint64_t keys_seen[kNShapes] = {};
  uint32_t actions_seen = 0;
  // Facts about the container, filled in by the reader.
  int protocol = -1;
  std::string writer;
  uint64_t n_bytes = 0;
  bool has_trailing_bytes = false;
};

}  // namespace fragdoctor
