#include "json_reader.h"

#include <cmath>
#include <cstdlib>
#include <string>
#include <vector>

namespace fragdoctor {

namespace {

constexpr size_t kBatch = 1000;        // items are stored in batches, as the pickle module does
constexpr size_t kLongestNumber = 64;  // no writer comes close; a double needs 25 characters

class JsonReader {
 public:
  JsonReader(ByteSource& source, const ReadLimits& limits, uint64_t seed)
      : in_(source), fold_(limits, seed), limits_(limits) {}

  SnapshotTables run() {
    try {
      if (in_.has(3) && in_.bytes()[0] == 0xEF && in_.bytes()[1] == 0xBB &&
          in_.bytes()[2] == 0xBF) {
        in_.skip(3);
      }
      value();
      while (!open_.empty()) next();
      const uint64_t end = in_.offset();
      skip_space();
      if (in_.has(1)) refuse("Something follows after the end of the JSON value.");
      SnapshotTables tables = fold_.finish(end);
      tables.n_bytes = in_.offset();
      tables.writer.clear();
      return tables;
    } catch (ReadError& error) {
      if (error.offset() == kNoOffset) error.set_offset(at_);
      throw;
    }
  }

 private:
  struct Open {
    bool is_dict;
    size_t n_items;  // items of this batch
    bool is_first;
  };

  [[noreturn]] void refuse(const char* message) const {
    throw ReadError(ErrorKind::refused, message, "The file is damaged or no JSON.", at_);
  }

  uint8_t take() {
    if (!in_.has(1)) {
      throw ReadError(ErrorKind::truncated, "The snapshot ends in the middle.",
                      "The process that wrote it was probably killed; record it again.",
                      in_.offset());
    }
    const uint8_t byte = in_.bytes()[0];
    in_.skip(1);
    return byte;
  }

  void skip_space() {
    while (in_.has(1)) {
      const uint8_t byte = in_.bytes()[0];
      if (byte != ' ' && byte != '\n' && byte != '\r' && byte != '\t') break;
      in_.skip(1);
    }
    at_ = in_.offset();
  }

  // Continues the innermost open container by one item, or closes it.
  void next() {
    skip_space();
    uint8_t byte = take();
    Open& top = open_.back();
    const uint8_t closing = top.is_dict ? '}' : ']';
    if (byte == closing) return close();
    if (!top.is_first) {
      if (byte != ',') refuse("A comma or the end of a container is missing.");
      skip_space();
      byte = take();
    }
    top.is_first = false;
    if (++top.n_items > kBatch) {
      flush();
      fold_.mark(at_);
      top.n_items = 1;
    }
    if (top.is_dict) {
      if (byte != '"') refuse("A key of a dict is not a string.");
      string();
      skip_space();
      if (take() != ':') refuse("A key of a dict has no value.");
      value();
    } else {
      value_from(byte);
    }
  }

  void flush() {
    if (open_.back().is_dict) {
      fold_.set_items(at_);
    } else {
      fold_.append_items(at_);
    }
  }

  void close() {
    flush();
    open_.pop_back();
  }

  void value() {
    skip_space();
    value_from(take());
  }

  void value_from(uint8_t byte) {
    switch (byte) {
      case '{':
      case '[':
        if (byte == '{') {
          fold_.push_dict();
        } else {
          fold_.push_list();
        }
        fold_.mark(at_);
        open_.push_back({byte == '{', 0, true});
        return;
      case '"': return string();
      case 't': word("rue"); return fold_.push_bool(true);
      case 'f': word("alse"); return fold_.push_bool(false);
      case 'n': word("ull"); return fold_.push_none();
      default: return number(byte);
    }
  }

  void word(const char* rest) {
    for (; *rest != '\0'; ++rest) {
      if (take() != static_cast<uint8_t>(*rest)) refuse("A word is neither true, false nor null.");
    }
  }

  static bool is_digit(char c) { return c >= '0' && c <= '9'; }

  void number(uint8_t first) {
    std::string text(1, static_cast<char>(first));
    while (in_.has(1)) {
      const char c = static_cast<char>(in_.bytes()[0]);
      if (!is_digit(c) && c != '.' && c != 'e' && c != 'E' && c != '+' && c != '-') break;
      if (text.size() == kLongestNumber) refuse("A number is more than 64 characters long.");
      text += c;
      in_.skip(1);
    }
    if (!open_.empty() && !in_.has(1)) take();  // cut short: no container ends with a number
    const size_t start = text[0] == '-' ? 1 : 0;
    size_t end = start;
    while (end < text.size() && is_digit(text[end])) ++end;
    if (end == start || (text[start] == '0' && end - start > 1)) {
      refuse("Something is no JSON value (NaN and Infinity are none).");
    }
    if (end == text.size()) return integer(text, start);
    char* parsed_to = nullptr;
    const double real = std::strtod(text.c_str(), &parsed_to);
    if (*parsed_to != '\0' || text.back() == '.' ||
        (text[end] == '.' && !is_digit(text[end + 1])) || !std::isfinite(real)) {
      refuse("A number is malformed or too large.");
    }
    fold_.push_real(real);
  }

