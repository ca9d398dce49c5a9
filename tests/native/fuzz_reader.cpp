// Corrupts snapshot files at random and reads them. Run it under ASan and UBSan:
//   fuzz_reader COUNT SEED FILE...
// The same count, seed and files give the same corruptions. It fails if anything but a ReadError
// comes out, or if the process grows beyond kMostKilobytes; the sanitizers end it on anything worse.
#include <sys/resource.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "json_reader.h"
#include "pickle_opcodes.h"
#include "pickle_reader.h"

namespace {

using Bytes = std::vector<uint8_t>;
constexpr long kMostKilobytes = 1536 * 1024;  // sanitizers keep freed memory aside for a while

class MemorySource : public fragdoctor::ByteSource {
 public:
  // Hands out pieces of odd sizes, so that opcodes fall across the edges of the window.
  MemorySource(const Bytes& bytes, size_t piece) : bytes_(bytes), piece_(piece) {}

  size_t read(uint8_t* into, size_t room) override {
    const size_t n = std::min({room, piece_, bytes_.size() - at_});
    if (n != 0) std::memcpy(into, bytes_.data() + at_, n);
    at_ += n;
    return n;
  }

 private:
  const Bytes& bytes_;
  size_t piece_;
  size_t at_ = 0;
};

class Corruptor {
 public:
  explicit Corruptor(uint64_t seed) : random_(seed) {}

  size_t below(size_t n) { return n == 0 ? 0 : static_cast<size_t>(random_() % n); }

  Bytes corrupt(const Bytes& from) {
    Bytes out = from;
    const size_t n_changes = 1 + below(6);
    for (size_t i = 0; i < n_changes; ++i) change(out);
    return out;
  }

 private:
  void change(Bytes& bytes) {
    if (bytes.size() < 4) return;
    const size_t at = below(bytes.size());
    const auto where = bytes.begin() + static_cast<ptrdiff_t>(at);
    const size_t n = std::min<size_t>(1 + below(32), bytes.size() - at);
    const auto end = where + static_cast<ptrdiff_t>(n);
    switch (below(9)) {
      case 0: bytes[at] = static_cast<uint8_t>(random_()); break;
      case 1: bytes[at] ^= static_cast<uint8_t>(1u << below(8)); break;
      case 2: bytes[at] = fragdoctor::kOpcodeNames[below(std::size(fragdoctor::kOpcodeNames))].code;
        break;
      case 3: bytes.erase(where, end); break;
      case 4: {
        const Bytes copy(where, end);
        bytes.insert(bytes.begin() + static_cast<ptrdiff_t>(below(bytes.size())), copy.begin(),
                     copy.end());
        break;
      }
      case 5: bytes.resize(at); break;
      case 6: for (size_t i = 0; i < std::min<size_t>(n, 8); ++i) bytes[at + i] = 0xFF; break;
      case 7: {
        const size_t other = below(bytes.size() - n + 1);
        const Bytes copy(where, end);
        std::copy(copy.begin(), copy.end(), bytes.begin() + static_cast<ptrdiff_t>(other));
        break;
      }
      default: {
        const uint8_t allowed[] = "}](uase.\x94hjKMJ\x8a\x8cX\x88\x89N\x85\x86\x87)tqr";
        bytes.insert(where, allowed[below(sizeof allowed - 1)]);
      }
    }
  }

  std::mt19937_64 random_;
};

const char* outcome(const Bytes& bytes, size_t piece, bool is_json) {
  MemorySource source(bytes, piece);
  try {
    const auto tables = is_json ? fragdoctor::read_json(source, {}, 1)
                                : fragdoctor::read_pickle(source, {}, 1);
    return tables.event_offsets.size() == 0 ? "impossible" : "read";
  } catch (const fragdoctor::ReadError& error) {
    if (error.message().empty() || error.offset() == fragdoctor::kNoOffset) return "impossible";
    switch (error.kind()) {
      case fragdoctor::ErrorKind::not_a_snapshot: return "not a snapshot";
      case fragdoctor::ErrorKind::truncated: return "truncated";
      case fragdoctor::ErrorKind::refused: return "refused";
      default: return "limit";
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) {
    std::fprintf(stderr, "usage: fuzz_reader COUNT SEED FILE...\n");
    return 2;
  }
  const size_t count = std::strtoull(argv[1], nullptr, 10);
  Corruptor corruptor(std::strtoull(argv[2], nullptr, 10));
  std::vector<Bytes> files;
  for (int i = 3; i < argc; ++i) {
    std::ifstream file(argv[i], std::ios::binary);
    files.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
    const bool is_json = !files.back().empty() && files.back()[0] == '{';
    if (std::strcmp(outcome(files.back(), 1 << 16, is_json), "read") != 0) {
      std::fprintf(stderr, "%s cannot be read as it is\n", argv[i]);
      return 1;
    }
  }
  const char* names[] = {"read", "not a snapshot", "truncated", "refused", "limit", "impossible"};
  size_t counts[std::size(names)] = {};
  for (size_t i = 0; i < count; ++i) {
    const Bytes& file = files[i % files.size()];
    const Bytes bytes = corruptor.corrupt(file);
    const size_t piece = 1 + corruptor.below(2) * corruptor.below(4096) + corruptor.below(64);
    const char* name = outcome(bytes, piece, file[0] == '{');
    for (size_t j = 0; j < std::size(names); ++j) {
      if (std::strcmp(name, names[j]) == 0) ++counts[j];
    }
  }
  for (size_t j = 0; j < std::size(names); ++j) std::printf("%s: %zu\n", names[j], counts[j]);
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  std::printf("peak: %ld KiB\n", usage.ru_maxrss);
  return counts[std::size(names) - 1] == 0 && usage.ru_maxrss < kMostKilobytes ? 0 : 1;
}
