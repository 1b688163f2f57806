// Launches recorded once as CUDA graphs and replayed. Knows nothing of what is launched.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <vector>

#include "base/check.h"
#include "cuda/ops.h"

namespace helm::cuda {

// Graphs by the shape of the step. A shape's first use launches as it is, since the first launch of
// a kernel loads its code, which cannot be captured; the second captures; later ones replay. A
// shape that cannot be captured is launched as it is from then on.
class GraphCache {
 public:
  GraphCache() = default;
  ~GraphCache();
  GraphCache(const GraphCache&) = delete;
  GraphCache& operator=(const GraphCache&) = delete;

  // Enqueues on `stream` what `launch()` enqueues there for steps of this shape.
  template <class Launch>
  void run(const StepShape& shape, cudaStream_t stream, const Launch& launch) {
    Entry& entry = find(shape, stream);
    if (entry.graph == nullptr && entry.warm && !entry.plain) {
      entry.graph = capture(stream, launch);
      entry.plain = entry.graph == nullptr;
      ++(entry.plain ? refusals_ : captures_);
    }
    if (entry.graph == nullptr) {
      launch();
      entry.warm = true;
    } else {
      replay(entry, stream);
    }
  }

  int64_t captures() const { return captures_; }  // so far
  int64_t replays() const { return replays_; }
  int64_t refusals() const { return refusals_; }  // shapes that could not be captured

 private:
  // Each graph takes memory of the GPU that no budget counts, about a kilobyte per launch.
  static constexpr size_t kMostGraphs = 32;

  struct Entry {
    StepShape shape;
    bool warm;
    bool plain;  // could not be captured
    cudaGraphExec_t graph;
    int64_t last_use;
  };

  // What is enqueued on the stream in its lifetime is recorded instead.
  class Capture {
   public:
    explicit Capture(cudaStream_t stream);
    Capture(const Capture&) = delete;
    Capture& operator=(const Capture&) = delete;
    bool open() const { return open_; }  // whether it records
    ~Capture();                          // drops the recording unless finished
    cudaGraphExec_t finish();            // null if it cannot be replayed

   private:
    cudaStream_t stream_;
    bool open_;
  };

  // The recording of `launch()`, or null. What made it fail shows when the step is launched as it
  // is.
  template <class Launch>
  static cudaGraphExec_t capture(cudaStream_t stream, const Launch& launch) {
    Capture recording(stream);
    if (!recording.open()) return nullptr;
    try {
      launch();
    } catch (const Error&) {
      return nullptr;
    }
    return recording.finish();
  }

  Entry& find(const StepShape& shape, cudaStream_t stream);
  void replay(Entry& entry, cudaStream_t stream);

  std::vector<Entry> entries_;
  int64_t uses_ = 0;
  int64_t captures_ = 0;
  int64_t replays_ = 0;
  int64_t refusals_ = 0;
};

}  // namespace helm::cuda
