// Corrupts snapshot files at random and reads them. Run it under ASan and UBSan:
//   fuzz_reader [COUNT [SEED FILE...]]       (tools/fuzz.py makes a libFuzzer target of it)
// The same count, seed and files give the same corruptions. Every file is read twice: in large
// pieces, and in pieces so small that the shortcut for plain events (EventReader) never applies.
// Both must give the same result, down to the offset of an error and the last column. It fails if
// they do not, if anything but a ReadError comes out, or if the process grows beyond
// kMostKilobytes; the sanitizers end it on anything worse.
#include <sys/resource.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "json_reader.h"
#include "pickle_opcodes.h"
#include "pickle_reader.h"

// Keep less freed memory, and shorter allocation stacks: half the time, a tenth of the memory.
extern "C" const char* __asan_default_options() {
  return "quarantine_size_mb=16:malloc_context_size=3";
}

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
      case 2:
        bytes[at] = fragdoctor::kOpcodeNames[below(std::size(fragdoctor::kOpcodeNames))].code;
        break;
      case 3: bytes.erase(where, end); break;
      case 4: {
        const Bytes copy(where, end);
        bytes.insert(bytes.begin() + static_cast<ptrdiff_t>(below(bytes.size())), copy.begin(),
                     copy.end());
        break;
      }
      case 5: bytes.resize(at); break;
      case 6:
        for (size_t i = 0; i < std::min<size_t>(n, 8); ++i) bytes[at + i] = 0xFF;
        break;
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

// The result of a file: its kind in kOutcomes, and a text that distinguishes results.
struct Outcome {
  const char* name;
  std::string details;
};

constexpr const char* kOutcomes[] = {"read", "not a snapshot", "truncated", "refused", "limit"};

class Digest {
 public:
  void add(const void* bytes, size_t n) {
    hash_ = fragdoctor::hash_bytes(bytes, n, fragdoctor::mix(hash_, n));
  }
  template <class T>
  void add(const fragdoctor::Column<T>& column) {
    if (!column.empty()) add(column.data(), column.size() * sizeof(T));
  }
  void add(const std::string& text) { add(text.data(), text.size()); }
  std::string text() const { return std::to_string(hash_); }

 private:
  uint64_t hash_ = 1;
};

std::string digest(const fragdoctor::SnapshotTables& t) {
  Digest all;
  for (const std::string& text : t.strings) all.add(text);
  all.add(t.frame_filename);
  all.add(t.frame_name);
  all.add(t.frame_line);
  all.add(t.stack_offsets);
  all.add(t.stack_frames);
  all.add(t.streams);
  all.add(t.pools);
  all.add(t.segments.address);
  all.add(t.segments.stack);
  all.add(t.segments.pool);
  all.add(t.segments.block_offsets);
  all.add(t.blocks.address);
  all.add(t.blocks.requested_bytes);
  all.add(t.blocks.state);
  all.add(t.blocks.stack);
  all.add(t.events.action);
  all.add(t.events.address);
  all.add(t.events.size_bytes);
  all.add(t.events.stream);
  all.add(t.events.time_us);
  all.add(t.events.stack);
  all.add(t.events.pool);
  all.add(t.events.compile_context.values());
  all.add(t.events.user_metadata.values());
  all.add(t.event_offsets);
  all.add(t.oom_rows);
  all.add(t.annotations.time_us);
  for (const auto& [name, times] : t.unknown_keys) all.add(name + ' ' + std::to_string(times));
  for (const auto& [name, times] : t.unknown_values) all.add(name + ' ' + std::to_string(times));
  all.add(t.keys_seen, sizeof t.keys_seen);
  all.add(&t.actions_seen, sizeof t.actions_seen);
  all.add(t.writer);
  return all.text();
}

