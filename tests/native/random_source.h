// Numbers for a generator of cases, drawn from a seed or from the bytes that a fuzzer makes up.
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>

class RandomSource {
 public:
  explicit RandomSource(std::uint64_t seed) : engine_(seed) {}
  RandomSource(const std::uint8_t* bytes, std::size_t n) : bytes_(bytes), n_(n) {}

  // Two of a fuzzer's bytes make a number, spread over 64 bits, so that each generator decision has
  // its own place to mutate. Once the bytes are used up, all further numbers are equal.
  std::uint64_t operator()() {
    if (bytes_ == nullptr) return engine_();
    std::uint64_t x = 0;
    for (int i = 0; i < 2 && at_ < n_; ++i) x = x << 8U | bytes_[at_++];
    x += 0x9E3779B97F4A7C15U;
    x = (x ^ (x >> 30U)) * 0xBF58476D1CE4E5B9U;
    x = (x ^ (x >> 27U)) * 0x94D049BB133111EBU;
    return x ^ (x >> 31U);
  }

  bool is_used_up() const { return bytes_ != nullptr && at_ >= n_; }

 private:
  std::mt19937_64 engine_;
  const std::uint8_t* bytes_ = nullptr;
  std::size_t n_ = 0;
  std::size_t at_ = 0;
};
