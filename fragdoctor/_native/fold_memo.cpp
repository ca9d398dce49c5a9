// Interned texts, pairs and stacks, and the pickle's memo, which refers to them.
#include <string>

#include "schema_fold.h"
#include "utf8.h"

namespace fragdoctor {

void SchemaFold::too_many_values() {
  throw ReadError(ErrorKind::limit, "The file holds more than 536,870,911 values of one kind.", "",
                  kNoOffset);
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
    case Utf8::valid: id = intern_text(utf8, offset); break;
    case Utf8::lone_surrogates:
      ++n_replaced_strings_;
      id = intern_text(replace_surrogates(utf8), offset);
      break;
    case Utf8::invalid: refuse("A string is not valid UTF-8.", offset);
  }
  push_tag(Tag::string).id = id;
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
    case Tag::none:
    case Tag::boolean:
    case Tag::integer:
    case Tag::big_integer:
    case Tag::real: refuse("A number is put into the memo.", offset);
    case Tag::list:
    case Tag::dict:
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
  if (index >= memo_.size())
    refuse("The memo is asked for an entry that it does not have.", offset);
  uint32_t entry = memo_[index];
  if (static_cast<MemoTag>(entry >> kMemoShift) == MemoTag::open) {
    // A container right below a mark is being filled. Any other is finished: filling it later after
    // all would be refused as an extension after use.
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
