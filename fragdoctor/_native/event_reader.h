// Reads the events of a pickled trace straight from the bytes.
//
// A trace is a million dicts that look alike: the same keys in the same order, numbers, and memo
// entries. The stack machine (SchemaFold) can read them all, but its stack and its marks cost more
// than the events themselves. This is the shortcut for the plain events. Anything that is not
// plainly an event is left to the stack machine, from the first byte of its dict, with nothing
// changed: only the stack machine decides what is an error.
#pragma once

#include <cstddef>
#include <cstdint>

#include "schema_fold.h"

namespace fragdoctor {

class EventReader {
 public:
  explicit EventReader(SchemaFold& fold) : fold_(fold) {}

  // MEMOIZE and SHORT_BINUNICODE belong to protocol 4 and above.
  void set_protocol(int protocol) { has_short_forms_ = protocol >= 4; }

  // Adds the whole events that begin at `next` to the list on top of the stack, as long as they are
  // plain and begin at least kMostBytes before `end`. Returns the first byte that was not used.
  const uint8_t* read(const uint8_t* next, const uint8_t* end);

 private:
  static constexpr uint32_t kNothing = 0xFFFFFFFF;
  static constexpr size_t kMostKeys = 16;
  static constexpr size_t kMostText = 200;
  // A key (5) and a text with its length (5) and its memo (5): the most that is read without
  // checking for the end of the window. The loads touch eight more bytes.
  static constexpr size_t kMostBytes = 5 + 5 + kMostText + 5 + 8;

  // An event as stored in the file: IDs of the fold, kNothing for missing ones.
  struct Event {
    uint64_t mask = 0;  // bit(key) of the keys that it has
    uint64_t address = 0, size_bytes = 0, stream = 0;
    int64_t time_us = -1;
    uint32_t stack = kNothing, pool = kNothing, compile_context = kNothing,
             user_metadata = kNothing;
    uint8_t action = 0;
    uint8_t height = 1;  // nesting of containers
  };
  // The opcode that fetched the key at this place of the last event, as bytes.
  struct KnownKey {
    uint64_t bytes = 1;
    uint64_t mask = 0;
    Key key = Key::none;
    uint8_t length = 0;
  };

  bool applies() const;
  bool read_event();
  bool read_pairs(Event& event);
  Key read_key(size_t place);
  bool read_value(Key key, Event& event);
  bool read_action(Event& event);
  bool read_integer(uint64_t& value);
  bool read_unsigned(uint64_t& value);
  bool read_time(Event& event);
  bool read_text(uint32_t& string);
  bool read_new_text(size_t n, uint32_t& string);
  bool read_frames(Event& event, uint32_t& stack);
  bool read_new_stack(Event& event, uint32_t& stack);
  bool read_frame_ids();
  bool read_pool(Event& event);
  bool read_new_pool(Event& event);
  bool read_memo(uint32_t entry);
  uint32_t peek_recalled(size_t& length) const;
  void add(const Event& event);

  SchemaFold& fold_;
  bool has_short_forms_ = false;
  const uint8_t* next_ = nullptr;
  const uint8_t* last_ = nullptr;  // kMostBytes before the end
  KnownKey keys_[kMostKeys];
  Column<uint32_t> frames_;  // of the current stack
  // The last short text that was spelled out, which is "N/A" in nearly every event.
  uint64_t short_text_ = 0;
  size_t short_length_ = SIZE_MAX;
  uint32_t short_id_ = 0;
};

}  // namespace fragdoctor