  void integer(const std::string& text, size_t start) {
    uint64_t value = 0;
    for (size_t i = start; i < text.size(); ++i) {
      const auto digit = static_cast<uint64_t>(text[i] - '0');
      if (value > (UINT64_MAX - digit) / 10) return fold_.push_big_integer();
      value = value * 10 + digit;
    }
    constexpr uint64_t kTop = uint64_t{1} << 63;
    if (start == 1) {
      if (value > kTop) return fold_.push_big_integer();
      return fold_.push_integer(static_cast<int64_t>(uint64_t{0} - value));
    }
    if (value >= kTop) return fold_.push_large_integer(value);
    fold_.push_integer(static_cast<int64_t>(value));
  }

  void string() {
    const uint64_t start = in_.offset();
    std::string text;
    for (uint8_t byte = take(); byte != '"'; byte = take()) {
      if (byte < 0x20) refuse("A string holds a raw control character.");
      if (byte == '\\') {
        escape(text);
      } else {
        text += static_cast<char>(byte);
      }
      if (text.size() > limits_.max_string_bytes) {
        throw ReadError(
            ErrorKind::limit,
            "A string is longer than " + std::to_string(limits_.max_string_bytes) + " bytes.",
            "Genuine snapshots hold file names and short texts.", start);
      }
    }
    fold_.push_string(text, start);
  }

  void escape(std::string& text) {
    switch (take()) {
      case '"': text += '"'; return;
      case '\\': text += '\\'; return;
      case '/': text += '/'; return;
      case 'b': text += '\b'; return;
      case 'f': text += '\f'; return;
      case 'n': text += '\n'; return;
      case 'r': text += '\r'; return;
      case 't': text += '\t'; return;
      case 'u': return code_point(text);
      default: refuse("A string holds an unknown escape.");
    }
  }

  uint32_t four_digits() {
    uint32_t value = 0;
    for (int i = 0; i < 4; ++i) {
      const uint8_t c = take();
      uint32_t digit = 0;
      if (c >= '0' && c <= '9') digit = c - uint32_t{'0'};
      else if (c >= 'a' && c <= 'f') digit = c - uint32_t{'a'} + 10;
      else if (c >= 'A' && c <= 'F') digit = c - uint32_t{'A'} + 10;
      else refuse("A string holds a malformed escape.");
      value = value * 16 + digit;
    }
    return value;
  }

  // A lone surrogate is passed on as its three bytes; the fold turns it into U+FFFD and counts it.
  void code_point(std::string& text) {
    uint32_t point = four_digits();
    if (point >= 0xD800 && point < 0xDC00 && in_.has(6) && in_.bytes()[0] == '\\' &&
        in_.bytes()[1] == 'u' && (in_.bytes()[2] == 'd' || in_.bytes()[2] == 'D') &&
        std::string("cdefCDEF").find(static_cast<char>(in_.bytes()[3])) != std::string::npos) {
      in_.skip(2);
      point = 0x10000 + ((point - 0xD800) << 10) + (four_digits() - 0xDC00);
    }
    const auto put = [&text](uint32_t byte) { text += static_cast<char>(byte); };
    if (point < 0x80) {
      put(point);
    } else if (point < 0x800) {
      put(0xC0 | point >> 6);
      put(0x80 | (point & 0x3F));
    } else if (point < 0x10000) {
      put(0xE0 | point >> 12);
      put(0x80 | (point >> 6 & 0x3F));
      put(0x80 | (point & 0x3F));
    } else {
      put(0xF0 | point >> 18);
      put(0x80 | (point >> 12 & 0x3F));
      put(0x80 | (point >> 6 & 0x3F));
      put(0x80 | (point & 0x3F));
    }
  }

  ByteCursor in_;
  SchemaFold fold_;
  ReadLimits limits_;
  std::vector<Open> open_;
  uint64_t at_ = 0;  // offset of the current token
};

}  // namespace

SnapshotTables read_json(ByteSource& source, const ReadLimits& limits, uint64_t seed) {
  return JsonReader(source, limits, seed).run();
}

}  // namespace fragdoctor
