// Growing columns and hash-consing tables of the snapshot reader.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string_view>
#include <type_traits>
#include <utility>

namespace fragdoctor {

// A growing array of plain values whose buffer can be handed over (to numpy) without a copy.
// It grows by realloc: for large buffers the C library moves pages instead of copying them, so
// growing needs no second copy in memory, and space that was never touched costs nothing.
template <class T>
class Column {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  Column() = default;
  Column(const Column&) = delete;
  Column& operator=(const Column&) = delete;
  Column(Column&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)),
        size_(std::exchange(other.size_, 0)),
        room_(std::exchange(other.room_, 0)) {}
  Column& operator=(Column&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    std::swap(room_, other.room_);
    return *this;
  }
  ~Column() { std::free(data_); }

  void push_back(T value) {
    if (size_ == room_) reserve(room_ == 0 ? 64 : room_ + room_ / 2);
    data_[size_++] = value;
  }
  // There must be room for it.
  void push_back_unchecked(T value) { data_[size_++] = value; }
  // The source must not lie in this column.
  void append(const T* values, size_t n) {
    if (n == 0) return;
    if (size_ + n > room_) {
      const size_t half_more = room_ + room_ / 2;
      reserve(size_ + n > half_more ? size_ + n : half_more);
    }
    std::memcpy(data_ + size_, values, n * sizeof(T));
    size_ += n;
  }
  void assign(size_t n, T value) {
    size_ = 0;
    if (n > room_) reserve(n);
    for (size_t i = 0; i < n; ++i) data_[i] = value;
    size_ = n;
  }
  void truncate(size_t n) noexcept {
    if (n < size_) size_ = n;
  }
  void shrink_to_fit() noexcept {
    if (size_ == 0 || size_ == room_) return;
    if (void* smaller = std::realloc(data_, size_ * sizeof(T))) {
      data_ = static_cast<T*>(smaller);
      room_ = size_;
    }
  }
  // Gives the buffer away; the caller must release it with std::free. Null for an empty column.
  T* release() noexcept {
    size_ = room_ = 0;
    return std::exchange(data_, nullptr);
  }

  size_t size() const noexcept { return size_; }
  bool empty() const noexcept { return size_ == 0; }
  const T* data() const noexcept { return data_; }
  T& operator[](size_t i) noexcept { return data_[i]; }
  const T& operator[](size_t i) const noexcept { return data_[i]; }
  T& back() noexcept { return data_[size_ - 1]; }
  void pop_back() noexcept { --size_; }

  // Makes room for n values in total.
  void reserve(size_t n) {
    if (n <= room_) return;
    if (n > SIZE_MAX / 2 / sizeof(T)) throw std::bad_alloc();
    void* larger = std::realloc(data_, n * sizeof(T));
    if (larger == nullptr) throw std::bad_alloc();
    data_ = static_cast<T*>(larger);
    room_ = n;
  }

 private:
  T* data_ = nullptr;
  size_t size_ = 0;
  size_t room_ = 0;
};

// A column of what many files say the same everywhere: one value as long as all are equal.
template <class T>
class RepeatedColumn {
 public:
  void push_back(T value) {
    if (values_.size() != 1 || values_[0] != value) {
      if (values_.size() < size_) values_.assign(size_, T{values_[0]});
      values_.push_back(value);
    }
    ++size_;
  }
  // Of `size` values: one, or all.
  Column<T>& values() noexcept { return values_; }
  const Column<T>& values() const noexcept { return values_; }
  void resize(size_t n) noexcept {
    size_ = n;
    values_.truncate(n);
  }
  size_t size() const noexcept { return size_; }
  bool is_spread() const noexcept { return values_.size() == size_; }
  const T& operator[](size_t i) const noexcept { return values_[is_spread() ? i : 0]; }

 private:
  Column<T> values_;
  size_t size_ = 0;
};

// Seeded, because whoever writes the file must not be able to choose colliding keys.
inline uint64_t mix(uint64_t a, uint64_t b) noexcept {
  a ^= b * 0x9E3779B97F4A7C15ULL;
  a ^= a >> 32;
  a *= 0xD6E8FEB86659FD93ULL;
  a ^= a >> 32;
  a *= 0xD6E8FEB86659FD93ULL;
  return a ^ (a >> 32);
}

