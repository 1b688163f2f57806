// All of HELM's public headers.
#pragma once

#include "helm/encode.h"        // IWYU pragma: export
#include "helm/engine.h"        // IWYU pragma: export
#include "helm/footprint.h"     // IWYU pragma: export
#include "helm/generation.h"    // IWYU pragma: export
#include "helm/held_block.h"    // IWYU pragma: export
#include "helm/machine.h"       // IWYU pragma: export
#include "helm/plan.h"          // IWYU pragma: export
#include "helm/prefix_cache.h"  // IWYU pragma: export
#include "helm/program.h"       // IWYU pragma: export
#include "helm/service.h"       // IWYU pragma: export
#include "helm/speculation.h"   // IWYU pragma: export
#include "helm/types.h"         // IWYU pragma: export
#include "helm/version.h"       // IWYU pragma: export
