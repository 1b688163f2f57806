// Prints the bytes of CUDA's workspace for each plan and range of its units in the arguments,
// PLAN FIRST END and so on, on the largest GPU: the planner's figures are compared with it.
#include "cuda/workspace.h"

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <iterator>
#include <span>
#include <string>

#include "cuda/cublas.h"

int main(int argc, char** argv) {
  try {
    for (int i = 1; i + 2 < argc; i += 3) {
      std::ifstream file(argv[i]);
      const std::string json{std::istreambuf_iterator<char>(file), {}};
      const helm::Plan plan = helm::Plan::from_json(json);
      const auto first = static_cast<size_t>(std::atoi(argv[i + 1]));
      const auto end = static_cast<size_t>(std::atoi(argv[i + 2]));
      const auto units = std::span(plan.units).subspan(first, end - first);
      const helm::cuda::WorkspaceLayout layout(plan, units, helm::cuda::blas_workspace_bytes(12),
                                               helm::cuda::kMostMultiprocessors);
      std::printf("%lld\n", static_cast<long long>(layout.bytes));
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
