// The only error type of the snapshot reader. bind_pickle_reader.cpp turns it into Python's errors.
#pragma once

#include <cstdint>
#include <exception>
#include <string>
#include <utility>

namespace fragdoctor {

constexpr uint64_t kNoOffset = UINT64_MAX;

enum class ErrorKind : uint8_t { not_a_snapshot, truncated, refused, limit };

class ReadError : public std::exception {
 public:
  ReadError(ErrorKind kind, std::string message, std::string hint, uint64_t offset)
      : kind_(kind), message_(std::move(message)), hint_(std::move(hint)), offset_(offset) {}

  ErrorKind kind() const noexcept { return kind_; }
  const std::string& message() const noexcept { return message_; }
  const std::string& hint() const noexcept { return hint_; }
  uint64_t offset() const noexcept { return offset_; }
  void set_offset(uint64_t offset) noexcept { offset_ = offset; }
  const char* what() const noexcept override { return message_.c_str(); }

 private:
  ErrorKind kind_;
  std::string message_;
  std::string hint_;
  uint64_t offset_;
};

[[noreturn]] inline void refuse(const char* message, uint64_t offset) {
  throw ReadError(ErrorKind::refused, message,
                  "No genuine snapshot is written like this; nothing in it was executed.", offset);
}

}  // namespace fragdoctor
