// Folds the plain values of a snapshot file into columns while they are read.
//
// A reader (pickle, JSON) tells the fold what the file says, in the terms of a stack machine.
// When a dict is complete, its keys say what it is: an event becomes a row, a frame an ID, a list
// of frames a stack ID. Nothing but columns is kept, so memory stays far below what Python objects
// would take. A value's meaning is decided where it is used: a dict that is not a valid event is
// an error only if it stands in `device_traces`.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "columns.h"
#include "fold_value.h"
#include "read_error.h"
#include "snapshot_tables.h"
#include "vocabulary.h"

namespace fragdoctor {

struct ReadLimits {
  uint32_t max_depth = 16;
  uint64_t max_string_bytes = 16u << 20;
  uint32_t max_unknown_keys = 200;
};

struct FrameRecord {
  uint32_t filename;
  uint32_t name;
  uint64_t line;
};

struct PairRecord {
  int64_t first;
  int64_t second;
};

struct RowRange {
  uint64_t first;
  uint64_t count;
};

// An entry of a small dict that is kept as is (the allocator's settings).
struct PlainEntry {
  uint32_t key;  // string id
  Value value;
};

class SchemaFold {
 public:
  SchemaFold(const ReadLimits& limits, uint64_t seed);

  // Each takes the offset of the opcode or token, for error messages.
  void push_none() { push_tag(Tag::none); }
  void push_bool(bool value) { push_tag(Tag::boolean).flag = value; }
  void push_integer(int64_t value) { push_tag(Tag::integer).bits = static_cast<uint64_t>(value); }
  void push_large_integer(uint64_t value);  // 2^63 and above
  void push_big_integer() { push_tag(Tag::big_integer); }
  void push_real(double value);
  void push_string(std::string_view utf8, uint64_t offset);
  void push_list() { push_tag(Tag::list); }
  void push_dict() { push_tag(Tag::dict); }
  void mark(uint64_t offset);
  void set_items(uint64_t offset);
  void set_item(uint64_t offset);
  void append_items(uint64_t offset);
  void append_item(uint64_t offset);
  void make_tuple(size_t n, uint64_t offset);
  void make_tuple_from_mark(uint64_t offset);
  void memoize(uint64_t index, uint64_t offset) {
    const size_t floor = marks_.empty() ? 0 : marks_.back();
    if (stack_.size() > floor && index == memo_.size() && index < kMemoMask) {
      const Value& value = stack_.back();
      if (value.tag == Tag::string) {
        memo_.push_back(static_cast<uint32_t>(MemoTag::string) << kMemoShift | value.id);
        return;
      }
    }
    memoize_other(index, offset);
  }
  uint64_t memo_size() const { return memo_.size(); }
  void recall(uint64_t index, uint64_t offset) {
    if (!recall_text(index)) recall_other(index, offset);
  }
  // The frequent kinds of memo entries: strings, frames and stacks. False for any other kind.
  bool recall_text(uint64_t index) {
    if (index >= memo_.size()) return false;
    const uint32_t entry = memo_[index];
    if (entry >> kMemoShift > static_cast<uint32_t>(MemoTag::stack)) return false;
    constexpr Tag kTags[] = {Tag::string, Tag::frame, Tag::stack};
    stack_.push(kTags[entry >> kMemoShift]).id = entry & kMemoMask;
    return true;
  }
  SnapshotTables finish(uint64_t offset);
  // The two strings on top of the stack, for naming a refused global; "" if there are none.
  std::string top_strings() const;
  size_t depth() const { return marks_.size(); }
  // "python", "c++" or "", judging by the order in which containers are memoized and filled.
  const char* writer() const { return writer_; }

  // `count` event rows that were added in one go, as items of the list on top.
  void push_event_rows(size_t first, size_t count);

 private:
  friend class EventReader;

