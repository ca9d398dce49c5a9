#include "pickle_reader.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "event_reader.h"
#include "little_endian.h"
#include "pickle_opcodes.h"

namespace fragdoctor {

namespace {

class PickleReader {
 public:
  PickleReader(ByteSource& source, const ReadLimits& limits, uint64_t seed)
      : in_(source), fold_(limits, seed), events_(fold_), limits_(limits) {}

  SnapshotTables run() {
    try {
      read_protocol();
      do {
        read_events();
        read_run();
      } while (step());
      return finish();
    } catch (ReadError& error) {
      if (error.offset() == kNoOffset) error.set_offset(at_);
      throw;
    }
  }

 private:
  [[noreturn]] void refuse(const std::string& message) const {
    throw ReadError(ErrorKind::refused, message,
                    "No genuine snapshot is written like this; nothing in it was executed.", at_);
  }

  void need(size_t n) {
    if (!in_.has(n)) truncated();
  }

  [[noreturn]] void truncated() const {
    throw ReadError(ErrorKind::truncated, "The snapshot ends in the middle.",
                    "The process that wrote it was probably killed; record it again.",
                    in_.offset() + in_.n_ready());
  }

  template <size_t n>
  uint64_t take() {
    need(n);
    static_assert(n <= 8 && ByteCursor::kSlack >= 7);  // eight bytes may be read for one
    const uint64_t value = load_64(in_.bytes()) & (UINT64_MAX >> (64 - 8 * n));
    in_.skip(n);
    return value;
  }

  void read_protocol() {
    if (!in_.has(1)) {
      throw ReadError(ErrorKind::not_a_snapshot, "The file is empty.",
                      "Write one with torch.cuda.memory._dump_snapshot(\"snapshot.pickle\").", 0);
    }
    if (in_.bytes()[0] != kProto) {
      step();  // names a global or another forbidden opcode, if it begins with one
      refuse("The pickle does not begin with its protocol; protocols 0 and 1 are not read.");
    }
    in_.skip(1);
    protocol_ = static_cast<int>(take<1>());
    events_.set_protocol(protocol_);
    if (protocol_ < 2 || protocol_ > 5) {
      refuse("The pickle protocol " + std::to_string(protocol_) + " is not known.");
    }
  }

  void read_events() {
    const size_t ready = n_ready_in_frame();
    if (ready == 0 || in_.bytes()[0] != kEmptyDict) return;
    at_ = in_.offset();
    in_.skip_to(events_.read(in_.bytes(), in_.bytes() + ready));
  }

  // Keys and numbers make up most of a file. A run of them is read without checking for the end of
  // the window at each one; anything else is left to step().
  void read_run() {
    constexpr size_t kLongest = 1 + 1 + 8 + ByteCursor::kSlack;  // LONG1 of eight bytes
    const size_t ready = n_ready_in_frame();
    if (ready < kLongest) return;
    const uint8_t* next = in_.bytes();
    const uint8_t* const last = next + (ready - kLongest);
    for (bool goes_on = true; goes_on && next <= last;) {
      size_t n = 0;
      switch (*next) {
        case kBinGet: n = fold_.recall_text(next[1]) ? 2 : 0; break;
        case kLongBinGet: n = fold_.recall_text(load_32(next + 1)) ? 5 : 0; break;
        case kBinInt1:
          fold_.push_integer(next[1]);
          n = 2;
          break;
        case kBinInt2:
          fold_.push_integer(next[1] | next[2] << 8);
          n = 3;
          break;
        case kBinInt:
          fold_.push_integer(static_cast<int32_t>(load_32(next + 1)));
          n = 5;
          break;
        case kLong1:
          if (next[1] > 8) break;
          push_long(next + 2, next[1]);
          n = 2u + next[1];
          break;
        default: break;
      }
      goes_on = n != 0;
      next += n;
    }
    at_ = in_.offset();  // offset of the run, in case a limit is hit in it
    in_.skip_to(next);
  }

