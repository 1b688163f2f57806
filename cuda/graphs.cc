#include "cuda/graphs.h"

#include <algorithm>

#include "cuda/check.h"

namespace helm::cuda {

GraphCache::~GraphCache() {
  for (const Entry& entry : entries_) {
    if (entry.graph != nullptr) cudaGraphExecDestroy(entry.graph);
  }
}

GraphCache::Entry& GraphCache::find(const StepShape& shape, cudaStream_t stream) {
  ++uses_;
  const auto found =
      std::ranges::find_if(entries_, [&](const Entry& entry) { return entry.shape == shape; });
  if (found != entries_.end()) {
    found->last_use = uses_;
    return *found;
  }
  const Entry fresh{shape, false, false, nullptr, uses_};
  if (entries_.size() < kMostGraphs) return entries_.emplace_back(fresh);
  Entry& oldest = *std::ranges::min_element(entries_, {}, &Entry::last_use);
  if (oldest.graph != nullptr) {
    check(cudaStreamSynchronize(stream), "work before a captured step is dropped");  // it may run
    cudaGraphExecDestroy(oldest.graph);
  }
  oldest = fresh;
  return oldest;
}

void GraphCache::replay(Entry& entry, cudaStream_t stream) {
  check(cudaGraphLaunch(entry.graph, stream), "launching a captured step");
  ++replays_;
}

GraphCache::Capture::Capture(cudaStream_t stream)
    : stream_(stream),
      open_(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess) {
  if (!open_) cudaGetLastError();  // taken note of
}

GraphCache::Capture::~Capture() {
  if (!open_) return;
  cudaGraph_t graph = nullptr;
  cudaStreamEndCapture(stream_, &graph);
  if (graph != nullptr) cudaGraphDestroy(graph);
  cudaGetLastError();  // taken note of
}

cudaGraphExec_t GraphCache::Capture::finish() {
  if (!open_) return nullptr;
  open_ = false;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  cudaError_t status = cudaStreamEndCapture(stream_, &graph);
  if (status == cudaSuccess) status = cudaGraphInstantiate(&exec, graph, 0);
  if (graph != nullptr) cudaGraphDestroy(graph);
  if (status == cudaSuccess) return exec;
  cudaGetLastError();  // taken note of
  return nullptr;
}

}  // namespace helm::cuda
