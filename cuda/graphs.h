// Launches recorded once as CUDA graphs and replayed. Knows nothing of what is launched.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <vector>

#include "cuda/ops.h"

namespace helm::cuda {

// Graphs by the shape of the step. A shape's first use launches as it is, since the first launch of
// a kernel loads its code, which cannot be captured; the second captures; later ones replay.
class GraphCache {
 public:
  GraphCache() = default;
  ~GraphCache();
  GraphCache(const GraphCache&) = delete;
  GraphCache& operator=(const GraphCache&) = delete;

  // Enqueues on `stream` what `launch()` enqueues there for steps of this shape.
  template <class Launch>
  void run(const StepShape& shape, cudaStream_t stream, const Launch& launch) {
    Entry& entry = find(shape);
    if (entry.graph == nullptr && !entry.warm) {
      launch();
      entry.warm = true;
      return;
    }
    if (entry.graph == nullptr) {
      Capture capture(stream);
      launch();
      entry.graph = capture.finish();
      ++captures_;
    }
    replay(entry, stream);
  }

  int64_t captures() const { return captures_; }  // so far
  int64_t replays() const { return replays_; }

 private:
  // Each graph takes memory of the GPU that no budget counts, about a kilobyte per launch.
  static constexpr size_t kMostGraphs = 32;

  struct Entry {
    StepShape shape;
    bool warm;
    cudaGraphExec_t graph;
    int64_t last_use;
  };

  // What is enqueued on the stream in its lifetime is recorded instead.
  class Capture {
   public:
    explicit Capture(cudaStream_t stream);
    Capture(const Capture&) = delete;
    Capture& operator=(const Capture&) = delete;
    ~Capture();  // drops the recording unless finished
    cudaGraphExec_t finish();

   private:
    cudaStream_t stream_;
    bool open_ = true;
  };

  Entry& find(const StepShape& shape);
  void replay(Entry& entry, cudaStream_t stream);

  std::vector<Entry> entries_;
  int64_t uses_ = 0;
  int64_t captures_ = 0;
  int64_t replays_ = 0;
};

}  // namespace helm::cuda
