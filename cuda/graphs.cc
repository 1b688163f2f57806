#include "cuda/graphs.h"

#include <algorithm>

#include "cuda/check.h"

namespace helm::cuda {

GraphCache::~GraphCache() {
  for (const Entry& entry : entries_) {
    if (entry.graph != nullptr) cudaGraphExecDestroy(entry.graph);
  }
}

GraphCache::Entry& GraphCache::find(const StepShape& shape) {
  ++uses_;
  const auto found =
      std::ranges::find_if(entries_, [&](const Entry& entry) { return entry.shape == shape; });
  if (found != entries_.end()) {
    found->last_use = uses_;
    return *found;
  }
  const Entry fresh{shape, false, nullptr, uses_};
  if (entries_.size() < kMostGraphs) return entries_.emplace_back(fresh);
  Entry& oldest = *std::ranges::min_element(entries_, {}, &Entry::last_use);
  if (oldest.graph != nullptr) cudaGraphExecDestroy(oldest.graph);  // after it has run, if running
  oldest = fresh;
  return oldest;
}

void GraphCache::replay(Entry& entry, cudaStream_t stream) {
  check(cudaGraphLaunch(entry.graph, stream), "launching a captured step");
  ++replays_;
}

GraphCache::Capture::Capture(cudaStream_t stream) : stream_(stream) {
  check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal),
        "starting to capture a step");
}

GraphCache::Capture::~Capture() {
  if (!open_) return;
  cudaGraph_t graph = nullptr;
  cudaStreamEndCapture(stream_, &graph);
  if (graph != nullptr) cudaGraphDestroy(graph);
  cudaGetLastError();  // the failure that led here is on its way
}

cudaGraphExec_t GraphCache::Capture::finish() {
  open_ = false;
  cudaGraph_t graph = nullptr;
  check(cudaStreamEndCapture(stream_, &graph), "capturing a step (HELM_CUDA_GRAPHS=0 avoids it)");
  cudaGraphExec_t exec = nullptr;
  const cudaError_t status = cudaGraphInstantiate(&exec, graph, 0);
  cudaGraphDestroy(graph);
  check(status, "preparing a captured step (HELM_CUDA_GRAPHS=0 avoids it)");
  return exec;
}

}  // namespace helm::cuda
