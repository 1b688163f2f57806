// A small random decoder as a plan with tensors in memory, for tests of the runtime.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "helm/engine.h"
#include "helm/generation.h"

namespace helm::test {

struct TinyTensor {
  std::vector<int64_t> shape;
  std::shared_ptr<std::vector<float>> data;
};

struct TinyModel {
  std::string plan;  // JSON
  std::map<std::string, TinyTensor> tensors;

  EngineOptions options() const;
  // With another value, JSON too, at a path of the plan such as /limits/context.
  TinyModel with(const std::string& path, const std::string& value) const;
  // With another format or access of all slices of a device that have this one.
  TinyModel with_slices(const std::string& device, const std::string& key, const std::string& from,
                        const std::string& to) const;
};

// What the CPU has of a layer that is cut: the first KV heads, and elements between the two
// products of its mlp; 0: that is not cut.
struct TinyCut {
  int64_t heads = 0;
  int64_t inter = 0;
  bool cpu_home = true;  // has the residual
};

struct TinyShape {
  int64_t vocab = 61;
  int64_t hidden = 24;
  int64_t inter = 40;
  int64_t layers = 2;
  int64_t heads = 4;
  int64_t kv_heads = 2;
  int64_t head_dim = 10;
  int64_t page_tokens = 16;
  int64_t context = 200;
  int64_t sequences = 4;
  int64_t step_tokens = 32;
  int64_t pages = 400;
  int64_t window = 0;
  int64_t window_blocks = 0;
  std::string kv_dtype = "f32";
  std::string weight_dtype = "f32";  // the format of matrices
  bool qk_norm = false;
  bool qkv_bias = false;
  // Scaled embedding, norms that add to their weight and stand behind attention, scaled mlp, rope
  // of neighbours in a part of every head, a soft cap of logits.
  bool varied = false;
  float softcap = 0;  // of scores
  // Of a mixture, half of which a token has; 0: dense. In layout "neighbours" with biases, limits
  // and sinks of attention.
  int64_t experts = 0;
  std::string experts_layout = "apart";
  std::string score = "softmax";
  int threads = 2;
  // Of the embedding, every layer and the head, or of every unit; empty: all on the CPU.
  std::vector<std::string> devices = {};
  int64_t accelerator_pages = 0;
  int64_t accelerator_bytes = 1 << 30;
  int64_t cpu_bytes = 0;  // 0: the plan does not say
  bool overlap = false;
  int64_t decode_groups = 1;
  int64_t visit_tokens = 0;  // 0: layers in host memory are computed there
  int64_t visit_pages = 0;
  int64_t visit_buffers = 2;
  // What names of tensors contain that visit the accelerator in every step.
  std::vector<std::string> visiting = {};
  std::string overflow = "stream";
  double watermark = 0.8;
  // What the plan's tables say that the CPU takes for a position of a far row, in times of a step
  // without it; 0: there are none.
  double far_position_steps = 0;
  std::vector<TinyCut> cuts = {};  // by layer, or of the first ones
  int64_t cut_rows = 0;            // of the head, on the CPU; 0: it is not cut
  bool cut_on_cpu = false;         // all that is cut lies on the CPU
};

// Matrices of many pieces per member, stacked ones of unequal heights.
TinyShape large_shape(int threads, const char* dtype = "f32");
// All layers and the head in parts that run one after the other on the CPU.
TinyShape cut_shape();

TinyModel tiny_model(const TinyShape& shape = {});
// What the plan's tables say that steps take, JSON.
std::string step_times(const TinyShape& shape);

// Of a tensor of its plan, which may be a part of one of the model's.
std::vector<float> data_of(const TinyModel& model, const TensorSpec& tensor);

// A folder with a file of weights, removed afterwards.
class TinyFolder {
 public:
  TinyFolder();
  ~TinyFolder();
  TinyFolder(const TinyFolder&) = delete;
  TinyFolder& operator=(const TinyFolder&) = delete;
  const std::string& path() const { return path_; }
  // The model with its tensors, f32, in the file; those that the CPU holds as f32 are mapped.
  TinyModel mapped(const TinyModel& model) const;
  // Likewise, with the matrices of every so many-th layer on disk and nothing mapped.
  TinyModel on_disk(const TinyModel& model, int64_t ring_bytes, int64_t every = 1) const;

 private:
  std::string path_;
};

std::unique_ptr<Engine> tiny_engine(const TinyModel& model, const std::string& device = "sim");

// Arbitrary tokens; other seeds give others.
std::vector<int32_t> token_ids(int64_t count, int32_t seed);

// A fresh sequence's logits behind all tokens, which come in chunks.
std::vector<float> logits_of(Engine& engine, const std::vector<int32_t>& ids, size_t chunk = 64);

// Each request's tokens when all have run together.
std::vector<std::vector<int32_t>> generated(Engine& engine, std::vector<Request> requests);

}  // namespace helm::test
