#include "support/this_build.h"

namespace helm::test {

#ifdef HELM_TEST_SANITIZED
const bool kSanitized = true;
#else
const bool kSanitized = false;
#endif
#ifdef HELM_TEST_FEW
const bool kFew = true;
#else
const bool kFew = false;
#endif
const char* const kAccelerator = HELM_TEST_ACCELERATOR;
const int64_t kNewTokens = HELM_TEST_NEW_TOKENS;

}  // namespace helm::test
