// Streams, events, launches and graphs. A graph is the list of what was enqueued while capturing.
#include "stream.h"

#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "launch.h"
#include "state.h"

using cuda_emulation::Work;

struct CUgraph_st {
  std::vector<Work> work;
};
struct CUgraphExec_st {
  std::vector<Work> work;
};

struct CUstream_st {
  CUstream_st() : thread([this] { serve(); }) {}
  ~CUstream_st() {
    {
      std::lock_guard lock(mutex);
      stop = true;
    }
    changed.notify_all();
    thread.join();
  }

  void push(Work work) {
    {
      std::lock_guard lock(mutex);
      queue.push_back(std::move(work));
    }
    changed.notify_all();
  }

  void wait_idle() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return queue.empty() && !busy; });
  }

  bool idle() {
    std::lock_guard lock(mutex);
    return queue.empty() && !busy;
  }

  std::unique_ptr<CUgraph_st> capture;  // touched by the capturing host thread only

 private:
  void serve() {
    std::unique_lock lock(mutex);
    while (true) {
      changed.wait(lock, [&] { return stop || !queue.empty(); });
      if (queue.empty()) return;
      const Work work = std::move(queue.front());
      queue.pop_front();
      busy = true;
      lock.unlock();
      run(work);
      lock.lock();
      busy = false;
      changed.notify_all();
    }
  }

  static void run(const Work& work) {
    try {
      work();
    } catch (const std::exception& e) {
      cuda_emulation::report_fault(e.what());
    }
  }

  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Work> queue;
  bool busy = false, stop = false;
  std::thread thread;
};

// The n-th record of an event is done when `done` reaches n.
struct EventProgress {
  std::mutex mutex;
  std::condition_variable changed;
  uint64_t done = 0;
  std::chrono::steady_clock::time_point when;

  void wait(uint64_t record) {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return done >= record; });
  }
};

struct CUevent_st {
  std::shared_ptr<EventProgress> progress = std::make_shared<EventProgress>();
  uint64_t recorded = 0;
  bool timed = true;
};

namespace cuda_emulation {
namespace {

struct Streams {
  std::mutex mutex;
  std::set<cudaStream_t> open;
  std::unique_ptr<CUstream_st> legacy;  // the stream that null means
};

Streams& streams() {
  static Streams all;
  return all;
}

cudaStream_t resolve(cudaStream_t stream) {
  if (stream != nullptr) return stream;
  std::lock_guard lock(streams().mutex);
  if (!streams().legacy) streams().legacy = std::make_unique<CUstream_st>();
  return streams().legacy.get();
}

bool known(cudaStream_t stream) {
  if (stream == nullptr) return true;
  std::lock_guard lock(streams().mutex);
  return streams().open.contains(stream);
}

// Records and waits are no use to a graph, and are served even after a fault.
void enqueue_always(cudaStream_t stream, Work work) {
  resolve(stream)->push(std::move(work));
}

bool fits(dim3 grid, dim3 block) {
  const size_t threads = size_t{block.x} * block.y * block.z;
  return threads >= 1 && threads <= 1024 && block.z <= 64 && grid.x >= 1 && grid.y >= 1 &&
         grid.z >= 1 && grid.x <= 0x7fffffffu && grid.y <= 65535 && grid.z <= 65535;
}

}  // namespace

bool capturing(cudaStream_t stream) {
  return resolve(stream)->capture != nullptr;
}

void enqueue(cudaStream_t stream, Work work) {
  const cudaStream_t s = resolve(stream);
  Work guarded = [work = std::move(work)] {
    if (sticky() == cudaSuccess) work();
  };
  if (s->capture) {
    s->capture->work.push_back(std::move(guarded));
  } else {
    s->push(std::move(guarded));
  }
}

void enqueue_launch(const void* kernel, dim3 grid, dim3 block, size_t shared_bytes,
                    cudaStream_t stream, bool overlaps, std::function<void()> thread) {
  size_t allowed = kDefaultSharedBytes;
  {
    std::lock_guard lock(state().mutex);
    ++state().launches;
    state().overlapping_launches += overlaps;
    const auto found = state().shared_bytes.find(kernel);
    if (found != state().shared_bytes.end()) allowed = static_cast<size_t>(found->second);
  }
  if (!fits(grid, block)) {
    failed(cudaErrorInvalidConfiguration);
  } else if (shared_bytes > allowed) {
    failed(cudaErrorInvalidValue);
  } else {
    enqueue(stream, [=] {
      const auto body = [](const void* context) {
        (*static_cast<const std::function<void()>*>(context))();
      };
      run_grid({grid, block, shared_bytes, body, &thread, overlaps});
    });
  }
}

void drain() {
  std::vector<cudaStream_t> all;
  {
    std::lock_guard lock(streams().mutex);
    all.assign(streams().open.begin(), streams().open.end());
    if (streams().legacy) all.push_back(streams().legacy.get());
  }
  for (cudaStream_t stream : all) stream->wait_idle();
}

}  // namespace cuda_emulation