inline uint64_t hash_bytes(const void* bytes, size_t n, uint64_t seed) noexcept {
  const auto* p = static_cast<const unsigned char*>(bytes);
  uint64_t h = mix(seed, n);
  for (; n >= 8; p += 8, n -= 8) {
    uint64_t word = 0;
    std::memcpy(&word, p, 8);
    h = mix(h ^ seed, word);
  }
  uint64_t tail = 0;
  if (n > 0) std::memcpy(&tail, p, n);
  return mix(h ^ seed, tail);
}

// An open-addressing index of IDs 0, 1, 2, ... whose keys are stored elsewhere.
class HashIndex {
 public:
  // Returns the ID for which equal(id) holds, or next_id, which is then remembered.
  template <class Equal>
  uint32_t find_or_add(uint64_t hash, uint32_t next_id, Equal equal) {
    if ((n_used_ + 1) * 4 > slots_.size() * 3) grow();
    const auto short_hash = static_cast<uint32_t>(hash >> 32);
    const size_t mask = slots_.size() - 1;
    for (size_t i = short_hash & mask;; i = (i + 1) & mask) {
      Slot& slot = slots_[i];
      if (slot.id_plus_1 == 0) {
        slot = {short_hash, next_id + 1};
        ++n_used_;
        return next_id;
      }
      if (slot.hash == short_hash && equal(slot.id_plus_1 - 1)) return slot.id_plus_1 - 1;
    }
  }

 private:
  struct Slot {
    uint32_t hash;
    uint32_t id_plus_1;
  };
  void grow() {
    Column<Slot> old = std::move(slots_);
    slots_ = Column<Slot>();
    slots_.assign(old.empty() ? 256 : old.size() * 2, Slot{0, 0});
    const size_t mask = slots_.size() - 1;
    for (size_t j = 0; j < old.size(); ++j) {
      if (old[j].id_plus_1 == 0) continue;
      size_t i = old[j].hash & mask;
      while (slots_[i].id_plus_1 != 0) i = (i + 1) & mask;
      slots_[i] = old[j];
    }
  }

  Column<Slot> slots_;
  size_t n_used_ = 0;
};

// Distinct byte strings, or distinct lists of IDs, stored end to end.
template <class T>
class SpanTable {
 public:
  explicit SpanTable(uint64_t seed) : seed_(seed) { offsets_.push_back(0); }

  uint32_t intern(const T* values, size_t n) {
    const auto next = static_cast<uint32_t>(size());
    const uint64_t hash = hash_bytes(values, n * sizeof(T), seed_);
    const uint32_t id = index_.find_or_add(hash, next, [&](uint32_t other) {
      const uint64_t low = offsets_[other];
      return offsets_[other + 1] - low == n &&
             (n == 0 || std::memcmp(values_.data() + low, values, n * sizeof(T)) == 0);
    });
    if (id == next) {
      values_.append(values, n);
      offsets_.push_back(values_.size());
    }
    return id;
  }
  size_t size() const noexcept { return offsets_.size() - 1; }
  const T* begin_of(uint32_t id) const noexcept { return values_.data() + offsets_[id]; }
  size_t length_of(uint32_t id) const noexcept {
    return static_cast<size_t>(offsets_[id + 1] - offsets_[id]);
  }

 private:
  uint64_t seed_;
  HashIndex index_;
  Column<T> values_;
  Column<uint64_t> offsets_;
};

// Distinct plain records without padding.
template <class T>
class RecordTable {
  static_assert(std::has_unique_object_representations_v<T>);

 public:
  explicit RecordTable(uint64_t seed) : seed_(seed) {}

  uint32_t intern(const T& record) {
    const auto next = static_cast<uint32_t>(rows_.size());
    const uint32_t id = index_.find_or_add(
        hash_bytes(&record, sizeof(T), seed_), next,
        [&](uint32_t other) { return std::memcmp(&rows_[other], &record, sizeof(T)) == 0; });
    if (id == next) rows_.push_back(record);
    return id;
  }
  size_t size() const noexcept { return rows_.size(); }
  const T& operator[](uint32_t id) const noexcept { return rows_[id]; }

 private:
  uint64_t seed_;
  HashIndex index_;
  Column<T> rows_;
};

}  // namespace fragdoctor
