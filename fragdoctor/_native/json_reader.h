// Reads a memory snapshot that was written as JSON; same schema, same bounds as the pickle reader.
#pragma once

#include <cstdint>

#include "pickle_reader.h"

namespace fragdoctor {

// Throws ReadError. Duplicate keys: the last wins. NaN and Infinity are no JSON and are refused.
SnapshotTables read_json(ByteSource& source, const ReadLimits& limits, uint64_t seed);

}  // namespace fragdoctor