using namespace cuda_emulation;

cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return cudaStreamCreateWithFlags(stream, cudaStreamDefault);
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int) {
  return cudaStreamCreateWithFlags(stream, flags);
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = new CUstream_st;
  std::lock_guard lock(streams().mutex);
  streams().open.insert(*stream);
  return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  {
    std::lock_guard lock(streams().mutex);
    if (streams().open.erase(stream) == 0) return failed(cudaErrorInvalidResourceHandle);
  }
  delete stream;
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (!known(stream)) return failed(cudaErrorInvalidResourceHandle);
  if (capturing(stream)) return failed(cudaErrorStreamCaptureUnsupported);
  resolve(stream)->wait_idle();
  return failed(sticky());
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  if (!known(stream)) return failed(cudaErrorInvalidResourceHandle);
  if (capturing(stream)) return failed(cudaErrorStreamCaptureUnsupported);
  if (const cudaError_t error = sticky()) return failed(error);
  return resolve(stream)->idle() ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaDeviceSynchronize() {
  drain();
  return failed(sticky());
}

cudaError_t cudaEventCreate(cudaEvent_t* event) {
  return cudaEventCreateWithFlags(event, cudaEventDefault);
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  *event = new CUevent_st;
  (*event)->timed = (flags & cudaEventDisableTiming) == 0;
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  if (!known(stream)) return failed(cudaErrorInvalidResourceHandle);
  if (capturing(stream)) return failed(cudaErrorStreamCaptureUnsupported);
  enqueue_always(stream, [progress = event->progress, record = ++event->recorded] {
    {
      std::lock_guard lock(progress->mutex);
      progress->done = std::max(progress->done, record);
      progress->when = std::chrono::steady_clock::now();
    }
    progress->changed.notify_all();
  });
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  if (!known(stream)) return failed(cudaErrorInvalidResourceHandle);
  if (capturing(stream)) return failed(cudaErrorStreamCaptureUnsupported);
  enqueue_always(
      stream, [progress = event->progress, record = event->recorded] { progress->wait(record); });
  return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  event->progress->wait(event->recorded);
  return failed(sticky());
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  if (const cudaError_t error = sticky()) return failed(error);
  std::lock_guard lock(event->progress->mutex);
  return event->progress->done >= event->recorded ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end) {
  if (!begin->timed || !end->timed || begin->recorded == 0 || end->recorded == 0) {
    return failed(cudaErrorInvalidResourceHandle);
  }
  if (cudaEventQuery(begin) != cudaSuccess || cudaEventQuery(end) != cudaSuccess) {
    return failed(cudaErrorNotReady);
  }
  const auto time = end->progress->when - begin->progress->when;
  *milliseconds = std::chrono::duration<float, std::milli>(time).count();
  return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  if (stream == nullptr || capturing(stream)) return failed(cudaErrorStreamCaptureUnsupported);
  stream->capture = std::make_unique<CUgraph_st>();
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  *graph = nullptr;
  if (stream == nullptr || !stream->capture) return failed(cudaErrorInvalidValue);
  const std::unique_ptr<CUgraph_st> captured = std::move(stream->capture);
  {
    std::lock_guard lock(state().mutex);
    if (state().refuse_captures) return failed(cudaErrorStreamCaptureUnsupported);
  }
  *graph = new CUgraph_st(*captured);
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {
  *exec = new CUgraphExec_st{graph->work};
  return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  if (!known(stream)) return failed(cudaErrorInvalidResourceHandle);
  for (const Work& work : exec->work) enqueue(stream, work);
  return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  delete exec;
  return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}