Outcome outcome(const Bytes& bytes, size_t piece) {
  MemorySource source(bytes, piece);
  const bool is_json = !bytes.empty() && (bytes[0] == '{' || bytes[0] == '[');
  try {
    return {kOutcomes[0], digest(is_json ? fragdoctor::read_json(source, {}, 1)
                                         : fragdoctor::read_pickle(source, {}, 1))};
  } catch (const fragdoctor::ReadError& error) {
    if (error.message().empty() || error.offset() == fragdoctor::kNoOffset) {
      throw std::logic_error("an error without a message or an offset");
    }
    return {kOutcomes[1 + static_cast<size_t>(error.kind())],
            error.message() + " @ " + std::to_string(error.offset())};
  }
}

Bytes read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return Bytes(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
}

// Returns false, with a message on standard error, if the two ways of reading differ.
bool agree(const Bytes& bytes, size_t small_piece, size_t large_piece, const char*& name) {
  const Outcome slow = outcome(bytes, small_piece);
  const Outcome fast = outcome(bytes, large_piece);
  name = fast.name;
  if (slow.name == fast.name && slow.details == fast.details) return true;
  std::fprintf(stderr, "in small pieces: %s, %s\nin large pieces: %s, %s\n", slow.name,
               slow.details.c_str(), fast.name, fast.details.c_str());
  return false;
}

#ifndef FRAGDOCTOR_FUZZER
// Small files; the working directory must be the root of the sources.
const std::vector<std::string> kSeeds = {
    "tests/native/seeds/python_2.pickle",  "tests/native/seeds/python_4.pickle",
    "tests/native/seeds/python_5.pickle",  "tests/native/seeds/cpp.pickle",
    "tests/native/seeds/old.pickle",       "tests/native/seeds/old_cpp.pickle",
    "tests/native/seeds/modern.json",      "sample_snapshots/private_pool_oom.pickle",
    "sample_snapshots/caught_ooms.pickle", "sample_snapshots/two_devices_oom.pickle"};
#endif

}  // namespace

#ifdef FRAGDOCTOR_FUZZER
// Without sanitizers it hunts for new inputs, and one reading of most finds them twice as fast; the
// sanitized target then reads what was found, in both ways.
#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define FRAGDOCTOR_READ_TWICE
#endif
#endif
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t n) {
  const Bytes bytes(data, data + n);
  const char* name = nullptr;
#ifndef FRAGDOCTOR_READ_TWICE
  if (n % 8 != 0) {
    outcome(bytes, n % 2 == 0 ? 1 + n % 64 : 512 + n % 8192);
    return 0;
  }
#endif
  if (!agree(bytes, 1 + n % 64, 512 + n % 8192, name)) std::abort();
  return 0;
}
#else
int main(int argc, char** argv) {
  const size_t count = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 50000;
  Corruptor corruptor(argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1);
  std::vector<std::string> paths(argv + std::min(argc, 3), argv + argc);
  if (paths.empty()) paths = kSeeds;
  std::vector<Bytes> files;
  const char* name = nullptr;
  for (const std::string& path : paths) {
    files.push_back(read_file(path));
    if (!agree(files.back(), 1, 1 << 16, name) || std::strcmp(name, kOutcomes[0]) != 0) {
      std::fprintf(stderr, "%s cannot be read as it is\n", path.c_str());
      return 1;
    }
  }
  size_t counts[std::size(kOutcomes)] = {};
  for (size_t i = 0; i < count; ++i) {
    const Bytes bytes = corruptor.corrupt(files[i % files.size()]);
    const size_t large_piece = 512 + corruptor.below(2) * corruptor.below(8192);
    if (!agree(bytes, 1 + corruptor.below(64), large_piece, name)) {
      std::fprintf(stderr, "corruption %zu, of %s\n", i, paths[i % files.size()].c_str());
      return 1;
    }
    for (size_t j = 0; j < std::size(kOutcomes); ++j) counts[j] += name == kOutcomes[j] ? 1 : 0;
  }
  for (size_t j = 0; j < std::size(kOutcomes); ++j)
    std::printf("%s: %zu\n", kOutcomes[j], counts[j]);
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  std::printf("peak: %ld KiB\n", usage.ru_maxrss);
  return usage.ru_maxrss < kMostKilobytes ? 0 : 1;
}
#endif
