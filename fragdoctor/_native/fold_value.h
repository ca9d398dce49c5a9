// A value of the file that waits for its container, and the stack on which it waits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "vocabulary.h"

namespace fragdoctor {

enum class Tag : uint8_t {
  none,
  boolean,
  integer,
  big_integer,
  real,
  string,
  pair,  // two integers: a pool id
  dict,  // empty so far
  list,  // open; `kind` says what it holds
  empty_list,
  frame,
  stack,
  history_entry,
  history,
  events,
  traces,
  blocks,
  segments,
  annotations,
  host_segments,
  plain_dict,
  top,
  opaque,  // anything else; `trouble` says what is wrong with it if more is wanted
};

enum class ListKind : uint8_t {
  empty,
  frames,
  events,
  traces,
  blocks,
  segments,
  history,
  annotations,
  host_segments,
  pair,
  mixed
};

enum class Fault : uint8_t {
  none,
  wrong_type,
  negative,
  too_large,
  missing,
  twice,
  mixed_list,
  not_recognised
};

// Why a value cannot be what its place asks for. Reported only if it stands in such a place.
struct Trouble {
  Fault fault = Fault::none;
  Shape shape = Shape::other;
  Key key = Key::none;
};

struct Value {
  Tag tag = Tag::none;
  ListKind kind = ListKind::empty;
  uint8_t height = 0;  // nesting of containers below
  bool flag = false;   // integer: above 2^63; boolean: true; pair, opaque: usable as a dict key
  Trouble trouble;
  uint32_t memo = 0;  // memo index + 1 of an open container
  uint32_t id = 0;    // id, or first row
  uint64_t bits = 0;  // number, count of rows, or offset of the trouble
};

// The values that wait for their container. Grows with the bytes read, up to a bound.
class ValueStack {
 public:
  // The new value is all zeros except for its tag.
  Value& push(Tag tag) {
    if (size_ == values_.size()) grow();
    Value& value = values_[size_++];
    value = Value();
    value.tag = tag;
    return value;
  }
  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  Value& operator[](size_t i) { return values_[i]; }
  const Value& operator[](size_t i) const { return values_[i]; }
  Value& back() { return values_[size_ - 1]; }
  const Value& back() const { return values_[size_ - 1]; }
  void pop_back() { --size_; }
  void shrink(size_t n) { size_ = n; }

 private:
  void grow();

  std::vector<Value> values_;
  size_t size_ = 0;
};

inline bool is_hashable(const Value& value) {
  switch (value.tag) {
    case Tag::none:
    case Tag::boolean:
    case Tag::integer:
    case Tag::big_integer:
    case Tag::real:
    case Tag::string: return true;
    case Tag::pair:
    case Tag::opaque: return value.flag;
    default: return false;
  }
}

inline uint32_t height_of(const Value& value) {
  switch (value.tag) {
    case Tag::none:
    case Tag::boolean:
    case Tag::integer:
    case Tag::big_integer:
    case Tag::real:
    case Tag::string: return 0;
    case Tag::frame:
    case Tag::pair:
    case Tag::empty_list:
    case Tag::dict: return 1;
    case Tag::stack: return 2;
    default: return value.height;
  }
}

}  // namespace fragdoctor
