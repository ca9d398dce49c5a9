// Reads a memory snapshot written as JSON; same schema and same bounds as the pickle reader.
#pragma once

#include <cstdint>

#include "pickle_reader.h"

namespace fragdoctor {

// Throws ReadError. The last of duplicate keys wins. NaN and Infinity are not JSON: refused.
SnapshotTables read_json(ByteSource& source, const ReadLimits& limits, uint64_t seed);

}  // namespace fragdoctor
