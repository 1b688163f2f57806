// The library's own version.
#include "helm/version.h"

namespace helm {

const char* version() {
  return HELM_VERSION;
}

}  // namespace helm
