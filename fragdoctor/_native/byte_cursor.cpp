#include <cstring>

#include "pickle_reader.h"

namespace fragdoctor {

ByteCursor::ByteCursor(ByteSource& source)
    : source_(source),
      buffer_(new uint8_t[kWindow + kSlack]),
      next_(buffer_.get()),
      end_(buffer_.get()),
      base_(uint64_t{0} - reinterpret_cast<uintptr_t>(buffer_.get())) {}

bool ByteCursor::refill(size_t n) {
  auto left = static_cast<size_t>(end_ - next_);
  base_ += static_cast<uint64_t>(next_ - buffer_.get());  // the bytes that move to the front
  if (left != 0) std::memmove(buffer_.get(), next_, left);
  while (left < n && !at_end_) {
    const size_t got = source_.read(buffer_.get() + left, kWindow - left);
    at_end_ = got == 0;
    left += got;
  }
  next_ = buffer_.get();
  end_ = next_ + left;
  return left >= n;
}

}  // namespace fragdoctor
