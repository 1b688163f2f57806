// What differs between builds of the tests: constants of a test program, not macros of its files,
// so that a cache of compiled files serves every build.
#pragma once

#include <cstdint>

namespace helm::test {

extern const bool kSanitized;
// Under sanitizers everything takes ten to a hundred times as long, and what they look for does not
// need every combination of many values.
extern const bool kFew;
extern const char* const kAccelerator;  // for open_accelerator
extern const int64_t kNewTokens;        // of engines on it: fewer where it is emulated

}  // namespace helm::test
