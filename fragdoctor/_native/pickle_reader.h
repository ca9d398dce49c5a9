// Reads a pickled memory snapshot by an allowlist of opcodes. Nothing is ever executed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "schema_fold.h"

namespace fragdoctor {

// Where the bytes come from: fills at most `room` bytes and returns how many; 0 means the end.
class ByteSource {
 public:
  virtual ~ByteSource() = default;
  virtual size_t read(uint8_t* into, size_t room) = 0;
};

// Throws ReadError. `seed` keys the hash tables; use a random one for files from strangers.
SnapshotTables read_pickle(ByteSource& source, const ReadLimits& limits, uint64_t seed);

// A bounded window over a ByteSource, shared by the readers.
class ByteCursor {
 public:
  explicit ByteCursor(ByteSource& source);

  uint64_t offset() const { return base_ + reinterpret_cast<uintptr_t>(next_); }
  bool has(size_t n) { return static_cast<size_t>(end_ - next_) >= n || refill(n); }
  // Valid for n bytes after has(n); n must be at most kWindow. kSlack more may be read, as junk.
  const uint8_t* bytes() const { return next_; }
  void skip(size_t n) { next_ += n; }
  void skip_to(const uint8_t* next) { next_ = next; }  // must be within the ready bytes
  size_t n_ready() const { return static_cast<size_t>(end_ - next_); }

  static constexpr size_t kWindow = size_t{1} << 18;
  static constexpr size_t kSlack = 8;

 private:
  bool refill(size_t n);

  ByteSource& source_;
  std::unique_ptr<uint8_t[]> buffer_;  // not cleared: most files are smaller
  const uint8_t* next_;
  const uint8_t* end_;
  uint64_t base_;  // offset in the file minus address in the window, modulo 2^64
  bool at_end_ = false;
};

}  // namespace fragdoctor