  // A memo entry has 32 bits: what it is in the upper three, an ID below.
  enum class MemoTag : uint32_t { string, frame, stack, pair, open, used_up, empty_list, opaque };
  static constexpr uint32_t kMemoShift = 29;
  static constexpr uint32_t kMemoMask = (1u << kMemoShift) - 1;
  static uint32_t pack(MemoTag tag, uint64_t id) {
    if (id > kMemoMask) too_many_values();
    return static_cast<uint32_t>(tag) << kMemoShift | (static_cast<uint32_t>(id) & kMemoMask);
  }
  [[noreturn]] static void too_many_values();

  struct DictView;
  struct Top {
    uint32_t serial = 0;
    RowRange segments{0, 0}, annotations{0, 0}, host_segments{0, 0};
    bool host_are_segments = false;
    std::vector<RowRange> traces;
    std::vector<RowRange> host_traces;
    bool has_settings = false;
    std::vector<PlainEntry> settings;  // nested dicts stand before the dict that holds them
    size_t settings_start = 0;         // where they were in plain_
    size_t n_settings = 0;
  };
  // Sizes to which the waiting areas shrink once their items have been used.
  struct Floors {
    size_t plain;
    size_t traces;
  };

  Value& push_tag(Tag tag) { return stack_.push(tag); }
  size_t pop_mark(uint64_t offset);
  void fold_dict(size_t dict_at, size_t first_item, uint64_t offset);
  static void check_target(const Value& target, bool is_batch, uint64_t offset);
  uint32_t view_items(DictView& dict) const;
  Value fold_shape(const DictView& dict);
  void extend_list(size_t list_at, size_t first_item, uint64_t offset);
  void add_to_list(Value& list, const Value& item, uint64_t offset);
  Floors close_from(size_t first_item);
  void stack_is_done();
  void close(Value& value);
  void close_list(Value& value);
  void merge_run();
  void tuple_at(size_t first_item, uint64_t offset);
  uint32_t intern_pair(const PairRecord& pair) {
    const PairRecord& last = pairs_[last_pair_];
    if (last.first == pair.first && last.second == pair.second) return last_pair_;
    return intern_other_pair(pair);
  }
  uint32_t intern_other_pair(const PairRecord& pair);
  uint32_t intern_stack(const uint32_t* frames, size_t n);
  void memoize_other(uint64_t index, uint64_t offset);
  void recall_other(uint64_t index, uint64_t offset);
  uint32_t memo_form(const Value& value) const;
  void check_height(uint32_t height, uint64_t offset) const;

  Value fold_event(const DictView& dict);
  Value fold_frame(const DictView& dict);
  Value fold_block(const DictView& dict);
  Value fold_history_entry(const DictView& dict);
  Value fold_segment(const DictView& dict);
  Value fold_annotation(const DictView& dict);
  Value fold_host_segment(const DictView& dict);
  Value fold_top(const DictView& dict);
  Value fold_plain(const DictView& dict);
  const Value* wrapped_snapshot(const DictView& dict) const;
  void read_host(const DictView& dict, Top& top);
  bool read_rows(const DictView& dict, Key key, Tag wanted, RowRange& rows, Trouble& t,
                 uint64_t& at) const;

  bool read_unsigned(const DictView& dict, Key key, bool required, uint64_t& out, Trouble& t) const;
  bool read_modular(const DictView& dict, Key key, bool required, uint64_t& out, Trouble& t) const;
  bool read_signed(const DictView& dict, Key key, bool required, int64_t& out, Trouble& t) const;
  bool read_time(const DictView& dict, int64_t& out, Trouble& t) const;
  bool read_stack(const DictView& dict, int32_t& out, Trouble& t, uint64_t& at);
  bool read_history(const DictView& dict, uint64_t& requested, int32_t& stack, Trouble& t,
                    uint64_t& at);
  bool read_segment_type(const DictView& dict, uint8_t& type, Trouble& t);
  void derive_addresses(const RowRange& blocks, uint64_t address);
  bool read_pool(const DictView& dict, Key key, int32_t& out, Trouble& t);
  bool read_text(const DictView& dict, Key key, int32_t& out, Trouble& t);
  static Value opaque(const Trouble& trouble, uint64_t at, uint8_t height);

