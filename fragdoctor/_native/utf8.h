// UTF-8 as read by Python's "surrogatepass": lone surrogates are legal in odd file names.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace fragdoctor {

enum class Utf8 : uint8_t { valid, lone_surrogates, invalid };

inline bool is_continuation(unsigned char byte) { return (byte & 0xC0) == 0x80; }

inline Utf8 check_utf8(std::string_view text) {
  const auto* p = reinterpret_cast<const unsigned char*>(text.data());
  const auto* end = p + text.size();
  bool has_surrogates = false;
  while (p != end) {
    const unsigned char lead = *p++;
    if (lead < 0x80) continue;
    const auto left = static_cast<size_t>(end - p);
    if (lead >= 0xC2 && lead <= 0xDF) {
      if (left < 1 || !is_continuation(p[0])) return Utf8::invalid;
      p += 1;
    } else if (lead >= 0xE0 && lead <= 0xEF) {
      if (left < 2 || !is_continuation(p[0]) || !is_continuation(p[1])) return Utf8::invalid;
      if (lead == 0xE0 && p[0] < 0xA0) return Utf8::invalid;
      if (lead == 0xED && p[0] >= 0xA0) has_surrogates = true;
      p += 2;
    } else if (lead >= 0xF0 && lead <= 0xF4) {
      if (left < 3 || !is_continuation(p[0]) || !is_continuation(p[1]) || !is_continuation(p[2])) {
        return Utf8::invalid;
      }
      if ((lead == 0xF0 && p[0] < 0x90) || (lead == 0xF4 && p[0] > 0x8F)) return Utf8::invalid;
      p += 3;
    } else {
      return Utf8::invalid;
    }
  }
  return has_surrogates ? Utf8::lone_surrogates : Utf8::valid;
}

// Replaces every surrogate with U+FFFD, which also takes three bytes. The text must not be invalid.
inline std::string replace_surrogates(std::string_view text) {
  std::string out(text);
  for (size_t i = 0; i + 2 < out.size(); ++i) {
    if (static_cast<unsigned char>(out[i]) == 0xED &&
        static_cast<unsigned char>(out[i + 1]) >= 0xA0) {
      out[i] = static_cast<char>(0xEF);
      out[i + 1] = static_cast<char>(0xBF);
      out[i + 2] = static_cast<char>(0xBD);
      i += 2;
    }
  }
  return out;
}

}  // namespace fragdoctor