  bool step() {
    need(1);
    at_ = in_.offset();
    if (at_ >= frame_end_) leave_frame();
    const uint8_t opcode = in_.bytes()[0];
    in_.skip(1);
    switch (opcode) {
      case kBinGet: fold_.recall(take<1>(), at_); return true;
      case kLongBinGet: fold_.recall(take<4>(), at_); return true;
      case kMemoize:
        require(4, opcode);
        fold_.memoize(fold_.memo_size(), at_);
        return true;
      case kBinPut: fold_.memoize(take<1>(), at_); return true;
      case kLongBinPut: fold_.memoize(take<4>(), at_); return true;
      case kBinInt1: fold_.push_integer(static_cast<int64_t>(take<1>())); return true;
      case kBinInt2: fold_.push_integer(static_cast<int64_t>(take<2>())); return true;
      case kBinInt: fold_.push_integer(static_cast<int32_t>(take<4>())); return true;
      case kLong1: read_long(take<1>()); return true;
      case kLong4: read_long4(); return true;
      case kBinFloat: read_float(); return true;
      case kShortBinUnicode:
        require(4, opcode);
        read_string(take<1>());
        return true;
      case kBinUnicode: read_string(take<4>()); return true;
      case kBinUnicode8:
        require(4, opcode);
        read_string(take<8>());
        return true;
      case kMark: fold_.mark(at_); return true;
      case kSetItems: fold_.set_items(at_); return true;
      case kSetItem: fold_.set_item(at_); return true;
      case kAppends: fold_.append_items(at_); return true;
      case kAppend: fold_.append_item(at_); return true;
      case kTuple2: fold_.make_tuple(2, at_); return true;
      case kTuple1: fold_.make_tuple(1, at_); return true;
      case kTuple3: fold_.make_tuple(3, at_); return true;
      case kEmptyTuple: fold_.make_tuple(0, at_); return true;
      case kTuple: fold_.make_tuple_from_mark(at_); return true;
      case kEmptyDict: fold_.push_dict(); return true;
      case kEmptyList: fold_.push_list(); return true;
      case kNewTrue: fold_.push_bool(true); return true;
      case kNewFalse: fold_.push_bool(false); return true;
      case kNone: fold_.push_none(); return true;
      case kFrame:
        require(4, opcode);
        read_frame();
        return true;
      case kStop: return false;
      default: refuse_opcode(opcode);
    }
  }

  void require(int protocol, uint8_t opcode) const {
    if (protocol_ >= protocol) return;
    refuse("The opcode " + opcode_name(opcode) + " does not belong to pickle protocol " +
           std::to_string(protocol_) + ".");
  }

  void read_long(uint64_t n) {
    need(n);
    push_long(in_.bytes(), n);
    in_.skip(n);
  }

  void push_long(const uint8_t* bytes, size_t n) {
    if (n == 0) return fold_.push_integer(0);
    if (n <= 8) {
      static_assert(ByteCursor::kSlack >= 7);  // eight bytes may be read for one
      return fold_.push_integer(sign_extended(load_64(bytes), n));
    }
    const uint64_t low = load_64(bytes);
    const bool rest_is_zero = std::all_of(bytes + 8, bytes + n, [](uint8_t b) { return b == 0; });
    const bool rest_is_ones =
        std::all_of(bytes + 8, bytes + n, [](uint8_t b) { return b == 0xFF; });
    const bool high_bit = (low >> 63) != 0;
    if (rest_is_zero && high_bit) return fold_.push_large_integer(low);
    if ((rest_is_zero && !high_bit) || (rest_is_ones && high_bit)) {
      return fold_.push_integer(static_cast<int64_t>(low));
    }
    fold_.push_big_integer();
  }

  void read_long4() {
    const auto n = static_cast<int32_t>(take<4>());
    if (n < 0) refuse("An integer has a negative length.");
    auto left = static_cast<size_t>(n);
    if (left <= 255) return read_long(left);
    while (left != 0) {
      const size_t part = std::min(left, ByteCursor::kWindow);
      need(part);
      in_.skip(part);
      left -= part;
    }
    fold_.push_big_integer();
  }

  void read_float() {
    need(8);
    uint64_t bits = 0;
    for (int i = 0; i < 8; ++i) bits = bits << 8 | in_.bytes()[i];
    in_.skip(8);
    double value = 0;
    std::memcpy(&value, &bits, sizeof value);
    fold_.push_real(value);
  }