  uint32_t intern_text(std::string_view utf8, uint64_t offset);
  // IDs as they are handed out: assigned at the first use of a thing.
  static int32_t id_out(Column<int32_t>& out, Column<uint32_t>& used, uint32_t id) {
    if (out[id] < 0) {
      out[id] = static_cast<int32_t>(used.size());
      used.push_back(id);
    }
    return out[id];
  }
  int32_t string_out(uint32_t string) { return id_out(string_out_, strings_used_, string); }
  int32_t stack_out(uint32_t stack) { return id_out(stack_out_, stacks_used_, stack); }
  int32_t pool_out(uint32_t pair) { return id_out(pair_out_, pairs_used_, pair); }
  int32_t stream_id(uint64_t stream) {
    if (stream != last_stream_) {
      last_stream_ = stream;
      last_stream_id_ = static_cast<int32_t>(streams_.intern(stream));
    }
    return last_stream_id_;
  }
  static void check_row(size_t n_rows);
  void count_keys(Shape shape, const DictView& dict);
  void count_unknown_value(const char* path, uint32_t string);
  std::string text_of(uint32_t string) const;
  [[noreturn]] void raise(const Trouble& trouble, uint64_t offset) const;

  void gather_events(SnapshotTables& out);
  void gather_segments(SnapshotTables& out);
  void gather_stacks(SnapshotTables& out);
  void gather_settings(SnapshotTables& out);
  void gather_host(SnapshotTables& out);
  void gather_rest(SnapshotTables& out);

  static constexpr size_t kMaxIds = size_t{1} << 29;
  static constexpr uint32_t kNotAString = 0xFFFFFFFF;
  static constexpr uint8_t kNoAddress = 0x80;  // in the state of a block
  static constexpr uint8_t kHasAddress = 1, kHasSize = 2, kHasAllocated = 4, kAllocated = 8;

  ReadLimits limits_;
  ValueStack stack_;
  std::vector<size_t> marks_;
  Column<uint32_t> memo_;
  const char* writer_ = "";

  SpanTable<char> strings_;
  Column<uint8_t> key_of_, action_of_, state_of_, type_of_;  // by string id
  Column<int32_t> string_out_;                               // by string id, -1: not used yet
  Column<uint32_t> strings_used_;
  RecordTable<FrameRecord> frames_;
  SpanTable<uint32_t> stacks_;
  Column<int32_t> stack_out_;
  Column<uint32_t> stacks_used_;
  RecordTable<PairRecord> pairs_;
  uint32_t last_pair_ = 0;
  Column<int32_t> pair_out_;
  Column<uint32_t> pairs_used_;
  RecordTable<uint64_t> streams_;
  uint64_t last_stream_ = 0;
  int32_t last_stream_id_ = 0;

  size_t n_open_stacks_ = 0;
  Column<uint32_t> waiting_frames_;  // from lists of frames that are still open
  Column<RowRange> waiting_traces_;
  std::vector<PlainEntry> plain_;

  EventColumns events_;
  BlockColumns blocks_;  // bit 7 of `state`: the address is not in the file
  SegmentColumns segments_;
  AnnotationColumns annotations_;
  HostSegmentColumns host_segments_;
  Column<int64_t> oom_rows_;
  Column<uint64_t> oom_free_bytes_;

  Top top_;
  std::unordered_map<uint64_t, uint64_t> unknown_keys_;  // shape << 32 | string ID -> count
  std::unordered_map<std::string, uint64_t> unknown_values_;
  uint64_t n_more_unknown_keys_ = 0, n_more_unknown_values_ = 0;
  uint64_t n_replaced_strings_ = 0;
  uint64_t keys_seen_[kNShapes] = {};
  uint32_t actions_seen_ = 0;
};

}  // namespace fragdoctor
