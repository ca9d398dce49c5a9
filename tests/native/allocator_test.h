// Shared parts of the allocator's native tests.
#pragma once

#include <cstdio>
#include <cstdlib>

#define REQUIRE(condition)                                                            \
  do {                                                                                \
    if (!(condition)) {                                                               \
      std::fprintf(stderr, "%s:%d: %s does not hold\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                                   \
    }                                                                                 \
  } while (false)
