#include <cstring>

#include "pickle_reader.h"

namespace fragdoctor {

ByteCursor::ByteCursor(ByteSource& source)
    : source_(source),
      buffer_(kWindow + kSlack),
      next_(buffer_.data()),
      end_(buffer_.data()),
      base_(uint64_t{0} - reinterpret_cast<uintptr_t>(buffer_.data())) {}

bool ByteCursor::refill(size_t n) {
  auto left = static_cast<size_t>(end_ - next_);
  base_ += static_cast<uint64_t>(next_ - buffer_.data());  // what moves to the front
  if (left != 0) std::memmove(buffer_.data(), next_, left);
  while (left < n && !at_end_) {
    const size_t got = source_.read(buffer_.data() + left, kWindow - left);
    at_end_ = got == 0;
    left += got;
  }
  next_ = buffer_.data();
  end_ = next_ + left;
  return left >= n;
}

}  // namespace fragdoctor