  void read_string(uint64_t n) {
    if (n > limits_.max_string_bytes) {
      throw ReadError(ErrorKind::limit,
                      "A string says that it is " + std::to_string(n) + " bytes long, more than " +
                          std::to_string(limits_.max_string_bytes) + ".",
                      "Genuine snapshots hold file names and short texts.", at_);
    }
    if (n <= ByteCursor::kWindow) {
      need(n);
      fold_.push_string({reinterpret_cast<const char*>(in_.bytes()), n}, at_);
      in_.skip(n);
      return;
    }
    // Read piece by piece: memory follows the bytes that exist, not the announced length.
    std::string text;
    while (text.size() < n) {
      const size_t part = std::min<size_t>(n - text.size(), ByteCursor::kWindow);
      need(part);
      text.append(reinterpret_cast<const char*>(in_.bytes()), part);
      in_.skip(part);
    }
    fold_.push_string(text, at_);
  }

  void read_frame() {
    const uint64_t length = take<8>();
    if (frame_end_ != kNoFrame) refuse("A frame begins inside another frame.");
    if (length > UINT64_MAX / 2 - in_.offset()) refuse("The length of a frame is impossible.");
    frame_end_ = in_.offset() + length;
  }

  // The ready bytes that belong to the current frame: a run ends where its frame does.
  size_t n_ready_in_frame() const {
    const uint64_t at = in_.offset();
    return at < frame_end_ ? std::min<uint64_t>(in_.n_ready(), frame_end_ - at) : 0;
  }

  // Out of line: its throwing code would keep step() from being inlined into the loop.
  [[gnu::noinline]] void leave_frame() {
    if (at_ > frame_end_) refuse("A value goes beyond the end of its frame.");
    frame_end_ = kNoFrame;
  }

  [[noreturn]] void refuse_opcode(uint8_t opcode) {
    std::string name = opcode_name(opcode);
    const std::string global = names_global(opcode) ? global_name(opcode) : "";
    if (!global.empty())
      refuse("The pickle names the global " + global + " (" + name +
             "): refused, nothing was executed.");
    if (name.empty()) refuse("The byte " + std::to_string(opcode) + " is not a pickle opcode.");
    refuse("The pickle holds the opcode " + name + ", which no snapshot needs: refused.");
  }

  // "module.name" of the global that is about to be named; "" if that cannot be determined.
  std::string global_name(uint8_t opcode) {
    std::string name;
    if (opcode == kStackGlobal) {
      name = fold_.top_strings();
    } else {
      constexpr size_t kLongest = 160;
      in_.has(kLongest);
      const uint8_t* bytes = in_.bytes();
      int n_lines = 0;
      for (size_t i = 0; i < std::min(in_.n_ready(), kLongest) && n_lines < 2; ++i) {
        if (bytes[i] == '\n') {
          if (++n_lines == 1) name += '.';
        } else {
          name += static_cast<char>(bytes[i]);
        }
      }
      if (n_lines < 2) return "";
    }
    if (name.size() > 80) name.resize(80);
    for (char& c : name) {
      if (c < 0x20 || c > 0x7E) c = '?';
    }
    return name;
  }

  SnapshotTables finish() {
    if (frame_end_ != kNoFrame && frame_end_ > in_.offset()) {
      refuse("The last frame is longer than the pickle.");
    }
    SnapshotTables tables = fold_.finish(at_);
    tables.protocol = protocol_;
    tables.n_bytes = in_.offset();
    tables.has_trailing_bytes = in_.has(1);
    if (tables.writer.empty()) tables.writer = protocol_ == 2 ? "c++" : "python";
    return tables;
  }

  ByteCursor in_;
  SchemaFold fold_;
  EventReader events_;
  ReadLimits limits_;
  int protocol_ = 0;
  uint64_t at_ = 0;  // offset of the current opcode
  static constexpr uint64_t kNoFrame = UINT64_MAX;
  uint64_t frame_end_ = kNoFrame;
};

}  // namespace

SnapshotTables read_pickle(ByteSource& source, const ReadLimits& limits, uint64_t seed) {
  return PickleReader(source, limits, seed).run();
}

}  // namespace fragdoctor
